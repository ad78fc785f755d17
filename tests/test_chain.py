"""The chain solver against what is known of chains, and its cuts."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxrecals.schedule import Schedule, verify
from fxrecals.solve.auto import Frontier
from fxrecals.solve.chain import SLOTS, Chain, cuts, dearest
from fxrecals.solve.problem import Problem, make_problem
from fxrecals.solve.state import State
from fxrecals.timeline import simulate
from tests.chains import binomial, chain, rotor
from tests.strategies import joint_graphs


def op_by_op(problem: Problem) -> Chain:
    """Every op a block of its own."""
    return Chain(State(problem), tuple(range(problem.forward_count - 1)))


@pytest.mark.parametrize("slots", range(1, 8))
@pytest.mark.parametrize("length", [4, 6, 8, 12, 16, 24, 32, 48])
def test_uniform_chains_are_reversed_by_the_binomial_schedule(length: int, slots: int) -> None:
    """Two units of bytes are at work in every backward op, beside the state that it reads."""
    problem = make_problem(chain(length, 1))
    limit = slots - 1 + 3
    state = op_by_op(problem).state(limit)
    assert state is not None
    assert state.peak_bytes <= limit
    assert state.seconds == binomial(length, slots) - (length - 1)


@cache
def sweeps(length: int, slots: int) -> int:
    """Griewank's recursion: advance to some state, keep it, reverse what follows, then the rest."""
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(k + sweeps(length - k, slots - 1) + sweeps(k, slots) for k in range(1, length))


@pytest.mark.parametrize("slots", range(1, 6))
@pytest.mark.parametrize("length", range(1, 22))
def test_the_binomial_formula_solves_griewanks_recursion(length: int, slots: int) -> None:
    assert binomial(length, slots) == sweeps(length, slots)


@given(st.data())
def test_chains_cost_what_rotors_recursion_says(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 9))
    numbers = st.lists(st.integers(1, 6), min_size=length, max_size=length)
    sizes, slopes, times = (data.draw(numbers) for _ in range(3))
    problem = make_problem(chain(length, sizes, [float(t) for t in times], slopes))
    baseline = State(problem).peak_bytes
    assert baseline <= SLOTS
    limit = data.draw(st.integers(1, baseline))
    least = rotor(sizes, [float(t) for t in times], slopes, limit)
    state = op_by_op(problem).state(limit)
    assert (state is None) == np.isinf(least)
    if state is not None:
        assert state.peak_bytes <= limit
        assert state.seconds <= least
        found = Frontier(problem).cheapest(limit)
        assert found is not None
        assert found.seconds <= least


@given(joint_graphs(), st.integers(1, 100))
def test_what_a_chain_runs_again_is_a_valid_schedule(graph, percent: int) -> None:
    problem = make_problem(graph)
    limit = simulate(graph, Schedule.keeping_everything(graph)).peak_bytes * percent // 100
    state = op_by_op(problem).state(limit)
    if state is not None:
        made = problem.schedule(state.snapshot())
        verify(graph, made)
        assert simulate(graph, made).peak_bytes == state.peak_bytes


def test_cuts_fall_where_little_crosses() -> None:
    """Wide and narrow outputs in turn: every cut comes after a narrow one."""
    problem = make_problem(chain(32, [9, 1] * 16))
    found = cuts(problem, 8)
    assert 4 <= len(found) <= 11
    assert all(position % 2 for position in found)


def test_a_short_forward_is_cut_everywhere() -> None:
    assert cuts(make_problem(chain(5)), 16) == (0, 1, 2, 3)


def test_the_dearest_ops_are_those_of_most_seconds_per_byte() -> None:
    problem = make_problem(chain(4, [10, 10, 10, 10], [1.0, 5.0, 2.0, 4.0]))
    assert dearest(problem, 0.5) == {1, 3}
    assert dearest(problem, 0.0) == frozenset()
