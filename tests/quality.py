"""How far from the optimum `auto` stays, on graphs that Hypothesis draws."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings

from fxrecals.ir import Graph
from fxrecals.solve import exact
from fxrecals.solve.auto import Frontier
from fxrecals.solve.problem import make_problem
from tests.strategies import joint_graphs

LIMITS = 5
"""Of each graph, evenly from its floor to just under its unplanned peak."""

DRAWN = 9
"""Graphs drawn for each that is used: on most, no recompute lowers the peak."""


def against_the_optimum(graphs: int, *, exactly: bool | None) -> list[float | None]:
    """For each graph and limit, by what part `auto` takes more extra time than the optimum.

    Where the optimum takes none, the part is that of the step. None stands for no answer.

    Args:
        graphs: how many at most; those whose peak no recompute lowers do not count.
        exactly: as of `Frontier`: whether `auto` looks for the optimum itself.
    """
    gaps: list[float | None] = []

    @settings(
        max_examples=DRAWN * graphs,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(joint_graphs(max_ops=8))
    def draw(graph: Graph) -> None:
        problem = make_problem(graph)
        frontier = Frontier(problem, exactly=exactly)
        floor, _ = exact.lowest(problem)
        if floor == frontier.baseline_bytes or len(gaps) >= LIMITS * graphs:
            return
        for k in range(LIMITS):
            limit = floor + (frontier.baseline_bytes - floor) * k // LIMITS
            runs = exact.cheapest(problem, limit)
            point = frontier.cheapest(limit)
            assert runs is not None
            least = frontier.kept.at(runs).seconds
            gap = point and (point.seconds - least) / (least or graph.seconds or 1.0)
            gaps.append(gap if gap is None else max(0.0, gap))

    draw()
    return gaps
