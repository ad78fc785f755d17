"""`torch.compile` under a byte limit.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> compiled = torch.compile(model, backend=backend("1GB", inner="eager"))

A `Backend` is called by Dynamo once per graph. It lets AOTAutograd (or Inductor) trace forward
and backward together, plans on that joint graph, and hands back the two halves. Where a step
runs several graphs, they share the limit through a `Ledger` at first; once a step has ended and
they are known, it is planned as a whole. A graph with symbolic sizes has a schedule for each
size at which the limit asks for another. Graphs that need no gradients go to the inner compiler
untouched.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

from torch import Tensor, fx

from fxrecals import _torch
from fxrecals.capture import Captured, Joint, step
from fxrecals.compiling import Compilation, Untraced, handed_bytes, input_shapes
from fxrecals.cost import Cost, Free, generators_kept
from fxrecals.engine import Recals
from fxrecals.errors import DoubleBackwardError, InfeasibleLimitError, OptionError
from fxrecals.ir import Graph, Peak, Trait, bounded_graph, gradient_bytes
from fxrecals.ledger import Held, Ledger
from fxrecals.planning import limit_bytes, named_cost, named_peak, plan_graph, solve_within
from fxrecals.plans import Plan
from fxrecals.reading import read as read_joint
from fxrecals.schedule import Schedule, extra_seconds, is_valid
from fxrecals.sites import Site, Sizes, Version
from fxrecals.solve import SOLVERS
from fxrecals.steps import Execution, Pattern, Steps, Whole, captured, execution, pattern_of
from fxrecals.timeline import simulate
from fxrecals.units import DeviceLimits, Limit, format_bytes, parse_limit

INNERS = ("inductor", "eager")
OPTIONS = ("limit", "peak", "inner", "cost", "solver")


class Planner(Protocol):
    """Decides: from a graph and a limit to a schedule, or to a plan that has one."""

    def __call__(
        self, graph: Graph, limit: Any, *, solver: str, peak: Peak, allowance_bytes: int | None
    ) -> Any:
        """`allowance_bytes` replaces the limit where other graphs hold a part of it."""
        ...


class Reader(Protocol):
    """Reads a joint graph, as `fxrecals.reading.read` does."""

    def __call__(
        self,
        joint: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        parameter_inputs: Collection[int],
        mutated_inputs: Collection[int],
        cost: Cost,
    ) -> Graph:
        """Inputs are given by index among the placeholders."""
        ...


def backend(
    limit: int | str | Mapping[str, int | str] | Limit | DeviceLimits | None = None,
    *,
    peak: str = "activations",
    inner: Literal["inductor", "eager"] = "inductor",
    cost: Any = "roofline",
    solver: str = "auto",
    planner: Planner | None = None,
    reader: Reader | None = None,
    given: Plan | None = None,
) -> Backend:
    """A backend for `torch.compile` that keeps the peak of a step under `limit`.

    Args:
        limit: bytes as an int, ``"4GB"``, ``"4GiB"``, ``"50%"`` of the peak without recompute,
            ``"auto"``, or a dict by device. None recomputes nothing.
        peak: of what: ``"activations"``, or ``"step"`` for the activations and the gradients of
            parameters together. Of a model that breaks into several graphs, the gradients of a
            later one are not known when an earlier one is planned: there is a warning if they
            do not fit.
        inner: what runs the two halves. ``"eager"`` gives plain eager's bits; ``"inductor"``
            Inductor's speed.
        cost: ``"roofline"``, ``"measured"`` or a `fxrecals.cost.Cost`: how long an op takes.
        solver: how the schedule is found; see `fxrecals.solve`.
        planner: instead of `fxrecals.planning.solve_within`.
        reader: instead of `fxrecals.reading.read`.
        given: the plan of a step. What runs and is part of it, is not planned anew.

    Raises:
        OptionError: an argument that does not work, before anything is compiled.

    The compiled model raises `InfeasibleLimitError` when it is called with a limit under the
    floor; nothing has run then.

    >>> backend("4GB", inner="jax")
    Traceback (most recent call last):
    fxrecals.errors.OptionError: inner='jax' does not work; what works: 'inductor' or 'eager'
    """
    if inner not in INNERS:
        raise OptionError("inner", inner, _one_of(INNERS))
    if solver not in SOLVERS:
        raise OptionError("solver", solver, _one_of(SOLVERS))
    read = None if limit is None else parse_limit(limit)
    which = named_peak(peak)
    settings = _Settings(read, which, inner, named_cost(cost, which), solver)
    return Backend(settings, planner, reader, given)


def named_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend as `torch.compile(model, backend="fxrecals", options={"limit": "4GB"})` finds it.

    Graphs compiled with the same options share one limit, whichever model they come from.

    Args:
        gm: a graph from Dynamo.
        example_inputs: fake tensors that fit it.
        options: those of `backend`, by name: limit, peak, inner, cost, solver.
        mode: `torch.compile`'s.

    Raises:
        OptionError: an option that `backend` does not have.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> compiled = torch.compile(model, backend=named_backend, options={"inner": "eager"})
    >>> compiled(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """
    given = dict(options or {})
    for name, value in given.items():
        if name not in OPTIONS:
            raise OptionError("options", {name: value}, f"the names {_one_of(OPTIONS)}")
    if given.get("limit") is not None:
        given["limit"] = parse_limit(given["limit"])
    return _shared(tuple(sorted(given.items())))(gm, example_inputs, mode=mode)


