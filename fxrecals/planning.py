"""From a graph and a limit to a plan: what `fxrecals.plan` and the backend both ask."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxrecals import _torch
from fxrecals import cost as costing
from fxrecals.cost import Call, Cost, OpCost
from fxrecals.errors import InfeasibleLimitError, OptionError
from fxrecals.formats import format_bytes
from fxrecals.ir import Graph, Kind, Peak, bounded_graph, gradient_bytes
from fxrecals.plans import Choice, Plan
from fxrecals.schedule import Schedule
from fxrecals.solve import SOLVERS
from fxrecals.solve.auto import Clock, Frontier, Point, Progress, solve
from fxrecals.solve.problem import make_problem
from fxrecals.timeline import simulate
from fxrecals.units import DeviceLimits, Limit

LimitLike = int | str | Mapping[str, int | str] | Limit | DeviceLimits

SHARES = (90, 75, 60, 50, 40, 30, 25, 20, 15, 10)
"""Percent of the unplanned peak for which a plan without a limit prints the extra time."""

LONGEST = 1e6
"""Seconds that a deadline may be away."""

MARGIN = 0.9
"""Share of the free memory that ``limit="auto"`` uses; the rest is for fragments."""

UNPROVED = "solver='exact' found no proof in time: this is the cheapest plan that was found"

NEAR = 1e-6
"""Part by which an optimum may differ from its bound."""

MOMENTS = 2
"""Tensors of the size of the gradients that ``limit="auto"`` leaves for an optimizer's state."""


logger = logging.getLogger("fxrecals")


def plan_graph(
    graph: Graph,
    limit: Limit | DeviceLimits | None,
    *,
    solver: str = "auto",
    peak: Peak = Peak.ACTIVATIONS,
    allowance_bytes: int | None = None,
    notes: tuple[str, ...] = (),
    deadline: float | None = None,
    on_progress: Progress | None = None,
    explored: Frontier | None = None,
    name: str = "a graph",
) -> Plan:
    """The plan of a graph; a line of the log says so, and an artifact of torch's trace holds it.

    Args:
        graph: the step.
        limit: as it was read.
        solver: one of `SOLVERS`.
        peak: what the limit bounds.
        allowance_bytes: if given, replaces the limit.
        notes: what the reader of the plan should know.
        deadline: as for `fxrecals.plan`.
        on_progress: as for `fxrecals.plan`.
        explored: what `explore` found of this graph and peak, where the limit is one for all
            devices.
        name: whose graph it is, for the log.

    Raises:
        InfeasibleLimitError: the limit is under the floor.
    """
    start = time.perf_counter()
    limits = _by_device(limit, graph, peak) if isinstance(limit, DeviceLimits) else None
    divided = limits if allowance_bytes is None else None
    frontier = explored or _frontier(graph, peak, divided, solver, deadline)
    problem = frontier.problem
    choices: tuple[Choice, ...] = ()
    nbytes = allowance_bytes
    if limit is None:
        choices, point = _knee(frontier)
    else:
        if nbytes is None:
            nbytes = _resolve(limit, limits, graph, frontier.baseline_bytes, peak)
        try:
            point = solve(frontier, nbytes, on_progress)
        except InfeasibleLimitError as error:
            raise error.bounding(peak.value) from None
    bound = min(
        point.seconds,
        frontier.bound_seconds(point.peak_bytes if nbytes is None else nbytes),
    )
    if solver == "exact" and bound < point.seconds * (1 - NEAR):
        notes = (*notes, UNPROVED)
    found = Plan(
        graph,
        problem.schedule(point.runs),
        nbytes,
        frontier.floor.peak_bytes,
        choices,
        solver,
        notes,
        peak,
        bound,
        tuple(sorted((limits or {}).items())),
        frontier.lowest_peak,
    )
    _announce(found, name, time.perf_counter() - start)
    return found


def _announce(plan: Plan, name: str, seconds: float) -> None:
    limit = "none" if plan.limit_bytes is None else format_bytes(plan.limit_bytes)
    extra = 100 * plan.extra_seconds / max(plan.baseline_seconds, 1e-12)
    peak = format_bytes(plan.bounded.peak_bytes)
    about = "planned %s: limit %s, peak %s, +%.1f %% time, in %.2f s"
    logger.info(about, name, limit, peak, extra, seconds)
    _torch.trace_artifact("fxrecals_plan", plan.to_json)


def explore(graph: Graph, peak: Peak) -> Frontier:
    """What is known of a graph before a limit is given; its `floor` is the smallest that works."""
    return _frontier(graph, peak, None, "auto", None)


def _frontier(
    graph: Graph,
    peak: Peak,
    limits: Mapping[str, int] | None,
    solver: str,
    deadline: float | None,
) -> Frontier:
    problem = make_problem(bounded_graph(graph, peak), limits)
    exactly = True if solver == "exact" else None
    return Frontier(problem, clock=Clock(deadline), exactly=exactly)


