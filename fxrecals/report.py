"""What a plan says when it is printed: text in ASCII, at most 100 columns, the same every time.

A number stands beside the name of what it is a number of. Blocks of a model that are treated alike
share one row: ``layers.[0-11].mlp``.

    >>> pattern([("layers", (0,), "mlp"), ("layers", (1,), "mlp"), ("layers", (3,), "mlp")])
    'layers.[0-1,3].mlp'
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tabulate import tabulate

from fxrecals import schedule as schedules
from fxrecals.formats import format_bytes, format_count, format_seconds
from fxrecals.ir import ONCE, Graph, Kind, Op, Peak, Phase, Trait, Value, is_charged
from fxrecals.schedule import Region, Schedule
from fxrecals.timeline import Timeline

if TYPE_CHECKING:
    from fxrecals.plans import Plan

WIDTH = 98
"""Columns of notes, and of tables as far as names allow."""

REGION_ROWS = 12
"""Rows of the table of what runs again; the rest is one line."""

SAVED_ROWS = 8
"""Rows of the table of what is kept; the rest is one line."""

PICTURE = (60, 10)
"""Columns and rows of the picture of memory against time."""

WHY_ONCE = {
    Trait.MUTATES: "it writes to an input",
    Trait.OPAQUE: "not known to be pure",
    Trait.COLLECTIVE: "it talks to other processes",
    Trait.MUST_SAVE: "your checkpoint policy says MUST_SAVE",
    Trait.CALLER: "made between two graphs",
}
"""The traits that forbid a second run, in words."""

Component = str | tuple[int, ...]
"""A part of a module path; numbers are set apart, so that they can be merged."""

Place = tuple[Component, ...]


def text(plan: Plan) -> str:
    """A plan as people read it: verdict, what runs again, what is kept, peaks; then the curve
    limit against time where no limit was given, and the notes.

    >>> from fxrecals.ir import Graph, Kind, Op, Phase, Value
    >>> from fxrecals.plans import Plan
    >>> values = {n: Value(n, 8000, n) for n in "abc"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    >>> ops = (
    ...     Op("f", "aten.sin", ("x",), ("a",), Phase.FORWARD, seconds=1e-3),
    ...     Op("g", "aten.cos", ("a",), ("b",), Phase.FORWARD, seconds=1e-3),
    ...     Op("h", "aten.mul", ("a", "b"), ("c",), Phase.BACKWARD, seconds=1e-3),
    ... )
    >>> graph = Graph(ops, values, outputs=("b", "c"))
    >>> plan = Plan(graph, Schedule(("f", "g"), ("f", "h")), 24_000, floor_bytes=24_000)
    >>> print(text(plan).splitlines()[0])
    fits 24.0 kB: peak 24.0 kB instead of 24.0 kB, +33.3 % time (1 op runs again), floor 24.0 kB
    """
    parts = [verdict(plan), _regions(plan), _saved(plan), _peaks(plan)]
    if plan.choices:
        parts += [_choices(plan), _picture(plan)]
    parts += [_notes(plan)]
    return ascii_only("\n\n".join(part for part in parts if part))


def timeline_text(plan: Plan) -> str:
    """The memory timeline of a plan, a line for each run, in bytes, after two lines of header.

    >>> from fxrecals.ir import Graph, Op, Phase, Value
    >>> from fxrecals.plans import Plan
    >>> op = Op("sin", "aten.sin", (), ("a",), Phase.FORWARD)
    >>> graph = Graph((op,), {"a": Value("a", 8, "a")}, outputs=())
    >>> print(timeline_text(Plan(graph, Schedule(("sin",), ()), None, floor_bytes=8)))
    bytes; live counts what the run reads, makes and uses for itself; peak at run 0
    run  op   module  half     live  allocated  freed
      0  sin          forward     8          8      8
    """
    found = plan.bounded
    header = ("run", "op", "module", "half", "live", "allocated", "freed")
    rows: list[tuple[str, ...]] = [header]
    for index, step in enumerate(found.steps):
        module = plan.graph.op(step.op).where.module
        numbers = (step.live_bytes, step.allocated_bytes, step.freed_bytes)
        rows.append((str(index), step.op, module, half_of(found, index), *map(str, numbers)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (False, True, True, True, False, False, False)
    lines = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]
    about = "bytes; live counts what the run reads, makes and uses for itself"
    about += ", and gradients" if plan.peak is Peak.STEP else ""
    peak = f"; peak at run {found.peak_index}" if found.steps else ""
    return ascii_only("\n".join([about + peak, *lines]))


def half_of(timeline: Timeline, index: int) -> str:
    """Where a run stands: "forward", "backward", or "again" for a recompute."""
    if index < timeline.forward_runs:
        return "forward"
    return "again" if timeline.steps[index].again else "backward"


# --- the verdict --------------------------------------------------------------------------------


def verdict(plan: Plan) -> str:
    """One line: whether the plan fits, its peak, its price and the floor."""
    which, nbytes = which_peak(plan), plan.bounded.peak_bytes
    peak, baseline = format_bytes(nbytes), format_bytes(plan.bounded_baseline.peak_bytes)
    floor = f"floor {format_bytes(plan.floor_bytes)}"
    again = f"{more_time(plan, plan.extra_seconds)} ({count_again(plan)})"
    if plan.limit_bytes is None and not plan.choices:
        return f"no limit given: {which} {peak} instead of {baseline}, {again}, {floor}"
    if plan.limit_bytes is None:
        return f"no limit given: {which} {baseline}; the knee is at {peak}, {again}"
    each = plan.device_limits
    limit = ", ".join(f"{format_bytes(most)} on {device}" for device, most in each)
    limit = limit or format_bytes(plan.limit_bytes)
    if not each and nbytes > plan.limit_bytes:
        return f"does not fit {limit}: {which} {peak} instead of {baseline}, {again}, {floor}"
    if not plan.regions:
        return f"fits {limit} as it is: {which} {baseline}, nothing runs again, {floor}"
    return f"fits {limit}: {which} {peak} instead of {baseline}, {again}, {floor}"


def which_peak(plan: Plan) -> str:
    """What a limit bounds, in words."""
    return "peak" if plan.peak is Peak.ACTIVATIONS else f"{plan.peak.value} peak"


def count_again(plan: Plan) -> str:
    """How many ops run again, how often, and in how many regions."""
    counts = schedules.recomputed(plan.graph, plan.schedule)
    if not counts:
        return "nothing runs again"
    regions, most = len(plan.regions), max(counts.values())
    ops = f"{len(counts)} ops run again" if len(counts) > 1 else "1 op runs again"
    often = f" up to {most} times" if most > 1 else ""
    return f"{ops}{often} in {regions} regions" if regions > 1 else f"{ops}{often}"


def more_time(plan: Plan, seconds: float) -> str:
    """Extra time as a share of the step's, or in seconds where the step's is not known."""
    if not plan.baseline_seconds:
        return f"+{format_seconds(seconds)}"
    return f"+{percent(seconds, plan.baseline_seconds)} time"


def percent(part: float, whole: float) -> str:
    """A share in percent; of nothing it is 0 %."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if share < 99.95 else f"{share:.0f} %"


# --- what runs again ----------------------------------------------------------------------------


@dataclass
class RegionGroup:
    """Regions that look the same.

    Attributes:
        places: the module path of each.
        what: the ops, in words.
        regions: how many there are.
        runs: runs of ops in all of them.
        often: how often each of the ops runs again in the whole step.
        readers: what the regions run for, in words.
        nbytes: bytes that are not kept from forward to backward, because these regions make them.
        flops: floating point operations of all the runs.
        seconds: estimated time of all the runs.
    """

    places: list[Place]
    what: str
    regions: int = 0
    runs: int = 0
    often: set[int] = field(default_factory=set)
    readers: dict[str, None] = field(default_factory=dict)
    nbytes: int = 0
    flops: int = 0
    seconds: float = 0.0


def _regions(plan: Plan) -> str:
    groups = grouped_regions(plan)
    if not groups:
        return ""
    shown = groups if len(groups) <= REGION_ROWS + 1 else groups[:REGION_ROWS]
    places = [tail_of(pattern(group.places), 26) for group in shown]
    room = 48 - max(map(len, places))
    rows = [
        _region_row(place, _start(group.what, room), group)
        for place, group in zip(places, shown, strict=True)
    ]
    if len(groups) > len(shown):
        rest = _summed(groups[len(shown) :])
        rows.append(_region_row(f"and {len(groups) - len(shown)} more", "", rest))
    rows.append(_region_row("all", "", _summed(groups)))
    headers = ("runs again in", "what", "regions", "runs", "times", "frees", "FLOP", "time")
    return table(headers, rows, "llrrrrrr")


def _region_row(where: str, what: str, group: RegionGroup) -> tuple[str, ...]:
    return (
        where,
        what,
        str(group.regions),
        str(group.runs),
        "-".join(map(str, dict.fromkeys([min(group.often), max(group.often)]))),
        format_bytes(group.nbytes),
        format_count(group.flops),
        format_seconds(group.seconds),
    )


def _summed(groups: Sequence[RegionGroup]) -> RegionGroup:
    return RegionGroup(
        places=[],
        what="",
        regions=sum(g.regions for g in groups),
        runs=sum(g.runs for g in groups),
        often={count for g in groups for count in g.often},
        nbytes=sum(g.nbytes for g in groups),
        flops=sum(g.flops for g in groups),
        seconds=sum(g.seconds for g in groups),
    )


def grouped_regions(plan: Plan) -> list[RegionGroup]:
    """Regions that look the same, together; those that free the most come first."""
    graph = plan.graph
    counts = schedules.recomputed(graph, plan.schedule)
    freed = kept_between(graph, Schedule.keeping_everything(graph))
    for storage in kept_between(graph, plan.schedule):
        freed.pop(storage, None)
    found: dict[tuple[Place, str], RegionGroup] = {}
    for region, reader in zip(plan.regions, first_readers(graph, plan.schedule), strict=True):
        ops = [graph.op(name) for name in region.ops]
        place, what = _place(ops), _what(ops)
        group = found.setdefault((_wild(place), what), RegionGroup([], what))
        group.places.append(place)
        group.readers[short_name(graph.op(reader))] = None
        _add(group, graph, region, counts, freed)
    return sorted(found.values(), key=lambda g: (-g.nbytes, -g.seconds))


def _add(
    group: RegionGroup,
    graph: Graph,
    region: Region,
    counts: Mapping[str, int],
    freed: dict[str, list[Value]],
) -> None:
    """Adds a region; a storage counts for the first region that makes it."""
    group.regions += 1
    for name in region.ops:
        op = graph.op(name)
        group.runs += 1
        group.often.add(counts[name])
        group.flops += op.flops
        group.seconds += op.seconds
        for storage in made_storages(graph, op):
            values = freed.pop(storage, None)
            group.nbytes += values[0].nbytes if values else 0


def first_readers(graph: Graph, schedule: Schedule) -> tuple[str, ...]:
    """For each region the first op of the backward that reads what it makes, views apart; the next
    op of the backward where only other regions do."""
    found: list[str] = []
    served: set[int] = set()
    made_by: dict[str, int] = {}  # storage -> the region that made it last
    waiting, inside = 0, False  # regions for which no op of the backward has come that is no view
    for name in schedule.backward:
        op = graph.op(name)
        if op.phase is Phase.FORWARD:
            made = () if op.is_view else made_storages(graph, op)
            made_by.update(dict.fromkeys(made, len(found)))
            inside = inside or not op.is_view
            continue
        if inside:
            found.append(name)
            inside, waiting = False, waiting + 1
        if op.is_view:
            continue
        found[len(found) - waiting :] = [name] * waiting
        waiting = 0
        for storage in {graph.values[value].storage for value in op.inputs} & made_by.keys():
            region = made_by[storage]
            if region not in served:
                served.add(region)
                found[region] = name
    return tuple(found)


def made_storages(graph: Graph, op: Op) -> Iterator[str]:
    """Storages that a run of an op allocates."""
    sources = {graph.values[name].storage for name in op.inputs}
    storages = dict.fromkeys(graph.values[name].storage for name in op.outputs)
    yield from (storage for storage in storages if storage not in sources)


def kept_between(graph: Graph, schedule: Schedule) -> dict[str, list[Value]]:
    """Storages alive between forward and backward, each with its values that are."""
    made = {name for op in graph.forward for name in op.outputs}
    held = [name for name in graph.outputs if name in made]
    found: dict[str, list[Value]] = {}
    for name in dict.fromkeys([*schedules.saved(graph, schedule), *held]):
        value = graph.values[name]
        if is_charged(value):
            found.setdefault(value.storage, []).append(value)
    return found


# --- names of places and ops --------------------------------------------------------------------


def _place(ops: Sequence[Op]) -> Place:
    """The module that holds all of some ops; of numbered neighbours, all their numbers."""
    paths = list(dict.fromkeys(tuple(op.where.module.split(".")) for op in ops))
    shared: list[Component] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            if all(part.isdigit() for part in parts):
                shared.append(tuple(sorted({int(part) for part in parts})))
            break
        shared.append((int(parts[0]),) if parts[0].isdigit() else parts[0])
    return tuple(shared)


def _wild(place: Place) -> Place:
    return tuple(part if isinstance(part, str) else "*" for part in place)


def pattern(places: Sequence[Place]) -> str:
    """Paths that differ in numbers only, as one: ``layers.[0-11].mlp``."""
    parts = (_either(parts) for parts in zip(*places, strict=True))
    return ".".join(parts) or "(model)"


def _either(parts: Sequence[Component]) -> str:
    if isinstance(parts[0], str):
        return parts[0]
    numbers = sorted({n for part in parts if not isinstance(part, str) for n in part})
    return str(numbers[0]) if len(numbers) == 1 else f"[{_ranges(numbers)}]"


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in short.

    >>> _ranges([0, 1, 2, 5]), _ranges([0, 2, 4, 6, 8])
    ('0-2,5', '0..8')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) > 3:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _what(ops: Sequence[Op]) -> str:
    return " ".join(dict.fromkeys(short_name(op) for op in ops))


