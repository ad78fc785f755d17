"""Lower bounds: never above what brute force finds, tight where that is known."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxrecals.ir import Graph, Kind, Op, Phase, Value
from fxrecals.solve.auto import Frontier
from fxrecals.solve.bound import Relaxation
from fxrecals.solve.problem import make_problem
from fxrecals.solve.state import State
from tests.chains import chain
from tests.oracle import cheapest, every_set
from tests.strategies import joint_graphs
from tests.test_solve import runs_able


@given(joint_graphs(max_ops=5))
def test_no_schedule_is_below_the_bounds(graph: Graph) -> None:
    problem = make_problem(graph)
    assume(len(runs_able(problem)) <= 14)
    relaxation = Relaxation(State(problem))
    for peak, seconds in cheapest(problem, most=len(runs_able(problem))).items():
        assert relaxation.lowest_peak <= peak
        assert relaxation.solve(peak).seconds <= seconds + 1e-9


@given(joint_graphs(), st.randoms(use_true_random=False))
def test_no_random_schedule_is_below_the_bounds(graph: Graph, dice: random.Random) -> None:
    problem = make_problem(graph)
    able = runs_able(problem)
    assume(able)
    state = State(problem)
    for run in dice.sample(able, min(len(able), 6)):
        state.toggle(*run)
    relaxation = Relaxation(State(problem))
    assert relaxation.lowest_peak <= state.peak_bytes
    assert relaxation.solve(state.peak_bytes).seconds <= state.seconds + 1e-9


@pytest.mark.parametrize("short", [1, 5, 15])
def test_one_storage_too_many_costs_its_op(short: int) -> None:
    """Of a chain, where one storage must go, the bound is that share of the cheapest one."""
    problem = make_problem(chain(6, 20, [3.0, 3.0, 1.0, 3.0, 3.0, 3.0]))
    limit = State(problem).peak_bytes - short
    bound = Relaxation(State(problem)).solve(limit).seconds
    assert bound == pytest.approx(short / 20, rel=1e-3)
    found = Frontier(problem).cheapest(limit)
    assert found is not None
    assert found.seconds == 1.0


def test_below_the_lowest_peak_there_is_no_schedule() -> None:
    relaxation = Relaxation(State(make_problem(chain(6, 20))))
    assert relaxation.lowest_peak == 60
    assert relaxation.solve(59).seconds == float("inf")
    assert relaxation.solve(60).seconds < float("inf")


def test_no_bound_where_everything_fits() -> None:
    problem = make_problem(chain(6))
    assert Relaxation(State(problem)).solve(State(problem).peak_bytes).seconds == 0.0


def test_every_set_has_the_lowest_peak_or_more() -> None:
    problem = make_problem(chain(3, 5))
    lowest = min(State(problem, runs).peak_bytes for runs in every_set(problem, 6))
    assert Relaxation(State(problem)).lowest_peak == lowest


def test_what_the_backward_never_reads_is_paid_for_with_what_it_reads() -> None:
    """f makes a, g makes b of it; only b is read in the backward. To have b again takes both ops,
    or a held on, which is as large."""
    values = {n: Value(n, 10, n) for n in ("a", "b")}
    values |= {"x": Value("x", 10, "x", Kind.PRIMAL), "y": Value("y", 0, "y")}
    values |= {n: Value(n, 10, n, Kind.BACKWARD) for n in ("p", "q")}
    graph = Graph(
        (
            Op("f", "f", ("x",), ("a",), Phase.FORWARD, seconds=9.0),
            Op("g", "f", ("a",), ("b",), Phase.FORWARD, seconds=1.0),
            Op("out", "f", ("b",), ("y",), Phase.FORWARD),
            Op("start", "g", ("y",), ("p",), Phase.BACKWARD, scratch_bytes=15),
            Op("one", "g", ("p", "b"), ("q",), Phase.BACKWARD),
        ),
        values,
        ("y", "q"),
    )
    bound = Relaxation(State(make_problem(graph))).solve(30).seconds
    assert bound == pytest.approx(0.5 * 10.0, rel=1e-3)
