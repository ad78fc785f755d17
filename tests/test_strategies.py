from hypothesis import given, settings
from hypothesis import strategies as st

from fxrecals import ir, schedule
from fxrecals.ir import Graph, Kind, Phase, Trait
from fxrecals.schedule import Schedule
from tests.strategies import RNG_BYTES, graphs_with_schedules, joint_graphs, schedules


@given(joint_graphs())
def test_drawn_graphs_are_valid(graph: Graph) -> None:
    ir.verify(graph)


@given(joint_graphs(devices=("cpu", "cuda:0")))
def test_drawn_graphs_on_several_devices_are_valid(graph: Graph) -> None:
    ir.verify(graph)
    device = {value.storage: value.device for value in graph.values.values()}
    assert all(device[value.storage] == value.device for value in graph.values.values())


@given(graphs_with_schedules())
def test_drawn_schedules_are_valid(drawn: tuple[Graph, Schedule]) -> None:
    schedule.verify(*drawn)


@given(st.data())
def test_drawn_graphs_stay_small(data: st.DataObject) -> None:
    graph = data.draw(joint_graphs(max_ops=3, max_bytes=5))
    assert len(graph.forward) <= 3
    assert 2 <= len(graph.backward) <= 4
    assert all(value.nbytes <= 5 for value in graph.values.values())
    drawn = data.draw(schedules(graph, max_again=2))
    assert len(drawn.backward) <= 3 * len(graph.backward)


@given(joint_graphs())
def test_the_callers_loss_turns_forward_outputs_into_tangents(graph: Graph) -> None:
    loss = graph.backward[0]
    assert loss.traits == {Trait.CALLER}
    assert graph.outputs[: len(loss.inputs)] == loss.inputs
    assert all(graph.producer[name].phase is Phase.FORWARD for name in loss.inputs)
    assert all(graph.values[name].kind is Kind.TANGENT for name in loss.outputs)


@given(joint_graphs())
def test_a_drawn_random_op_ends_with_its_generator_state(graph: Graph) -> None:
    for op in graph.ops:
        states = [name for name in op.outputs if graph.values[name].kind is Kind.RNG_STATE]
        assert states == ([f"{op.name}:rng"] if op.is_random else [])
        assert op.outputs[-1:] == tuple(states) or not states
        assert all(graph.values[name].nbytes == RNG_BYTES for name in states)


@given(joint_graphs())
def test_drawn_views_live_in_a_storage_that_they_read(graph: Graph) -> None:
    for op in graph.ops:
        read = {graph.values[name].storage for name in op.inputs}
        made = {graph.values[name].storage for name in op.outputs}
        assert made <= read if op.is_view else not made & read


@given(joint_graphs())
def test_a_gradient_has_its_storage_to_itself(graph: Graph) -> None:
    kinds: dict[str, set[Kind]] = {}
    for value in graph.values.values():
        kinds.setdefault(value.storage, set()).add(value.kind)
    assert all(len(found) == 1 for found in kinds.values() if Kind.GRADIENT in found)


@given(joint_graphs(views=False, multi_output=False, random=False, once=False))
def test_what_is_switched_off_is_not_drawn(graph: Graph) -> None:
    assert all(not op.traits for op in graph.ops if op.name != "loss")
    assert all(len(op.outputs) == 1 for op in graph.ops if op.name != "loss")


def _traits(graph: Graph) -> set[Trait]:
    return {trait for op in graph.ops for trait in op.traits}


ODDITIES = {
    "random": lambda graph, again: Trait.RANDOM in _traits(graph),
    "must_save": lambda graph, again: Trait.MUST_SAVE in _traits(graph),
    "opaque": lambda graph, again: Trait.OPAQUE in _traits(graph),
    "collective": lambda graph, again: Trait.COLLECTIVE in _traits(graph),
    "forward view": lambda graph, again: any(op.is_view for op in graph.forward),
    "backward view": lambda graph, again: any(op.is_view for op in graph.backward),
    "several outputs": lambda graph, again: any(
        len(op.outputs) > 1 and not op.is_random for op in graph.forward
    ),
    "gradient": lambda graph, again: any(
        value.kind is Kind.GRADIENT for value in graph.values.values()
    ),
    "no bytes": lambda graph, again: any(value.nbytes == 0 for value in graph.values.values()),
    "scratch": lambda graph, again: any(op.scratch_bytes for op in graph.ops),
    "a saved view": lambda graph, again: any(
        graph.producer[name].is_view for name in schedule.saved(graph, again)
    ),
    "recompute": lambda graph, again: bool(schedule.recomputed(graph, again)),
    "recompute twice": lambda graph, again: 2 in schedule.recomputed(graph, again).values(),
    "recomputed randomness": lambda graph, again: any(
        graph.op(name).is_random for name in schedule.recomputed(graph, again)
    ),
}


def test_every_oddity_is_drawn_within_a_few_hundred_graphs() -> None:
    """What is never drawn, no property test of the solvers and the timeline ever meets."""
    seen: set[str] = set()

    @settings(max_examples=300)
    @given(graphs_with_schedules())
    def look(drawn: tuple[Graph, Schedule]) -> None:
        seen.update(oddity for oddity, is_in in ODDITIES.items() if is_in(*drawn))

    look()
    assert set(ODDITIES) - seen == set()
