"""The pictures of the page: live bytes over the step, what is kept by module, limit against time.

Shapes are SVG that is stretched to the width of the page; texts and marks are HTML above it, so
that they are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fxrecals.charts import (
    AGAIN,
    Bar,
    Box,
    Fate,
    Moment,
    Tile,
    bars,
    bounded,
    is_timed,
    moments,
    saved_tiles,
    thinned,
)
from fxrecals.composition import Category
from fxrecals.formats import format_bytes, format_seconds
from fxrecals.ir import Peak, Trait
from fxrecals.page.markup import Column, Markup, data, element, joined, table
from fxrecals.report import first_readers, percent, short_name
from fxrecals.schedule import Region, Schedule

if TYPE_CHECKING:
    from fxrecals.plans import Plan

SPANS = 800
"""Places in the width of a chart; runs that share one are shown by the one with the most bytes."""

ROWS = 24
"""Of the tables that say what a chart shows."""

SIDE = 1000
"""Units of an SVG in either direction."""

FAR = 1.6
"""A limit that is so many times what is drawn is said and not drawn."""

NAMES = {
    Category.SAVED: "kept for the backward",
    Category.RECOMPUTED: "made again",
    Category.TEMPORARY: "temporary",
    Category.SCRATCH: "scratch of one op",
    Category.GRADIENT: "gradients of parameters",
}

CLASSES = {Fate.KEPT: "kept", Fate.DROPPED: "dropped", Fate.INSTEAD: "instead"}


# --- live bytes over the step -------------------------------------------------------------------


def memory(plan: Plan) -> Markup:
    """The chart of live bytes over the step, planned and without recompute, with what runs again
    below, and the same as a table."""
    graph, peak = plan.graph, plan.peak
    planned = moments(graph, plan.schedule)
    before = moments(graph, Schedule.keeping_everything(graph))
    end = max(planned[-1].until, before[-1].until)
    spans = thinned(planned, end, SPANS, peak)
    others = thinned(before, end, SPANS, peak)
    most = _largest(planned), max(m.total(peak) for m in before)
    top = _top(max(*most, 1), _limit_line(plan))
    plot = element(
        "div",
        _svg(
            _gridlines(top),
            _stack(spans, top, peak),
            _outline(others, top, peak) if plan.regions else "",
        ),
        _limit(plan, top),
        *_marks(plan, planned, before, end, top),
        element("div", cls="cursor", hidden=True),
        cls="plot",
    )
    chart = element(
        "div",
        _ticks_y(top, _round_bytes),
        plot,
        _lane("", _halves(planned, end), "halves"),
        _lane("runs again", _again(plan, planned, end), "again") if plan.regions else "",
        _ticks_x(end, _round_seconds if is_timed(graph) else _round_runs),
        cls="chart",
        id="memory",
        tabindex=0,
        role="img",
        aria_label=_about(plan),
    )
    found = element("figure", _legend(plan, planned), chart, _as_table(planned, before, end, peak))
    return joined(found, _spans_data(plan, spans, before))


def _about(plan: Plan) -> str:
    before, after = plan.bounded_baseline, plan.bounded
    return (
        f"Live bytes over the step: at most {format_bytes(after.peak_bytes)} at {after.peak_at}, "
        f"without recompute {format_bytes(before.peak_bytes)}. Arrow keys go from op to op; the "
        "table below says the same."
    )


def _largest(runs: Sequence[Moment]) -> int:
    return max(sum(m.nbytes.values()) for m in runs)


def _limit_line(plan: Plan) -> int | None:
    """The limit, where there is one for all that is drawn."""
    several = len({value.device for value in plan.graph.values.values()}) > 1
    return None if several and plan.device_limits else plan.limit_bytes


def _top(most: int, limit: int | None) -> float:
    """Where the axis of bytes ends."""
    return 1.09 * max(most, limit if limit and limit < FAR * most else 0)


def _svg(*shapes: object) -> Markup:
    return element(
        "svg",
        *shapes,
        viewBox=f"0 0 {SIDE} {SIDE}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _y(value: float, top: float) -> str:
    return f"{SIDE * (1 - value / top):.1f}"


def _stack(spans: Sequence[Moment | None], top: float, peak: Peak) -> Markup:
    """An area for each category, the lowest last, so that each covers what is below it."""
    heights = [0] * len(spans)
    found: list[Markup] = []
    for category in Category:
        each = (m.nbytes[category] if m else 0 for m in spans)
        heights = [below + nbytes for below, nbytes in zip(heights, each, strict=True)]
        path = f"M0 {SIDE}{_steps(heights, top)}V{SIDE}Z"
        free = "" if category in bounded(peak) else " free"
        found.append(element("path", d=path, cls=category.value + free))
    return joined(*reversed(found))


def _outline(spans: Sequence[Moment | None], top: float, peak: Peak) -> Markup:
    heights = [m.total(peak) for m in spans if m]
    return element("path", d=f"M0 {SIDE}{_steps(heights, top)}V{SIDE}", cls="before")


def _steps(heights: Sequence[int], top: float) -> str:
    """The commands of a path along a step function."""
    found: list[str] = []
    for i, height in enumerate(heights):
        if i and height == heights[i - 1]:
            found.pop()
        else:
            found.append(f"V{_y(height, top)}")
        found.append(f"H{SIDE * (i + 1) / SPANS:g}")
    return "".join(found)


def _nice(top: float) -> list[float]:
    """Round numbers from 0 to below `top`, four to nine of them.

    >>> _nice(45.0)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(power * factor for factor in (1, 2, 5) if power * factor <= rough)
    return [step * i for i in range(math.ceil(top / step))]


