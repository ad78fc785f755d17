"""What a plan says when it is printed."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from fxrecals import report, schedule
from fxrecals.formats import format_bytes
from fxrecals.ir import Graph, Kind, Op, Peak, Phase, Trait, Value, Where, is_charged
from fxrecals.plans import Choice, Plan
from fxrecals.schedule import Schedule
from tests.strategies import graphs_with_schedules

MB = 10**6


def blocks(count: int, traits: frozenset[Trait] = frozenset()) -> Graph:
    """Blocks of a linear and an activation, `layers.<i>.up` and `layers.<i>.act`, and a backward
    that reads both results of each."""
    values = {"x": Value("x", MB, "x", Kind.PRIMAL)}
    forward: list[Op] = []
    backward: list[Op] = []
    held = "x"
    for i in range(count):
        up, act = f"up_{i}", f"act_{i}"
        for name in (up, act):
            values[name] = Value(name, MB, name)
        for name, source, kind in ((up, held, "up"), (act, up, "act")):
            target = f"torch.ops.aten.{'addmm' if kind == 'up' else 'gelu'}.default"
            where = Where(f"layers.{i}.{kind}", f"net.py:{10 + i}")
            seconds, flops = (2e-3, 1000) if kind == "up" else (1e-3, 0)
            op = Op(name, target, (source,), (name,), Phase.FORWARD, seconds, flops)
            forward.append(replace(op, traits=traits, where=where))
        held = act
    for i in reversed(range(count)):
        name = f"back_{i}"
        values[name] = Value(name, 8, name, Kind.GRADIENT)
        reads = (f"up_{i}", f"act_{i}")
        backward.append(Op(name, "mul", reads, (name,), Phase.BACKWARD, seconds=3e-3))
    grads = tuple(op.name for op in backward)
    return Graph((*forward, *backward), values, (held, *grads))


def plan_of(graph: Graph, again: Sequence[str] = (), limit: int | None = 100 * MB) -> Plan:
    """A plan in which each op of `again` runs again just before the backward of its block."""
    backward: list[str] = []
    for op in graph.backward:
        backward += [name for name in again if name.split("_")[1] == op.name.split("_")[1]]
        backward.append(op.name)
    made = Schedule(tuple(op.name for op in graph.forward), tuple(backward))
    schedule.verify(graph, made)
    return Plan(graph, made, limit, floor_bytes=3 * MB)


def verdict(plan: Plan) -> str:
    return repr(plan).splitlines()[0]


def row(plan: Plan, start: str) -> str:
    return next(line for line in repr(plan).splitlines() if line.startswith(start))


# --- the verdict --------------------------------------------------------------------------------


def test_verdict_says_limit_peak_price_and_floor() -> None:
    plan = plan_of(blocks(3), ["up_0", "act_0", "up_1"])
    assert verdict(plan) == (
        "fits 100 MB: peak 4.00 MB instead of 6.00 MB, +27.8 % time "
        "(3 ops run again in 2 regions), floor 3.00 MB"
    )


def test_verdict_of_a_plan_without_recompute_says_so() -> None:
    assert verdict(plan_of(blocks(2))) == (
        "fits 100 MB as it is: peak 4.00 MB, nothing runs again, floor 3.00 MB"
    )


def test_verdict_of_a_plan_over_its_limit_does_not_claim_to_fit() -> None:
    assert verdict(plan_of(blocks(2), ["up_0"], limit=MB)).startswith("does not fit 1.00 MB: peak")


def test_verdict_without_a_limit_names_the_knee() -> None:
    plan = replace(plan_of(blocks(2), ["up_0"], limit=None), choices=(Choice(4 * MB, 4 * MB, 0.0),))
    assert verdict(plan).startswith("no limit given: peak 4.00 MB; the knee is at")


def test_verdict_says_how_often_an_op_runs() -> None:
    graph = blocks(2)
    backward = ("up_0", "back_1", "up_0", "back_0")
    plan = Plan(graph, Schedule(tuple(op.name for op in graph.forward), backward), MB, MB)
    assert "(1 op runs again up to 2 times in 2 regions)" in verdict(plan)


def test_verdict_of_a_graph_without_times_gives_seconds_and_no_percent() -> None:
    graph = blocks(1)
    free = replace(graph, ops=tuple(replace(op, seconds=0.0) for op in graph.ops))
    assert "%" not in verdict(plan_of(free, ["up_0"]))


# --- what runs again ----------------------------------------------------------------------------


def test_regions_that_look_the_same_are_one_row() -> None:
    # Two of the activations are kept all the same: the next block starts from them.
    plan = plan_of(blocks(6), [f"{kind}_{i}" for i in (0, 1, 2, 4) for kind in ("up", "act")])
    found = row(plan, "layers.[0-2,4]").split()
    assert found == ["layers.[0-2,4]", "addmm", "gelu", "4", "8", "1", "6.00", "MB", "4.00", "k",
                     "12.0", "ms"]  # fmt: skip


def test_regions_that_do_other_things_are_rows_of_their_own() -> None:
    plan = plan_of(blocks(3), ["up_0", "act_0", "up_1"])
    assert "addmm gelu" in row(plan, "layers.0 ")
    assert "gelu" not in row(plan, "layers.1.up")


def test_what_frees_the_most_comes_first_and_the_sum_last() -> None:
    plan = plan_of(blocks(4), ["up_0", "act_0", "up_1", "up_2", "up_3"])
    lines = [line for line in repr(plan).splitlines() if line.startswith(("layers", "all"))]
    assert [line.split()[0] for line in lines[:3]] == ["layers.[1-3].up", "layers.0", "all"]
    assert "4.00 MB" in lines[2], "the last activation of block 0 is kept to start from"


def test_a_storage_that_is_kept_is_not_freed_by_running_its_op_again() -> None:
    plan = plan_of(blocks(2), ["act_1"])  # the caller holds it
    assert " 0 B " in row(plan, "layers.1.act")


def test_rows_past_the_twelfth_are_summed() -> None:
    graph = blocks(20)
    ops = tuple(
        replace(op, where=Where(f"part{'abcdefghijklmnopqrst'[int(op.name.split('_')[1])]}"))
        for op in graph.ops
    )
    plan = plan_of(replace(graph, ops=ops), [f"up_{i}" for i in range(20)])
    assert row(plan, "and 8 more").split()[3:] == "8 8 1 8.00 MB 8.00 k 16.0 ms".split()


def test_regions_across_numbered_neighbours_name_them_all() -> None:
    graph = blocks(2)
    backward = ("up_0", "act_0", "up_1", "back_1", "back_0")
    plan = Plan(graph, Schedule(tuple(op.name for op in graph.forward), backward), MB, MB)
    assert row(plan, "layers.[0-1]")


# --- what is kept -------------------------------------------------------------------------------


def test_a_tensor_kept_for_its_time_says_what_it_saves() -> None:
    plan = plan_of(blocks(3))
    assert row(plan, "up_0 +2").endswith("it saves 6.00 ms")


def test_time_saved_is_that_from_what_else_is_kept() -> None:
    values = {n: Value(n, MB, n) for n in "abc"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    ops = (
        Op("f", "sin", ("x",), ("a",), Phase.FORWARD, seconds=1e-3),
        Op("g", "cos", ("a",), ("b",), Phase.FORWARD, seconds=1e-3),
        Op("h", "mul", ("b",), ("c",), Phase.BACKWARD),
    )
    plan = plan_of(Graph(ops, values, ("c",)))
    assert row(plan, "g ").endswith("it saves 2.00 ms"), "its input is not kept"


def test_what_the_caller_holds_is_kept_for_that() -> None:
    assert row(plan_of(blocks(2)), "act_1").endswith("the caller holds it")


def test_what_a_region_starts_from_is_kept_for_that() -> None:
    plan = plan_of(blocks(3), ["up_1"])
    assert row(plan, "act_0").endswith("a region starts from it")


@pytest.mark.parametrize("trait", sorted(report.WHY_ONCE))
def test_an_op_that_may_not_run_again_says_why(trait: Trait) -> None:
    words = " ".join(repr(plan_of(blocks(2, frozenset({trait})))).split())
    assert "runs once:" in words
    assert report.WHY_ONCE[trait].split()[0] in words


def test_a_generator_state_is_kept_for_the_op_it_replays() -> None:
    values = {n: Value(n, MB, n) for n in "ab"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    values["drop:rng"] = Value("drop:rng", 5056, "drop:rng", Kind.RNG_STATE)
    drop = Op("drop", "torch.ops.aten.native_dropout.default", ("x",), ("a", "drop:rng"),
              Phase.FORWARD, traits=frozenset({Trait.RANDOM}))  # fmt: skip
    back = Op("back", "mul", ("a",), ("b",), Phase.BACKWARD)
    plan = Plan(Graph((drop, back), values, ("b",)), Schedule(("drop",), ("drop", "back")), MB, 0)
    assert row(plan, "drop:rng").endswith("replays dropout")


def test_the_result_of_an_op_with_several_is_numbered() -> None:
    values = {n: Value(n, MB, n) for n in ("a", "b", "c")}
    ops = (
        Op("both", "split", (), ("a", "b"), Phase.FORWARD),
        Op("back", "mul", ("b",), ("c",), Phase.BACKWARD),
    )
    assert row(plan_of(Graph(ops, values, ("c",))), "both[1]")


# --- peaks, curve, picture, notes ---------------------------------------------------------------


def test_peaks_are_given_without_and_with_the_plan() -> None:
    plan = plan_of(blocks(4), ["up_0", "up_1"])
    expected = f"{format_bytes(plan.baseline_peak_bytes)} {format_bytes(plan.peak_bytes)}"
    assert expected in " ".join(row(plan, "peak of activations").split())
    assert plan.timeline.peak_at in row(plan, "peak of activations")
    assert format_bytes(plan.floor_bytes) in row(plan, "floor")


def test_devices_have_a_row_each_where_there_are_several() -> None:
    graph = blocks(2)
    values = {**graph.values, "up_0": replace(graph.values["up_0"], device="cuda:0")}
    plan = plan_of(replace(graph, values=values))
    assert "3.00 MB" in row(plan, "on cpu")
    assert "1.00 MB" in row(plan, "on cuda:0")
    assert not any(line.startswith("on cpu") for line in repr(plan_of(graph)).splitlines())


def test_the_curve_marks_the_plan_that_is_shown() -> None:
    plan = plan_of(blocks(3), ["up_0"], limit=None)
    choices = (Choice(99 * MB, 99 * MB, 0.0), Choice(plan.peak_bytes, plan.peak_bytes, 2e-3))
    found = repr(replace(plan, choices=choices))
    (marked,) = [line for line in found.splitlines() if "<- this plan" in line]
    assert f"+{100 * 2e-3 / plan.baseline_seconds:.1f} %" in marked


def test_the_picture_has_the_planned_and_the_other_profile() -> None:
    again = [f"{kind}_{i}" for i in range(5) for kind in ("up", "act")]
    plan = plan_of(blocks(6), again, limit=None)
    found = repr(replace(plan, choices=(Choice(MB, MB, 0.0),)))
    picture = [line for line in found.splitlines() if re.match(r".{8} \|", line)]
    assert len(picture) == report.PICTURE[1]
    assert any("#" in line and ":" in line for line in picture)
    assert all(len(line) <= 10 + report.PICTURE[0] for line in picture)


def heavy(plan: Plan, nbytes: int = 3 * MB) -> Plan:
    """A plan whose parameters' gradients weigh so much, with a limit on the step."""
    values = {
        name: replace(value, nbytes=nbytes) if value.kind is Kind.GRADIENT else value
        for name, value in plan.graph.values.items()
    }
    return replace(plan, graph=replace(plan.graph, values=values), peak=Peak.STEP)


