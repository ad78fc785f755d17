"""Which graphs a step runs, in order, learned from the steps that were taken.

A model that breaks compiles into several graphs, and one graph may run several times before its
backward. Dynamo hands a backend one graph at a time: how they belong together shows only when
they run. So each run is noted with the storages that went in and came out. When a step has
ended, all backwards included, its runs are a `capture.Captured` like that of a traced step, and
can be planned as one. A step that begins like one seen before is expected to go on like it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fxrecals import _torch
from fxrecals.capture import Captured, Joint, Run
from fxrecals.errors import InfeasibleLimitError
from fxrecals.schedule import Schedule
from fxrecals.sites import Part, Site, Sizes

LONGEST = 256
"""Runs of a step up to which it is planned as a whole."""

MOST_PATTERNS = 32
"""Sequences of runs that are planned as a whole."""

Pattern = tuple[tuple[int, Sizes], ...]
"""The sites and sizes of a step's runs, in order."""


@dataclass(eq=False)
class Execution:
    """One run of a graph within a step.

    Attributes:
        site: whose graph it is.
        sizes: at which it ran.
        part: what ran.
        taken: storages of the arguments, None for numbers.
        made_within: of each argument, whether autograd knows how it was made.
        given: storages of the results.
        kept: keeps the numbers of storages from being given to others.
        has_run: whether its backward has.
    """

    site: Site
    sizes: Sizes
    part: Part
    taken: tuple[int | None, ...]
    made_within: tuple[bool, ...]
    given: tuple[int | None, ...]
    kept: tuple[Any, ...]
    has_run: bool = False

    @property
    def joint(self) -> Joint:
        """The joint graph that ran, at the sizes at which it did."""
        return replace(self.part.joint, sizes=tuple(self.site.known(self.sizes).items()))


def execution(
    site: Site, sizes: Sizes, part: Part, arguments: Sequence[Any], results: Sequence[Any]
) -> Execution:
    """Notes a run that has just ended."""
    return Execution(
        site,
        sizes,
        part,
        tuple(map(_key, arguments)),
        tuple(isinstance(x, Tensor) and x.grad_fn is not None for x in arguments),
        tuple(map(_key, results)),
        tuple(_torch.weak_storage(x) for x in results if _key(x) is not None),
    )


def _key(x: Any) -> int | None:
    return _torch.storage_key(x) if isinstance(x, Tensor) else None


@dataclass(frozen=True)
class Whole:
    """How a step is run that was planned as one.

    Attributes:
        number: tells them apart.
        schedule: of all of it.
        parts: the schedule of each of its runs.
        refused: why there is none.
    """

    number: int
    schedule: Schedule | None = None
    parts: tuple[Schedule, ...] = ()
    refused: InfeasibleLimitError | None = None


