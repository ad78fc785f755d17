"""What the user reads: a plan as text, and its timeline one line a run.

`text` is the `repr` of a plan. It is made from the plan alone, about 100 columns wide, in ASCII,
and the same for the same plan. Regions that look alike are one row: ``layers.0-11.mlp`` stands
for the regions of twelve layers. So are saved tensors: ``add_1 +11`` are twelve of a kind.

    >>> from fxrecals.ir import Graph, Kind, Op, Phase, Value
    >>> from fxrecals.plans import Plan
    >>> from fxrecals.schedule import Schedule
    >>> values = {n: Value(n, 4000, n) for n in "ab"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    >>> values["c"] = Value("c", 8, "c", Kind.GRADIENT)
    >>> ops = (
    ...     Op("f", "sin", ("x",), ("a",), Phase.FORWARD, seconds=1e-3),
    ...     Op("g", "cos", ("a",), ("b",), Phase.FORWARD, seconds=1e-3),
    ...     Op("h", "mul", ("a", "b"), ("c",), Phase.BACKWARD, seconds=2e-3),
    ... )
    >>> graph = Graph(ops, values, outputs=("b", "c"))
    >>> plan = Plan(graph, Schedule(("f", "g"), ("f", "h")), limit_bytes=8000, floor_bytes=8000)
    >>> print(text(plan).partition(" (")[0])
    fits 8.00 kB: peak 8.00 kB instead of 8.00 kB, +25.0 % time
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from tabulate import tabulate

from fxrecals import schedule as schedules
from fxrecals.formats import format_bytes, format_count, format_seconds
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, is_charged
from fxrecals.schedule import Region, Schedule, makes, reads

if TYPE_CHECKING:
    from fxrecals.plans import Choice, Plan

T = TypeVar("T")

WIDTH = 100
"""Columns that the report takes, about: a long reason may take a few more."""

REGION_ROWS = 12
SAVED_ROWS = 8
PICTURE = (60, 10)
"""Columns and rows of the picture of the memory profile."""

_REASONS = {
    Trait.MUST_SAVE: "a checkpoint policy keeps it",
    Trait.MUTATES: "it writes to an input",
    Trait.COLLECTIVE: "it talks to other processes",
    Trait.OPAQUE: "it is not known to be pure",
    Trait.CALLER: "it is not in a graph",
}
"""Why an op may not run again, the first that applies."""


def text(plan: Plan) -> str:
    """The report of a plan: verdict, regions, largest saved tensors, figures; without a limit
    also the curve limit against time and a picture of the memory profile.

    Bytes are decimal (1 MB is 10^6 bytes); times are estimates of the cost model.
    """
    facts = _Facts(plan)
    parts = [_verdict(plan), _regions(facts), _saved(facts), _figures(plan)]
    if plan.choices:
        parts += [_curve(plan), _picture(plan)]
    parts.append(_notes(plan))
    return _ascii("\n\n".join(part for part in parts if part))


def timeline_text(plan: Plan) -> str:
    """One line a run, in order, below a header: what runs, where, and the bytes it moves.

    *live* are activation bytes while it runs, *allocated* what it adds, *freed* what dies with
    it. The second column tells a first run of the forward or the backward from one again.
    """
    peak = plan.timeline.peak_index
    rows = [["", "half", "op", "module", "live", "allocated", "freed", ""]]
    for index, step in enumerate(plan.timeline.steps):
        op = plan.graph.op(step.op)
        sizes = (step.live_bytes, step.allocated_bytes, step.freed_bytes)
        half = "again" if step.again else _half(op)
        note = "<- peak" if index == peak else ""
        rows.append([str(index), half, op.name, op.where.module, *map(format_bytes, sizes), note])
    return _ascii("\n".join(_aligned(rows, right=(0, 4, 5, 6))))


def _half(op: Op) -> str:
    return "caller" if Trait.CALLER in op.traits else op.phase.value


def _aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


# --- the verdict -------------------------------------------------------------------------------


def _verdict(plan: Plan) -> str:
    peak, baseline = format_bytes(plan.peak_bytes), format_bytes(plan.baseline_peak_bytes)
    if plan.limit_bytes is None:
        return _offer(plan, peak, baseline)
    limit = format_bytes(plan.limit_bytes)
    tail = f", floor {format_bytes(plan.floor_bytes)}"
    if plan.peak_bytes > plan.limit_bytes:
        return f"does not fit {limit}: peak {peak} instead of {baseline}, {_price(plan)}{tail}"
    if not plan.regions:
        return f"fits {limit} as it is: peak {peak}, nothing runs again{tail}"
    return f"fits {limit}: peak {peak} instead of {baseline}, {_price(plan)}{tail}"


def _offer(plan: Plan, peak: str, baseline: str) -> str:
    """The verdict where no limit was given."""
    if not plan.regions:
        return f"no limit given: peak {baseline}, and to run ops again would not pay"
    return (
        f"no limit given: peak {baseline}; the knee is at {peak}, {_price(plan)}, "
        f"floor {format_bytes(plan.floor_bytes)}"
    )


def _knee(plan: Plan) -> Choice | None:
    """The row of the curve that the plan is."""
    mine = (plan.peak_bytes, plan.extra_seconds)
    found = (c for c in plan.choices if c.peak_bytes == mine[0])
    return min(found, key=lambda c: abs(c.extra_seconds - mine[1]), default=None)


def _price(plan: Plan) -> str:
    runs = sum(len(region.ops) for region in plan.regions)
    distinct = len({name for region in plan.regions for name in region.ops})
    again = f"{_counted(distinct, 'op')} {'runs' if distinct == 1 else 'run'} again"
    if runs > distinct:
        again += f", {runs} runs,"
    regions = _counted(len(plan.regions), "region")
    return f"{_share(plan.extra_seconds, plan.baseline_seconds)} time ({again} in {regions})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _share(seconds: float, of_seconds: float) -> str:
    """Extra time in percent, or "unknown" where the cost model said nothing."""
    return f"+{100 * seconds / of_seconds:.1f} %" if of_seconds else "unknown"


# --- what the tables are made of ---------------------------------------------------------------


class _Facts:
    """What a plan says of storages: which are saved without recompute, which with it, and why."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.storages = {name: value.storage for name, value in plan.graph.values.items()}
        self.makers: dict[str, tuple[Op, str]] = {}
        for op in self.graph.ops:
            for name in op.outputs:
                self.makers.setdefault(self.storages[name], (op, name))
        self.kept = _kept(self.graph, plan.schedule, plan.saved)
        everything = Schedule.keeping_everything(self.graph)
        before = _kept(self.graph, everything, schedules.saved(self.graph, everything))
        self.freed = frozenset(before) - frozenset(self.kept)
        self.freed_bytes = self.freed_by(plan.regions)
        self.again = schedules.recomputed(self.graph, plan.schedule)

    def freed_by(self, regions: Iterable[Region]) -> int:
        """Bytes of what the regions make again so that it need not be saved, each storage once."""
        made = {
            self.storages[name]
            for region in regions
            for op in region.ops
            for name in self.graph.op(op).outputs
        }
        return sum(self.nbytes(storage) for storage in made & self.freed)

    def nbytes(self, storage: str) -> int:
        """Size of a storage."""
        return self.graph.values[self.makers[storage][1]].nbytes

    def remake_seconds(self, storage: str) -> float:
        """Time to compute a storage again from what else is saved."""
        wanted: dict[str, None] = {}
        stack = [self.makers[storage][0]]
        while stack:
            op = stack.pop()
            if op.name in wanted:
                continue
            wanted[op.name] = None
            for name in op.inputs:
                maker = self.graph.producer.get(name)
                if maker is not None and self.storages[name] not in self.kept:
                    stack.append(maker)
        return sum(self.graph.op(name).seconds for name in wanted)


