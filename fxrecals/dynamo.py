"""`torch.compile` under a byte limit.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> compiled = torch.compile(model, backend=backend("1GB", inner="eager"))

A `Backend` is called by Dynamo once per graph. It lets AOTAutograd (or Inductor) trace forward
and backward together, plans on that joint graph, and hands back the two halves. Where a model
breaks into several graphs, they share the limit through a `Ledger`. Graphs that need no
gradients go to the inner compiler untouched.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

from torch import fx

from fxrecals import _torch
from fxrecals.cost import Cost, Free
from fxrecals.errors import InfeasibleLimitError, OptionError
from fxrecals.halves import compilers, split
from fxrecals.ir import Graph, Peak, Trait, bounded_graph, gradient_bytes
from fxrecals.planning import named_cost, named_peak, solve_within
from fxrecals.plans import Plan
from fxrecals.reading import read as read_joint
from fxrecals.schedule import Schedule
from fxrecals.solve import SOLVERS
from fxrecals.timeline import simulate
from fxrecals.units import DeviceLimits, Limit, format_bytes, parse_limit

INNERS = ("inductor", "eager")
OPTIONS = ("limit", "peak", "inner", "cost", "solver")

Halves = tuple[fx.GraphModule, fx.GraphModule]


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
    return Backend(settings, planner or solve_within, reader or read_joint)


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


# --- what several graphs share -----------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What one graph holds in a step.

    Attributes:
        saved_bytes: from its forward to its backward.
        gradient_bytes: from its backward on: its gradients, where the limit counts them.
        room_bytes: how much later graphs, whose backwards run first, may leave to its backward.
    """

    saved_bytes: int
    gradient_bytes: int = 0
    room_bytes: float = float("inf")


class Ledger:
    """What the graphs of one step hold of its limit.

    While a later graph is compiled, earlier ones have run their forward and not their backward:
    what they keep is not there for the later one. Nor are gradients, where the limit counts them,
    of graphs whose backward has run, until none is left that waits for its own.

    >>> ledger = Ledger()
    >>> ledger.allowance(parse_limit("50%"), baseline_bytes=1000) is None
    True
    >>> ticket = ledger.enter([Held(300)])
    >>> ledger.allowance(parse_limit("50%"), baseline_bytes=4000)
    200
    >>> ledger.leave(ticket)
    >>> ledger.alive_bytes
    0
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Held, ...]] = {}
        self._gradient_bytes = 0
        self._entered = 0
        self._limit_bytes: int | None = None

    @property
    def _held(self) -> list[Held]:
        return [held for graphs in self._waiting.values() for held in graphs]

    @property
    def alive_bytes(self) -> int:
        """Bytes that graphs hold for a backward yet to come, and gradients that count."""
        return sum(held.saved_bytes for held in self._held) + self._gradient_bytes

    @property
    def is_empty(self) -> bool:
        """Whether no graph waits for its backward: a step begins."""
        return not self._waiting

    def allowance(self, limit: Limit, baseline_bytes: int) -> int | None:
        """Bytes left for a graph, or None where all of the limit is its own.

        A share is one of the first graph's peak, and stays that for the rest of the step.
        Free memory ("auto") is already less what others hold.

        Args:
            limit: the limit of the step.
            baseline_bytes: peak of the graph without recompute.
        """
        if limit.nbytes is None and limit.share is None:
            return None
        if self.is_empty or self._limit_bytes is None:
            self._limit_bytes = limit.resolve(baseline_bytes)
        return None if self.is_empty else max(0, self._limit_bytes - self.alive_bytes)

    def over_bytes(self, gradient_bytes: int) -> float:
        """By how much backwards that wait miss the limit, at most, once a graph has joined them
        that leaves so many bytes of gradients; 0 if none does.

        >>> ledger = Ledger()
        >>> for held in (Held(300, gradient_bytes=90, room_bytes=50), Held(200, 40, 20)):
        ...     _ = ledger.enter([held])
        >>> [ledger.over_bytes(nbytes) for nbytes in (5, 15, 30)]
        [0, 5, 20]
        """
        found: float = 0
        for held in reversed(self._held):
            found = max(found, gradient_bytes - held.room_bytes)
            gradient_bytes += held.gradient_bytes
        return found

    def enter(self, held: Sequence[Held]) -> int:
        """Notes that a forward has run of graphs that hold so much; returns a ticket to leave."""
        self._entered += 1
        self._waiting[self._entered] = tuple(held)
        return self._entered

    def leave(self, ticket: int, *, has_run: bool = False) -> None:
        """Notes that a backward has run or never will. Leaving twice is leaving once."""
        left = self._waiting.pop(ticket, ())
        if has_run:
            self._gradient_bytes += sum(held.gradient_bytes for held in left)
        if self.is_empty:
            self._gradient_bytes = 0


# --- the backend -------------------------------------------------------------------------------


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
        plans: what the planner returned for each graph that needs gradients, in order.
        ledger: what the graphs hold just now.
    """

    __name__ = "fxrecals"

    def __init__(self, settings: _Settings, planner: Planner, reader: Reader) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.plans: tuple[Any, ...] = ()
        self._planner = planner
        self._reader = reader
        self._has_warned = False
        self._has_warned_of_symbols = False

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
        compilation = _Compilation(self)
        try:
            compiled = compilation.compile(gm, example_inputs, mode)
        except Exception:
            if compilation.refused is None:
                raise
            return _refusal(compilation.refused)
        if not compilation.held:
            return compiled
        return _tracked(compiled, self.ledger, compilation.held)

    def plan(self, graph: Graph) -> Any:
        """Plans a joint graph within what is left of the limit.

        Raises:
            InfeasibleLimitError: the graph is alone, and its floor is over the limit.
        """
        limit = self.settings.limit
        if limit is None:
            return Schedule.keeping_everything(graph)
        allowance = self._allowance(graph, limit)
        try:
            return self._ask(graph, limit, allowance)
        except InfeasibleLimitError as error:
            if allowance is None:
                raise
            floor = error.floor_bytes
            self._warn(
                graph,
                f"needs at least {format_bytes(floor)}, and the graphs before it leave "
                f"{format_bytes(allowance)} of limit={limit}: it is planned at its floor, "
                f"{format_bytes(floor - allowance)} over what is left",
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

    def read(self, joint: fx.GraphModule, num_fwd_outputs: int, parameters: Sequence[int]) -> Graph:
        """A joint graph from AOTAutograd, as planning sees it.

        Args:
            joint: as a partition function gets it.
            num_fwd_outputs: how many of its outputs the forward returns.
            parameters: indices of the placeholders that outlive the step.
        """
        with _torch.outside_tracing():  # ops may be run to be priced
            graph = self._reader(
                joint,
                num_fwd_outputs=num_fwd_outputs,
                parameter_inputs=tuple(parameters),
                mutated_inputs=_torch.updated_inputs(joint, num_fwd_outputs),
                cost=self.settings.cost if self.settings.limit is not None else Free(),
            )
        return _with_seeds_kept(joint, graph) if self.settings.inner == "inductor" else graph

    def warn_of_symbols(self, joint: fx.GraphModule) -> None:
        """Says, once, that a plan for symbolic sizes is one for the sizes first seen."""
        symbolic = any(map(_torch.is_symbol, joint.graph.find_nodes(op="placeholder")))
        if not symbolic or self._has_warned_of_symbols or self.settings.limit is None:
            return
        self._has_warned_of_symbols = True
        warnings.warn(
            "a graph has sizes that may change: its plan holds the limit at the sizes with which "
            "it was traced, and not at larger ones; torch.compile(..., dynamic=False) plans for "
            "each size",
            stacklevel=2,
        )

    def remember(self, planned: Any) -> None:
        """Adds to `plans`."""
        self.plans = (*self.plans, planned)

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
        """Says, once, how a graph after a break misses the limit."""
        if self._has_warned:
            return
        self._has_warned = True
        sources = (op.where.source for op in graph.ops if op.where.source)
        warnings.warn(
            f"the graph after the break at {next(sources, 'an unknown line')} {found}. "
            "fxrecals.plan and fxrecals.rewrite see the whole step, and may find room",
            stacklevel=2,
        )


def _with_seeds_kept(joint: fx.GraphModule, graph: Graph) -> Graph:
    """`graph`, with Inductor's seeds drawn once: what is random from a seed can run again."""
    seeds = {node.name for node in joint.graph.nodes if _torch.draws_seed(node.target)}
    ops = (
        replace(op, traits=op.traits | {Trait.OPAQUE}) if op.name in seeds else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops)) if seeds else graph


