from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value
from fxrecals.schedule import (
    Region,
    Schedule,
    extra_flops,
    extra_seconds,
    makes,
    reads,
    recomputed,
    regions,
    saved,
    verify,
)
from tests.strategies import graphs_with_schedules, joint_graphs


def _op(name: str, inputs: str, outputs: str, phase: Phase, *traits: Trait) -> Op:
    return Op(
        name,
        "compute",
        tuple(inputs.split()),
        tuple(outputs.split()),
        phase,
        seconds=1.5,
        flops=7,
        traits=frozenset(traits),
    )


def _graph() -> Graph:
    """x -> sin -> dropout -> transpose -> cos; the backward reads all but the first in reverse."""
    ops = (
        _op("sin", "x", "sin", Phase.FORWARD),
        _op("drop", "sin", "drop drop:rng", Phase.FORWARD, Trait.RANDOM),
        _op("t", "drop", "t", Phase.FORWARD, Trait.VIEW),
        _op("cos", "t", "cos", Phase.FORWARD, Trait.MUST_SAVE),
        _op("loss", "cos", "tangent", Phase.BACKWARD, Trait.CALLER),
        _op("cos_b", "tangent t", "cos_b", Phase.BACKWARD),
        _op("drop_b", "cos_b drop", "drop_b", Phase.BACKWARD),
    )
    values = {n: Value(n, 8, n) for n in ("sin", "drop", "cos")}
    values |= {
        "x": Value("x", 8, "x", Kind.PRIMAL),
        "drop:rng": Value("drop:rng", 3, "drop:rng", Kind.RNG_STATE),
        "t": Value("t", 8, "drop"),
        "tangent": Value("tangent", 8, "tangent", Kind.TANGENT),
        "cos_b": Value("cos_b", 8, "cos_b", Kind.BACKWARD),
        "drop_b": Value("drop_b", 8, "drop_b", Kind.GRADIENT),
    }
    return Graph(ops, values, ("cos", "tangent", "drop_b"))


FORWARD = ("sin", "drop", "t", "cos")


def _schedule(backward: str) -> Schedule:
    return Schedule(FORWARD, tuple(backward.split()))


KEEP = _schedule("loss cos_b drop_b")
TWICE = _schedule("loss sin drop t cos_b drop drop_b")


def test_the_schedule_without_recompute_runs_each_op_once() -> None:
    assert Schedule.keeping_everything(_graph()) == KEEP
    assert KEEP.runs == (*FORWARD, "loss", "cos_b", "drop_b")
    verify(_graph(), KEEP)
    assert not recomputed(_graph(), KEEP)
    assert extra_seconds(_graph(), KEEP) == 0
    assert extra_flops(_graph(), KEEP) == 0
    assert regions(_graph(), KEEP) == ()


def test_what_the_backward_reads_before_it_is_made_again_is_saved() -> None:
    assert saved(_graph(), KEEP) == ("drop", "cos", "t")
    assert saved(_graph(), _schedule("loss drop t cos_b drop_b")) == ("sin", "cos", "drop:rng")
    assert saved(_graph(), _schedule("loss cos_b drop drop_b")) == ("sin", "cos", "drop:rng", "t")


def test_inputs_of_the_step_are_never_saved() -> None:
    assert "x" not in saved(_graph(), TWICE)


def test_a_random_op_reads_its_generator_state_only_when_it_runs_again() -> None:
    drop = _graph().op("drop")
    assert reads(drop, again=False) == ("sin",)
    assert reads(drop, again=True) == ("sin", "drop:rng")
    assert makes(drop, again=False) == ("drop", "drop:rng")
    assert makes(drop, again=True) == ("drop",)


def test_other_ops_read_and_make_the_same_each_time() -> None:
    sin = _graph().op("sin")
    assert reads(sin, again=True) == reads(sin, again=False) == ("x",)
    assert makes(sin, again=True) == makes(sin, again=False) == ("sin",)


