"""What pictures of a plan show, as data: for `plot`, which draws with matplotlib, and for `page`.

All bytes are those of `timeline`, sorted by `composition`. Thinning keeps peaks: of the runs that
share a place in a picture, the one with the most bytes is shown.

    >>> [round(box.width * box.height, 3) for box in squarify([3, 2, 1], Box(0, 0, 3, 2))]
    [3.0, 2.0, 1.0]
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from fxrecals.composition import ACTIVATIONS, Category, compose
from fxrecals.ir import Graph, Op, Peak, Phase
from fxrecals.report import kept_between, made_storages
from fxrecals.schedule import Region, Schedule

if TYPE_CHECKING:
    from fxrecals.plans import Plan

MODEL = "(model)"
"""Where an op stands that belongs to no module by name."""


# --- live bytes over the step -------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """One run.

    Attributes:
        run: its index in the schedule.
        op: what runs.
        half: "forward", "backward", or "again" for a recompute.
        since: estimated seconds from the start of the step; the index where no op has a time.
        until: when it is done, likewise.
        nbytes: bytes that are alive meanwhile, by category.
    """

    run: int
    op: Op
    half: str
    since: float
    until: float
    nbytes: Mapping[Category, int]

    def total(self, peak: Peak) -> int:
        """Of the live bytes those that a limit on `peak` bounds."""
        return sum(self.nbytes[category] for category in bounded(peak))


def bounded(peak: Peak) -> tuple[Category, ...]:
    """The categories whose sum a limit on `peak` bounds."""
    return ACTIVATIONS if peak is Peak.ACTIVATIONS else tuple(Category)


def is_timed(graph: Graph) -> bool:
    """Whether ops have times; where none has, each run counts as one."""
    return graph.seconds > 0


AGAIN = "again"
"""As the half of a recompute."""


def moments(graph: Graph, schedule: Schedule) -> tuple[Moment, ...]:
    """Every run of a step, in order."""
    found = compose(graph, schedule)
    timed, now = is_timed(graph), 0.0
    made: list[Moment] = []
    for run, name in enumerate(schedule.runs):
        op = graph.op(name)
        again = op.phase is Phase.FORWARD and run >= len(schedule.forward)
        until = now + op.seconds if timed else run + 1.0
        nbytes = {category: found[category][run] for category in Category}
        made.append(Moment(run, op, AGAIN if again else op.phase.value, now, until, nbytes))
        now = until
    return tuple(made)


def thinned(
    runs: Sequence[Moment], end: float, spans: int, peak: Peak
) -> tuple[Moment | None, ...]:
    """For each of `spans` equal stretches of time up to `end`, the run with the most live bytes.

    Args:
        runs: of one schedule, in order.
        end: where the last span ends; spans after the last run get None.
        spans: how many.
        peak: which bytes count.
    """
    found: list[Moment | None] = [None] * spans
    totals = [-1] * spans
    for moment in runs:
        total = moment.total(peak)
        first = min(spans - 1, int(spans * moment.since / end))
        last = min(spans - 1, int(spans * moment.until / end))
        # A run that ends where a span begins is no part of that span.
        if last > first and spans * moment.until / end == last:
            last -= 1
        for span in range(first, last + 1):
            if total > totals[span]:
                totals[span], found[span] = total, moment
    return tuple(found)


@dataclass(frozen=True)
class Bar:
    """Regions that run again at one place of a picture.

    Attributes:
        since: when the first begins, as in `Moment`.
        until: when the last ends.
        regions: what they are.
    """

    since: float
    until: float
    regions: tuple[Region, ...]


def bars(regions: Sequence[Region], runs: Sequence[Moment], gap: float) -> tuple[Bar, ...]:
    """The regions of a plan over time; those that are less than `gap` apart share a bar."""
    found: list[Bar] = []
    for region, (since, until) in zip(regions, _stretches(runs), strict=True):
        if found and since - found[-1].until < gap and found[-1].until - found[-1].since < gap:
            last = found[-1]
            found[-1] = replace(last, until=until, regions=(*last.regions, region))
        else:
            found.append(Bar(since, until, (region,)))
    return tuple(found)


def _stretches(runs: Iterable[Moment]) -> Iterator[tuple[float, float]]:
    """When each region begins and ends, views left out as `schedule.regions` does."""
    since: float | None = None
    until = 0.0
    for moment in runs:
        if moment.op.phase is Phase.BACKWARD:
            if since is not None:
                yield since, until
            since = None
        elif moment.half == AGAIN and not moment.op.is_view:
            since = moment.since if since is None else since
            until = moment.until


def memory_csv(plan: Plan) -> str:
    """Every run of a plan as CSV: its op, when it starts and ends, and live bytes by category."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    unit = "seconds" if is_timed(plan.graph) else "runs"
    about = ("run", "op", "module", "source", "half", f"since_{unit}", f"until_{unit}")
    writer.writerow([*about, *(f"{category.value}_bytes" for category in Category)])
    for m in moments(plan.graph, plan.schedule):
        where = (m.op.name, m.op.where.module, m.op.where.source, m.half)
        writer.writerow([m.run, *where, m.since, m.until, *m.nbytes.values()])
    return text.getvalue()


# --- what is kept, by module --------------------------------------------------------------------