@dataclass
class _Compilation:
    """One call of a backend: carries what the partitioner finds out to whoever called it.

    Attributes:
        held: of each plan made: what its graph holds in a step.
        refused: why there is no plan.
        digest: names the plans, for Inductor's cache.
    """

    owner: Backend
    held: list[Held] = field(default_factory=list)
    refused: InfeasibleLimitError | None = None
    digest: str = ""

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None
    ) -> Callable[..., Any]:
        if self.owner.settings.inner == "eager":
            halves = {"partition_fn": self.partition, **compilers()}
            compile_ = _torch.aot_autograd(keep_inference_input_mutations=True, **halves)
            return compile_(gm, example_inputs)
        partitioner = _torch.inductor_partitioner(self.partition, self.identity)
        patches = _torch.inductor_mode(mode)
        return _torch.compile_with_inductor(gm, example_inputs, partitioner, patches)

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> Halves:
        """AOTAutograd's partitioner: reads, plans, splits."""
        self.owner.warn_of_symbols(joint)
        graph = self.owner.read(joint, num_fwd_outputs, static_lifetime_input_indices or ())
        try:
            planned = self.owner.plan(graph)
        except InfeasibleLimitError as error:
            self.refused = error
            raise
        self.owner.remember(planned)
        schedule: Schedule = getattr(planned, "schedule", planned)
        self.held.append(self.owner.held(graph, planned))
        self.digest = hashlib.sha256(f"{self.digest}{schedule.runs}".encode()).hexdigest()
        return split(
            joint,
            graph,
            schedule,
            num_fwd_outputs=num_fwd_outputs,
            mutated_inputs=_torch.updated_inputs(joint, num_fwd_outputs),
            lowered=self.owner.settings.inner == "inductor",
        )

    def identity(self) -> tuple[str, ...]:
        """What code generated for this compilation must not be shared beyond."""
        settings = self.owner.settings
        return ("fxrecals", str(settings.limit), settings.solver, self.digest)


def _refusal(error: InfeasibleLimitError) -> Callable[..., Any]:
    # Dynamo wraps what a backend raises in an error of its own. Raised from the compiled code,
    # it reaches the user as it is, and nothing has run either.
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error.with_traceback(None)

    return refuse


def _tracked(
    compiled: Callable[..., Any], ledger: Ledger, held: Sequence[Held]
) -> Callable[..., Any]:
    """`compiled`, entered in the ledger from its forward to its backward."""

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        node = _torch.compiled_node(outputs, args)
        if node is not None:
            ticket = ledger.enter(held)
            node.register_hook(lambda inputs, outputs: ledger.leave(ticket, has_run=True))
            weakref.finalize(node, ledger.leave, ticket).atexit = False
        return outputs

    return run
