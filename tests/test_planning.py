"""From a graph and a limit to a plan: which peak a limit bounds, and what "auto" leaves free."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrecals import cost, planning
from fxrecals.errors import FxrecalsError, InfeasibleLimitError, OptionError
from fxrecals.ir import Graph, Kind, Op, Peak, Phase, Trait, Value, gradient_bytes, verify
from fxrecals.planning import checked_deadline, plan_graph
from fxrecals.plans import Plan
from fxrecals.units import parse_limit
from tests.chains import TWO, chain, side_by_side
from tests.strategies import joint_graphs


def layers(count: int, loss_scratch_bytes: int = 0) -> Graph:
    """Layers with a parameter each: activations of 8 bytes, gradients of 4."""
    values = {"x": Value("x", 0, "x", Kind.PRIMAL), "t": Value("t", 8, "t", Kind.TANGENT)}
    forward: list[Op] = []
    backward: list[Op] = []
    reads = ["x", *(f"a{i}" for i in range(count))]
    for i in range(count):
        values[f"a{i}"] = Value(f"a{i}", 8, f"a{i}")
        forward.append(Op(f"f{i}", "f", (reads[i],), (f"a{i}",), Phase.FORWARD, seconds=1.0))
    last, upstream = reads[-1], "t"
    for i in reversed(range(count)):
        weight, data = f"w{i}", f"d{i}"
        values[weight] = Value(weight, 4, weight, Kind.GRADIENT)
        values[data] = Value(data, 8, data, Kind.BACKWARD)
        backward.append(Op(f"bw{i}", "b", (reads[i], upstream), (weight,), Phase.BACKWARD, 1.0))
        backward.append(Op(f"bd{i}", "b", (reads[i], upstream), (data,), Phase.BACKWARD, 1.0))
        upstream = data
    loss = Op("loss", "caller", (last,), ("t",), Phase.BACKWARD, traits=frozenset({Trait.CALLER}))
    loss = replace(loss, scratch_bytes=loss_scratch_bytes)
    held = (last, "t", upstream, *(f"w{i}" for i in range(count)))
    graph = Graph((*forward, loss, *backward), values, held)
    verify(graph)
    return graph


@settings(max_examples=50)
@given(joint_graphs(max_ops=6))
def test_a_limit_on_the_step_bounds_activations_and_gradients_together(graph: Graph) -> None:
    plain = plan_graph(graph, parse_limit("100%"), peak=Peak.STEP)
    assert plain.limit_bytes == plain.baseline_step_peak_bytes
    assert plain.step_peak_bytes == plain.bounded.peak_bytes
    limit = max(1, plain.floor_bytes)
    lowest = plan_graph(graph, parse_limit(limit), peak=Peak.STEP)
    assert lowest.step_peak_bytes <= limit
    assert lowest.graph == graph
    assert lowest.peak is Peak.STEP


@settings(max_examples=20)
@given(joint_graphs(max_ops=6))
def test_the_curve_is_that_of_the_peak_asked_for(graph: Graph) -> None:
    for peak in Peak:
        plan = plan_graph(graph, None, peak=peak)
        assert plan.choices[0].peak_bytes == plan.bounded_baseline.peak_bytes
        assert plan.bounded.peak_bytes in {choice.peak_bytes for choice in plan.choices}


def test_a_limit_on_the_step_reaches_lower_than_any_on_activations() -> None:
    """The loss sets the floor of activations: under it, they fill the room that gradients need."""
    graph = layers(12, loss_scratch_bytes=48)
    top = plan_graph(graph, parse_limit("100%"))
    by_activations = [
        plan_graph(graph, parse_limit(limit)).step_peak_bytes
        for limit in range(top.floor_bytes, top.baseline_peak_bytes + 1, 4)
    ]
    by_step = plan_graph(graph, parse_limit("100%"), peak=Peak.STEP).floor_bytes
    assert by_step < min(by_activations)


def test_a_percentage_is_of_the_peak_that_is_bounded() -> None:
    graph = layers(12)
    baseline = plan_graph(graph, parse_limit("100%")).baseline
    assert baseline.step_peak_bytes > baseline.peak_bytes
    for peak, whole in zip(Peak, (baseline.peak_bytes, baseline.step_peak_bytes), strict=True):
        assert plan_graph(graph, parse_limit("90%"), peak=peak).limit_bytes == whole * 9 // 10


def test_a_limit_under_the_floor_of_the_step_says_so_and_names_one_that_works() -> None:
    graph = layers(4)
    with pytest.raises(
        InfeasibleLimitError, match=r"limit 5 B of the step peak is below"
    ) as caught:
        plan_graph(graph, parse_limit(5), peak=Peak.STEP)
    floor = caught.value.floor_bytes
    assert caught.value.peak == "step"
    assert caught.value.op in graph.by_name
    assert str(caught.value).endswith(f'(limit={floor}, peak="step")')
    assert plan_graph(graph, parse_limit(floor), peak=Peak.STEP).step_peak_bytes <= floor
    with pytest.raises(InfeasibleLimitError):
        plan_graph(graph, parse_limit(floor - 1), peak=Peak.STEP)


@pytest.mark.parametrize("limit", ["auto", {"cpu": "auto"}])
@pytest.mark.parametrize(("peak", "apart"), [(Peak.ACTIVATIONS, 3), (Peak.STEP, 2)])
def test_auto_sets_gradients_aside_where_the_limit_does_not_count_them(
    limit: str | dict[str, str], peak: Peak, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "free_bytes", lambda device: 1000)
    graph = layers(5)
    assert gradient_bytes(graph) == 20
    plan = plan_graph(graph, parse_limit(limit), peak=peak)
    assert plan.limit_bytes == 0.9 * (1000 - apart * 20)


@pytest.mark.parametrize("peak", ["steps", "", None, 1, ["step"]])
def test_a_peak_that_there_is_not_is_refused_with_those_that_there_are(peak: str) -> None:
    with pytest.raises(OptionError, match="what works: 'activations' or 'step'") as caught:
        planning.named_peak(peak)
    assert caught.value.argument == "peak"


def test_the_bound_is_below_the_plan_and_travels_with_it() -> None:
    plan = plan_graph(chain(12), parse_limit("50%"))
    assert 0.0 < plan.bound_seconds <= plan.extra_seconds
    assert Plan.from_json(plan.to_json()).bound_seconds == plan.bound_seconds
    assert "no schedule within the limit takes less" in repr(plan)


def test_the_optimum_is_its_own_bound() -> None:
    plan = plan_graph(chain(6), parse_limit("60%"), solver="exact")
    assert plan.bound_seconds == plan.extra_seconds


def test_every_device_has_its_own_limit() -> None:
    graph = side_by_side([chain(12), chain(12)], TWO)
    alone = plan_graph(chain(12), None).baseline_peak_bytes
    plan = plan_graph(graph, parse_limit({TWO[0]: alone, TWO[1]: alone // 2}))
    assert plan.device_limits == ((TWO[0], alone), (TWO[1], alone // 2))
    peaks = plan.timeline.device_peaks
    assert peaks[TWO[0]] <= alone
    assert peaks[TWO[1]] <= alone // 2
    assert f"on {TWO[1]}" in repr(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_device_that_has_no_room_is_named() -> None:
    graph = side_by_side([chain(12), chain(12)], TWO)
    with pytest.raises(InfeasibleLimitError) as caught:
        plan_graph(graph, parse_limit({TWO[0]: 1000, TWO[1]: 12}))
    assert caught.value.device == TWO[1]
    assert caught.value.limit_bytes == 12
    floor = caught.value.floor_bytes
    assert dict(caught.value.device_floors) == {TWO[0]: 1000, TWO[1]: floor}
    plan = plan_graph(graph, parse_limit({TWO[0]: 1000, TWO[1]: floor}))
    assert 0 < caught.value.lowest_bytes <= floor
    assert caught.value.lowest_bytes <= plan.lowest_bytes


def test_a_device_without_a_limit_is_an_error() -> None:
    graph = side_by_side([chain(3), chain(3)], TWO)
    with pytest.raises(OptionError, match="cuda:1"):
        plan_graph(graph, parse_limit({TWO[0]: 1000}))


@given(joint_graphs(), st.integers(1, 100), st.integers(1, 100))
def test_the_limits_that_an_error_names_work_together(
    graph: Graph, first: int, second: int
) -> None:
    two = side_by_side([graph, chain(4)], TWO)
    limits, message = {TWO[0]: first, TWO[1]: second}, ""
    try:
        plan_graph(two, parse_limit(limits))
    except InfeasibleLimitError as error:
        limits, message = dict(error.device_floors), str(error)
    assert not message or f"limit={limits}" in message
    for device, peak in plan_graph(two, parse_limit(limits)).bounded.device_peaks.items():
        assert peak <= limits[device]


def test_an_optimum_that_is_not_proved_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "NEAR", -1.0)  # as if the bound were far below
    plan = plan_graph(chain(6), parse_limit("60%"), solver="exact")
    assert plan.notes == (planning.UNPROVED,)


def test_an_optimum_that_is_proved_needs_no_note() -> None:
    plan = plan_graph(chain(6), parse_limit("60%"), solver="exact")
    assert plan.notes == ()
    assert plan.bound_seconds == plan.extra_seconds > 0


def test_more_bytes_than_can_be_counted_are_an_error() -> None:
    with pytest.raises(FxrecalsError, match=str(2**62)):
        plan_graph(chain(4, nbytes=2**60), parse_limit("100%"))


@pytest.mark.parametrize("deadline", [0, -1.0, "soon", True, inf, nan, 10**400])
def test_a_deadline_is_a_positive_number(deadline: Any) -> None:
    with pytest.raises(OptionError, match="deadline"):
        checked_deadline(deadline)