def short_name(op: Op) -> str:
    """What an op computes, as people call it.

    >>> short_name(Op("f", "torch.ops.aten.native_layer_norm.default", (), (), Phase.FORWARD))
    'layer_norm'
    """
    parts = op.target.split(".")
    name = parts[3] if op.target.startswith("torch.ops.") and len(parts) > 3 else parts[-1]
    return name.strip("_").removeprefix("native_").removeprefix("scaled_dot_product_")


# --- what is kept -------------------------------------------------------------------------------


@dataclass
class KeptGroup:
    """Kept storages that look the same.

    Attributes:
        names: what each storage was made for: an op's name, ``split[1]`` where it makes several.
        places: modules that made them.
        source: source line of the first.
        reason: why they are kept; what it would cost to make them again if it is for time alone.
        nbytes: bytes of all.
        remakers: the ops that would make them again from what else is kept, with their times.
    """

    names: list[str]
    places: list[Place]
    source: str
    reason: str
    nbytes: int = 0
    remakers: dict[str, float] = field(default_factory=dict)

    @property
    def because(self) -> str:
        """Why they are kept, as a part of a sentence."""
        return self.reason or f"it saves {format_seconds(sum(self.remakers.values()))}"


def _saved(plan: Plan) -> str:
    groups = grouped_saved(plan)
    if not groups:
        return ""
    shown = groups if len(groups) <= SAVED_ROWS + 1 else groups[:SAVED_ROWS]
    rows = [_kept_row(group) for group in shown]
    rest = groups[len(shown) :]
    if rest:
        tensors = sum(len(g.names) for g in rest)
        rows.append((f"and {tensors} more", "", format_bytes(sum(g.nbytes for g in rest)), "", ""))
    rows.append(
        (
            f"all {sum(len(g.names) for g in groups)}",
            "",
            format_bytes(sum(g.nbytes for g in groups)),
            "",
            "",
        )
    )
    return table(("kept", "made in", "bytes", "line", "because"), rows, "llrll")