def test_a_limit_on_the_step_is_spoken_of_as_one() -> None:
    plan = heavy(plan_of(blocks(3), ["up_0", "act_0", "up_1"], limit=12 * MB))
    assert plan.peak_bytes < plan.step_peak_bytes
    peaks = format_bytes(plan.step_peak_bytes), format_bytes(plan.baseline_step_peak_bytes)
    assert verdict(plan).startswith("fits 12.0 MB: step peak {} instead of {},".format(*peaks))
    assert plan.bounded.peak_at in row(plan, "peak with gradients")
    assert row(plan, "peak of activations").endswith("MB")
    over = replace(plan, limit_bytes=plan.peak_bytes)
    assert verdict(over).startswith("does not fit")


def test_verdict_of_a_plan_for_the_step_without_recompute_or_limit() -> None:
    kept = heavy(plan_of(blocks(2)))
    assert verdict(kept).startswith("fits 100 MB as it is: step peak 9.00 MB, nothing")
    knee = replace(kept, limit_bytes=None, choices=(Choice(9 * MB, 9 * MB, 0.0),))
    assert verdict(knee).startswith("no limit given: step peak 9.00 MB; the knee is at 9.00 MB")


def test_the_curve_of_the_step_gives_its_shares_and_marks_the_plan() -> None:
    plan = heavy(plan_of(blocks(3), ["up_0"], limit=None))
    whole, own = plan.baseline_step_peak_bytes, plan.step_peak_bytes
    choices = (Choice(whole // 2, whole // 2, 5e-3), Choice(own, own, 2e-3))
    found = repr(replace(plan, choices=choices)).splitlines()
    (marked,) = [line for line in found if "<- this plan" in line]
    assert marked.split()[0] == format_bytes(own).split()[0]
    assert any("of the step peak" in line for line in found)
    assert any("50.0 %" in line for line in found)
    assert any("bytes with gradients, op by op" in line for line in found)


def test_devices_are_told_apart_of_the_peak_that_is_bounded() -> None:
    plan = heavy(plan_of(blocks(2)))
    values = {**plan.graph.values, "up_0": replace(plan.graph.values["up_0"], device="cuda:0")}
    lines = repr(replace(plan, graph=replace(plan.graph, values=values))).splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("peak with gradients")]
    assert lines[at + 1].split()[:3] == ["on", "cpu", "8.00"]


def test_curve_and_picture_are_left_out_under_a_limit() -> None:
    assert "<- this plan" not in repr(plan_of(blocks(2)))
    assert "+----" not in repr(plan_of(blocks(2)))


def test_notes_come_last() -> None:
    plan = replace(plan_of(blocks(1)), notes=("the model is two graphs", "word " * 60))
    assert "note: the model is two graphs\n" in repr(plan)
    assert repr(plan).splitlines()[-1].startswith("      word")


# --- the text as such ---------------------------------------------------------------------------


@given(graphs_with_schedules())
def test_any_plan_prints_in_ascii_and_the_same_each_time(drawn: tuple[Graph, Schedule]) -> None:
    plan = Plan(*drawn, limit_bytes=None, floor_bytes=0, choices=(Choice(9, 9, 0.0),))
    found = repr(plan)
    assert found.isascii()
    assert found == repr(Plan(*drawn, limit_bytes=None, floor_bytes=0, choices=plan.choices))
    assert max(map(len, found.splitlines())) <= 110
    assert report.timeline_text(plan).isascii()


@given(graphs_with_schedules())
def test_kept_bytes_add_up_to_what_the_timeline_saves(drawn: tuple[Graph, Schedule]) -> None:
    plan = Plan(*drawn, limit_bytes=0, floor_bytes=0)
    rows = report.grouped_saved(plan)
    assert sum(group.nbytes for group in rows) == plan.saved_bytes


@given(graphs_with_schedules())
def test_freed_bytes_add_up_to_what_is_saved_less(drawn: tuple[Graph, Schedule]) -> None:
    graph, made = drawn
    plan = Plan(graph, made, limit_bytes=0, floor_bytes=0)
    states = sum(
        graph.values[name].nbytes
        for name in plan.saved
        if graph.values[name].kind is Kind.RNG_STATE
    )
    freed = sum(group.nbytes for group in report.grouped_regions(plan))
    kept_anew = _bytes(graph, report.kept_between(graph, made)) - plan.saved_bytes
    assert kept_anew == 0
    before = _bytes(graph, report.kept_between(graph, Schedule.keeping_everything(graph)))
    started = _only_planned(plan)
    assert freed == before - plan.saved_bytes + states + started


def _bytes(graph: Graph, storages: dict[str, list[Value]]) -> int:
    return sum(values[0].nbytes for values in storages.values() if is_charged(values[0]))


def _only_planned(plan: Plan) -> int:
    """Bytes that are kept for regions to start from, and were not kept without them."""
    before = report.kept_between(plan.graph, Schedule.keeping_everything(plan.graph))
    after = report.kept_between(plan.graph, plan.schedule)
    return sum(
        values[0].nbytes
        for storage, values in after.items()
        if storage not in before and values[0].kind is not Kind.RNG_STATE
    )


def test_names_that_are_not_ascii_are_escaped() -> None:
    graph = blocks(1)
    ops = tuple(replace(op, where=Where("schicht.\u00e4")) for op in graph.ops)
    plan = plan_of(replace(graph, ops=ops))
    assert r"schicht.\xe4" in repr(plan)
    assert report.timeline_text(plan).isascii()


# --- the timeline -------------------------------------------------------------------------------


def test_timeline_has_a_line_for_each_run_and_tells_first_from_later_ones() -> None:
    plan = plan_of(blocks(2), ["up_0"])
    _, header, *lines = report.timeline_text(plan).splitlines()
    assert len(lines) == len(plan.schedule.runs)
    assert header.split() == "run op module half live allocated freed".split()
    halves = [re.split(r"\s{2,}", line.strip())[-4] for line in lines]
    assert halves == ["forward"] * 4 + ["backward", "again", "backward"]


def test_timeline_numbers_are_bytes_under_their_headers() -> None:
    plan = plan_of(blocks(2), ["up_0"])
    first, header, *lines = report.timeline_text(plan).splitlines()
    end = header.index("live") + len("live")
    live = [int(line[:end].split()[-1]) for line in lines]
    assert live == [step.live_bytes for step in plan.timeline.steps]
    assert f"peak at run {plan.timeline.peak_index}" in first


def test_a_timeline_of_the_step_counts_gradients_among_the_live_bytes() -> None:
    plan = heavy(plan_of(blocks(2), ["up_0"]))
    first, _, *lines = report.timeline_text(plan).splitlines()
    assert "and gradients" in first
    live = [int(re.split(r"\s{2,}", line.strip())[-3]) for line in lines]
    assert max(live) == plan.step_peak_bytes
    assert f"peak at run {live.index(max(live))}" in first
