"""What a plan says of one tensor, or of a module."""

import pytest
import torch
from torch import nn

import fxrecals
from fxrecals import OptionError, Plan
from fxrecals.explanation import AGAIN, BACKWARD, FREED, HELD, INPUT, KEPT, Story
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value
from fxrecals.schedule import Schedule, recomputed
from fxrecals.timeline import lifetimes
from tests.cli_models import blocks


@pytest.fixture(scope="module")
def plan() -> Plan:
    return fxrecals.plan(*blocks(), "40%")


def story(plan: Plan, name: str) -> Story:
    (found,) = plan.explain(name).stories
    return found


def test_what_runs_again_is_made_again_and_lives_twice(plan: Plan) -> None:
    for name, times in recomputed(plan.graph, plan.schedule).items():
        for found in plan.explain(name).stories:
            if found.fate == AGAIN:
                assert len(found.lives) == 1 + times
                assert [life.begins for life in found.lives] == ["forward"] + ["again"] * times


def test_everything_saved_is_said_to_be_kept_or_held(plan: Plan) -> None:
    charged = [name for name in plan.saved if plan.graph.values[name].nbytes]
    fates = {story(plan, name).fate for name in charged if name.startswith(("add", "gelu"))}
    assert fates <= {KEPT, HELD}
    assert fates


def test_each_fate_is_told(plan: Plan) -> None:
    found = {each.fate for name in plan.graph.values for each in plan.explain(name).stories}
    assert found == {KEPT, HELD, AGAIN, FREED, BACKWARD, INPUT}


def test_every_name_of_a_plan_can_be_asked_for_and_prints_in_ascii(plan: Plan) -> None:
    modules = {op.where.module for op in plan.graph.forward if op.where.module}
    for name in [*plan.graph.values, *plan.graph.by_name, *modules]:
        assert repr(plan.explain(name)).isascii()


def test_names_of_results_are_those_of_the_report(plan: Plan) -> None:
    assert "native_layer_norm_3[0]" in repr(plan)
    assert story(plan, "native_layer_norm_3[0]").op == "native_layer_norm_3"


def test_a_module_has_the_tensors_of_those_in_it(plan: Plan) -> None:
    inner = {
        each.name for part in ("norm", "up", "drop") for each in plan.explain(f"1.{part}").stories
    }
    assert inner < {each.name for each in plan.explain("1").stories}


def test_what_it_takes_to_make_it_again_is_what_is_not_kept(plan: Plan) -> None:
    found = story(plan, "gelu_1")
    seconds = {op.name: op.seconds for op in plan.graph.ops}
    assert found.remake_seconds == sum(seconds[name] for name in found.remade_by)
    assert found.remade_by[-1] == "gelu_1"


def test_what_must_not_run_again_has_no_cost_of_it() -> None:
    values = {n: Value(n, 8, n) for n in "ab"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    once = frozenset({Trait.MUST_SAVE})
    ops = (
        Op("f", "aten.sin", ("x",), ("a",), Phase.FORWARD, traits=once),
        Op("g", "aten.cos", ("a",), ("b",), Phase.BACKWARD),
    )
    graph = Graph(ops, values, outputs=("b",))
    plan = Plan(graph, Schedule.keeping_everything(graph), None, floor_bytes=16)
    assert story(plan, "f").remake_seconds is None
    assert "it cannot be made again" in repr(plan.explain("f"))
    assert "MUST_SAVE" in repr(plan.explain("f"))


def test_a_step_of_several_graphs_is_asked_without_their_prefixes() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.up(x).tanh()
            torch._dynamo.graph_break()
            return self.down(x).tanh()

    plan = fxrecals.plan(Broken(), torch.randn(64, 8), "100%")
    assert [each.name for each in plan.explain("tanh").stories] == ["g0.tanh", "g1.tanh"]
    assert [each.name for each in plan.explain("g1.tanh").stories] == ["g1.tanh"]


def test_an_unknown_name_gets_those_that_are_near(plan: Plan) -> None:
    with pytest.raises(OptionError, match="'gelu_1'"):
        plan.explain("gelu_11")


def test_lifetimes_add_up_to_the_live_bytes_of_the_timeline(plan: Plan) -> None:
    born = [0] * len(plan.timeline.steps)
    for life in lifetimes(plan.graph, plan.schedule):
        value = next(v for v in plan.graph.values.values() if v.storage == life.storage)
        if value.kind.value not in ("primal", "gradient"):
            born[life.born] += value.nbytes
    assert born == [step.allocated_bytes for step in plan.timeline.steps]
