"""A plan is a value: what it says follows from its graph and schedule, and it travels as JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from fxrecals import schedule as schedules
from fxrecals.errors import FxrecalsError
from fxrecals.ir import Graph, Kind, Op, Peak, Phase, Trait, Value, Where
from fxrecals.plans import VERSION, Choice, Plan
from fxrecals.schedule import Schedule
from fxrecals.timeline import simulate
from tests.strategies import graphs_with_schedules


def _graph(prefix: str = "", caller: bool = True) -> Graph:
    """x -> f -> g, a caller's loss, and h, which reads both."""

    def named(*names: str) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    where = Where("layers.0", "net.py:3")
    ops = [
        Op(prefix + "f", "sin", named("x"), named("a"), Phase.FORWARD, 2.0, 6, where=where),
        Op(prefix + "g", "cos", named("a"), named("b"), Phase.FORWARD, 1.0),
    ]
    if caller:
        loss = frozenset({Trait.CALLER})
        ops.append(Op("loss", "caller", named("b"), named("t"), Phase.BACKWARD, traits=loss))
    ops.append(Op(prefix + "h", "mul", named("t", "a", "b"), named("c"), Phase.BACKWARD, 3.0))
    kinds = {"x": Kind.PRIMAL, "t": Kind.TANGENT, "c": Kind.GRADIENT}
    values = {
        prefix + n: Value(prefix + n, 8, prefix + n, kinds.get(n, Kind.ACTIVATION)) for n in "xabtc"
    }
    return Graph(tuple(ops), values, named("b", "t", "c"))


def _plan(graph: Graph, again: tuple[str, ...] = ("f",)) -> Plan:
    keep = Schedule.keeping_everything(graph)
    backward = (*keep.backward[:-1], *again, keep.backward[-1])
    return Plan(graph, Schedule(keep.forward, backward), limit_bytes=100, floor_bytes=24)


def test_figures_follow_from_graph_and_schedule() -> None:
    plan = _plan(_graph())
    assert plan.peak_bytes == simulate(plan.graph, plan.schedule).peak_bytes == 24
    assert plan.baseline_peak_bytes == 24
    assert plan.step_peak_bytes == 32
    assert plan.saved_bytes == 8
    assert plan.baseline.saved_bytes == 16
    assert (plan.baseline_seconds, plan.extra_seconds, plan.extra_flops) == (6.0, 2.0, 6)
    assert plan.saved == ("b",)
    assert [region.ops for region in plan.regions] == [("f",)]


@given(graphs_with_schedules())
def test_what_a_limit_on_the_step_bounds_is_activations_and_gradients(
    drawn: tuple[Graph, Schedule],
) -> None:
    plan = Plan(*drawn, limit_bytes=7, floor_bytes=5, peak=Peak.STEP)
    live = [step.live_bytes + step.gradient_bytes for step in plan.timeline.steps]
    assert [step.live_bytes for step in plan.bounded.steps] == live
    assert plan.bounded.peak_bytes == plan.step_peak_bytes
    assert plan.bounded_baseline.peak_bytes == plan.baseline_step_peak_bytes
    other = replace(plan, peak=Peak.ACTIVATIONS)
    assert (other.bounded, other.bounded_baseline) == (plan.timeline, plan.baseline)


@given(graphs_with_schedules())
def test_json_gives_back_the_plan_and_itself(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    plan = Plan(graph, schedule, 7, 5, (Choice(7, 6, 0.1),), "greedy", ("it breaks",))
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert again.peak_bytes == plan.peak_bytes
    assert repr(again) == repr(plan)


def test_json_keeps_a_plan_without_a_limit() -> None:
    plan = replace(_plan(_graph()), limit_bytes=None)
    assert Plan.from_json(plan.to_json()).limit_bytes is None


def test_json_keeps_which_peak_is_bounded_and_takes_activations_for_none() -> None:
    plan = replace(_plan(_graph()), peak=Peak.STEP)
    data = json.loads(plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan
    del data["peak"]
    assert Plan.from_json(json.dumps(data)) == _plan(_graph())
    with pytest.raises(FxrecalsError, match="not a plan"):
        Plan.from_json(json.dumps({**data, "peak": "highest"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "3", "not json"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(FxrecalsError, match="not a plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("key", ["graph", "schedule", "limit_bytes", "choices"])
def test_a_plan_with_a_part_missing_is_refused(key: str) -> None:
    data = json.loads(_plan(_graph()).to_json())
    del data[key]
    with pytest.raises(FxrecalsError, match="not a plan"):
        Plan.from_json(json.dumps(data))


def test_a_plan_with_a_part_of_another_shape_is_refused() -> None:
    data = json.loads(_plan(_graph()).to_json())
    with pytest.raises(FxrecalsError, match="not a plan"):
        Plan.from_json(json.dumps({**data, "graph": {"ops": [{"name": 3}]}}))


def test_a_later_layout_is_refused_by_number() -> None:
    data = json.loads(_plan(_graph()).to_json())
    with pytest.raises(FxrecalsError, match=f"layout {VERSION + 1}; .* layout {VERSION}"):
        Plan.from_json(json.dumps({**data, "version": VERSION + 1}))


def test_the_only_part_of_a_step_of_one_graph_is_all_of_it() -> None:
    plan = _plan(_graph())
    assert plan.part("", plan.graph) == plan.schedule


def test_a_part_is_a_schedule_of_the_graph_by_itself() -> None:
    step = _graph("g0.")
    plan = _plan(step, again=("g0.f",))
    alone = _graph()
    part = plan.part("g0.", alone)
    assert part == Schedule(("f", "g"), ("loss", "f", "h"))
    assert part is not None
    schedules.verify(alone, part)


def test_a_graph_that_is_not_of_the_step_has_no_part() -> None:
    plan = _plan(_graph("g0."), again=("g0.f",))
    assert plan.part("g1.", _graph()) is None
    assert plan.part("g0.", replace(_graph(), ops=_graph().ops[1:])) is None


def test_a_graph_of_other_sizes_is_not_of_the_step() -> None:
    plan, other = _plan(_graph()), _graph()
    values = {name: replace(value, nbytes=9) for name, value in other.values.items()}
    assert plan.part("", other) is not None
    assert plan.part("", replace(other, values=values)) is None


def test_export_writes_what_the_plan_says_and_makes_the_folder(tmp_path: Path) -> None:
    plan = _plan(_graph())
    folder = plan.export(tmp_path / "a" / "b")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["memory.csv", "plan.json", "plan.txt", "report.html", "timeline.txt"]
    assert Plan.from_json((folder / "plan.json").read_text()) == plan
    assert (folder / "plan.txt").read_text() == f"{plan!r}\n"
    assert (folder / "report.html").read_text(encoding="utf-8") == plan.to_html()


def test_the_exporter_is_called_with_the_folder_and_is_no_part_of_the_value(tmp_path: Path) -> None:
    called: list[Path] = []

    def exporter(plan: Plan, folder: Path) -> None:
        assert folder.is_dir()
        called.append(folder)

    plan = replace(_plan(_graph()), exporter=exporter)
    plan.export(tmp_path / "out")
    assert called == [tmp_path / "out"]
    assert plan == _plan(_graph())


def test_exporting_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    plan = _plan(_graph())
    first, second = plan.export(tmp_path / "1"), plan.export(tmp_path / "2")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