def _kept_row(group: KeptGroup) -> tuple[str, ...]:
    more = f" +{len(group.names) - 1}" if len(group.names) > 1 else ""
    name = _middle(group.names[0], 22 - len(more)) + more
    where = tail_of(pattern(group.places), 22)
    line = tail_of(group.source, 21)
    return (
        name,
        where,
        format_bytes(group.nbytes),
        line,
        "\n".join(textwrap.wrap(group.because, 24)),
    )


def grouped_saved(plan: Plan) -> list[KeptGroup]:
    """Kept storages that look the same, together; the largest come first."""
    graph = plan.graph
    makers = {storage: op for op in reversed(graph.forward) for storage in made_storages(graph, op)}
    starts = region_starts(graph, plan.schedule)
    found: dict[tuple[Place, str, str, str], KeptGroup] = {}
    kept = kept_between(graph, plan.schedule)
    for storage, values in kept.items():
        op = makers[storage]
        place, reason = _place([op]), reason_kept(graph, op, values, storage in starts)
        which = which_result(graph, op, storage)
        group = found.setdefault(
            (_wild(place), short_name(op), which, reason),
            KeptGroup([], [], op.where.source, reason),
        )
        group.names.append(op.name + which)
        group.places.append(place)
        group.nbytes += values[0].nbytes
        if not reason:
            group.remakers.update(remakers(graph, op, kept))
    return sorted(found.values(), key=lambda g: -g.nbytes)


