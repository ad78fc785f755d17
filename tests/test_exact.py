"""The optimum, held against brute force over every set of recomputes."""

import random
import sys
from collections import Counter
from dataclasses import replace
from math import inf

import highspy
import pytest
from hypothesis import assume, given, settings
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

DEVICES = ("cpu", "cuda:0")


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


def with_more_held(graph: Graph, dice: random.Random) -> Graph:
    """The graph of a caller who holds more: views, and some but not all that an op makes."""
    rare = [op.outputs[0] for op in graph.ops if op.is_view or len(op.outputs) > 1]
    return replace(graph, outputs=(*graph.outputs, *dice.sample(rare, dice.randint(0, len(rare)))))


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
    best: dict[int, float] = {}
    for runs in oracle.every_set(problem, most=problem.end * problem.forward_count):
        state = State(problem, runs)
        best[state.peak_bytes] = min(state.seconds, best.get(state.peak_bytes, inf))
    floor, runs = exact.lowest(problem)
    assert floor == min(best)
    check(State(problem, runs), floor)
    assert exact.search(problem, floor - 1) == exact.Answer(None, inf, True)
    for limit in sorted({*best, *(peak - 1 for peak in best if peak > floor)}):
        optimum = min(seconds for peak, seconds in best.items() if peak <= limit)
        answer = exact.search(problem, limit)
        assert answer.proved
        assert answer.runs is not None
        state = State(problem, answer.runs)
        check(state, limit)
        assert state.seconds == pytest.approx(optimum)
        assert answer.bound_seconds == pytest.approx(optimum)


def check(state: State, limit: int) -> None:
    """A state is within a limit, and needs each of its recomputes for that."""
    assert state.peak_bytes <= limit
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


def is_useful(liveness: exact._Liveness, state: State, op: int, stage: int) -> bool:
    """Whether a recompute makes something anew that is read."""
    return any(refine.is_read_after(state, made, stage) for made in liveness._fresh(op))


def drop_useless(liveness: exact._Liveness, state: State) -> None:
    while useless := [
        (op, stage)
        for op, stages in state.runs.items()
        for stage in stages
        if not is_useful(liveness, state, op, stage)
    ]:
        state.toggle(*useless[0])


def program_bytes(liveness: exact._Liveness, state: State) -> list[list[int]]:
    """The peak of each load within each position of a state, by the program."""
    values = least(liveness, state)
    problem = state.problem
    again = Counter(stage for _, stage in liveness.runs.values())
    found = [[0] * problem.end for _ in problem.loads]
    points = iter(liveness.points)
    for position in reversed(range(problem.end)):
        for _ in range(1 + again[position]):
            for load in found:
                nbytes = sum(more * values[column] for column, more in next(points).items())
                load[position] = max(load[position], nbytes)
    assert next(points, None) is None
    return found


@settings(max_examples=200)
@given(joint_graphs(once=False), dice)
def test_the_program_knows_the_bytes_of_any_set(graph: Graph, dice: random.Random) -> None:
    check_program(make_problem(with_more_held(graph, dice)), dice)


@settings(max_examples=50)
@given(joint_graphs(devices=DEVICES), dice)
def test_the_program_knows_the_bytes_of_each_device(graph: Graph, dice: random.Random) -> None:
    check_program(make_problem(graph, limits(dice)), dice)


def limits(dice: random.Random) -> dict[str, int]:
    return {device: dice.randint(1, 50) for device in DEVICES}


def check_program(problem: Problem, dice: random.Random) -> None:
    liveness = exact._Liveness(problem)
    able = list(liveness.runs.values())
    assume(able)
    for _ in range(8):
        state = State(problem)
        for run in dice.sample(able, dice.randint(0, len(able))):
            state.toggle(*run)
        drop_useless(liveness, state)
        assert program_bytes(liveness, state) == state.loads.tolist()