@dataclass
class Steps:
    """The step that is running, and those that were seen.

    Attributes:
        running: runs of the step so far.
        wholes: what was planned, by pattern; None for what is one run, or too long.
    """

    running: list[Execution] = field(default_factory=list)
    wholes: dict[Pattern, Whole | None] = field(default_factory=dict)
    _expected: dict[Pattern, Pattern] = field(default_factory=dict)
    _pattern: Pattern = ()

    def enter(self, run: Execution) -> None:
        """Notes a run."""
        if len(self.running) <= LONGEST:
            self.running.append(run)
            self._pattern = (*self._pattern, (run.site.number, run.sizes))

    def end(self) -> tuple[Execution, ...]:
        """Ends the step. Returns its runs if they are to be planned as a whole."""
        runs, pattern = tuple(self.running), self._pattern
        self.running, self._pattern = [], ()
        if not runs or not all(run.has_run for run in runs):
            return ()  # some forward was only looked at: no step to learn from
        is_new = pattern not in self.wholes
        if not is_new or len(runs) == 1 or len(runs) > LONGEST:
            self.learn(pattern, self.wholes.get(pattern))
            return ()
        return runs if len(self.wholes) < MOST_PATTERNS else ()

    def learn(self, pattern: Pattern, whole: Whole | None) -> None:
        """Expects a step that begins like this one to go on like it."""
        self.wholes[pattern] = whole
        if self._expected.get(pattern[:1]) != pattern:
            self._expected |= {pattern[: i + 1]: pattern for i in range(len(pattern))}

    def next(self, site: Site, sizes: Sizes) -> tuple[Whole, int] | None:
        """What was planned for the run that comes, and which of a step's runs it is."""
        so_far = (*self._pattern, (site.number, sizes))
        pattern = self._expected.get(so_far)
        whole = self.wholes[pattern] if pattern is not None else self._larger(so_far)
        return None if whole is None else (whole, len(self.running))

    def of_the_same_sites(self, pattern: Pattern) -> list[Whole]:
        """What was planned for the same sites at any sizes."""
        return [whole for known, whole in self._planned() if sites_of(known) == sites_of(pattern)]

    def _larger(self, pattern: Pattern) -> Whole | None:
        """What was planned for a step that begins at the same sites, with sizes at least as large:
        it needs no less memory."""
        for known, whole in self._planned():
            begun = known[: len(pattern)]
            if sites_of(begun) == sites_of(pattern) and all(
                a <= b
                for (_, sizes), (_, larger) in zip(pattern, begun, strict=True)
                for a, b in zip(sizes, larger, strict=True)
            ):
                return whole
        return None

    def _planned(self) -> Iterator[tuple[Pattern, Whole]]:
        for pattern, whole in reversed(self.wholes.items()):
            if whole is not None and whole.refused is None:
                yield pattern, whole


def sites_of(pattern: Pattern) -> tuple[int, ...]:
    """The sites of a pattern."""
    return tuple(site for site, _ in pattern)


def pattern_of(runs: Sequence[Execution]) -> Pattern:
    """The pattern of some runs."""
    return tuple((run.site.number, run.sizes) for run in runs)


def captured(runs: Sequence[Execution]) -> Captured:
    """The runs of a step as if they had been traced together.

    A tensor that autograd made between two graphs counts as made within the step; any other that
    no graph made was there before. What no later graph takes is the step's result.
    """
    joints = {joint: i for i, joint in enumerate(dict.fromkeys(run.joint for run in runs))}
    breaks = dict.fromkeys(run.site.reason for run in runs if run.site.reason)
    return Captured(tuple(joints), tuple(_runs(runs, joints)), tuple(breaks))


def _runs(runs: Sequence[Execution], joints: dict[Joint, int]) -> Iterator[Run]:
    made: dict[int, tuple[int, int]] = {}  # storage -> the run and output that made it
    outside: set[int] = set()
    for index, run in enumerate(runs):
        joint = run.joint
        inputs = list(_places(_torch.input_descs(joint.module), run.taken))
        sources = {i: made[key] for i, _, key in inputs if key in made}
        within = tuple(i for i, k, _ in inputs if i not in sources and run.made_within[k])
        outside.update(key for i, _, key in inputs if i not in sources and i not in within)
        yield Run(
            joint=joints[joint],
            prefix=f"g{index}.",
            sources=sources,
            made=within,
            parameters={i: key for i, _, key in inputs if i in joint.parameter_inputs},
            results=tuple(_results(runs, index)),
        )
        descs = _torch.output_descs(joint.module)[: joint.num_fwd_outputs]
        for i, _, key in _places(descs, run.given):
            if key not in outside:
                made[key] = (index, i)


def _results(runs: Sequence[Execution], index: int) -> Iterator[int]:
    joint = runs[index].joint
    taken = {key for run in runs[index + 1 :] for key in run.taken}
    descs = _torch.output_descs(joint.module)[: joint.num_fwd_outputs]
    return (i for i, _, key in _places(descs, runs[index].given) if key not in taken)


def _places(descs: Sequence[Any], keys: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """Of what a joint graph takes or returns: its index, that in the call, and its storage."""
    for index, desc in enumerate(descs):
        place = _torch.place_in_arguments(desc)
        key = keys[place] if place is not None and place < len(keys) else None
        if place is not None and key is not None:
            yield index, place, key
