"""Train under a byte limit: recomputation planned on the joint forward and backward graph.

model = torch.compile(model, backend=fxrecals.backend(limit="4GB"))
print(fxrecals.plan(model, example, limit="4GB"))
small = fxrecals.rewrite(model, example, limit="4GB")
recals = fxrecals.recals("4GB"); out = recals(model, x)
model = fxrecals.compile(model, limit="4GB")
"""

from fxrecals.api import plan, rewrite
from fxrecals.doctoring import doctor
from fxrecals.dynamo import backend
from fxrecals.engine import Evictable, recals
from fxrecals.errors import (
    CaptureError,
    DoubleBackwardError,
    FxrecalsError,
    InfeasibleLimitError,
    LimitError,
    OptionError,
)
from fxrecals.fallback import compile, ran
from fxrecals.fitting import fit
from fxrecals.monitoring import monitor
from fxrecals.package import load
from fxrecals.plans import Plan

recals_with_rngs = recals
"""`recals`, under the name by which users of buildz-gpu know it."""

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "DoubleBackwardError",
    "Evictable",
    "FxrecalsError",
    "InfeasibleLimitError",
    "LimitError",
    "OptionError",
    "Plan",
    "backend",
    "compile",
    "doctor",
    "fit",
    "load",
    "monitor",
    "plan",
    "ran",
    "recals",
    "recals_with_rngs",
    "rewrite",
]