def _gridlines(top: float) -> Markup:
    return joined(
        *(
            element("line", x1=0, x2=SIDE, y1=_y(tick, top), y2=_y(tick, top), cls="grid")
            for tick in _nice(top)[1:]
        )
    )


def _ticks_y(top: float, name: Callable[[float], str]) -> Markup:
    ticks = (element("span", name(t), style=f"bottom:{100 * t / top:.2f}%") for t in _nice(top))
    return element("div", *ticks, cls="ticks-y", aria_hidden="true")


def _ticks_x(end: float, name: Callable[[float], str]) -> Markup:
    ticks = (element("span", name(t), style=_left(t, end), cls=_side(t / end)) for t in _nice(end))
    return element("div", *ticks, cls="ticks-x", aria_hidden="true")


def _side(share: float) -> str | None:
    """The class of a text that would else stick out at an edge."""
    return "left" if share < 0.06 else "right" if share > 0.94 else None


def _round_bytes(nbytes: float) -> str:
    """As `format_bytes`, without zeros behind the point.

    >>> _round_bytes(80e6)
    '80 MB'
    """
    return re.sub(r"\.0+ ", " ", format_bytes(int(nbytes)))


def _round_seconds(seconds: float) -> str:
    return re.sub(r"\.0+ ", " ", format_seconds(seconds))


def _round_runs(count: float) -> str:
    return f"run {count:.0f}"


def _left(at: float, end: float) -> str:
    return f"left:{100 * at / end:.3f}%"


def _limit(plan: Plan, top: float) -> Markup | str:
    limit = _limit_line(plan)
    if limit is None:
        return ""
    if limit > top:
        text = element("span", f"limit {format_bytes(limit)}, above this picture")
        return element("div", text, cls="limit", style="top:1.4em;border:0")
    label = element("span", f"limit {format_bytes(limit)}")
    return element("div", label, cls="limit", style=f"bottom:{100 * limit / top:.2f}%")


def _marks(
    plan: Plan, planned: Sequence[Moment], before: Sequence[Moment], end: float, top: float
) -> Iterator[Markup]:
    """The peak, and that without recompute where there is room for both names."""
    here, other = (max(runs, key=lambda m: m.total(plan.peak)) for runs in (planned, before))
    apart = abs(other.total(plan.peak) - here.total(plan.peak)) > top / 14
    if plan.regions and (apart or abs(other.since - here.since) > end / 4):
        yield _mark(other, end, top, plan.peak, "other", "without recompute")
    yield _mark(here, end, top, plan.peak, "", "peak")


