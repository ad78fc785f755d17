"""Figures show the bytes of the timeline, whatever the model calls its modules."""

import io
import sys
from dataclasses import replace
from typing import Any

import pytest

from fxrecals.errors import FxrecalsError
from fxrecals.ir import Graph, Peak
from fxrecals.plans import Plan
from fxrecals.schedule import Schedule
from tests.test_page import CHOICES, HOSTILE, chain

pytest.importorskip("matplotlib")

from fxrecals import plot

NOTHING = Plan(Graph((), {}, ()), Schedule((), ()), None, floor_bytes=0)


def drawn(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()


@pytest.mark.parametrize("peak", Peak)
def test_the_stack_reaches_the_peak_and_the_line_that_without_recompute(peak: Peak) -> None:
    plan = replace(chain(8), peak=peak)
    axes = plot.memory(plan).axes[0]
    *stack, outline = axes.patches
    assert max(map(max, (patch.get_data().values for patch in stack))) == plan.bounded.peak_bytes
    assert max(outline.get_data().values) == plan.bounded_baseline.peak_bytes
    assert plan.limit_bytes in axes.lines[0].get_ydata()


def test_each_region_has_its_bar() -> None:
    plan = chain(8)
    (bars,) = plot.memory(plan).axes[1].collections
    assert len(bars.get_paths()) == len(plan.regions)


def test_areas_of_modules_are_in_proportion_to_their_bytes() -> None:
    plan = chain(8)
    axes = plot.saved(plan).axes[0]
    filled = [patch for patch in axes.patches if patch.get_fill() and patch.get_width()]
    areas = {fate: 0.0 for fate in plot.FATES}
    for patch in filled:
        for fate, color in plot.FATES.items():
            if patch.get_facecolor() == pytest.approx(_rgba(color)):
                areas[fate] += patch.get_width() * patch.get_height()
    kept = areas[plot.Fate.KEPT] + areas[plot.Fate.INSTEAD]
    dropped = areas[plot.Fate.DROPPED]
    before = plan.baseline.saved_bytes
    assert kept / (kept + dropped) == pytest.approx(plan.saved_bytes / before, rel=1e-3)


def _rgba(color: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgba

    return to_rgba(color)


def test_names_that_look_like_formulas_are_drawn_as_they_are() -> None:
    names = tuple(name for name in HOSTILE if name.isprintable())
    plan = chain(14, (*names, r"$\frac{$"))
    assert "<svg" in drawn(plot.saved(plan))
    assert "<svg" in drawn(plot.memory(plan))


def test_the_curve_has_a_point_for_each_choice() -> None:
    plan = replace(chain(8), choices=CHOICES)
    found = plot.pareto(plan).axes[0].lines[0]
    assert list(found.get_xdata()) == [choice.limit_bytes for choice in CHOICES]


@pytest.mark.parametrize("draw", [plot.memory, plot.saved, plot.pareto])
def test_where_there_is_nothing_to_draw_the_error_says_so(draw: Any) -> None:
    with pytest.raises(FxrecalsError, match=r"nothing to draw|no curve"):
        draw(NOTHING)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FxrecalsError, match=r'pip install "fxrecals\[plot\]"'):
        plot.memory(chain(4))