def which_result(graph: Graph, op: Op, storage: str) -> str:
    """Which result of an op lives in a storage: "" for the only one, or ``[1]``, or ``:rng``."""
    index = [graph.values[name].storage for name in op.outputs].index(storage)
    if op.is_random and index == len(op.outputs) - 1:
        return ":rng"
    return f"[{index}]" if len(op.outputs) - op.is_random > 1 else ""


def reason_kept(graph: Graph, op: Op, values: Iterable[Value], is_start: bool) -> str:
    """Why a storage is kept; "" if only because to make it again takes time."""
    if any(value.kind is Kind.RNG_STATE for value in values):
        return f"replays {short_name(op)}"
    held = set(graph.outputs)
    if any(value.name in held for value in values):
        return "the caller holds it"
    if not op.may_run_again:
        return "runs once: " + next(WHY_ONCE[trait] for trait in Trait if trait in op.traits & ONCE)
    return "a region starts from it" if is_start else ""


def remakers(graph: Graph, op: Op, kept: Collection[str]) -> Iterator[tuple[str, float]]:
    """What must run to make an op's results again from the storages that are kept."""
    seen = {op.name}
    stack = [op]
    while stack:
        now = stack.pop()
        yield now.name, now.seconds
        for name in now.inputs:
            source = graph.producer.get(name)
            if source and source.name not in seen and graph.values[name].storage not in kept:
                seen.add(source.name)
                stack.append(source)


