"""What the pictures show is what the timeline says, thinned without losing a peak."""

import csv
import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxrecals.charts import (
    Box,
    Fate,
    bars,
    is_timed,
    memory_csv,
    moments,
    saved_tiles,
    squarify,
    thinned,
)
from fxrecals.ir import Graph, Peak, Phase
from fxrecals.plans import Plan
from fxrecals.report import first_readers, made_storages
from fxrecals.schedule import Schedule, regions
from tests.strategies import graphs_with_schedules

Drawn = tuple[Graph, Schedule]
PEAKS = st.sampled_from(Peak)


def plan_of(drawn: Drawn, peak: Peak = Peak.ACTIVATIONS) -> Plan:
    return Plan(*drawn, limit_bytes=None, floor_bytes=0, peak=peak)


@given(graphs_with_schedules(), PEAKS)
def test_moments_have_the_bytes_of_the_timeline_and_follow_each_other(
    drawn: Drawn, peak: Peak
) -> None:
    runs = moments(*drawn)
    steps = plan_of(drawn, peak).bounded.steps
    assert [m.total(peak) for m in runs] == [step.live_bytes for step in steps]
    assert all(one.until == next_one.since for one, next_one in pairwise(runs))


@given(graphs_with_schedules(), PEAKS, st.integers(1, 40), st.sampled_from([1.0, 1.5]))
def test_thinning_keeps_the_peak_and_shows_each_run_where_it_is(
    drawn: Drawn, peak: Peak, spans: int, stretch: float
) -> None:
    runs = moments(*drawn)
    end = stretch * runs[-1].until
    shown = thinned(runs, end, spans, peak)
    assert len(shown) == spans
    assert max(m.total(peak) for m in shown if m) == max(m.total(peak) for m in runs)
    width = end / spans
    for i, m in enumerate(shown):
        if m is not None:
            assert m.since <= (i + 1) * width + 1e-9
            assert m.until >= i * width - 1e-9


@given(graphs_with_schedules(), st.sampled_from([0.0, 1.0, 3.0]))
def test_every_region_has_its_place_on_a_bar(drawn: Drawn, gap: float) -> None:
    graph, schedule = drawn
    found = bars(regions(graph, schedule), moments(graph, schedule), gap)
    assert tuple(r for bar in found for r in bar.regions) == regions(graph, schedule)
    assert all(bar.since <= bar.until for bar in found)
    assert all(one.until <= next_one.since for one, next_one in pairwise(found))


@given(graphs_with_schedules())
def test_bars_that_share_nothing_last_as_long_as_what_runs_again(drawn: Drawn) -> None:
    graph, schedule = drawn
    found = bars(regions(graph, schedule), moments(graph, schedule), gap=0.0)
    if is_timed(graph):
        again = sum(graph.op(name).seconds for bar in found for r in bar.regions for name in r.ops)
        views = sum(op.seconds for op in graph.ops if op.is_view)
        assert sum(bar.until - bar.since for bar in found) >= again
        assert views or sum(bar.until - bar.since for bar in found) == pytest.approx(again)


def slow_first_readers(graph: Graph, schedule: Schedule) -> list[str]:
    """As `first_readers`, region by region."""
    ops = [graph.op(name) for name in schedule.backward]
    stretches: list[list[int]] = [[]]  # of each region, where its ops stand
    for i, op in enumerate(ops):
        if op.phase is Phase.BACKWARD and stretches[-1]:
            stretches.append([])
        elif op.phase is Phase.FORWARD and not op.is_view:
            stretches[-1].append(i)
    made = [{s: i for i in places for s in made_storages(graph, ops[i])} for places in stretches]
    found: list[str] = []
    for k, places in enumerate(stretches[:-1]):
        readers = [
            op.name
            for i, op in enumerate(ops)
            if i > places[-1] and op.phase is Phase.BACKWARD and not op.is_view
            for s in {graph.values[name].storage for name in op.inputs}
            if max((m for m in range(len(made)) if made[m].get(s, i) < i), default=-1) == k
        ]
        later = [op for op in ops[places[-1] :] if op.phase is Phase.BACKWARD]
        plain = [op.name for op in later if not op.is_view]
        found.append([*readers, *plain, later[0].name][0])
    return found


@given(graphs_with_schedules())
def test_each_region_runs_for_the_first_op_of_the_backward_that_reads_it(drawn: Drawn) -> None:
    assert list(first_readers(*drawn)) == slow_first_readers(*drawn)


@given(graphs_with_schedules())
def test_the_csv_has_every_run_with_bytes_that_add_up_to_the_peak(drawn: Drawn) -> None:
    plan = plan_of(drawn)
    rows = list(csv.DictReader(io.StringIO(memory_csv(plan))))
    assert [row["op"] for row in rows] == list(plan.schedule.runs)
    parts = ("saved_bytes", "recomputed_bytes", "temporary_bytes", "scratch_bytes")
    assert max(sum(int(row[part]) for part in parts) for row in rows) == plan.peak_bytes


@given(graphs_with_schedules())
def test_the_treemap_adds_up_to_what_is_kept_with_the_plan_and_without(drawn: Drawn) -> None:
    plan = plan_of(drawn)
    tiles = saved_tiles(plan, Box(0, 0, 2, 1))

    def total(*fates: Fate) -> int:
        return sum(tile.nbytes.get(fate, 0) for tile in tiles for fate in fates)

    assert total(Fate.KEPT, Fate.INSTEAD) == plan.saved_bytes
    assert total(Fate.KEPT, Fate.DROPPED) == plan.baseline.saved_bytes
    for tile in tiles:
        assert sum(child.total for child in tile.children) == tile.total


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=40),
    st.floats(0.1, 10.0),
)
def test_a_treemap_fills_its_box_in_proportion_and_nothing_overlaps(
    sizes: list[int], width: float
) -> None:
    sizes = sorted(sizes, reverse=True)
    boxes = squarify(sizes, Box(0.0, 0.0, width, 1.0))
    area = width / sum(sizes)
    for size, box in zip(sizes, boxes, strict=True):
        assert box.width * box.height == pytest.approx(size * area, rel=1e-6, abs=1e-9)
        assert box.x >= -1e-9
        assert box.y >= -1e-9
        assert box.x + box.width <= width + 1e-6
        assert box.y + box.height <= 1 + 1e-6
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(across, down) <= 1e-6


def test_the_example_of_the_paper_is_squarified_as_there() -> None:
    """Figure 5 of Bruls et al.: 6, 6, 4, 3, 2, 2, 1 in a rectangle of 6 by 4."""
    boxes = squarify([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
    found = [(round(b.width, 2), round(b.height, 2)) for b in boxes]
    assert found[:4] == [(3, 2), (3, 2), (1.71, 2.33), (1.29, 2.33)]


def test_nothing_fills_nothing() -> None:
    assert squarify([], Box(0, 0, 1, 1)) == []
