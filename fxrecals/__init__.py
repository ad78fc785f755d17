"""Train under a byte limit: recomputation planned on the joint forward and backward graph.

model = torch.compile(model, backend=fxrecals.backend(limit="4GB"))
print(fxrecals.plan(model, example, limit="4GB"))
small = fxrecals.rewrite(model, example, limit="4GB")
"""

from fxrecals.api import plan, rewrite
from fxrecals.dynamo import backend
from fxrecals.errors import (
    CaptureError,
    FxrecalsError,
    InfeasibleLimitError,
    LimitError,
    OptionError,
)
from fxrecals.fitting import fit
from fxrecals.monitoring import monitor
from fxrecals.package import load
from fxrecals.plans import Plan

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "FxrecalsError",
    "InfeasibleLimitError",
    "LimitError",
    "OptionError",
    "Plan",
    "backend",
    "fit",
    "load",
    "monitor",
    "plan",
    "rewrite",
]