# The graphs of a model come one by one, with nothing to tell that they belong together but the
# options, which are values: so equal options are one backend.
@lru_cache(maxsize=32)
def _shared(options: tuple[tuple[str, Any], ...]) -> Backend:
    return backend(**dict(options))


def _one_of(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))


# --- the backend -------------------------------------------------------------------------------

FEW = 0.01
"""Part of a step's time that a plan for other sizes may cost and still be used."""

ROOMY = 0.8
"""Part of the limit under which a plan for other sizes wastes room."""

MOST_VERSIONS = 8
"""Versions of a graph beyond which room is wasted rather than another one made."""

MOST_PLANS = 64
"""Plans that a backend remembers."""

GIVEN = -1
"""Stands for the plan that was given where places are numbered by plans."""


@dataclass(frozen=True)
class _Settings:
    limit: Limit | DeviceLimits | None
    peak: Peak
    inner: str
    cost: Cost
    solver: str


class Backend:
    """What `backend` returns: a Dynamo backend that remembers its plans.

    Attributes:
        plans: what was planned last, in order: for each graph that needs gradients, and for steps
            of several graphs as a whole.
        ledger: what the graphs hold just now.
    """

    __name__ = "fxrecals"

    def __init__(
        self,
        settings: _Settings,
        planner: Planner | None = None,
        reader: Reader | None = None,
        given: Plan | None = None,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.plans: tuple[Any, ...] = ()
        self._planner = planner or solve_within
        self._reader = reader or read_joint
        # Those who plan by themselves have planned the step already.
        self._sees_steps = planner is None and reader is None and settings.limit is not None
        self._given = given and replace(given, exporter=None)  # with it, the plan cannot be copied
        self._engine: Recals | None = None  # for graphs that are not traced
        self._rehearsed: list[int] = []  # tickets of runs without memory
        self._steps = Steps()
        self._has_warned = False
        self._has_warned_of_breaks = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same settings, and no graphs: nothing waits for a backward there."""
        fresh = {"ledger": Ledger(), "plans": (), "_steps": Steps()}
        return {**self.__dict__, **fresh, "_rehearsed": [], "_engine": None}

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compiles one graph of Dynamo's; called by `torch.compile`."""
        if options:
            raise OptionError("options", dict(options), "the arguments of fxrecals.backend")
        self._end_step()
        site = Site.of(gm, example_inputs, mode)
        # What a backend raises, Dynamo wraps in an error of its own. Raised when the compiled
        # function is called, it reaches the user as it is, and nothing has run either.
        try:
            found = self._planned(site, site.sizes(site.inputs), example_inputs)
        except Untraced as untraced:
            return self._on_the_engine(gm, untraced.reason)
        if isinstance(found, Version) and found.part is None:
            return found.call
        return lambda *arguments: self._run(site, arguments)

    def _on_the_engine(self, gm: fx.GraphModule, reason: BaseException) -> Callable[..., Any]:
        """A graph that AOTAutograd does not trace: the engine runs it as it is, under what other
        graphs leave of the limit.

        Raises:
            BaseException: the reason, where the limit is a share of a peak that nobody knows.
        """
        limit = self.settings.limit
        if limit is None:
            return gm.forward
        if isinstance(limit, Limit) and limit.share is not None:
            raise reason
        if self._engine is None:
            self._engine = Recals(limit, others=lambda: self.ledger.alive_bytes)
        warnings.warn(
            f"AOTAutograd does not trace the graph at {_torch.source_of(gm) or 'an unknown line'} "
            f"({_torch.root_reason(reason)}): the engine runs it under limit={limit}. It does not "
            f"see what ops between the graphs allocate; fxrecals.compile and fxrecals.recals do",
            stacklevel=2,
        )
        engine = self._engine
        return lambda *arguments: engine(gm.forward, *arguments)

    # --- running --------------------------------------------------------------------------------

    def _run(self, site: Site, arguments: Sequence[Any]) -> Any:
        """One call of a compiled graph: its forward, entered in the ledger until its backward."""
        sizes = site.sizes(arguments)
        if any(map(_torch.is_fake, arguments)):
            return self._rehearse(site, sizes, arguments)
        while self._rehearsed:
            self.ledger.leave(self._rehearsed.pop())
        version = self._version(site, sizes)
        results = version.call(*arguments)
        node = _torch.compiled_node(results, arguments)
        if node is not None and version.part is not None:
            self._enter(execution(site, sizes, version.part, arguments, results), node)
        return results

    def _rehearse(self, site: Site, sizes: Sizes, arguments: Sequence[Any]) -> Any:
        """One call without memory: where Dynamo cuts a graph for DDP's buckets, it runs each part
        to compile the next. What it would hold stays in the ledger until a step begins."""
        version = site.by_sizes[sizes]
        if isinstance(version, InfeasibleLimitError):
            raise copy.copy(version)
        if version.part is not None:
            self._rehearsed.append(self.ledger.enter([version.part.held]))
        return version.call(*arguments)

    def _version(self, site: Site, sizes: Sizes) -> Version:
        """What is to run."""
        self._end_step()
        expected = self._steps.next(site, sizes)
        if expected is not None:
            whole, place = expected
            if whole.refused is not None:
                raise copy.copy(whole.refused)
            return self._placed(site, sizes, whole, place)
        if (given := self._as_given(site, sizes)) is not None:
            return given
        found = site.by_sizes.get(sizes) or self._planned(site, sizes)
        if isinstance(found, InfeasibleLimitError):
            raise copy.copy(found)
        return found

    def _end_step(self) -> None:
        """Plans the step that has ended as a whole, if one has, and is worth it."""
        if self.ledger.is_empty and self._steps.running:
            self._learn(self._steps.end())

    def _enter(self, run: Execution, node: Any) -> None:
        ticket = self.ledger.enter([run.part.held])
        if self._sees_steps:
            self._steps.enter(run)

        def leave(gradients: Sequence[Any], _: Any) -> None:
            run.has_run = True
            self.ledger.leave(ticket, has_run=True)
            _refuse_second_derivatives(gradients)

        node.register_hook(leave)
        weakref.finalize(node, self.ledger.leave, ticket).atexit = False

    # --- one graph ------------------------------------------------------------------------------

    def _planned(
        self, site: Site, sizes: Sizes, example_inputs: Sequence[Any] | None = None
    ) -> Version | InfeasibleLimitError:
        """The version of a graph for some sizes, or why there is none; both are remembered."""
        found: Version | InfeasibleLimitError | None = self._fitting(site, sizes)
        if found is None:
            try:
                found = self._compiled(site, sizes, self._decider(site), example_inputs)
            except InfeasibleLimitError as error:
                found = copy.copy(error)  # without the frames that it has been through
                if example_inputs is not None:  # DDP asks AOTAutograd what it found, in any case
                    self._compiled(site, sizes, _keep_everything, example_inputs)
                    site.versions.clear()
        site.remember(sizes, found)
        return found

    def _as_given(self, site: Site, sizes: Sizes) -> Version | None:
        """The version for a run that is part of the plan that was given."""
        first = site.versions[0].part if site.versions else None
        if self._given is None or first is None:
            return None
        key = (GIVEN, len(self._steps.running))
        if key not in site.by_place:
            schedule = self._given_part(first.graph)
            site.by_place[key] = schedule and self._with_schedule(site, sizes, schedule)
        return site.by_place[key]

    def _given_part(self, graph: Graph) -> Schedule | None:
        """The part of the plan that was given which the coming run of a graph is."""
        place = len(self._steps.running)
        prefixes = self._given.prefixes if self._given is not None else ()
        if self._given is None or place >= len(prefixes):
            return None
        return self._given.part(prefixes[place], graph)

    def _tightened(self, plan: Plan, less_bytes: int) -> Plan:
        """A plan for so much less than another one's limit, or for the floor."""
        limit = self.settings.limit
        assert limit is not None
        assert plan.limit_bytes is not None
        allowance = max(plan.limit_bytes - less_bytes, plan.floor_bytes)
        note = (
            f"planned for {format_bytes(plan.limit_bytes - allowance)} less than "
            f"{format_bytes(plan.limit_bytes)}: Inductor's kernels take that much more than the ops"
        )
        found: Plan = self._ask(plan.graph, limit, allowance)
        return replace(found, notes=(*found.notes, note))

    def _decider(self, site: Site) -> Callable[[Graph, int], Any]:
        def decide(graph: Graph, less_bytes: int) -> Any:
            given = self._given_part(graph)
            if given is not None:
                return given
            planned = self.plan(graph, is_followed=self._is_followed(site))
            if less_bytes and isinstance(planned, Plan):
                planned = self._tightened(planned, less_bytes)
            self.remember(planned)
            return planned

        return decide

    def _compiled(
        self,
        site: Site,
        sizes: Sizes,
        decide: Callable[[Graph, int], Any],
        example_inputs: Sequence[Any] | None = None,
    ) -> Version:
        """A new version of a graph.

        Args:
            site: the graph.
            sizes: what to plan for.
            decide: tells the plan, or the schedule.
            example_inputs: what Dynamo gave, while it is tracing; None later.

        Raises:
            InfeasibleLimitError: `decide` did.
        """
        plans = self.plans
        version, over = self._compile(site, sizes, decide, example_inputs)
        if over > 0:
            self.plans, loose, before = plans, version, over
            version, over = self._compile(site, sizes, decide, example_inputs, before)
            version = loose if over >= before else version
            if over > 0:
                warnings.warn(
                    f"what Inductor makes of the graph at {_torch.source_of(site.gm)} takes "
                    f"{format_bytes(min(over, before))} more than limit={self.settings.limit}, "
                    f'as far as its kernels tell; inner="eager" keeps it',
                    stacklevel=2,
                )
        site.versions.append(version)
        return version

    def _compile(
        self,
        site: Site,
        sizes: Sizes,
        decide: Callable[[Graph, int], Any],
        example_inputs: Sequence[Any] | None,
        less_bytes: int = 0,
    ) -> tuple[Version, int]:
        """A version of a graph, planned for so much less than the limit, and by how much it passes
        the limit all the same."""
        settings = self.settings
        named = (str(settings.limit), settings.solver)
        compilation = Compilation(
            self.read,
            decide,
            self.held,
            settings.inner,
            settings.limit is not None,
            settings.peak,
            named,
            site.known(sizes),
            less_bytes,
        )
        try:
            if example_inputs is not None:
                call = compilation.compile(site.gm, example_inputs, site.mode)
            else:
                with _torch.compile_lock(), generators_kept(), _torch.traced_again(site.inputs):
                    call = compilation.compile(site.gm, site.inputs, site.mode)
        except Exception as error:
            if compilation.refused is not None:
                raise compilation.refused from None
            if compilation.was_traced or _torch.steers_dynamo(error):
                raise
            raise Untraced(error) from error
        return Version(call, compilation.part), compilation.over_bytes()

    def _fitting(self, site: Site, sizes: Sizes) -> Version | None:
        """The cheapest version that was made for other sizes and holds the limit at these.

        None where there is none, or where it recomputes much although there is room.
        """
        limit = self.settings.limit
        made = [version for version in site.versions if version.part is not None]
        if limit is None and made:
            return made[0]
        if not made or not isinstance(limit, Limit):
            return None
        parts = [version.part for version in made if version.part is not None]
        joint = replace(parts[0].joint, sizes=tuple(site.known(sizes).items()))
        graph = self.read(joint)
        left = self._left(graph, limit)
        allowed = left // 2 if self._is_followed(site) else left
        more = len(made) < MOST_VERSIONS
        found = self._cheapest(graph, [part.schedule for part in parts], allowed, more)
        return None if found is None else made[found]

    def _cheapest(
        self, graph: Graph, schedules: Sequence[Schedule], allowance: int, more: bool
    ) -> int | None:
        """Index of the schedule that costs least of those that need at most `allowance` bytes.

        None where none does; and, if there may be `more`, where the best one recomputes much
        although there is room.
        """
        bounded = bounded_graph(graph, self.settings.peak)
        fitting: list[tuple[float, int, int]] = []
        for index, schedule in enumerate(schedules):
            if is_valid(graph, schedule):
                peak = simulate(bounded, schedule).peak_bytes
                if peak <= allowance:
                    fitting.append((extra_seconds(graph, schedule), peak, index))
        if not fitting:
            return None
        seconds, peak, index = min(fitting)
        wastes = seconds > FEW * graph.seconds and peak < ROOMY * allowance
        return None if wastes and more else index

    def _is_followed(self, site: Site) -> bool:
        """Whether another graph will need room too, and it is not known how much."""
        return site.is_followed and self._sees_steps

    def _left(self, graph: Graph, limit: Limit) -> int:
        """Bytes of a limit that are left for a graph."""
        allowance = self._allowance(graph, limit)
        return limit_bytes(graph, limit, self.settings.peak) if allowance is None else allowance

    def plan(self, graph: Graph, *, is_followed: bool = False) -> Any:
        """Plans a joint graph within what is left of the limit.

        Args:
            graph: the graph.
            is_followed: whether another graph needs room as well: this one gets half of what is
                left, or its floor, until the step can be planned as a whole.

        Raises:
            InfeasibleLimitError: the graph is alone, and its floor is over the limit.
        """
        limit = self.settings.limit
        if limit is None:
            return Schedule.keeping_everything(graph)
        allowance = self._allowance(graph, limit)
        if is_followed and isinstance(limit, Limit):
            allowance = self._left(graph, limit)
        try:
            return self._ask(
                graph, limit, allowance // 2 if is_followed and allowance else allowance
            )
        except InfeasibleLimitError as error:
            if allowance is None:
                raise
            floor = error.floor_bytes
            if floor > allowance:
                left = f"the graphs before it leave {format_bytes(allowance)} of limit={limit}"
                if self.ledger.is_empty:
                    left = f"limit={limit} is {format_bytes(allowance)}, as far as is known"
                self._warn(
                    graph,
                    f"needs at least {format_bytes(floor)}, and {left}: it is planned at its "
                    f"floor, {format_bytes(floor - allowance)} over that",
                )
            return self._ask(graph, limit, floor)

    def held(self, graph: Graph, planned: Any) -> Held:
        """What a planned graph holds in a step. Warns where graphs before it have no room for it.

        Args:
            graph: the graph.
            planned: what the planner returned for it. A schedule without a limit of its own is
                part of a whole, and has room for what else is.
        """
        peak, limit = self.settings.peak, self.settings.limit
        gradients = gradient_bytes(graph) if peak is Peak.STEP else 0
        over = self.ledger.over_bytes(gradients)
        if over > 0:
            self._warn(
                graph,
                f"makes {format_bytes(gradients)} of gradients, which the graphs before it were "
                f"planned without: the backward of one of them may go {format_bytes(int(over))} "
                f"over limit={limit}",
            )
        found = simulate(bounded_graph(graph, peak), getattr(planned, "schedule", planned))
        if not isinstance(planned, Plan) or not isinstance(limit, Limit):
            return Held(found.saved_bytes, gradients)
        live = (
            step.live_bytes
            for step in found.steps[found.forward_runs :]
            if Trait.CALLER not in graph.op(step.op).traits
        )
        room = (planned.limit_bytes or 0) - max(live, default=0)
        return Held(found.saved_bytes, gradients, room)

    def read(self, joint: Joint) -> Graph:
        """A joint graph from AOTAutograd, as planning sees it, at its sizes."""
        with _torch.outside_tracing(), _torch.sizes_known(dict(joint.sizes)):
            return self._reader(  # ops may be run to be priced
                joint.module,
                num_fwd_outputs=joint.num_fwd_outputs,
                parameter_inputs=joint.parameter_inputs,
                mutated_inputs=_torch.updated_inputs(joint.module, joint.num_fwd_outputs),
                cost=self.settings.cost if self.settings.limit is not None else Free(),
            )

    def _ask(self, graph: Graph, limit: Limit | DeviceLimits, allowance: int | None) -> Any:
        options = {"solver": self.settings.solver, "peak": self.settings.peak}
        return self._planner(graph, limit, **options, allowance_bytes=allowance)

    def _allowance(self, graph: Graph, limit: Limit | DeviceLimits) -> int | None:
        if isinstance(limit, DeviceLimits):
            return None  # what is held is not known by device
        bounded = bounded_graph(graph, self.settings.peak)
        keep = Schedule.keeping_everything(graph)
        return self.ledger.allowance(limit, simulate(bounded, keep).peak_bytes)

    def _warn(self, graph: Graph, found: str) -> None:
        """Says, once, how a graph before or after a break misses the limit."""
        if self._has_warned:
            return
        self._has_warned = True
        sources = (op.where.source for op in graph.ops if op.where.source)
        then = (
            "the next step is planned as a whole, and may find room"
            if self._sees_steps
            else "fxrecals.plan and fxrecals.rewrite see the whole step, and may find room"
        )
        which = "the graph" if self.ledger.is_empty else "the graph after the break"
        warnings.warn(
            f"{which} at {next(sources, 'an unknown line')} {found}; {then}",
            stacklevel=2,
        )

    # --- the step as a whole --------------------------------------------------------------------

    def _learn(self, runs: Sequence[Execution]) -> None:
        """Plans a step that has ended as a whole, if it is one of several runs, and new."""
        if not runs:
            return
        limit = self.settings.limit
        assert limit is not None, "without a limit no step is looked at"
        pattern = pattern_of(runs)
        if all(
            (found := run.site.by_place.get((GIVEN, place))) is not None and found.part is run.part
            for place, run in enumerate(runs)
        ):
            self._steps.learn(pattern, None)
            return
        seen = captured(runs)
        with _torch.outside_tracing(), generators_kept():
            graph = step(seen, self.settings.cost)
            found = self._known(graph, limit, pattern)
            if found is None:
                found = self._whole(graph, limit, seen)
        self._steps.learn(pattern, found)

    def _known(self, graph: Graph, limit: Limit | DeviceLimits, pattern: Pattern) -> Whole | None:
        """What was planned for the same step at other sizes, if it is good enough for these."""
        known = self._steps.of_the_same_sites(pattern)
        schedules = [whole.schedule for whole in known if whole.schedule is not None]
        if not schedules or not isinstance(limit, Limit):
            return None
        allowed = limit_bytes(graph, limit, self.settings.peak)
        found = self._cheapest(graph, schedules, allowed, len(known) < MOST_VERSIONS)
        return None if found is None else known[found]

    def _whole(self, graph: Graph, limit: Limit | DeviceLimits, seen: Captured) -> Whole:
        """Plans a step of several runs."""
        number = len(self._steps.wholes)
        options = {"solver": self.settings.solver, "peak": self.settings.peak}
        try:
            plan = plan_graph(graph, limit, notes=seen.breaks, **options)
        except InfeasibleLimitError as error:
            first = seen.joints[seen.runs[0].joint]
            return Whole(number, refused=error.of_inputs(input_shapes(first)))
        self.remember(plan)
        self._warn_of_breaks(plan, seen)
        return Whole(number, plan.schedule, self._parts(plan, seen))

    def _parts(self, plan: Plan, seen: Captured) -> tuple[Schedule, ...]:
        """The schedule of each run of a step."""
        found: list[Schedule] = []
        for run in seen.runs:
            part = plan.part(run.prefix, self.read(seen.joints[run.joint]))
            assert part is not None, "the parts of a step are its graphs"
            found.append(part)
        return tuple(found)

    def _placed(self, site: Site, sizes: Sizes, whole: Whole, place: int) -> Version:
        """The version for a run of a step that was planned as a whole."""
        found = site.by_place.get((whole.number, place))
        if found is None:
            found = self._with_schedule(site, sizes, whole.parts[place])
            site.by_place[whole.number, place] = found
        return found

    def _with_schedule(self, site: Site, sizes: Sizes, schedule: Schedule) -> Version:
        """The version of a graph that runs a schedule."""
        return site.with_schedule(schedule) or self._compiled(
            site, sizes, lambda graph, less: schedule
        )

    def _warn_of_breaks(self, plan: Plan, seen: Captured) -> None:
        """Says, once, what breaks cost a step that has to recompute."""
        if self._has_warned_of_breaks or not seen.breaks or plan.extra_seconds <= 0:
            return
        self._has_warned_of_breaks = True
        handed = format_bytes(handed_bytes(plan.graph))
        extra = 100 * plan.extra_seconds / max(plan.baseline_seconds, 1e-12)
        warnings.warn(
            f"the step is {len(seen.runs)} graphs, planned together from now on, under "
            f"limit={self.settings.limit} with {extra:.1f} % more time. What one graph hands to "
            f"the next, {handed} here, no recompute can free. {'; '.join(seen.breaks)}",
            stacklevel=2,
        )

    def remember(self, planned: Any) -> None:
        """Adds to `plans`."""
        self.plans = (*self.plans, planned)[-MOST_PLANS:]


def _keep_everything(graph: Graph, _: int) -> Schedule:
    return Schedule.keeping_everything(graph)


def _refuse_second_derivatives(gradients: Sequence[Any]) -> None:
    """Raises an error of ours where autograd would go through a backward graph."""
    made = (x.grad_fn for x in gradients if isinstance(x, Tensor))
    for node in dict.fromkeys(node for node in made if node is not None):
        node.register_prehook(_raise_double_backward)


def _raise_double_backward(_: Any) -> None:
    raise DoubleBackwardError
