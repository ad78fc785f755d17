"""Why a plan keeps a tensor or makes it again, what that costs, who needs it, when it is freed.

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
>>> print(explain(plan, "a"))
f: 8.00 kB, made by sin
  made again 1 time in the backward, for h
  to make it again takes 1.00 ms: f
  needed in the forward by g; in the backward by h
  lives from f to g (forward); from f (again) to h (backward)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fxrecals.errors import OptionError
from fxrecals.formats import format_bytes, format_seconds
from fxrecals.ir import Graph, Kind, Op, Phase, Value
from fxrecals.report import (
    ascii_only,
    kept_between,
    made_storages,
    reason_kept,
    region_starts,
    remakers,
    short_name,
    table,
    tail_of,
    which_result,
)
from fxrecals.schedule import Schedule
from fxrecals.timeline import Lifetime, lifetimes

if TYPE_CHECKING:
    from fxrecals.plans import Plan

NAMED = 4
"""Names that a line lists; of the rest it says how many there are."""

INPUT = "input"
KEPT = "kept"
HELD = "held"
AGAIN = "made again"
FREED = "freed"
BACKWARD = "backward"


@dataclass(frozen=True)
class Life:
    """One stretch in which a tensor takes memory.

    Attributes:
        since: the op whose run allocates it.
        until: the op after whose run it is freed; "" if the caller holds it.
        begins: "forward", "backward" or "again", for a run in the backward of a forward op.
        ends: the same of `until`, or "".
    """

    since: str
    until: str
    begins: str
    ends: str


@dataclass(frozen=True)
class Story:
    """What becomes of one tensor: of one storage, with all that lives in it.

    Attributes:
        name: what the report calls it: the op that makes it, with ``[1]`` where that makes several.
        op: name of the op that makes it, "" for an input of the step.
        target: what that op computes.
        module: module path of that op.
        source: source line of that op.
        nbytes: bytes.
        fate: "input", "kept" from forward to backward, "held" by the caller, "made again" in the
            backward, "freed" before it, or made in the "backward".
        because: why, in words.
        remake_seconds: estimated time of making it again from what is kept; None where it may not
            or cannot be made again.
        remade_by: the ops that this would take.
        forward_readers: ops of the forward that read it.
        backward_readers: ops of the backward that read it.
        lives: when it takes memory.
    """

    name: str
    op: str
    target: str
    module: str
    source: str
    nbytes: int
    fate: str
    because: str
    remake_seconds: float | None
    remade_by: tuple[str, ...]
    forward_readers: tuple[str, ...]
    backward_readers: tuple[str, ...]
    lives: tuple[Life, ...]


@dataclass(frozen=True)
class Explanation:
    """What `Plan.explain` returns; it prints itself.

    Attributes:
        name: what was asked for.
        is_module: whether that is a module.
        stories: of each tensor, in order of creation.
    """

    name: str
    is_module: bool
    stories: tuple[Story, ...]

    def __repr__(self) -> str:
        if self.is_module:
            return ascii_only(_module_text(self))
        return ascii_only("\n\n".join(map(_story_text, self.stories)))


def explain(plan: Plan, name: str) -> Explanation:
    """What becomes of a tensor, or of all that a module makes in the forward.

    Raises:
        OptionError: the plan knows nothing of that name.
    """
    graph, teller = plan.graph, _Teller(plan.graph, plan.schedule)
    values = _values_named(graph, name)
    is_module = not values
    values = values or _values_made_in(graph, name)
    if not values:
        raise OptionError("name", name, _known(graph, name))
    storages = dict.fromkeys(value.storage for value in values)
    return Explanation(name, is_module, tuple(map(teller.story, storages)))


def _values_named(graph: Graph, name: str) -> list[Value]:
    """The values of a name, or those that an op of the name makes; without the prefix of a graph
    of the step, those of all its graphs."""
    found: list[Value] = []
    prefixes = dict.fromkeys(op.name.partition(".")[0] + "." for op in graph.ops if "." in op.name)
    for full in (name, *(prefix + name for prefix in prefixes)):
        op = graph.by_name.get(full.partition("[")[0])
        outputs = [graph.values[output] for output in op.outputs] if op else []
        if full in graph.values:
            found.append(graph.values[full])
        elif op and full != op.name:
            found += (v for v in outputs if op.name + which_result(graph, op, v.storage) == full)
        else:
            found += outputs
    return found


def _values_made_in(graph: Graph, module: str) -> list[Value]:
    made = ((op, storage) for op in graph.forward for storage in made_storages(graph, op))
    return [
        next(graph.values[n] for n in op.outputs if graph.values[n].storage == storage)
        for op, storage in made
        if op.where.module == module or op.where.module.startswith(f"{module}.")
    ]


def _known(graph: Graph, name: str) -> str:
    modules = dict.fromkeys(op.where.module for op in graph.ops if op.where.module)
    names = [*modules, *graph.values]
    near = difflib.get_close_matches(name, names, n=3) or [*modules][:2] + [*graph.by_name][:1]
    return "a tensor, an op or a module of the plan, such as " + ", ".join(map(repr, near))


class _Teller:
    """Tells stories of one schedule."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedule = schedule

    @cached_property
    def kept(self) -> dict[str, list[Value]]:
        return kept_between(self.graph, self.schedule)

    @cached_property
    def starts(self) -> set[str]:
        return region_starts(self.graph, self.schedule)

    @cached_property
    def makers(self) -> dict[str, Op]:
        ops = reversed(self.graph.ops)
        return {storage: op for op in ops for storage in made_storages(self.graph, op)}

    @cached_property
    def members(self) -> dict[str, list[Value]]:
        found: dict[str, list[Value]] = {}
        for value in self.graph.values.values():
            found.setdefault(value.storage, []).append(value)
        return found

    @cached_property
    def readers(self) -> dict[str, list[Op]]:
        """By storage, the ops that read it; a view of it is not one of them, who reads that is."""
        found: dict[str, list[Op]] = {}
        for op in self.graph.ops:
            for storage in dict.fromkeys(self.graph.values[n].storage for n in op.inputs):
                if not op.is_view:
                    found.setdefault(storage, []).append(op)
        return found

    @cached_property
    def lives(self) -> dict[str, list[Lifetime]]:
        found: dict[str, list[Lifetime]] = {}
        for life in lifetimes(self.graph, self.schedule):
            found.setdefault(life.storage, []).append(life)
        return found

    def story(self, storage: str) -> Story:
        value, op = self.members[storage][0], self.makers.get(storage)
        if op is not None:
            value = next(v for v in self.members[storage] if v.name in op.outputs)
        fate = self._fate(value, op)
        is_state = value.kind is Kind.RNG_STATE
        remade = None if is_state or fate in (INPUT, BACKWARD) else self._remade_by(op)
        readers = self.readers.get(storage, [])
        return Story(
            name=op.name + which_result(self.graph, op, storage) if op else value.name,
            op=op.name if op else "",
            target=short_name(op) if op else "",
            module=op.where.module if op else "",
            source=op.where.source if op else "",
            nbytes=value.nbytes,
            fate=fate,
            because=self._because(value, op, fate),
            remake_seconds=None if remade is None else sum(s for _, s in remade),
            remade_by=() if remade is None else tuple(name for name, _ in remade),
            forward_readers=tuple(o.name for o in readers if o.phase is Phase.FORWARD),
            backward_readers=tuple(o.name for o in readers if o.phase is Phase.BACKWARD),
            lives=tuple(self._lives(storage)) if op else (),
        )

    def _fate(self, value: Value, op: Op | None) -> str:
        if op is None or value.kind is Kind.PRIMAL:
            return INPUT
        if op.phase is Phase.BACKWARD:
            return BACKWARD
        held = set(self.graph.outputs)
        if any(v.name in held for v in self.members[value.storage]):
            return HELD
        if value.storage in self.kept:
            return KEPT
        lives = self.lives.get(value.storage, [])
        again = any(life.born >= len(self.schedule.forward) for life in lives)
        return AGAIN if again else FREED

    def _because(self, value: Value, op: Op | None, fate: str) -> str:
        if op is None or fate == INPUT:
            return "there before the step, and not counted"
        if fate == BACKWARD:
            if value.kind is Kind.GRADIENT:
                return "a gradient of a parameter"
            return "only forward ops run again"
        if fate == AGAIN:
            times = sum(name == op.name for name in self.schedule.backward)
            return f"{times} time{'s' if times > 1 else ''} in the backward"
        if fate == FREED and value.kind is Kind.RNG_STATE:
            return "its op does not run again, so it is not even taken"
        if fate == FREED:
            return "the backward does not read it"
        values = self.kept.get(value.storage, self.members[value.storage])
        reason = reason_kept(self.graph, op, values, value.storage in self.starts)
        return reason or "the limit has room for it, which saves the time to make it again"

    def _remade_by(self, op: Op | None) -> list[tuple[str, float]] | None:
        """What must run to make an op's results again, in the order of the forward."""
        if op is None or not op.may_run_again:
            return None
        others = [name for name in self.kept if name not in set(made_storages(self.graph, op))]
        found = dict(remakers(self.graph, op, others))
        if any(not self.graph.op(name).may_run_again for name in found):
            return None
        ops = (o for o in self.graph.forward if o.name in found and not o.is_view)
        return [(o.name, found[o.name]) for o in ops]

    def _lives(self, storage: str) -> Iterator[Life]:
        runs, turn = self.schedule.runs, len(self.schedule.forward)

        def half(index: int) -> str:
            if index < turn:
                return "forward"
            return "again" if self.graph.op(runs[index]).phase is Phase.FORWARD else "backward"

        for life in self.lives.get(storage, []):
            until = ("", "") if life.dies is None else (runs[life.dies], half(life.dies))
            yield Life(runs[life.born], until[0], half(life.born), until[1])