def region_starts(graph: Graph, schedule: Schedule) -> set[str]:
    """Storages from the forward that an op which runs again reads."""
    again: set[str] = set()
    found: set[str] = set()
    for name in schedule.backward:
        op = graph.op(name)
        if op.phase is Phase.FORWARD and not op.is_view:
            found.update(graph.values[n].storage for n in op.inputs)
            found -= again
            again.update(made_storages(graph, op))
    return found


# --- peaks, choices, picture, notes -------------------------------------------------------------


def _peaks(plan: Plan) -> str:
    before, after = plan.baseline, plan.timeline
    seconds = plan.baseline_seconds
    rows = [
        *_peak_rows(plan),
        _both("kept for the backward", before.saved_bytes, after.saved_bytes, ""),
        ("floor: lowest limit found", "", format_bytes(plan.floor_bytes), ""),
        ("no schedule stays below", "", format_bytes(plan.lowest_bytes), ""),
        (
            "time of a step, estimated",
            format_seconds(seconds),
            format_seconds(seconds + plan.extra_seconds),
            more_time(plan, plan.extra_seconds) if plan.regions else "",
        ),
    ]
    if plan.regions:
        bound = format_seconds(seconds + plan.bound_seconds)
        more = more_time(plan, plan.bound_seconds)
        rows.append(("no schedule within the limit takes less", "", bound, more))
    return table(("", "no recompute", "planned", ""), rows, "lrrl")


