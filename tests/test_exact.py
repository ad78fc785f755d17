"""The optimum, held against brute force over every set of recomputes."""

import random
import sys
from dataclasses import replace
from math import inf

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrecals.errors import OptionError
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value, verify
from fxrecals.solve import exact, refine
from fxrecals.solve.problem import Problem, make_problem
from fxrecals.solve.state import State
from tests import oracle
from tests.chains import binomial, chain
from tests.strategies import joint_graphs

dice = st.randoms(use_true_random=False)


def with_few_able(problem: Problem, most: int, dice: random.Random) -> Problem:
    """The problem with so many ops able to run again that `most` recomputes are to choose from.

    Ops with several outputs, of which the caller holds some, come first: they are rare.
    """

    def stages(op: int) -> int:
        return sum(problem.may_run_at(op, at) for at in range(problem.forward_count, problem.end))

    ops = [op for op in range(problem.forward_count) if problem.may_run_again[op]]
    dice.shuffle(ops)
    ops.sort(key=lambda op: len(problem.makes[op]) == 1)
    able: set[int] = set()
    for op in ops:
        if stages(op) <= most:
            able.add(op)
            most -= stages(op)
    return replace(problem, may_run_again=tuple(op in able for op in range(problem.end)))


def in_giants(graph: Graph, dice: random.Random) -> Graph:
    """The graph with ten billion times the bytes, and now and then a byte or two more."""
    odd = {v.storage: dice.choice((0, 0, 1, 2)) for v in graph.values.values()}
    values = {
        name: replace(value, nbytes=10**10 * value.nbytes + odd[value.storage])
        for name, value in graph.values.items()
    }
    ops = tuple(replace(op, scratch_bytes=10**10 * op.scratch_bytes) for op in graph.ops)
    return replace(graph, ops=ops, values=values)


def check_against_every_set(problem: Problem) -> None:
    best = oracle.cheapest(problem, most=problem.end * problem.forward_count)
    floor, runs = exact.lowest(problem)
    assert floor == min(best) == State(problem, runs).peak_bytes
    assert exact.search(problem, floor - 1) == exact.Answer(None, inf, True)
    for limit in sorted({*best, *(peak - 1 for peak in best if peak > floor)}):
        optimum = min(seconds for peak, seconds in best.items() if peak <= limit)
        answer = exact.search(problem, limit)
        assert answer.proved
        assert answer.runs is not None
        state = State(problem, answer.runs)
        assert state.peak_bytes <= limit
        assert state.seconds == pytest.approx(optimum)
        assert answer.bound_seconds == pytest.approx(optimum)
        check_needed(state, limit)


def check_needed(state: State, limit: int) -> None:
    for op, stages in state.snapshot().items():
        for stage in stages:
            state.toggle(op, stage)
            assert state.peak_bytes > limit
            state.toggle(op, stage)


def least(liveness: exact._Liveness, state: State) -> list[bool]:
    """The least values of all columns where those of the runs are as in a state."""
    program = liveness.program
    values = [column == exact.ONE for column in range(program.count)]
    for column, run in liveness.runs.items():
        values[column] = state.runs_at(*run)
    settled = False
    while not settled:
        settled = True
        for row, bound in zip(program.rows, program.bounds, strict=True):
            if sum(value * values[column] for column, value in row.items()) > bound:
                raised = [c for c, value in row.items() if value < 0 and c not in liveness.runs]
                values[max(raised)] = True
                settled = False
    return values


def drop_useless(liveness: exact._Liveness, state: State) -> None:
    """Takes back what makes nothing anew that is read."""
    while useless := [
        (op, stage)
        for op, stages in state.runs.items()
        for stage in stages
        if not any(refine.is_read_after(state, s, stage) for s in liveness._fresh(op))
    ]:
        state.toggle(*useless[0])


@settings(max_examples=300)
@given(joint_graphs(once=False), dice)
def test_the_program_knows_the_bytes_of_any_set(graph: Graph, dice: random.Random) -> None:
    problem = make_problem(graph)
    liveness = exact._Liveness(problem)
    able = list(liveness.runs.values())
    state = State(problem)
    for run in dice.sample(able, dice.randint(0, len(able))):
        state.toggle(*run)
    drop_useless(liveness, state)
    values = least(liveness, state)
    peaks = [sum(n * values[c] for c, n in point.items()) for point in liveness.points]
    assert max(peaks) == state.peak_bytes


@settings(max_examples=60)
@given(joint_graphs(once=False), dice)
def test_nothing_is_cheaper_and_nothing_lower(graph: Graph, dice: random.Random) -> None:
    check_against_every_set(with_few_able(make_problem(graph), 8, dice))


@settings(max_examples=20)
@given(joint_graphs(once=False), dice)
def test_no_byte_is_lost_among_a_hundred_billion(graph: Graph, dice: random.Random) -> None:
    check_against_every_set(with_few_able(make_problem(in_giants(graph, dice)), 6, dice))


@pytest.mark.slow
@settings(max_examples=400)
@given(joint_graphs(), dice)
def test_nothing_is_cheaper_or_lower_among_more(graph: Graph, dice: random.Random) -> None:
    check_against_every_set(with_few_able(make_problem(graph), 11, dice))