def test_recomputed_ops_are_counted_without_views() -> None:
    assert dict(recomputed(_graph(), TWICE)) == {"sin": 1, "drop": 2}
    assert extra_flops(_graph(), TWICE) == 4 * 7
    assert extra_seconds(_graph(), TWICE) == 4 * 1.5


def test_a_region_is_a_run_of_recompute_before_one_backward_op() -> None:
    assert regions(_graph(), TWICE) == (
        Region(("sin", "drop"), before="cos_b"),
        Region(("drop",), before="drop_b"),
    )
    assert regions(_graph(), _schedule("loss t cos_b drop_b")) == ()


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (Schedule(("sin",), KEEP.backward), "the forward part is not the graph's forward"),
        (Schedule(FORWARD[::-1], KEEP.backward), "the forward part is not the graph's forward"),
        (_schedule("loss nothing cos_b drop_b"), "unknown ops ['nothing']"),
        (
            _schedule("loss drop_b cos_b"),
            "the backward part does not run each backward op once, in order",
        ),
        (
            _schedule("loss cos_b cos_b drop_b"),
            "the backward part does not run each backward op once, in order",
        ),
        (_schedule("loss cos cos_b drop_b"), "op 'cos' may not run again"),
        (_schedule("loss cos_b drop_b sin"), "recompute after the last backward op"),
        (_schedule("loss cos_b drop_b t"), "recompute after the last backward op"),
    ],
)
def test_a_broken_schedule_is_refused_with_the_reason(schedule: Schedule, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^not a valid schedule:\n- ") as caught:
        verify(_graph(), schedule)
    assert f"- {reason}" in str(caught.value).splitlines()


@given(joint_graphs())
def test_keeping_everything_is_a_schedule_of_every_graph(graph: Graph) -> None:
    keep = Schedule.keeping_everything(graph)
    verify(graph, keep)
    assert not recomputed(graph, keep)


def _saved_by_definition(graph: Graph, schedule: Schedule) -> set[str]:
    """Follows each read of the backward part back to the newest run that made what it reads."""
    made_in_backward: dict[str, bool] = {}
    for part, names in ((False, schedule.forward), (True, schedule.backward)):
        for name in names:
            op = graph.op(name)
            again = part and op.phase is Phase.FORWARD
            for value in reads(op, again) if part else ():
                if not made_in_backward.get(value, True):
                    made_in_backward[f"saved {value}"] = True
            made_in_backward.update(dict.fromkeys(makes(op, again), part))
    return {key.removeprefix("saved ") for key in made_in_backward if key.startswith("saved ")}


@given(graphs_with_schedules())
def test_saved_values_are_those_read_across_the_loss(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    found = saved(graph, schedule)
    assert set(found) == _saved_by_definition(graph, schedule)
    order = list(graph.values)
    assert list(found) == sorted(found, key=order.index)


@given(graphs_with_schedules())
def test_regions_counts_and_costs_agree(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    counts = Counter(name for region in regions(graph, schedule) for name in region.ops)
    assert counts == Counter(recomputed(graph, schedule))
    seconds = sum(graph.op(name).seconds * times for name, times in counts.items())
    assert extra_seconds(graph, schedule) == seconds
    assert extra_flops(graph, schedule) == sum(
        graph.op(name).flops * times for name, times in counts.items()
    )


@given(graphs_with_schedules())
def test_generator_states_are_saved_of_the_ops_that_run_again(
    drawn: tuple[Graph, Schedule],
) -> None:
    graph, schedule = drawn
    again = recomputed(graph, schedule)
    states = [name for name in saved(graph, schedule) if graph.values[name].kind is Kind.RNG_STATE]
    assert states == [f"{op.name}:rng" for op in graph.forward if op.is_random and op.name in again]


@given(graphs_with_schedules())
def test_dropping_one_backward_op_breaks_a_schedule(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    with pytest.raises(ValueError, match="each backward op once"):
        verify(graph, replace(schedule, backward=schedule.backward[1:]))