# --- text ---------------------------------------------------------------------------------------


def _story_text(story: Story) -> str:
    where = f" in {story.module}" if story.module else ""
    line = f" ({story.source})" if story.source else ""
    made = f", made by {story.target}{where}{line}" if story.op else ""
    lines = [f"{story.name}: {format_bytes(story.nbytes)}{made}", f"  {_fate_text(story)}"]
    if story.remake_seconds is not None:
        ops = f": {_names(story.remade_by)}" if story.remade_by else ""
        lines.append(f"  to make it again takes {format_seconds(story.remake_seconds)}{ops}")
    elif story.fate in (KEPT, HELD, FREED) and story.lives:
        lines.append("  it cannot be made again")
    lines.append(f"  needed {_needed(story)}")
    if story.lives:
        lines.append(f"  lives {'; '.join(map(_life_text, story.lives))}")
    return "\n".join(lines)


def _fate_text(story: Story) -> str:
    if story.fate == KEPT:
        return f"kept from forward to backward: {story.because}"
    if story.fate == AGAIN:
        again = dict.fromkeys(life.until for life in story.lives if life.begins == "again")
        return f"made again {story.because}, for {_names([name for name in again if name])}"
    if story.fate == HELD:
        return "held to the end of the step: the caller holds it"
    if story.fate == FREED:
        return f"freed within the forward: {story.because}"
    if story.fate == BACKWARD:
        return f"made in the backward: {story.because}"
    return f"an input of the step: {story.because}"


