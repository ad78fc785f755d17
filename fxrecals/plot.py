"""Pictures of plans, drawn by matplotlib, which need not be there until one is asked for.

Each function returns a `matplotlib.figure.Figure`: save it by ``savefig``, or show it in a
notebook. `Plan.to_html` draws the same without matplotlib, to be pointed at.

    >>> from fxrecals.ir import Graph, Op, Phase, Value
    >>> from fxrecals.plans import Plan
    >>> from fxrecals.schedule import Schedule
    >>> op = Op("sin", "aten.sin", (), ("a",), Phase.FORWARD)
    >>> graph = Graph((op,), {"a": Value("a", 8, "a")}, outputs=("a",))
    >>> figure = memory(Plan(graph, Schedule(("sin",), ()), 100, floor_bytes=8))
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['live bytes', '']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxrecals.charts import (
    Box,
    Fate,
    Tile,
    bars,
    bounded,
    is_timed,
    moments,
    saved_tiles,
    thinned,
)
from fxrecals.composition import Category
from fxrecals.errors import FxrecalsError
from fxrecals.formats import format_bytes, format_seconds
from fxrecals.ir import Peak
from fxrecals.schedule import Schedule

if TYPE_CHECKING:
    from fxrecals.plans import Plan

SPANS = 1000
"""Places in the width of a picture; runs that share one are shown by the one with most bytes."""

COLORS = {
    Category.SAVED: "#3b82c4",
    Category.RECOMPUTED: "#e08a2c",
    Category.TEMPORARY: "#58a583",
    Category.SCRATCH: "#a9b1bc",
    Category.GRADIENT: "#8e71c7",
}

FATES = {Fate.KEPT: "#3b82c4", Fate.DROPPED: "#f3d9b8", Fate.INSTEAD: "#58a583"}

GREY, RED = "#6b7480", "#c9303e"


def memory(plan: Plan) -> Any:
    """Live bytes over the step by category, against the step without recompute, with the limit;
    below it, what runs again.

    The categories are those whose sum the limit bounds: with ``peak="activations"``, gradients of
    parameters are left out.

    Raises:
        FxrecalsError: matplotlib is missing, or the plan has no ops.
    """
    graph, peak = plan.graph, plan.peak
    if not plan.timeline.steps:
        raise FxrecalsError("the plan has no ops, so there is nothing to draw")
    figure = _figure(9.0, 4.4)
    axes, lane = figure.subplots(2, 1, sharex=True, height_ratios=(14, 1))
    runs = moments(graph, plan.schedule)
    before = moments(graph, Schedule.keeping_everything(graph))
    end = max(runs[-1].until, before[-1].until)
    edges = [end * i / SPANS for i in range(SPANS + 1)]
    base = [0] * SPANS
    for category in bounded(peak):
        each = (m.nbytes[category] if m else 0 for m in thinned(runs, end, SPANS, peak))
        top = [low + nbytes for low, nbytes in zip(base, each, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=COLORS[category])
        axes.patches[-1].set_label(category.value)
        base = top
    others = [m.total(peak) if m else 0 for m in thinned(before, end, SPANS, peak)]
    axes.stairs(others, edges, color=GREY, linestyle="--", label="without recompute")
    if plan.limit_bytes is not None:
        label = f"limit {format_bytes(plan.limit_bytes)}"
        axes.axhline(plan.limit_bytes, color=RED, linewidth=1.2, label=label)
    axes.set(ylabel="live bytes", xlim=(0, end), ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda nbytes, _: format_bytes(int(nbytes)))
    axes.legend(frameon=False, fontsize="small")
    found = bars(plan.regions, runs, gap=end / SPANS)
    lane.broken_barh(
        [(bar.since, max(bar.until - bar.since, end / SPANS)) for bar in found],
        (0, 1),
        color=COLORS[Category.RECOMPUTED],
    )
    timed = is_timed(graph)
    lane.set(yticks=(), ylim=(0, 1), xlabel="estimated time in the step" if timed else "run")
    lane.set_title("runs again", loc="left", fontsize="small", color=GREY)
    if timed:
        lane.xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    _unframe(axes, lane)
    return figure


def saved(plan: Plan) -> Any:
    """What is kept for the backward by module, as a treemap: with the plan, and without.

    Raises:
        FxrecalsError: matplotlib is missing, or nothing is kept.
    """
    from_module = saved_tiles(plan, Box(0.0, 0.0, 9.0, 4.4))
    if not from_module:
        raise FxrecalsError("nothing is kept for the backward, so there is nothing to draw")
    figure = _figure(9.0, 4.8)
    axes = figure.subplots()
    for fate, color in FATES.items():
        nbytes = sum(tile.nbytes.get(fate, 0) for tile in from_module)
        if nbytes:
            axes.bar(0, 0, color=color, label=f"{fate.value}: {format_bytes(nbytes)}")
    for tile in from_module:
        for child in tile.children:
            _draw_parts(axes, child)
            _draw_frame(axes, child.box, 0.6)
        _draw_frame(axes, tile.box, 2.5)
        _name(axes, tile)
    axes.set(xlim=(0, 9.0), ylim=(4.4, 0))
    axes.axis("off")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return figure


def _draw_parts(axes: Any, tile: Tile) -> None:
    from matplotlib.patches import Rectangle

    left = tile.box.x
    for fate, color in FATES.items():
        width = tile.box.width * tile.nbytes.get(fate, 0) / tile.total
        axes.add_patch(Rectangle((left, tile.box.y), width, tile.box.height, color=color, lw=0))
        left += width


def _draw_frame(axes: Any, box: Box, width: float) -> None:
    from matplotlib.patches import Rectangle

    frame = Rectangle((box.x, box.y), box.width, box.height, fill=False, ec="white", lw=width)
    axes.add_patch(frame)


def _name(axes: Any, tile: Tile) -> None:
    """The name of a block where there is room for it, from its end if it is long."""
    room = int(tile.box.width / 0.09)
    if room < 3 or tile.box.height < 0.25:
        return
    name = tile.name if len(tile.name) <= room else f"..{tile.name[2 - room :]}"
    text = axes.text(tile.box.x + 0.06, tile.box.y + 0.06, name, va="top", fontsize="x-small")
    text.set_parse_math(False)
    text.set_bbox({"facecolor": "white", "alpha": 0.7, "pad": 1.5, "linewidth": 0})


def pareto(plan: Plan) -> Any:
    """The curve limit against extra time, with the proved bound below it.

    Args:
        plan: one that was made without a limit, so that it has `choices`.

    Raises:
        FxrecalsError: matplotlib is missing, or the plan has no choices.
    """
    if not plan.choices:
        raise FxrecalsError("the plan has no curve; what works: a plan made without a limit")
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    limits = [choice.limit_bytes for choice in plan.choices]
    whole = max(plan.baseline_seconds, 1e-12)
    found = [100 * choice.extra_seconds / whole for choice in plan.choices]
    bound = [100 * choice.bound_seconds / whole for choice in plan.choices]
    axes.plot(limits, found, marker="o", color=COLORS[Category.SAVED], label="found")
    axes.plot(limits, bound, linestyle="--", color=GREY, label="proved: none takes less")
    axes.axvline(plan.floor_bytes, color=RED, linewidth=0.8, label="floor")
    what = "step" if plan.peak is Peak.STEP else "activations"
    axes.set_xlabel(f"limit on the peak of the {what}")
    axes.set_ylabel("extra time, % of a step")
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_bytes(int(nbytes)))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _unframe(axes)
    return figure


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FxrecalsError('plots need matplotlib: pip install "fxrecals[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def _unframe(*each: Any) -> None:
    for axes in each:
        axes.spines[["top", "right"]].set_visible(False)