def _mark(at: Moment, end: float, top: float, peak: Peak, kind: str, name: str) -> Markup:
    share, nbytes = (at.since + at.until) / 2 / end, at.total(peak)
    side = "left" if share < 0.12 else "right" if share > 0.88 else ""
    return element(
        "div",
        element("span", f"{format_bytes(nbytes)} {name}"),
        cls=f"peak {kind} {side}".strip(),
        style=f"left:{100 * share:.2f}%;bottom:{100 * nbytes / top:.2f}%",
    )


def _lane(name: str, content: Markup, kind: str) -> Markup:
    label = element("div", name, cls="lane-name", aria_hidden="true")
    return joined(label, element("div", content, cls=f"lane {kind}"))


def _halves(runs: Sequence[Moment], end: float) -> Markup:
    turn = next((m.since for m in runs if m.half != "forward"), end)
    return joined(
        element("i", "forward", style=f"left:0;width:{100 * turn / end:.2f}%"),
        element("i", "backward", style=f"{_left(turn, end)};width:{100 - 100 * turn / end:.2f}%"),
    )


def _again(plan: Plan, runs: Sequence[Moment], end: float) -> Markup:
    readers = dict(zip(plan.regions, first_readers(plan.graph, plan.schedule), strict=True))
    found = bars(plan.regions, runs, gap=end / SPANS)
    return joined(*(_bar(plan, bar, end, readers) for bar in found))


def _bar(plan: Plan, bar: Bar, end: float, readers: Mapping[Region, str]) -> Markup:
    graph = plan.graph
    names = [name for region in bar.regions for name in region.ops]
    ops = [graph.op(name) for name in names]
    title = f"{len(ops)} ops run again" if len(ops) > 1 else f"{short_name(ops[0])} runs again"
    places = list(dict.fromkeys(op.where.module for op in ops if op.where.module))
    lines = [
        f"{title}, {format_seconds(sum(op.seconds for op in ops))}",
        _list(list(dict.fromkeys(map(short_name, ops)))),
        f"in {_list(places)}" if places else "",
        f"for {_list([readers[region] for region in bar.regions])}",
    ]
    return element(
        "i",
        style=f"{_left(bar.since, end)};width:{100 * (bar.until - bar.since) / end:.3f}%",
        data_tip="\n".join(filter(None, lines)),
    )