def _peak_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Both peaks; that which the limit bounds with the op that it is reached at, and by device."""
    before, after = plan.baseline, plan.timeline
    peaks = {
        Peak.ACTIVATIONS: ("peak of activations", before.peak_bytes, after.peak_bytes),
        Peak.STEP: ("peak with gradients", before.step_peak_bytes, after.step_peak_bytes),
    }
    for peak, figures in peaks.items():
        yield _both(*figures, _peak_at(plan) if peak is plan.peak else "")
        if peak is plan.peak:
            yield from _device_peaks(plan.bounded_baseline, plan.bounded)


def _device_peaks(before: Timeline, after: Timeline) -> Iterator[tuple[str, ...]]:
    if len(before.device_peaks) > 1:
        for device in sorted(before.device_peaks):
            planned = after.device_peaks.get(device, 0)
            yield _both(f"on {device}", before.device_peaks[device], planned, "")


def _both(name: str, before: int, after: int, where: str) -> tuple[str, ...]:
    return (name, format_bytes(before), format_bytes(after), where)


def _peak_at(plan: Plan) -> str:
    found = plan.bounded
    if not found.steps:
        return ""
    op = plan.graph.op(found.peak_at)
    half = {"forward": "forward", "backward": "backward", "again": "run again"}
    module = f" in {op.where.module}" if op.where.module else ""
    return _start(f"at {op.name}{module}, {half[half_of(found, found.peak_index)]}", 50)


def _choices(plan: Plan) -> str:
    whole = plan.bounded_baseline.peak_bytes
    rows = [
        (
            format_bytes(choice.limit_bytes),
            percent(choice.limit_bytes, whole),
            format_bytes(choice.peak_bytes),
            more_time(plan, choice.extra_seconds).removesuffix(" time"),
            "<- this plan" if choice.peak_bytes == plan.bounded.peak_bytes else "",
        )
        for choice in plan.choices
    ]
    which = which_peak(plan)
    return table(("limit", f"of the {which}", which, "more time", ""), rows, "rrrrl")


def _picture(plan: Plan) -> str:
    """Bytes that a limit bounds, op by op; what runs again stands at the op that it runs for."""
    columns, height = PICTURE
    before = _profile(plan, plan.bounded_baseline, columns)
    after = _profile(plan, plan.bounded, columns)
    top = max([*before, *after, 1])
    what = "activation bytes" if plan.peak is Peak.ACTIVATIONS else "bytes with gradients"
    lines = [f"{'':10}{what}, op by op:  # planned   : no recompute"]
    for row in range(height):
        level = top * (2 * (height - row) - 1) / (2 * height)
        cells = (
            "#" if a >= level else ":" if b >= level else " "
            for a, b in zip(after, before, strict=True)
        )
        label = format_bytes(top * (height - row) // height) if row % 3 == 0 else ""
        lines.append(f"{label:>8} |{''.join(cells)}".rstrip())
    turn = len(plan.graph.forward) * columns // max(1, len(plan.graph.ops))
    lines.append(f"{'0 B':>8} +{'-' * turn}|{'-' * max(0, columns - turn - 1)}")
    lines.append(f"{'':10}{'forward':<{turn}} {'backward'}")
    return "\n".join(lines)


def _profile(plan: Plan, timeline: Timeline, columns: int) -> list[int]:
    """Live bytes in each column, the largest where several runs share one."""
    place = {op.name: i for i, op in enumerate(plan.graph.ops)}
    found = [0] * columns
    now = len(place) - 1
    for step in reversed(timeline.steps):
        now = now if step.again else place[step.op]
        column = now * columns // len(place)
        found[column] = max(found[column], step.live_bytes)
    return found


def policy_notes(plan: Plan) -> Iterator[str]:
    """How far the plan follows what the user's checkpoints ask for."""
    graph = plan.graph
    kept = _kept_of_checkpoints(plan)
    if kept:
        yield (
            f"{_counted(len(kept), 'value', 'is', 'are')} kept, as the limit allows it, that your "
            f"checkpoints would make again: {format_bytes(sum(kept))}"
        )
    demanded = sum(Trait.MUST_RECOMPUTE in op.traits for op in graph.backward)
    if demanded:
        yield (
            f"{_counted(demanded, 'op', 'runs', 'run')} twice because your checkpoint policy says "
            f"{Trait.MUST_RECOMPUTE.name}: both columns count it"
        )
    wish = Trait.PREFER_SAVE
    again = schedules.recomputed(graph, plan.schedule)
    count = sum(wish in graph.op(name).traits for name in again)
    if count:
        yield (
            f"{_counted(count, 'op', 'runs', 'run')} again although your checkpoint policy says "
            f"{wish.name}: a higher limit keeps what they make"
        )