def solve_within(
    graph: Graph,
    limit: Limit | DeviceLimits,
    *,
    solver: str,
    peak: Peak,
    allowance_bytes: int | None,
) -> Plan:
    """What a backend asks for each graph: a plan within its limit, or within what is left."""
    return plan_graph(graph, limit, solver=solver, peak=peak, allowance_bytes=allowance_bytes)


def limit_bytes(graph: Graph, limit: Limit, peak: Peak) -> int:
    """A limit on a graph's peak in bytes."""
    counted = bounded_graph(graph, peak)
    baseline = simulate(counted, Schedule.keeping_everything(graph)).peak_bytes
    return limit.resolve(baseline, lambda: free_bytes(graph, peak))


def check_solver(solver: str) -> None:
    """Raises `OptionError` for a solver that does not exist."""
    if solver not in SOLVERS:
        raise OptionError("solver", solver, " or ".join(map(repr, SOLVERS)))


def checked_deadline(deadline: float | None) -> float | None:
    """The deadline, if it is one.

    Raises:
        OptionError: it is no positive number of seconds.
    """
    if deadline is None:
        return None
    number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if not (number and 0 < deadline <= LONGEST):
        raise OptionError("deadline", deadline, "a positive number of seconds, as in 30")
    return deadline


def named_peak(peak: str) -> Peak:
    """The peak of a name.

    Raises:
        OptionError: there is none of that name.

    >>> named_peak("step")
    <Peak.STEP: 'step'>
    """
    try:
        return Peak(peak)
    except ValueError:
        raise OptionError("peak", peak, " or ".join(repr(each.value) for each in Peak)) from None


@dataclass(frozen=True)
class _Together:
    """A cost by which the scratch of an op is what it takes beside all its outputs.

    Without it, what an op frees before it allocates a gradient is scratch too: gradients are not
    charged then, and do not take its place.
    """

    cost: Cost

    def price(self, calls: Sequence[Call]) -> tuple[OpCost, ...]:
        """As `cost` prices them, with no output charged apart."""
        return self.cost.price([replace(call, gradients=frozenset()) for call in calls])


def named_cost(cost: str | Cost, peak: Peak) -> Cost:
    """The cost model of a name, or the one that was given, for a limit on `peak`.

    Raises:
        OptionError: neither a known name nor an object with a ``price`` method.
    """
    found = costing.named(cost)
    return _Together(found) if peak is Peak.STEP else found


def _knee(frontier: Frontier) -> tuple[tuple[Choice, ...], Point]:
    """The curve limit against extra time, and the point where bending down begins to cost."""
    baseline, floor = frontier.baseline_bytes, frontier.floor.peak_bytes
    limits = [baseline, *(baseline * share // 100 for share in SHARES), floor]
    points = frontier.curve([limit for limit in limits if limit >= floor])
    choices = tuple(
        Choice(limit, p.peak_bytes, p.seconds, min(p.seconds, frontier.bound_seconds(limit)))
        for limit, p in points.items()
    )
    worst = max((p.seconds for p in points.values()), default=0.0) or 1.0
    best = min(points.values(), key=lambda p: p.peak_bytes / max(baseline, 1) + p.seconds / worst)
    return choices, best


def _resolve(
    limit: Limit | DeviceLimits,
    limits: Mapping[str, int] | None,
    graph: Graph,
    baseline_bytes: int,
    peak: Peak,
) -> int:
    if isinstance(limit, Limit):
        return limit.resolve(baseline_bytes, lambda: free_bytes(graph, peak))
    return max((limits or {}).values())


def _by_device(limit: DeviceLimits, graph: Graph, peak: Peak) -> dict[str, int]:
    """The limit of each device in bytes."""
    devices = sorted({v.device for v in graph.values.values() if v.kind is Kind.ACTIVATION})
    if sorted(device for device, _ in limit.limits) != devices:
        each = ", ".join(f'"{device}": "4GB"' for device in devices)
        expected = f"a limit for each device that the model's activations are on: {{{each}}}"
        raise OptionError("limit", str(limit), expected)
    counted = bounded_graph(graph, peak)
    baseline = simulate(counted, Schedule.keeping_everything(graph)).device_peaks
    return dict(limit.resolve(baseline, lambda device: free_bytes(graph, peak, device)))


def free_bytes(graph: Graph, peak: Peak, device: str | None = None) -> int:
    """What ``limit="auto"`` allows: free memory of the device, less the state of an optimizer with
    two moments, less gradients where the limit does not count them, less a margin."""
    apart = MOMENTS + (peak is Peak.ACTIVATIONS)
    devices = {v.device for v in graph.values.values() if v.kind is Kind.ACTIVATION}
    free = min(costing.free_bytes(each) for each in ([device] if device else sorted(devices)))
    return max(1, int(MARGIN * (free - apart * gradient_bytes(graph))))