def _needed(story: Story) -> str:
    halves = (("forward", story.forward_readers), ("backward", story.backward_readers))
    found = [f"in the {half} by {_names(names)}" for half, names in halves if names]
    return "; ".join(found) or "by no op"


def _life_text(life: Life) -> str:
    since = life.since + (f" ({life.begins})" if life.begins == "again" else "")
    if not life.until:
        return f"from {since} to the end"
    return f"from {since} to {life.until} ({life.ends})"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    rest = len(names) - NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


def _module_text(explanation: Explanation) -> str:
    stories = explanation.stories
    rows = [_row(story) for story in sorted(stories, key=lambda s: -s.nbytes)]
    again = [story for story in stories if story.fate == AGAIN]
    sums = [
        (what, sum(story.nbytes for story in stories if story.fate == what))
        for what in (KEPT, HELD, AGAIN, FREED)
    ]
    total = ", ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in sums if nbytes)
    counted = f"{len(stories)} tensor{'s' if len(stories) > 1 else ''}"
    seconds = sum(story.remake_seconds or 0.0 for story in again)
    about = f"{explanation.name}: {counted}; {total or 'no bytes'}"
    if again:
        about += f"; one by one, to make these again takes {format_seconds(seconds)}"
    headers = ("tensor", "bytes", "becomes", "because", "again", "freed after")
    return f"{about}\n\n{table(headers, rows, 'lrllrl')}"


def _row(story: Story) -> tuple[str, ...]:
    seconds = story.remake_seconds
    last = story.lives[-1].until if story.lives else "-"
    return (
        tail_of(story.name, 26),
        format_bytes(story.nbytes),
        story.fate,
        _brief(story),
        "-" if seconds is None else format_seconds(seconds),
        tail_of(last, 24) if last else "the step",
    )


def _brief(story: Story) -> str:
    """Why, in a few words."""
    if story.fate == KEPT and story.because.startswith("the limit"):
        return "the limit has room"
    return story.because.partition(", so ")[0]