def _kept_of_checkpoints(plan: Plan) -> list[int]:
    """Bytes of each storage that is kept for the backward alone, and that a checkpoint would make
    again."""
    graph = plan.graph
    wishes = {Trait.PREFER_RECOMPUTE, Trait.MUST_RECOMPUTE}
    held = {graph.values[name].storage for name in graph.outputs}
    makers = {storage: op for op in reversed(graph.forward) for storage in made_storages(graph, op)}
    return [
        values[0].nbytes
        for storage, values in kept_between(graph, plan.schedule).items()
        if storage not in held and makers[storage].traits & wishes
        if values[0].kind is not Kind.RNG_STATE
    ]


def _counted(count: int, what: str, one: str, many: str) -> str:
    return f"{count} {what}s {many}" if count > 1 else f"{count} {what} {one}"


def _notes(plan: Plan) -> str:
    return "\n".join(
        textwrap.fill(
            f"note: {note}",
            WIDTH,
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for note in (*plan.notes, *policy_notes(plan))
    )


# --- text ---------------------------------------------------------------------------------------


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table with a line under its headers; `align` has "l" or "r" for each column."""
    sides = [{"l": "left", "r": "right"}[side] for side in align]
    # The headers are a row like any other: tabulate makes columns wider than their headers.
    plain = tabulate([headers, *rows], tablefmt="plain", disable_numparse=True, colalign=sides)
    lines = [line.rstrip() for line in plain.splitlines()]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _start(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 2] + ".."


def _middle(name: str, width: int) -> str:
    """A name without its middle.

    >>> _middle("_scaled_dot_product_flash_attention_for_cpu[0]", 20)
    '_scaled_dot_..cpu[0]'
    """
    if len(name) <= width:
        return name
    end = min(6, width // 2)
    return f"{name[: width - 2 - end]}..{name[-end:]}"


def tail_of(path: str, width: int) -> str:
    """The end of a dotted path, from a dot on if that leaves something.

    >>> tail_of("transformer.h.[0-5].attn.c_attn", 24), tail_of("configuration_utils.py:7", 20)
    ('..h.[0-5].attn.c_attn', '..uration_utils.py:7')
    """
    if len(path) <= width:
        return path
    end = path[2 - width :]
    _, dot, rest = end.partition(".")
    return f"..{rest if dot and len(rest) >= width // 2 else end}"


def ascii_only(words: str) -> str:
    """Words with what is not ASCII escaped."""
    return words.encode("ascii", "backslashreplace").decode("ascii")