@pytest.mark.slow
@settings(max_examples=400)
@given(joint_graphs(), dice)
def test_no_byte_is_lost_among_more(graph: Graph, dice: random.Random) -> None:
    check_against_every_set(with_few_able(make_problem(in_giants(graph, dice)), 9, dice))


@pytest.mark.parametrize("slots", range(1, 7))
@pytest.mark.parametrize("length", [4, 6, 8, 10])
def test_uniform_chains_cost_what_griewank_says(length: int, slots: int) -> None:
    """Two units of bytes are at work in every backward op, beside the state that it reads."""
    problem = make_problem(chain(length, 1))
    answer = exact.search(problem, slots + 2)
    assert answer.proved
    assert answer.runs is not None
    assert State(problem, answer.runs).seconds == binomial(length, slots) - (length - 1)


def test_a_chain_of_sixty_values_is_solved_and_twice_alike() -> None:
    problem = make_problem(chain(30))
    answer = exact.search(problem, 185)
    assert answer.proved
    assert answer.runs is not None
    state = State(problem, answer.runs)
    assert state.peak_bytes <= 185
    assert state.seconds == 13
    assert exact.cheapest(problem, 185) == answer.runs


def test_a_byte_too_much_is_cut_off_where_the_tolerance_hides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[bool] = []
    minimise = exact._minimise

    def counted(*args):
        solved.append(True)
        return minimise(*args)

    monkeypatch.setattr(exact, "_minimise", counted)
    giant = 10**11
    problem = make_problem(chain(6, [giant + k for k in range(6)], gradients=giant))
    answer = exact.search(problem, 5 * giant + 1)
    assert len(solved) > 1
    assert answer.proved
    assert answer.runs is not None
    state = State(problem, answer.runs)
    assert state.peak_bytes <= 5 * giant + 1
    assert state.seconds == 3


@pytest.mark.parametrize(("read", "floor"), [((), 50), (("h",), 60)])
def test_a_second_copy_of_what_the_caller_holds_takes_room(
    read: tuple[str, ...], floor: int
) -> None:
    """`both` makes `h`, which the caller holds, and `a`, which would better be made again.

    A new `h` comes with a new `a`. If the last op reads `h`, it reads the new one.
    """
    values = {"x": Value("x", 10, "x", Kind.PRIMAL)}
    values |= {name: Value(name, 10, name) for name in ("h", "a", "b", "c")}
    values |= {"t": Value("t", 10, "t", Kind.TANGENT)}
    values |= {name: Value(name, 10, name, Kind.BACKWARD) for name in ("p", "q")}
    caller = frozenset({Trait.CALLER})
    graph = Graph(
        (
            Op("both", "f", ("x",), ("h", "a"), Phase.FORWARD, seconds=1.0),
            Op("next", "f", ("a",), ("b",), Phase.FORWARD, seconds=1.0),
            Op("wide", "f", ("b",), ("c",), Phase.FORWARD, seconds=1.0, scratch_bytes=20),
            Op("loss", "caller", ("h", "c"), ("t",), Phase.BACKWARD, traits=caller),
            Op("first", "g", ("t", "b"), ("p",), Phase.BACKWARD),
            Op("last", "g", ("p", "a", *read), ("q",), Phase.BACKWARD),
        ),
        values,
        ("h", "t", "q"),
    )
    verify(graph)
    problem = make_problem(graph)
    assert exact.lowest(problem)[0] == floor
    check_against_every_set(problem)


def test_at_the_deadline_nothing_is_claimed_that_is_not_known() -> None:
    """Optimal schedules with so few slots are found soon, and proved late."""
    problem = make_problem(chain(24, 1))
    optimum = binomial(24, 3) - 23
    for seconds in (0.0, 0.5):
        answer = exact.search(problem, 5, seconds=seconds)
        assert not answer.proved
        assert answer.bound_seconds <= optimum
        if answer.runs is not None:
            state = State(problem, answer.runs)
            assert state.peak_bytes <= 5
            assert state.seconds >= optimum


def test_without_highspy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(OptionError, match=r"solver='exact'.*pip install 'fxrecals\[milp\]'"):
        exact.cheapest(make_problem(chain(4)), 30)


def test_too_much_to_choose_from_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(chain(8))
    count = len(exact._Liveness(problem).runs)
    monkeypatch.setattr(exact, "MOST_RUNS", count)
    assert exact.cheapest(problem, 90) == {}
    monkeypatch.setattr(exact, "MOST_RUNS", count - 1)
    with pytest.raises(OptionError, match=f"up to {count - 1} recomputes"):
        exact.cheapest(problem, 90)


def test_others_may_use_highs_with_as_many_threads_as_they_like() -> None:
    def others() -> highspy.HighsModelStatus:
        solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("threads", 2)
        x, y = solver.addBinary(), solver.addBinary()
        solver.addConstr(2 * x + 2 * y <= 3)
        solver.maximize(x + y)
        return solver.getModelStatus()

    assert others() == highspy.HighsModelStatus.kOptimal
    assert exact.search(make_problem(chain(8)), 60).proved
    assert others() == highspy.HighsModelStatus.kOptimal