def _kept(graph: Graph, schedule: Schedule, saved: Collection[str]) -> dict[str, None]:
    """Charged storages alive between forward and backward, in order of creation."""
    alive = frozenset(graph.outputs) | frozenset(saved)
    outside = {v.storage for v in graph.values.values() if v.kind is Kind.PRIMAL}
    made = (graph.values[name] for op in graph.forward for name in op.outputs)
    return {
        value.storage: None
        for value in made
        if value.name in alive and value.storage not in outside and is_charged(value)
    }


# --- module paths that look alike --------------------------------------------------------------

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def _pattern(module: str) -> str:
    """A module path with its numbers left open."""
    return _NUMBER.sub("*", module)


def _merged(modules: Sequence[str]) -> str:
    """One path for paths of one pattern, their numbers as a range: ``layers.0-11.mlp``."""
    numbers = [[int(n) for n in _NUMBER.findall(module)] for module in modules]
    ranges = iter([_range(sorted(set(column))) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda match: next(ranges, "*"), modules[0])


def _range(numbers: Sequence[int]) -> str:
    """Sorted numbers as ``0-3,5``, or ``*`` where that is long."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if len(spans) > 3:
        return "*"
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _common(modules: Iterable[str]) -> str:
    """The longest path that all paths begin with; ops without a path do not count."""
    paths = [module.split(".") for module in modules if module]
    if not paths:
        return ""
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _short(target: str) -> str:
    """An op's target without what all targets share.

    >>> _short("torch.ops.aten.native_dropout.default"), _short("torch.ops.mine.twist.default")
    ('native_dropout', 'mine.twist')
    """
    if not target.startswith("torch.ops."):
        return target.rpartition(".")[2]
    namespace, _, name = target.removeprefix("torch.ops.").partition(".")
    name = name.partition(".")[0]
    return name if namespace in ("aten", "prims") else f"{namespace}.{name}"


def _grouped(things: Iterable[T], keys: Iterable[Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for thing, key in zip(things, keys, strict=True):
        groups.setdefault(key, []).append(thing)
    return list(groups.values())


# --- regions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Look:
    """How a region looks: its module path, and what of that module runs again."""

    module: str
    parts: tuple[str, ...]

    @property
    def pattern(self) -> Hashable:
        """What makes two regions the same row."""
        return _pattern(self.module), tuple(dict.fromkeys(map(_pattern, self.parts)))


def _look(graph: Graph, region: Region) -> _Look:
    ops = [graph.op(name) for name in region.ops]
    module = _common(op.where.module for op in ops)
    return _Look(module, tuple(dict.fromkeys(_part(op, module) for op in ops)))


def _part(op: Op, module: str) -> str:
    """The submodule that an op is in, or the op where it is the module's own."""
    inner = op.where.module.removeprefix(module).strip(".")
    return inner or _short(op.target)


def _regions(facts: _Facts) -> str:
    plan = facts.plan
    if not plan.regions:
        return ""
    looks = {region: _look(plan.graph, region) for region in plan.regions}
    groups = _grouped(plan.regions, (looks[region].pattern for region in plan.regions))
    groups.sort(key=facts.freed_by, reverse=True)
    shown, rest = _first(groups, REGION_ROWS)
    rows = [_region_row(facts, _title([looks[r] for r in group]), group) for group in shown]
    if rest:
        hidden = [region for group in rest for region in group]
        rows.append(_region_row(facts, f"and {len(rest)} more", hidden))
    if len(groups) > 1:
        rows.append(_region_row(facts, "all", plan.regions))
    headers = [
        "runs again in the backward",
        "regions",
        "ops",
        "frees",
        "times",
        "extra FLOP",
        "extra time",
    ]
    return _table(headers, rows, right=range(1, 7), flexible=0, cut=_beginning)


def _first(groups: list[T], count: int) -> tuple[list[T], list[T]]:
    """The first rows, and the rest: never a rest of one, which needs a row as well."""
    count = count if len(groups) > count + 1 else count + 1
    return groups[:count], groups[count:]


def _title(looks: Sequence[_Look]) -> str:
    module = _merged([look.module for look in looks])
    parts = looks[0].parts
    if len(looks) > 1:  # whose numbers differ
        parts = tuple(dict.fromkeys(map(_pattern, parts)))
    return ": ".join(part for part in (module, ", ".join(parts)) if part)


def _region_row(facts: _Facts, title: str, regions: Sequence[Region]) -> list[str]:
    ops = [facts.graph.op(name) for region in regions for name in region.ops]
    times = sorted({facts.again[op.name] for op in ops})
    return [
        title,
        str(len(regions)),
        str(len(ops)),
        format_bytes(facts.freed_by(regions)),
        f"{times[0]}x" if len(times) == 1 else f"{times[0]}-{times[-1]}x",
        format_count(sum(op.flops for op in ops)),
        format_seconds(sum(op.seconds for op in ops)),
    ]


# --- saved tensors -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """One storage that is alive between forward and backward.

    Attributes:
        name: of the value that it was made for; one of several results as ``split[1]``.
        op: what made it.
        nbytes: its size.
        reason: why it is kept, without figures.
        seconds: time to compute it again, where that is the reason, else 0.
    """

    name: str
    op: Op
    nbytes: int
    reason: str
    seconds: float = 0.0

    @property
    def look(self) -> Hashable:
        """What makes two of them the same row."""
        where = self.op.where
        place = self.name.partition("[")[2]
        return (self.op.target, place, _pattern(where.module), where.source, self.reason)


def _saved(facts: _Facts) -> str:
    if not facts.kept:
        return ""
    starts = _region_starts(facts.graph, facts.plan.schedule)
    kept = [_kept_tensor(facts, storage, starts) for storage in facts.kept]
    groups = _grouped(kept, ((item.look, item.nbytes) for item in kept))
    groups.sort(key=lambda group: sum(item.nbytes for item in group), reverse=True)
    shown, rest = _first(groups, SAVED_ROWS)
    rows = [_saved_row(group) for group in shown]
    if rest:
        hidden = [item for group in rest for item in group]
        rows.append([f"and {len(hidden)} more", _total(hidden), "", "", ""])
    if len(groups) > 1:
        rows.append([f"all {len(kept)}", _total(kept), "", "", ""])
    headers = ["saved tensor (+n alike)", "bytes", "module", "source", "why"]
    return _table(headers, rows, right=(1,), flexible=2, cut=_ending)


def _total(kept: Iterable[_Kept]) -> str:
    return format_bytes(sum(item.nbytes for item in kept))


def _saved_row(group: Sequence[_Kept]) -> list[str]:
    first = group[0]
    name = _ending(first.name, 24)
    seconds = sum(item.seconds for item in group)
    reason = f"{first.reason}: {format_seconds(seconds)}" if seconds else first.reason
    return [
        name if len(group) == 1 else f"{name} +{len(group) - 1}",
        _total(group),
        _merged([item.op.where.module for item in group]),
        first.op.where.source,
        textwrap.fill(reason, 26),
    ]


def _kept_tensor(facts: _Facts, storage: str, starts: Collection[str]) -> _Kept:
    op, name = facts.makers[storage]
    nbytes = facts.nbytes(storage)
    seconds = 0.0
    if _is_held(facts, storage):
        reason = "the caller holds it"
    elif facts.graph.values[name].kind is Kind.RNG_STATE:
        reason = f"generator state for replay of {_short(op.target)}"
    elif not op.may_run_again:
        reason = f"its op may not run again: {_forbidden(op)}"
    elif storage in starts:
        reason = "a region starts from it"
    else:
        seconds = facts.remake_seconds(storage)
        reason = "dear to recompute"
        if not _is_dear(facts, seconds, nbytes):
            seconds, reason = 0.0, "the limit has room for it"
    return _Kept(_shown_name(op, name), op, nbytes, reason, seconds)


def _is_held(facts: _Facts, storage: str) -> bool:
    return any(facts.storages[name] == storage for name in facts.graph.outputs)


def _forbidden(op: Op) -> str:
    return next(words for trait, words in _REASONS.items() if trait in op.traits)


def _is_dear(facts: _Facts, seconds: float, nbytes: int) -> bool:
    """Whether a tensor costs more time per byte than what the plan computes again, on average."""
    return seconds * facts.freed_bytes > facts.plan.extra_seconds * nbytes


def _shown_name(op: Op, name: str) -> str:
    """The value's name, or which result of its op it is, where only a getitem names it."""
    results = [n for n in op.outputs if n != f"{op.name}:rng"]
    if name == op.name or name not in results:
        return name
    return f"{op.name}[{results.index(name)}]"


def _region_starts(graph: Graph, schedule: Schedule) -> frozenset[str]:
    """Storages as the forward left them that an op which runs again reads, also through views."""
    old = {name for op in graph.forward for name in op.outputs}
    found: set[str] = set()
    for name in schedule.backward:
        op = graph.op(name)
        if op.phase is not Phase.FORWARD:
            continue
        sources = {graph.values[x].storage for x in reads(op, True) if x in old}
        if not op.is_view:
            found |= sources
        for made in makes(op, True):
            if graph.values[made].storage not in sources:
                old.discard(made)
    return frozenset(found)


# --- figures -----------------------------------------------------------------------------------


def _figures(plan: Plan) -> str:
    rows = [
        ["activation peak", *_pair(plan.baseline_peak_bytes, plan.peak_bytes), _peak_at(plan)],
        *_device_rows(plan),
        ["with gradients", *_pair(plan.baseline.step_peak_bytes, plan.step_peak_bytes), ""],
        ["saved tensors", *_pair(plan.baseline.saved_bytes, plan.saved_bytes), ""],
        ["floor", "", format_bytes(plan.floor_bytes), "the smallest limit that works"],
        [
            "estimated time",
            format_seconds(plan.baseline_seconds),
            format_seconds(plan.baseline_seconds + plan.extra_seconds),
            _share(plan.extra_seconds, plan.baseline_seconds),
        ],
    ]
    return _table(["", "without", "planned", ""], rows, right=(1, 2), flexible=3, cut=_beginning)


def _pair(before: int, after: int) -> tuple[str, str]:
    return format_bytes(before), format_bytes(after)


def _peak_at(plan: Plan) -> str:
    name = plan.timeline.peak_at
    if not name:
        return ""
    where = plan.graph.op(name).where
    module = f" in {where.module}" if where.module else ""
    source = f" ({where.source})" if where.source else ""
    return f"at {name}{module}{source}"


def _device_rows(plan: Plan) -> Iterator[list[str]]:
    before, after = plan.baseline.device_peaks, plan.timeline.device_peaks
    if len(before) > 1:
        for device in sorted(before):
            yield [f"  on {device}", *_pair(before[device], after.get(device, 0)), ""]


def _curve(plan: Plan) -> str:
    knee = _knee(plan)
    rows = [
        [
            format_bytes(choice.limit_bytes),
            _part_of(choice.limit_bytes, plan.baseline_peak_bytes),
            format_bytes(choice.peak_bytes),
            _share(choice.extra_seconds, plan.baseline_seconds),
            "<- this plan" if choice is knee else "",
        ]
        for choice in plan.choices
    ]
    return _table(
        ["limit", "share", "peak", "extra time", ""],
        rows,
        right=range(4),
        flexible=4,
        cut=_beginning,
    )


def _part_of(nbytes: int, whole: int) -> str:
    return f"{100 * nbytes / whole:.0f} %" if whole else ""


def _picture(plan: Plan) -> str:
    """The live bytes of the planned step and of the step without recompute, over its ops."""
    width, height = PICTURE
    before = _columns([step.live_bytes for step in plan.baseline.steps], width)
    after = _columns(_by_baseline_op(plan), width)
    top = max([*before, *after], default=0)
    if not top:
        return ""
    lines = []
    for row in range(height, 0, -1):
        level = top * (row - 0.5) / height
        label = format_bytes(top) if row == height else ""
        cells = (
            "#" if b >= level else "." if a >= level else " "
            for a, b in zip(before, after, strict=True)
        )
        lines.append(f"{label:>8} |{''.join(cells)}".rstrip())
    lines.append(f"{'0 B':>8} +{'-' * width}")
    lines.append(f"{'':>10}{_halves(plan, width)}")
    lines.append(f"{'':>10}live activation bytes:  # planned   . without recompute")
    return "\n".join(lines)


def _by_baseline_op(plan: Plan) -> list[int]:
    """Live bytes at each op of the step; what runs again counts with the op it runs for."""
    found: list[int] = []
    pending = 0
    for step in plan.timeline.steps:
        pending = max(pending, step.live_bytes)
        if not step.again:
            found.append(pending)
            pending = 0
    return found


def _columns(live: Sequence[int], width: int) -> list[int]:
    """The largest of each of `width` stretches; the same one twice where there are too few."""
    if not live:
        return [0] * width
    starts = [column * len(live) // width for column in range(width + 1)]
    pairs = pairwise(starts)
    return [max(live[a : max(b, a + 1)]) for a, b in pairs]


def _halves(plan: Plan, width: int) -> str:
    total = max(1, len(plan.baseline.steps))
    split = round(width * plan.baseline.forward_runs / total)
    return f"{'forward'[:split].ljust(split)}{'backward'[: width - split]}"


def _notes(plan: Plan) -> str:
    if not plan.notes:
        return ""
    wrapped = (
        textwrap.fill(
            note,
            WIDTH,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for note in plan.notes
    )
    return "\n".join(["notes:", *wrapped])


# --- laying out --------------------------------------------------------------------------------


def _table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int],
    flexible: int,
    cut: Callable[[str, int], str],
) -> str:
    """A table of at most `WIDTH` columns, if shortening its flexible column is enough."""
    fixed = sum(
        max((len(line) for cell in column for line in cell.split("\n")), default=0) + 2
        for i, column in enumerate(zip(headers, *rows, strict=True))
        if i != flexible
    )
    room = max(20, WIDTH - fixed)
    fitted = [
        [cut(cell, room) if i == flexible else cell for i, cell in enumerate(row)] for row in rows
    ]
    laid_out = tabulate(
        fitted,
        headers=headers,
        tablefmt="simple",
        disable_numparse=True,
        colalign=["right" if i in right else "left" for i in range(len(headers))],
    )
    return "\n".join(line.rstrip() for line in laid_out.splitlines())


def _beginning(words: str, width: int) -> str:
    return words if len(words) <= width else words[: width - 3] + "..."


def _ending(words: str, width: int) -> str:
    """The end of a long path, which says more than its beginning; whole names, if one fits."""
    if len(words) <= width:
        return words
    end = words[3 - width :]
    _, dot, names = end.partition(".")
    return f"...{names if dot else end}"


def _ascii(words: str) -> str:
    return words.encode("ascii", "backslashreplace").decode("ascii")


__all__ = ["text", "timeline_text"]