class Fate(str, Enum):
    """What a plan changes for a tensor that is kept for the backward, with it or without."""

    KEPT = "kept, as without a limit"
    DROPPED = "no longer kept"
    INSTEAD = "kept in place of others"


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Tile:
    """A module in a treemap; its area is that of all its bytes.

    Attributes:
        name: its path, that of a child without its parent's.
        box: where it is drawn; a child's within its parent.
        nbytes: bytes by fate.
        children: smaller tiles that fill it.
    """

    name: str
    box: Box
    nbytes: Mapping[Fate, int]
    children: tuple[Tile, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all fates."""
        return sum(self.nbytes.values())


def saved_tiles(plan: Plan, box: Box, smallest: float = 1e-3) -> tuple[Tile, ...]:
    """A treemap of what is kept for the backward, with the plan or without: blocks of the model,
    and the modules in them.

    The bytes of `Fate.KEPT` and `Fate.INSTEAD` add up to `Plan.saved_bytes`, those of `Fate.KEPT`
    and `Fate.DROPPED` to the saved bytes of the step without recompute.

    Args:
        plan: what is shown.
        box: the rectangle to fill.
        smallest: blocks, and modules of a block, with a smaller share of all bytes are summed up.
    """
    found: dict[str, dict[str, dict[Fate, int]]] = {}
    tensors = list(_fates(plan))
    for module, fate, nbytes in tensors:
        block, rest = _block(module)
        each = found.setdefault(block, {}).setdefault(rest, {})
        each[fate] = each.get(fate, 0) + nbytes
    least = smallest * sum(nbytes for _, _, nbytes in tensors)
    blocks = _large({block: _sum(modules.values()) for block, modules in found.items()}, least)
    return tuple(
        replace(tile, children=_tiles(_large(modules, least), tile.box))
        for tile in _tiles(blocks, box)
        for modules in [found.get(tile.name, {"": tile.nbytes})]
    )


def _fates(plan: Plan) -> Iterator[tuple[str, Fate, int]]:
    """Module, fate and bytes of every tensor that is kept with the plan or without."""
    graph = plan.graph
    before = kept_between(graph, Schedule.keeping_everything(graph))
    after = kept_between(graph, plan.schedule)
    for op in graph.forward:
        for storage in made_storages(graph, op):
            values = before.pop(storage, None)
            others = after.pop(storage, None)
            if values and others:
                yield op.where.module or MODEL, Fate.KEPT, values[0].nbytes
            elif values:
                yield op.where.module or MODEL, Fate.DROPPED, values[0].nbytes
            elif others:
                yield op.where.module or MODEL, Fate.INSTEAD, others[0].nbytes


def _block(module: str) -> tuple[str, str]:
    """A path up to its first number, or its first part, and the rest.

    >>> _block("transformer.h.3.mlp.act"), _block("head.norm"), _block("0")
    (('transformer.h.3', 'mlp.act'), ('head', 'norm'), ('0', ''))
    """
    parts = module.split(".")
    end = next((i for i, part in enumerate(parts) if part.isdigit()), 0) + 1
    return ".".join(parts[:end]), ".".join(parts[end:])


def _sum(each: Iterable[Mapping[Fate, int]]) -> dict[Fate, int]:
    found: dict[Fate, int] = {}
    for nbytes in each:
        for fate, count in nbytes.items():
            found[fate] = found.get(fate, 0) + count
    return found


def _large(
    modules: Mapping[str, Mapping[Fate, int]], least: float
) -> Mapping[str, Mapping[Fate, int]]:
    """The modules that can be seen; the others as one."""
    large = {name: each for name, each in modules.items() if sum(each.values()) >= least}
    small = [each for name, each in modules.items() if name not in large]
    return {**large, f"({len(small)} smaller)": _sum(small)} if small else large


def _tiles(modules: Mapping[str, Mapping[Fate, int]], box: Box) -> tuple[Tile, ...]:
    shown = {name: nbytes for name, nbytes in modules.items() if sum(nbytes.values())}
    names = sorted(shown, key=lambda name: -sum(shown[name].values()))
    boxes = squarify([sum(shown[name].values()) for name in names], box)
    return tuple(Tile(name, place, shown[name]) for name, place in zip(names, boxes, strict=True))


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Fills a rectangle with one rectangle for each size, with areas in proportion and sides as
    equal as a greedy pass finds (Bruls, Huizing, van Wijk, "Squarified Treemaps", 2000).

    Args:
        sizes: positive, the largest first.
        box: what is filled.
    """
    scale = box.width * box.height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    found: list[Box] = []
    while len(found) < len(areas):
        start = len(found)
        end, side = start + 1, min(box.width, box.height)
        while end < len(areas) and _worst(areas[start : end + 1], side) <= _worst(
            areas[start:end], side
        ):
            end += 1
        row, box = _split(box, areas[start:end])
        found += row
    return found


def _worst(areas: Sequence[float], side: float) -> float:
    """The largest ratio of sides in a row of rectangles along a side."""
    if not side:
        return 1.0
    depth = sum(areas) / side
    return max(max(depth * depth / area, area / (depth * depth)) for area in areas)


def _split(box: Box, areas: Sequence[float]) -> tuple[list[Box], Box]:
    """A row of rectangles along the shorter side, and what is left of the box."""
    whole, row = sum(areas), list[Box]()
    if box.width >= box.height:
        depth, y = whole / box.height if box.height else 0.0, box.y
        for area in areas:
            row.append(Box(box.x, y, depth, box.height * area / whole))
            y += row[-1].height
        return row, Box(box.x + depth, box.y, max(0.0, box.width - depth), box.height)
    depth, x = whole / box.width if box.width else 0.0, box.x
    for area in areas:
        row.append(Box(x, box.y, box.width * area / whole, depth))
        x += row[-1].width
    return row, Box(box.x, box.y + depth, box.width, max(0.0, box.height - depth))