def _list(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _legend(plan: Plan, runs: Sequence[Moment]) -> Markup:
    limited = bounded(plan.peak)
    items = [
        element(
            "li",
            NAMES[category] + ("" if category in limited else " (not limited)"),
            style=f"--c:var(--{category.value})",
        )
        for category in Category
        if any(m.nbytes[category] for m in runs)
    ]
    line = element("li", "without recompute", cls="stroke", style="--c:var(--before)")
    return element("ul", *items, line if plan.regions else "", cls="legend")


def _spans_data(plan: Plan, spans: Sequence[Moment | None], before: Sequence[Moment]) -> Markup:
    """What the script shows for each span: texts, each once, and for each span which."""
    without = {m.op.name: m.total(plan.peak) for m in before}
    shown = list(dict.fromkeys(m.run for m in spans if m))
    place = {run: i for i, run in enumerate(shown)}
    by_run = {m.run: m for m in spans if m}
    last = len(shown) - 1
    which = [place[m.run] if m else last for m in spans]
    highest = max(shown, key=lambda run: by_run[run].total(plan.peak))
    value = {
        "texts": [_moment_text(by_run[run], plan.peak, without) for run in shown],
        "spans": which,
        "peak": which.index(place[highest]),
    }
    return element("script", data(value), type="application/json", id="memory-data")


def _moment_text(moment: Moment, peak: Peak, without: dict[str, int]) -> str:
    op, again = moment.op, moment.half == AGAIN
    half = "runs again" if again else f"in the {moment.half}"
    name = "your loss" if Trait.CALLER in op.traits else short_name(op)
    parts = [f"{format_bytes(n)} {NAMES[category]}" for category, n in moment.nbytes.items() if n]
    lines = [
        f"{format_bytes(moment.total(peak))} while {name} {half}",
        " ".join(filter(None, [op.name, f"in {op.where.module}" if op.where.module else ""])),
        op.where.source,
        *parts,
        "" if again else f"{format_bytes(without[op.name])} here without recompute",
    ]
    return "\n".join(filter(None, lines))


def _as_table(
    planned: Sequence[Moment], before: Sequence[Moment], end: float, peak: Peak
) -> Markup:
    columns = [
        Column("from", "n"),
        Column("most while", "name"),
        Column("in", "name"),
        Column("half"),
        Column("planned", "n"),
        *(Column(NAMES[category], "n") for category in Category),
        Column("without recompute", "n"),
    ]
    others = thinned(before, end, ROWS, peak)
    rows = [
        [
            format_seconds(end * i / ROWS),
            m.op.name,
            m.op.where.module,
            m.half,
            format_bytes(m.total(peak)),
            *(format_bytes(m.nbytes[category]) for category in Category),
            format_bytes(other.total(peak)) if other else "",
        ]
        for i, (m, other) in enumerate(zip(thinned(planned, end, ROWS, peak), others, strict=True))
        if m
    ]
    summary = element("summary", f"The same as a table, in {ROWS} parts")
    return element("details", summary, table("Live bytes over the step", columns, rows))


# --- what is kept, by module --------------------------------------------------------------------


def treemap(plan: Plan) -> Markup:
    """What is kept for the backward by module, with the plan and without, and as a table."""
    tiles = saved_tiles(plan, Box(0.0, 0.0, 2.4, 1.0))
    legend = element(
        "ul",
        *(
            element("li", _fate_text(tiles, fate), style=f"--c:var(--{_color(fate)})")
            for fate in Fate
            if any(fate in tile.nbytes for tile in tiles)
        ),
        cls="legend",
    )
    area = element("div", *(_block(tile) for tile in tiles), cls="map", role="group")
    columns = [Column("block", "name"), *(Column(fate.value, "n") for fate in Fate)]
    rows = [[t.name, *(format_bytes(t.nbytes.get(fate, 0)) for fate in Fate)] for t in tiles]
    summary = element("summary", "The same as a table")
    caption = "Bytes kept for the backward, by block"
    return element(
        "figure", legend, area, element("details", summary, table(caption, columns, rows, ROWS))
    )


def _color(fate: Fate) -> str:
    return "saved" if fate is Fate.KEPT else CLASSES[fate]


def _fate_text(tiles: Sequence[Tile], fate: Fate) -> str:
    return f"{fate.value}: {format_bytes(sum(tile.nbytes.get(fate, 0) for tile in tiles))}"


def _block(tile: Tile) -> Markup:
    inside = element("div", *(_leaf(tile, child) for child in tile.children), cls="inside")
    return element(
        "div",
        element("b", ".".join(tile.name.split(".")[-2:])),
        inside,
        cls="tile block",
        style=_place(tile.box, Box(0.0, 0.0, 2.4, 1.0)),
        data_tip=_tile_text(tile.name, tile),
    )


def _leaf(block: Tile, tile: Tile) -> Markup:
    parts = (
        element("i", cls=CLASSES[fate], style=f"width:{100 * nbytes / tile.total:.2f}%")
        for fate, nbytes in _in_order(tile)
    )
    path = f"{block.name}.{tile.name}" if tile.name else block.name
    return element(
        "div",
        element("div", *parts, cls="parts"),
        element("span", tile.name) if tile.name else "",
        cls="tile",
        style=_place(tile.box, block.box),
        tabindex=0,
        role="img",
        aria_label=_tile_text(path, tile),
        data_tip=_tile_text(path, tile),
    )


def _in_order(tile: Tile) -> Iterator[tuple[Fate, int]]:
    yield from ((fate, tile.nbytes[fate]) for fate in Fate if tile.nbytes.get(fate))


def _tile_text(path: str, tile: Tile) -> str:
    return "\n".join([path, *(f"{format_bytes(n)} {fate.value}" for fate, n in _in_order(tile))])


def _place(box: Box, within: Box) -> str:
    left, top = (box.x - within.x) / within.width, (box.y - within.y) / within.height
    width, height = box.width / within.width, box.height / within.height
    return (
        f"left:{100 * left:.3f}%;top:{100 * top:.3f}%;"
        f"width:{100 * width:.3f}%;height:{100 * height:.3f}%"
    )


# --- limit against extra time -------------------------------------------------------------------


def pareto(plan: Plan) -> Markup:
    """The curve limit against extra time with the proved bound, and the same as a table."""
    whole = plan.baseline_seconds or 1.0
    found = [100 * choice.extra_seconds / whole for choice in plan.choices]
    bound = [100 * choice.bound_seconds / whole for choice in plan.choices]
    end, top = 1.04 * max(c.limit_bytes for c in plan.choices), 1.12 * max(*found, 1.0)
    ends = [choice.limit_bytes / end for choice in plan.choices]
    dots = (
        _dot(plan, index, at, height / top)
        for index, (at, height) in enumerate(zip(ends, found, strict=True))
    )
    lines = _svg(
        _gridlines(top),
        element("path", d=_line(ends, bound, top), cls="bound"),
        element("path", d=_line(ends, found, top), cls="found"),
    )
    chart = element(
        "div",
        _ticks_y(top, "+{:g} %".format),
        element("div", lines, *dots, cls="plot"),
        _ticks_x(end, _round_bytes),
        cls="chart",
    )
    legend = element(
        "ul",
        element("li", "extra time of the plan found", style="--c:var(--saved)"),
        element("li", "this plan", style="--c:var(--recomputed)"),
        element("li", "proved: no schedule takes less", cls="stroke", style="--c:var(--before)"),
        cls="legend",
    )
    return element("figure", legend, chart, _pareto_table(plan))


def _is_shown(plan: Plan, index: int) -> bool:
    return plan.choices[index].peak_bytes == plan.bounded.peak_bytes


def _dot(plan: Plan, index: int, left: float, height: float) -> Markup:
    choice = plan.choices[index]
    text = (
        f"limit {format_bytes(choice.limit_bytes)}\npeak {format_bytes(choice.peak_bytes)}\n"
        f"+{format_seconds(choice.extra_seconds)}, at least +{format_seconds(choice.bound_seconds)}"
    )
    return element(
        "div",
        cls="dot here" if _is_shown(plan, index) else "dot",
        style=f"left:{100 * left:.2f}%;bottom:{100 * height:.2f}%",
        tabindex=0,
        role="img",
        aria_label=text,
        data_tip=text,
    )


def _line(ends: Sequence[float], heights: Sequence[float], top: float) -> str:
    points = zip(ends, heights, strict=True)
    return "M" + "L".join(f"{SIDE * x:.1f} {_y(height, top)}" for x, height in points)


def _pareto_table(plan: Plan) -> Markup:
    columns = [
        Column(title, "n")
        for title in ("limit", "of the peak", "peak", "more time", "found", "at least")
    ]
    whole, seconds = plan.bounded_baseline.peak_bytes, plan.baseline_seconds
    rows = [
        [
            format_bytes(choice.limit_bytes),
            percent(choice.limit_bytes, whole),
            format_bytes(choice.peak_bytes),
            f"+{format_seconds(choice.extra_seconds)}",
            f"+{percent(choice.extra_seconds, seconds)}",
            f"+{percent(choice.bound_seconds, seconds)}",
            "here" if _is_shown(plan, index) else "",
        ]
        for index, choice in enumerate(plan.choices)
    ]
    return table("Limits and the extra time that they cost", columns, rows)
