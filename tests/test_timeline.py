"""The judge of peak bytes against a slow oracle, and its rules one by one."""

from hypothesis import given

from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value
from fxrecals.schedule import Schedule
from fxrecals.timeline import simulate
from tests.oracle import live_bytes
from tests.strategies import graphs_with_schedules

F, B = Phase.FORWARD, Phase.BACKWARD
VIEW = frozenset({Trait.VIEW})


def graph_of(*ops: Op, outputs: tuple[str, ...] = (), values: tuple[Value, ...] = ()) -> Graph:
    """A graph whose values, unless given, are activations of 8 bytes; `x` is an input."""
    names = dict.fromkeys(n for op in ops for n in (*op.inputs, *op.outputs))
    made = {n: Value(n, 8, n) for n in names} | {value.name: value for value in values}
    made["x"] = Value("x", 100, "x", Kind.PRIMAL)
    return Graph(ops, made, outputs)


def live(graph: Graph, *backward: str) -> list[int]:
    forward = tuple(op.name for op in graph.forward)
    steps = simulate(graph, Schedule(forward, backward)).steps
    return [step.live_bytes for step in steps]


@given(graphs_with_schedules())
def test_it_agrees_with_the_oracle(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    steps = simulate(graph, schedule).steps
    assert [step.live_bytes for step in steps] == live_bytes(graph, schedule)


@given(graphs_with_schedules())
def test_all_is_freed_but_what_the_caller_holds(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    charged = {
        v.storage: v.nbytes
        for v in (graph.values[name] for name in graph.outputs)
        if v.kind not in (Kind.PRIMAL, Kind.GRADIENT)
    }
    assert simulate(graph, schedule).end_bytes == sum(charged.values())


@given(graphs_with_schedules())
def test_the_peak_of_the_device_is_the_peak_where_there_is_one(
    drawn: tuple[Graph, Schedule],
) -> None:
    timeline = simulate(*drawn)
    assert timeline.device_peaks.get("cpu", 0) == timeline.peak_bytes


def test_a_value_lives_to_its_last_use() -> None:
    """x -f-> a -g-> b; backward h(a), k(b)."""
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F), Op("g", "g", ("a",), ("b",), F),
        Op("h", "h", ("a",), ("c",), B), Op("k", "k", ("b",), ("d",), B),
    )  # fmt: skip
    assert live(graph, "h", "k") == [8, 16, 24, 16]


def test_a_value_made_again_is_free_in_between() -> None:
    """The same, with f run again before h: a is dead between g and the second f."""
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F), Op("g", "g", ("a",), ("b",), F),
        Op("k", "k", ("b",), ("d",), B), Op("h", "h", ("a",), ("c",), B),
    )  # fmt: skip
    assert live(graph, "k", "h") == [8, 16, 24, 16]
    assert live(graph, "k", "f", "h") == [8, 16, 16, 8, 16]


def test_a_view_of_a_saved_value_is_free() -> None:
    view = Value("v", 8, "a")
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F), Op("t", "t", ("a",), ("v",), F, traits=VIEW),
        Op("h", "h", ("v",), ("c",), B), values=(view,),
    )  # fmt: skip
    assert live(graph, "h") == [8, 8, 16]


def test_a_view_keeps_the_old_storage_when_its_base_is_made_again() -> None:
    """f runs again, but the view t of the first a is read after it: both copies are alive."""
    view = Value("v", 8, "a")
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F), Op("t", "t", ("a",), ("v",), F, traits=VIEW),
        Op("h", "h", ("a", "v"), ("c",), B), values=(view,),
    )  # fmt: skip
    assert live(graph, "f", "h") == [8, 8, 16, 24]
    assert live(graph, "f", "t", "h") == [8, 8, 8, 8, 16]


def test_an_output_that_nobody_reads_counts_while_its_op_runs() -> None:
    graph = graph_of(Op("f", "f", ("x",), ("a", "f:1"), F), Op("h", "h", ("a",), ("c",), B))
    assert live(graph, "h") == [16, 16]


def test_what_the_caller_holds_lives_to_the_end() -> None:
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F), Op("h", "h", ("x",), ("c",), B), outputs=("a", "c")
    )
    assert live(graph, "h") == [8, 16]


def test_scratch_counts_beside_inputs_and_outputs() -> None:
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F, scratch_bytes=5), Op("h", "h", ("a",), ("c",), B)
    )
    assert live(graph, "h") == [13, 16]


def test_parameters_are_not_charged_and_their_gradients_are_charged_apart() -> None:
    grad = Value("g", 8, "g", Kind.GRADIENT)
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F),
        Op("h", "h", ("a",), ("g",), B),
        outputs=("g",),
        values=(grad,),
    )
    timeline = simulate(graph, Schedule.keeping_everything(graph))
    assert (timeline.peak_bytes, timeline.step_peak_bytes) == (8, 16)


def test_a_generator_state_exists_only_if_its_op_runs_again() -> None:
    state = Value("f:rng", 3, "f:rng", Kind.RNG_STATE)
    graph = graph_of(
        Op("f", "f", ("x",), ("a", "f:rng"), F, traits=frozenset({Trait.RANDOM})),
        Op("h", "h", ("a",), ("c",), B), values=(state,),
    )  # fmt: skip
    assert live(graph, "h") == [8, 16]
    assert live(graph, "f", "h") == [11, 11, 16]


def test_what_is_saved_is_what_lives_between_forward_and_backward() -> None:
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F), Op("g", "g", ("a",), ("b",), F),
        Op("h", "h", ("a", "b"), ("c",), B), outputs=("b",),
    )  # fmt: skip
    assert simulate(graph, Schedule(("f", "g"), ("h",))).saved_bytes == 16
    assert simulate(graph, Schedule(("f", "g"), ("f", "h"))).saved_bytes == 8


def test_devices_are_counted_apart() -> None:
    there = Value("b", 50, "b", device="cuda:0")
    graph = graph_of(
        Op("f", "f", ("x",), ("a",), F), Op("g", "g", ("a",), ("b",), F, scratch_bytes=2),
        Op("h", "h", ("a", "b"), ("c",), B), values=(there,),
    )  # fmt: skip
    timeline = simulate(graph, Schedule(("f", "g"), ("h",)))
    assert dict(timeline.device_peaks) == {"cpu": 16, "cuda:0": 52}
