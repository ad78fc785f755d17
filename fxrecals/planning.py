"""From a graph and a limit to a plan: what `fxrecals.plan` and the backend both ask."""

from __future__ import annotations

from collections.abc import Mapping

from fxrecals import cost as costing
from fxrecals.errors import OptionError
from fxrecals.ir import Graph, Kind
from fxrecals.plans import Choice, Plan
from fxrecals.schedule import Schedule
from fxrecals.solve import SOLVERS
from fxrecals.solve.auto import Frontier, solve
from fxrecals.solve.problem import make_problem
from fxrecals.units import DeviceLimits, Limit

LimitLike = int | str | Mapping[str, int | str] | Limit | DeviceLimits

SHARES = (90, 75, 60, 50, 40, 30, 25, 20, 15, 10)
"""Percent of the unplanned peak for which a plan without a limit prints the extra time."""

MARGIN = 0.9
"""Share of the free memory that ``limit="auto"`` uses; the rest is for fragments."""


def plan_graph(
    graph: Graph,
    limit: Limit | DeviceLimits | None,
    *,
    solver: str = "auto",
    allowance_bytes: int | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a graph. `allowance_bytes`, if given, replaces the limit.

    Raises:
        InfeasibleLimitError: the limit is under the floor.
    """
    frontier = Frontier(make_problem(graph))
    if limit is None:
        choices, schedule = _knee(frontier)
        return Plan(graph, schedule, None, frontier.floor.peak_bytes, choices, solver, notes)
    nbytes = allowance_bytes
    if nbytes is None:
        nbytes = _resolve(limit, graph, frontier.baseline_bytes)
    schedule = solve(frontier, nbytes)
    return Plan(graph, schedule, nbytes, frontier.floor.peak_bytes, (), solver, notes)


def solve_within(
    graph: Graph, limit: Limit | DeviceLimits, *, solver: str, allowance_bytes: int | None
) -> Plan:
    """What a backend asks for each graph: a plan within its limit, or within what is left."""
    return plan_graph(graph, limit, solver=solver, allowance_bytes=allowance_bytes)


def check_solver(solver: str) -> None:
    """Raises `OptionError` for a solver that does not exist."""
    if solver not in SOLVERS:
        raise OptionError("solver", solver, " or ".join(map(repr, SOLVERS)))


def _knee(frontier: Frontier) -> tuple[tuple[Choice, ...], Schedule]:
    """The curve limit against extra time, and the schedule where bending down begins to cost."""
    baseline, floor = frontier.baseline_bytes, frontier.floor.peak_bytes
    limits = [baseline, *(baseline * share // 100 for share in SHARES), floor]
    points = frontier.curve([limit for limit in limits if limit >= floor])
    choices = tuple(Choice(limit, p.peak_bytes, p.seconds) for limit, p in points.items())
    worst = max((p.seconds for p in points.values()), default=0.0) or 1.0
    best = min(points.values(), key=lambda p: p.peak_bytes / max(baseline, 1) + p.seconds / worst)
    return choices, frontier.problem.schedule(best.runs)


def _resolve(limit: Limit | DeviceLimits, graph: Graph, baseline_bytes: int) -> int:
    if isinstance(limit, Limit):
        return limit.resolve(baseline_bytes, lambda: free_bytes(graph))
    devices = sorted({v.device for v in graph.values.values() if v.kind is Kind.ACTIVATION})
    named = sorted(device for device, _ in limit.limits)
    if named != devices or len(devices) != 1:
        expected = f"one limit in bytes: the model's activations are on {', '.join(devices)}"
        raise OptionError("limit", str(limit), expected)
    return limit.resolve({devices[0]: baseline_bytes}, costing.free_bytes)[devices[0]]


def free_bytes(graph: Graph) -> int:
    """What ``limit="auto"`` allows: free memory of the device, less gradients and the state of
    an optimizer with two moments, less a margin."""
    gradients = {v.storage: v.nbytes for v in graph.values.values() if v.kind is Kind.GRADIENT}
    devices = {v.device for v in graph.values.values() if v.kind is Kind.ACTIVATION}
    free = min(costing.free_bytes(device) for device in sorted(devices))
    return max(1, int(MARGIN * (free - 3 * sum(gradients.values()))))
