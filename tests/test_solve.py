"""The solvers: valid, judged, never over the limit, never worse for a larger one."""

import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxrecals import schedule as scheduling
from fxrecals.errors import InfeasibleLimitError
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value
from fxrecals.schedule import Schedule
from fxrecals.solve import greedy, refine
from fxrecals.solve.auto import Clock, Frontier, solve
from fxrecals.solve.problem import Problem, make_problem
from fxrecals.solve.state import State
from fxrecals.timeline import simulate
from tests.chains import TWO, chain, mlp, side_by_side
from tests.oracle import cheapest
from tests.strategies import joint_graphs


def runs_able(problem: Problem) -> list[tuple[int, int]]:
    return [
        (op, stage)
        for op in range(problem.forward_count)
        for stage in range(problem.forward_count, problem.end)
        if problem.may_run_at(op, stage)
    ]


def judged(problem: Problem, state: State) -> int:
    """The peak of a state by the judge, after the judge of schedules has let it pass."""
    made = problem.schedule(state.snapshot())
    scheduling.verify(problem.graph, made)
    return simulate(problem.graph, made).peak_bytes


def auto(graph: Graph, limit: int) -> Schedule:
    frontier = Frontier(make_problem(graph))
    return frontier.problem.schedule(solve(frontier, limit).runs)


@given(joint_graphs(), st.randoms(use_true_random=False))
def test_the_incremental_timeline_agrees_with_the_judge(graph: Graph, dice: random.Random) -> None:
    problem = make_problem(graph)
    state = State(problem)
    assert state.peak_bytes == simulate(graph, Schedule.keeping_everything(graph)).peak_bytes
    able = runs_able(problem)
    assume(able)
    for _ in range(6):
        for run in dice.sample(able, min(len(able), 2)):
            state.toggle(*run)
        assert state.peak_bytes == judged(problem, state)
        fresh = State(problem, state.snapshot())
        assert (fresh.total == state.total).all()
        assert fresh.seconds == pytest.approx(state.seconds)


@given(joint_graphs(), st.randoms(use_true_random=False))
def test_a_state_can_be_restored(graph: Graph, dice: random.Random) -> None:
    problem = make_problem(graph)
    able = runs_able(problem)
    assume(able)
    state = State(problem)
    state.toggle(*dice.choice(able))
    before, total = state.snapshot(), state.total
    for run in dice.choices(able, k=4):
        state.toggle(*run)
    state.restore(before)
    assert state.snapshot() == before
    assert (state.total == total).all()


@given(joint_graphs())
def test_with_nothing_run_again_the_schedule_is_the_graph(graph: Graph) -> None:
    assert make_problem(graph).schedule({}) == Schedule.keeping_everything(graph)


@given(joint_graphs())
def test_every_start_and_every_descent_is_a_valid_schedule(graph: Graph) -> None:
    problem = make_problem(graph)
    for point in Frontier(problem).points:
        assert judged(problem, State(problem, point.runs)) == point.peak_bytes


@given(joint_graphs(), st.integers(1, 100))
def test_never_over_the_limit_or_a_floor_that_works(graph: Graph, percent: int) -> None:
    baseline = simulate(graph, Schedule.keeping_everything(graph)).peak_bytes
    limit = baseline * percent // 100
    try:
        made = auto(graph, limit)
    except InfeasibleLimitError as error:
        limit, lowest = error.floor_bytes, error.lowest_bytes
        assert lowest <= limit
        made = auto(graph, limit)
    scheduling.verify(graph, made)
    assert simulate(graph, made).peak_bytes <= limit


