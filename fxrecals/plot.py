"""Pictures of plans, drawn by matplotlib, which need not be there until one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxrecals.errors import FxrecalsError

if TYPE_CHECKING:
    from fxrecals.plans import Plan


def pareto(plan: Plan) -> Any:
    """The curve limit against extra time, with the proved bound below it, as a figure.

    Args:
        plan: one that was made without a limit, so that it has `choices`.

    Returns:
        A `matplotlib.figure.Figure`; save it by ``savefig``.

    Raises:
        FxrecalsError: matplotlib is missing, or the plan has no choices.
    """
    if not plan.choices:
        raise FxrecalsError("the plan has no curve; what works: a plan made without a limit")
    axes, figure = _axes()
    limits = [choice.limit_bytes / 1e6 for choice in plan.choices]
    whole = max(plan.baseline_seconds, 1e-12)
    found = [100 * choice.extra_seconds / whole for choice in plan.choices]
    bound = [100 * choice.bound_seconds / whole for choice in plan.choices]
    axes.plot(limits, found, marker="o", color="#1f77b4", label="found")
    axes.plot(limits, bound, linestyle="--", color="#7f7f7f", label="proved: none takes less")
    axes.axvline(plan.floor_bytes / 1e6, color="#d62728", linewidth=0.8, label="floor")
    axes.set_xlabel(f"limit on the peak of the {_bounded(plan)}, MB")
    axes.set_ylabel("extra time, % of a step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _bounded(plan: Plan) -> str:
    return "step" if plan.peak.value == "step" else "activations"


def _axes() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FxrecalsError('plots need matplotlib: pip install "fxrecals[plot]"') from error
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    return figure.subplots(), figure