@settings(max_examples=60)
@given(joint_graphs(once=False), dice)
def test_nothing_is_cheaper_and_nothing_lower(graph: Graph, dice: random.Random) -> None:
    problem = make_problem(with_more_held(graph, dice))
    check_against_every_set(with_few_able(problem, 8, dice))


@settings(max_examples=30)
@given(joint_graphs(once=False, devices=DEVICES), dice)
def test_nothing_is_cheaper_with_a_limit_for_each_device(graph: Graph, dice: random.Random) -> None:
    problem = make_problem(graph, limits(dice))
    check_against_every_set(with_few_able(problem, 6, dice))


@settings(max_examples=20)
@given(joint_graphs(once=False), dice)
def test_no_byte_is_lost_among_a_hundred_billion(graph: Graph, dice: random.Random) -> None:
    check_against_every_set(with_few_able(make_problem(in_giants(graph, dice)), 6, dice))


@pytest.mark.slow
@settings(max_examples=400)
@given(joint_graphs(), dice)
def test_nothing_is_cheaper_or_lower_among_more(graph: Graph, dice: random.Random) -> None:
    problem = make_problem(with_more_held(graph, dice))
    check_against_every_set(with_few_able(problem, 11, dice))


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


@pytest.mark.parametrize("length", range(3, 12))
def test_uniform_chains_can_do_with_one_slot(length: int) -> None:
    assert exact.lowest(make_problem(chain(length, 1)))[0] == 3


def test_what_highs_leaves_needless_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def wasteful(program: exact._Program, *_: object) -> exact._Solution:
        return exact._Solution([1.0] * program.count, 0.0, False)

    monkeypatch.setattr(exact, "_minimise", wasteful)
    assert exact.search(make_problem(chain(5)), 1000) == exact.Answer({}, 0.0, False)


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


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("last_reads", [(), ("h",)])
@pytest.mark.parametrize("next_reads", [(), ("h",)])
def test_a_second_copy_of_what_the_caller_holds_takes_room(
    next_reads: tuple[str, ...], last_reads: tuple[str, ...], look: bool
) -> None:
    """`both` makes `h`, which the caller holds, and `a`, which would better be made again.

    A new `h` comes with a new `a`, and is what is read and looked at from then on.
    """
    values = {"x": Value("x", 10, "x", Kind.PRIMAL)}
    values |= {name: Value(name, 10, name) for name in ("h", "a", "b", "c")}
    values |= {"t": Value("t", 10, "t", Kind.TANGENT), "v": Value("v", 10, "h", Kind.BACKWARD)}
    values |= {name: Value(name, 10, name, Kind.BACKWARD) for name in ("p", "q")}
    caller, view = frozenset({Trait.CALLER}), frozenset({Trait.VIEW})
    ops = [
        Op("both", "f", ("x",), ("h", "a"), Phase.FORWARD, seconds=1.0),
        Op("next", "f", ("a", *next_reads), ("b",), Phase.FORWARD, seconds=1.0),
        Op("wide", "f", ("b",), ("c",), Phase.FORWARD, seconds=1.0, scratch_bytes=20),
        Op("loss", "caller", ("h", "c"), ("t",), Phase.BACKWARD, traits=caller),
        Op("first", "g", ("t", "b"), ("p",), Phase.BACKWARD),
        Op("look", "view", ("h",), ("v",), Phase.BACKWARD, traits=view),
        Op("last", "g", ("p", "a", *last_reads), ("q",), Phase.BACKWARD),
    ]
    if not look:
        del ops[5], values["v"]
    graph = Graph(tuple(ops), values, ("h", "t", "q", *(["v"] if look else [])))
    verify(graph)
    problem = make_problem(graph)
    check_against_every_set(problem)
    liveness = exact._Liveness(problem)
    for runs in oracle.every_set(problem, most=4):
        state = State(problem, runs)
        drop_useless(liveness, state)
        assert program_bytes(liveness, state) == state.loads.tolist()


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
