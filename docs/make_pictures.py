"""Draws the pictures of the documentation: live bytes over a training step.

    python docs/make_pictures.py
    python docs/make_pictures.py report   # the screenshot of the page alone

Writes ``docs/img/gpt2.svg`` (GPT-2 of `examples/train_gpt2.py`, kept whole and under 35 %) and
``docs/img/chain.svg`` (the four ops of ``docs/how-it-works.md``), each with its figures beside it
as CSV; and ``docs/img/report.png``, the page of a plan for GPT-2 on a GPU that is not there, as
Chromium shows it. Needs ``pip install "fxrecals[plot,test]"``. Colours of the curves are of middle
brightness, on no background, so that they can be read on light and on dark pages.
"""

from __future__ import annotations

import csv
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fxrecals
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value
from fxrecals.planning import plan_graph
from fxrecals.timeline import Timeline
from fxrecals.units import parse_limit

FOLDER = Path(__file__).parent / "img"
GREY, ORANGE, BLUE, RED = "#8a8f98", "#d9822b", "#3b8fd9", "#d64550"

POINTS = 400
"""Of a curve at most: as many as can be told apart in a picture."""

Curve = tuple[list[float], list[float]]
"""Milliseconds and live megabytes."""


def main(only: str = "") -> None:
    """Draws all of them, or only the report."""
    FOLDER.mkdir(exist_ok=True)
    if only != "report":
        draw_curves()
    photograph(large_plan())


def draw_curves() -> None:
    """Live bytes of both examples."""
    plan = gpt2_plan()
    draw(
        "gpt2",
        curve(plan.graph, plan.baseline),
        curve(plan.graph, plan.timeline),
        limit_mb=(plan.limit_bytes or 0) / 1e6,
        title="GPT-2, 6 blocks, limit 35 %",
    )
    plan = plan_graph(chain(), parse_limit("45MB"))
    draw(
        "chain",
        curve(plan.graph, plan.baseline),
        curve(plan.graph, plan.timeline),
        limit_mb=45.0,
        title="Four ops, limit 45 MB",
    )


def large_plan() -> fxrecals.Plan:
    """GPT-2 with 124 million parameters, 8 sequences of 1024 tokens, planned for an H100: on
    ``meta``, where nothing is allocated."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from fxrecals.cost import GPUS, Roofline

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False)).train()
        ids = torch.zeros(8, 1024, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    return fxrecals.plan(model, example, "40%", cost=Roofline(GPUS["H100"]), device="cuda")


def photograph(plan: fxrecals.Plan) -> None:
    """The top of a plan's page, with the pointer on the chart."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    browser_path = next(filter(None, map(shutil.which, names)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        path = Path(folder) / "plan.html"
        plan.to_html(path)
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 860})
        page.goto(path.as_uri())
        box = page.locator("#memory .plot").bounding_box()
        page.mouse.move(box["x"] + 0.62 * box["width"], box["y"] + 0.2 * box["height"])
        page.screenshot(path=FOLDER / "report.png")
        browser.close()


def gpt2_plan() -> fxrecals.Plan:
    """The plan that the example prints."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=128,
        n_embd=256,
        n_layer=6,
        n_head=8,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    ids = torch.zeros(4, 128, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids.clone()}
    return fxrecals.plan(GPT2LMHeadModel(config).train(), example, limit="35%")


def chain() -> Graph:
    """The graph of ``how-it-works.md``; each op takes a millisecond."""
    megabyte = 10**6
    values = (
        Value("x", 0, "x", Kind.PRIMAL),
        Value("a", 10 * megabyte, "a"),
        Value("b", 10 * megabyte, "b"),
        Value("c", 20 * megabyte, "c"),
        Value("d", 4, "d"),
        Value("dd", 4, "dd", Kind.TANGENT),
        Value("dc", 20 * megabyte, "dc", Kind.BACKWARD),
        Value("db", 10 * megabyte, "db", Kind.BACKWARD),
        Value("da", 10 * megabyte, "da", Kind.BACKWARD),
        Value("dw", 10 * megabyte, "dw", Kind.GRADIENT),
    )
    there, back, millisecond = Phase.FORWARD, Phase.BACKWARD, 1e-3
    ops = (
        Op("f1", "f1", ("x",), ("a",), there, millisecond),
        Op("f2", "f2", ("a",), ("b",), there, millisecond),
        Op("f3", "f3", ("b",), ("c",), there, millisecond),
        Op("f4", "f4", ("c",), ("d",), there, millisecond),
        Op("loss", "loss", ("d",), ("dd",), back, traits=frozenset({Trait.CALLER})),
        Op("b4", "b4", ("c", "dd"), ("dc",), back, millisecond),
        Op("b3", "b3", ("b", "dc"), ("db",), back, millisecond),
        Op("b2", "b2", ("a", "db"), ("da",), back, millisecond),
        Op("b1", "b1", ("x", "da"), ("dw",), back, millisecond),
    )
    return Graph(ops, {value.name: value for value in values}, outputs=("d", "dd", "dw"))


def curve(graph: Graph, timeline: Timeline) -> Curve:
    """Live megabytes over the estimated milliseconds of a step."""
    instants, live, now = [0.0], [0.0], 0.0
    for step in timeline.steps:
        end = now + 1e3 * graph.op(step.op).seconds
        instants += [now, end]
        live += [step.live_bytes / 1e6] * 2
        now = end
    return thinned(instants, live)


def thinned(instants: list[float], live: list[float]) -> Curve:
    """The highest point of each of `POINTS` spans of time, so that no peak is lost."""
    if len(instants) <= POINTS:
        return instants, live
    highest: dict[int, int] = {}
    for i, instant in enumerate(instants):
        span = int(POINTS * instant / instants[-1])
        if span not in highest or live[i] > live[highest[span]]:
            highest[span] = i
    return [instants[i] for i in highest.values()], [live[i] for i in highest.values()]


def draw(name: str, kept: Curve, planned: Curve, limit_mb: float, title: str) -> None:
    """One picture and its CSV."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "fxrecals", "svg.fonttype": "none", "font.size": 11}
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    fill(axes, kept, ORANGE, "everything kept")
    fill(axes, planned, BLUE, "planned")
    axes.axhline(limit_mb, color=RED, linestyle="--", linewidth=1.2)
    end = max(kept[0][-1], planned[0][-1])
    axes.text(end, limit_mb, f"limit {limit_mb:.0f} MB", color=RED, ha="right", va="bottom")
    axes.set(xlabel="estimated time in the step [ms]", ylabel="live activations [MB]")
    axes.set(xlim=(0, end), ylim=(0, None))
    axes.set_title(title, color=GREY, fontsize=11)
    paint(axes)
    figure.savefig(FOLDER / f"{name}.svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    write(FOLDER / f"{name}.csv", {"kept": kept, "planned": planned})


def fill(axes: Any, of: Curve, color: str, label: str) -> None:
    """A curve with the area below it."""
    axes.plot(*of, color=color, linewidth=1.2, label=label)
    axes.fill_between(*of, color=color, alpha=0.18, linewidth=0)


def paint(axes: Any) -> None:
    """Grey axes, no frame around them."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    axes.legend(loc="upper left", frameon=False, labelcolor=GREY)


def write(path: Path, curves: dict[str, Curve]) -> None:
    """The same figures as CSV."""
    rows: list[Sequence[Any]] = [("schedule", "milliseconds", "megabytes")]
    for name, points in curves.items():
        rows += [(name, f"{t:.4f}", f"{mb:.4f}") for t, mb in zip(*points, strict=True)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