@given(joint_graphs(), st.integers(1, 100))
def test_two_runs_give_the_same_schedule(graph: Graph, percent: int) -> None:
    frontier = Frontier(make_problem(graph))
    limit = max(frontier.floor.peak_bytes, frontier.baseline_bytes * percent // 100)
    assert solve(Frontier(make_problem(graph)), limit) == solve(frontier, limit)


@given(joint_graphs())
def test_along_a_curve_a_larger_limit_never_costs_more(graph: Graph) -> None:
    frontier = Frontier(make_problem(graph))
    low, high = frontier.floor.peak_bytes, frontier.baseline_bytes
    points = frontier.curve([low + (high - low) * k // 7 for k in range(8)])
    assert all(p.peak_bytes <= limit for limit, p in points.items())
    assert all(a.seconds <= b.seconds for a, b in pairwise(points.values()))


@given(joint_graphs(max_ops=4))
def test_close_to_brute_force_on_tiny_graphs(graph: Graph) -> None:
    problem = make_problem(graph)
    assume(len(runs_able(problem)) <= 16)
    best = cheapest(problem, most=3)
    frontier = Frontier(problem)
    assert frontier.floor.peak_bytes <= min(best) * 1.35 + 3
    for peak in best:
        found = frontier.cheapest(peak)
        if found is not None:
            optimum = min(seconds for p, seconds in best.items() if p <= peak)
            assert found.seconds >= 0
            assert found.seconds <= 3 * optimum + 5


def test_a_chain_reaches_a_floor_far_below_its_length() -> None:
    frontier = Frontier(make_problem(chain(64)))
    assert frontier.baseline_bytes == 650
    assert frontier.floor.peak_bytes <= 150


def test_half_the_memory_of_a_chain_costs_at_most_one_more_forward() -> None:
    graph = chain(64)
    made = auto(graph, 330)
    assert scheduling.extra_seconds(graph, made) <= 64
    assert simulate(graph, made).peak_bytes <= 330


def test_a_limit_under_the_floor_names_the_floor_and_the_op() -> None:
    with pytest.raises(InfeasibleLimitError) as caught:
        auto(chain(4), 1)
    assert caught.value.floor_bytes > 1
    assert caught.value.op


def test_a_limit_at_the_baseline_changes_nothing() -> None:
    graph = chain(8)
    keep = Schedule.keeping_everything(graph)
    assert auto(graph, simulate(graph, keep).peak_bytes) == keep


def test_one_byte_less_than_the_baseline_costs_about_one_op() -> None:
    graph = chain(32)
    baseline = simulate(graph, Schedule.keeping_everything(graph)).peak_bytes
    assert scheduling.extra_seconds(graph, auto(graph, baseline - 1)) <= 2


def test_spending_takes_the_dear_recompute_back_first() -> None:
    """Two values of the same size, one dear, one cheap, and room for one of them."""
    values = {n: Value(n, 10, n) for n in ("a", "b")}
    values |= {"x": Value("x", 10, "x", Kind.PRIMAL), "y": Value("y", 0, "y")}
    values |= {n: Value(n, 10, n, Kind.BACKWARD) for n in ("p", "q", "r")}
    graph = Graph(
        (
            Op("dear", "f", ("x",), ("a",), Phase.FORWARD, seconds=9.0),
            Op("cheap", "f", ("x",), ("b",), Phase.FORWARD, seconds=1.0),
            Op("out", "f", ("a", "b"), ("y",), Phase.FORWARD),
            Op("start", "g", ("y",), ("p",), Phase.BACKWARD, scratch_bytes=10),
            Op("one", "g", ("p", "a"), ("q",), Phase.BACKWARD),
            Op("two", "g", ("q", "b"), ("r",), Phase.BACKWARD),
        ),
        values,
        ("y", "r"),
    )
    problem = make_problem(graph)
    state = State(problem, {0: (4,), 1: (5,)})
    refine.spend(state, 30, refine.by_seconds, effort=100)
    assert state.snapshot() == {1: (5,)}


def test_lowering_stops_when_its_effort_is_spent() -> None:
    state = State(make_problem(chain(64)))
    greedy.lower(state, 1, effort=10)
    assert state.work < 40


def test_what_the_caller_hands_on_is_not_made_again() -> None:
    """f makes a; between two graphs the caller hands it on as b; a new a would not reach b."""
    values = {n: Value(n, 10, n) for n in ("a", "c")} | {"b": Value("b", 10, "a")}
    values |= {"x": Value("x", 10, "x", Kind.PRIMAL), "d": Value("d", 10, "d", Kind.BACKWARD)}
    graph = Graph(
        (
            Op("f", "f", ("x",), ("a",), Phase.FORWARD, seconds=1.0),
            Op("hand", "caller", ("a",), ("b",), Phase.FORWARD, traits=frozenset({Trait.CALLER})),
            Op("g", "f", ("b",), ("c",), Phase.FORWARD, seconds=1.0),
            Op("h", "g", ("c", "b"), ("d",), Phase.BACKWARD),
        ),
        values,
        ("d",),
    )
    assert make_problem(graph).may_run_again == (False, False, True, False)


@given(joint_graphs(devices=TWO), st.integers(1, 40), st.integers(1, 40), st.randoms())
def test_each_device_is_a_load_of_its_own(
    graph: Graph, first: int, second: int, dice: random.Random
) -> None:
    limits: dict[str, int] = dict(zip(TWO, (first, second), strict=True))
    problem = make_problem(graph, limits)
    state = State(problem)
    able = runs_able(problem)
    for run in dice.sample(able, min(len(able), 4)):
        state.toggle(*run)
    peaks = simulate(graph, problem.schedule(state.snapshot())).device_peaks
    most = max(limits.values())
    for load, bytes_at in zip(problem.loads, state.loads, strict=True):
        assert bytes_at.max() == peaks.get(load.device, 0) + most - limits[load.device]


@given(joint_graphs(devices=TWO), st.integers(30, 100), st.integers(30, 100))
def test_never_over_the_limit_of_a_device(graph: Graph, first: int, second: int) -> None:
    kept = simulate(graph, Schedule.keeping_everything(graph)).device_peaks
    limits = {
        device: max(1, kept.get(device, 0) * percent // 100)
        for device, percent in zip(TWO, (first, second), strict=True)
    }
    frontier = Frontier(make_problem(graph, limits))
    most = max(limits.values())
    point = frontier.cheapest(most)
    assert (point is None) == (frontier.floor.peak_bytes > most)
    if point is not None:
        peaks = simulate(graph, frontier.problem.schedule(point.runs)).device_peaks
        assert all(peaks.get(device, 0) <= limit for device, limit in limits.items())
        assert frontier.bound_seconds(most) <= point.seconds + 1e-9


def test_a_limit_on_one_device_leaves_the_other_alone() -> None:
    """Two chains of the same size on two devices; only one has to give way."""
    halves = [chain(12), chain(12)]
    graph = side_by_side(halves, TWO)
    alone = simulate(halves[0], Schedule.keeping_everything(halves[0])).peak_bytes
    limits = {TWO[0]: alone * 2, TWO[1]: alone // 2}
    frontier = Frontier(make_problem(graph, limits))
    point = frontier.cheapest(alone * 2)
    assert point is not None
    again = {frontier.problem.ops[op].name for op in point.runs}
    assert again
    assert all(name.startswith("1.") for name in again)


@given(joint_graphs(), st.integers(20, 100))
def test_other_names_change_nothing_but_names(graph: Graph, percent: int) -> None:
    """Names in the reverse order of the alphabet."""
    names = sorted([*graph.values, *(op.name for op in graph.ops)])
    new = {name: f"n{len(names) - k:04}" for k, name in enumerate(names)}
    renamed = Graph(
        tuple(
            replace(
                op,
                name=new[op.name],
                inputs=tuple(new[name] for name in op.inputs),
                outputs=tuple(new[name] for name in op.outputs),
            )
            for op in graph.ops
        ),
        {
            new[value.name]: replace(value, name=new[value.name], storage=new[value.storage])
            for value in graph.values.values()
        },
        tuple(new[name] for name in graph.outputs),
    )
    frontier, other = Frontier(make_problem(graph)), Frontier(make_problem(renamed))
    limit = frontier.baseline_bytes * percent // 100
    assert other.floor.peak_bytes == frontier.floor.peak_bytes
    points = frontier.cheapest(limit), other.cheapest(limit)
    if points[0] is None or points[1] is None:
        assert points == (None, None)
    else:
        assert points[0].seconds == points[1].seconds
        made = frontier.problem.schedule(points[0].runs)
        assert tuple(new[name] for name in made.backward) == (
            other.problem.schedule(points[1].runs).backward
        )


@given(joint_graphs(), st.integers(1, 100), st.integers(1, 100))
def test_a_larger_limit_never_costs_more(graph: Graph, first: int, second: int) -> None:
    """Of two searches that know nothing of each other, where each finds the optimum."""
    assume(Frontier(make_problem(graph)).is_small)
    less, more = sorted((first, second))
    found: list[float] = []
    for percent in (less, more):
        frontier = Frontier(make_problem(graph))
        limit = max(frontier.floor.peak_bytes, frontier.baseline_bytes * percent // 100)
        point = frontier.cheapest(limit)
        assert point is not None
        found.append(point.seconds)
    assert found[0] >= found[1]


@pytest.mark.parametrize(
    ("layers", "percent", "seconds"), [(5, 70, 15), (8, 60, 25), (8, 55, 50), (8, 50, 50)]
)
def test_values_are_made_again_where_there_is_room_for_it(
    layers: int, percent: int, seconds: float
) -> None:
    """The first is the optimum; none of them is found with every recompute just before its use."""
    frontier = Frontier(make_problem(mlp(layers)), exactly=False)
    point = frontier.cheapest(frontier.baseline_bytes * percent // 100)
    assert point is not None
    assert point.seconds <= seconds


def test_what_is_handed_out_later_is_not_held_before() -> None:
    """The caller takes a view of ``a`` from the backward: until then, ``a`` may go."""
    values = {"x": Value("x", 1, "x", Kind.PRIMAL), "t": Value("t", 10, "t", Kind.TANGENT)}
    values |= {"y": Value("y", 1, "y"), "a": Value("a", 10, "a")}
    values["view"] = Value("view", 10, "a", Kind.BACKWARD)
    graph = Graph(
        (
            Op("f", "f", ("x",), ("a",), Phase.FORWARD, seconds=1.0),
            Op("g", "g", ("x",), ("y",), Phase.FORWARD),
            Op("loss", "l", ("y",), ("t",), Phase.BACKWARD, traits=frozenset({Trait.CALLER})),
            Op("b", "v", ("a",), ("view",), Phase.BACKWARD, traits=frozenset({Trait.VIEW})),
        ),
        values,
        ("y", "view"),
    )
    frontier = Frontier(make_problem(graph), exactly=False)
    assert frontier.floor.peak_bytes < frontier.baseline_bytes
    assert frontier.floor.runs == {0: (3,)}


def test_an_input_lives_on_where_making_it_again_has_no_room() -> None:
    """At the floor ``a`` waits for the backward in place of ``b``, which is larger; to make both
    again there would take more."""
    values = {"x": Value("x", 0, "x", Kind.PRIMAL), "t": Value("t", 30, "t", Kind.TANGENT)}
    values |= {"a": Value("a", 8, "a"), "b": Value("b", 10, "b"), "y": Value("y", 1, "y")}
    values["s"] = Value("s", 24, "s", Kind.BACKWARD)
    graph = Graph(
        (
            Op("f", "f", ("x",), ("a",), Phase.FORWARD, seconds=1.0, scratch_bytes=40),
            Op("g", "g", ("a",), ("b",), Phase.FORWARD, seconds=1.0),
            Op("h", "h", ("b",), ("y",), Phase.FORWARD),
            Op("loss", "l", ("y",), ("t",), Phase.BACKWARD, traits=frozenset({Trait.CALLER})),
            Op("p", "p", ("t",), ("s",), Phase.BACKWARD),
            Op("q", "q", ("b", "s"), (), Phase.BACKWARD),
        ),
        values,
        ("y",),
    )
    frontier = Frontier(make_problem(graph), exactly=False)
    assert frontier.kept.at({1: (5,)}).peak_bytes < frontier.baseline_bytes
    assert frontier.floor.runs == {1: (5,)}


def test_varying_keeps_the_limit_and_gives_the_same_for_one_seed() -> None:
    problem = make_problem(mlp(6))
    limit = State(problem).peak_bytes * 6 // 10
    found: list[dict[int, tuple[int, ...]]] = []
    for _ in range(2):
        state = State(problem)
        assert greedy.lower(state, limit, effort=10_000)
        before = state.seconds
        refine.vary(state, limit, effort=3_000)
        assert judged(problem, state) <= limit
        assert state.seconds < before
        found.append(state.snapshot())
    assert found[0] == found[1]


def test_progress_tells_of_ever_better_answers() -> None:
    frontier = Frontier(make_problem(chain(24)), exactly=False)
    told: list[tuple[float, float, float]] = []
    limit = frontier.baseline_bytes // 3
    point = frontier.cheapest(limit, lambda *news: told.append(news))
    assert point is not None
    assert told
    assert all(a[0] > b[0] and a[2] <= b[2] for a, b in pairwise(told))
    assert all(bound <= best for best, bound, _ in told)
    assert told[-1][0] == point.seconds


def test_a_deadline_cuts_the_search_short_but_not_the_answer() -> None:
    problem = make_problem(chain(24))
    limit = State(problem).peak_bytes // 3
    hasty = Frontier(problem, clock=Clock(0.0)).cheapest(limit)
    patient = Frontier(problem).cheapest(limit)
    assert hasty is not None
    assert patient is not None
    assert hasty.peak_bytes <= limit
    assert patient.seconds <= hasty.seconds


def test_without_highspy_auto_does_without_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    frontier = Frontier(make_problem(chain(4)))
    assert frontier.is_small
    assert not frontier.seeks_optimum
    assert frontier.cheapest(frontier.floor.peak_bytes) is not None
