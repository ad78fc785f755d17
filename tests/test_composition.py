"""The live bytes of the timeline, sorted by why they are alive."""

from hypothesis import given

from fxrecals.composition import ACTIVATIONS, Category, alive_at, compose
from fxrecals.ir import Graph, Kind, Op, Peak, Phase, Value, bounded_graph
from fxrecals.schedule import Schedule
from fxrecals.timeline import simulate
from tests.strategies import graphs_with_schedules

F, B = Phase.FORWARD, Phase.BACKWARD


@given(graphs_with_schedules())
def test_categories_add_up_to_the_live_bytes_of_the_timeline(
    drawn: tuple[Graph, Schedule],
) -> None:
    timeline, found = simulate(*drawn), compose(*drawn)
    totals = [
        sum(found[category][i] for category in ACTIVATIONS) for i in range(len(timeline.steps))
    ]
    assert totals == [step.live_bytes for step in timeline.steps]
    assert max(totals) == timeline.peak_bytes
    assert list(found[Category.GRADIENT]) == [step.gradient_bytes for step in timeline.steps]


@given(graphs_with_schedules())
def test_with_gradients_they_add_up_to_what_a_limit_on_the_step_bounds(
    drawn: tuple[Graph, Schedule],
) -> None:
    graph, schedule = drawn
    bounded = simulate(bounded_graph(graph, Peak.STEP), schedule)
    totals = [sum(each) for each in zip(*compose(graph, schedule).values(), strict=True)]
    assert totals == [step.live_bytes for step in bounded.steps]
    assert max(totals) == bounded.peak_bytes


@given(graphs_with_schedules())
def test_what_is_saved_when_the_backward_begins_is_what_the_timeline_saves(
    drawn: tuple[Graph, Schedule],
) -> None:
    timeline, found = simulate(*drawn), compose(*drawn)
    assert found[Category.SAVED][timeline.forward_runs] == timeline.saved_bytes


@given(graphs_with_schedules())
def test_what_is_alive_at_a_run_adds_up_to_its_categories(drawn: tuple[Graph, Schedule]) -> None:
    found = compose(*drawn)
    run = simulate(*drawn).peak_index
    for category in set(Category) - {Category.SCRATCH}:
        alive = (value.nbytes for value, _, each in alive_at(*drawn, run) if each is category)
        assert sum(alive) == found[category][run]


def test_each_category_by_an_example() -> None:
    """x -f-> a -g-> b; the backward makes a again for h, which makes the parameter's gradient."""
    values = {n: Value(n, 8, n) for n in "abc"}
    values |= {"x": Value("x", 100, "x", Kind.PRIMAL), "w": Value("w", 4, "w", Kind.GRADIENT)}
    graph = Graph(
        (
            Op("f", "f", ("x",), ("a",), F),
            Op("g", "g", ("a",), ("b",), F, scratch_bytes=3),
            Op("k", "k", ("b",), ("c",), B),
            Op("h", "h", ("a", "c"), ("w",), B),
        ),
        values,
        outputs=("w",),
    )
    found = compose(graph, Schedule(("f", "g"), ("k", "f", "h")))
    assert found == {
        Category.SAVED: (0, 8, 8, 0, 0),
        Category.RECOMPUTED: (0, 0, 0, 8, 8),
        Category.TEMPORARY: (8, 8, 8, 8, 8),
        Category.SCRATCH: (0, 3, 0, 0, 0),
        Category.GRADIENT: (0, 0, 0, 0, 4),
    }


def test_the_largest_that_is_alive_comes_first() -> None:
    values = {"a": Value("a", 8, "a"), "b": Value("b", 9, "b")}
    ops = (Op("f", "f", (), ("a",), F), Op("g", "g", ("a",), ("b",), F))
    graph = Graph(ops, values, outputs=("b",))
    alive = alive_at(graph, Schedule(("f", "g"), ()), 1)
    assert [(value.name, run) for value, run, _ in alive] == [("b", 1), ("a", 0)]
