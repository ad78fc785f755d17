"""How close to optimal, and how fast: every figure of `docs/solver.md`.

    python -m benchmarks.solver floors     floors beside what no schedule can go below, measured
    python -m benchmarks.solver race       step times at the best other systems' peaks, in turn
    python -m benchmarks.solver curves     extra time against limit, with a picture
    python -m benchmarks.solver small      distance from the optimum on small random graphs
    python -m benchmarks.solver large      planning of up to thirty thousand ops

The models are the three yardsticks of `benchmarks.yardsticks`. Floors and races are of the step
peak, gradients included, in MiB; curves and large graphs are of planned activation bytes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import fxrecals
from benchmarks import measure, peers, yardsticks
from benchmarks.yardsticks import square_loss
from fxrecals.capture import capture, step
from fxrecals.cost import named
from fxrecals.ir import Graph, bounded_graph
from fxrecals.solve import greedy, refine
from fxrecals.solve.auto import Frontier
from fxrecals.solve.problem import make_problem

MIB = measure.MIB
PICTURE = Path(__file__).parent.parent / "docs" / "img" / "solver.svg"

MODELS: dict[str, Callable[[], yardsticks.Made]] = {
    "gpt": yardsticks.gpt,
    "resnet": yardsticks.resnet,
    "unet": yardsticks.unet,
}

PEER_PEAKS = (("gpt", 80), ("resnet", 96), ("unet", 53), ("unet", 38))
"""MiB with gradients at which the best other system stands, measured apart."""

SHARES = (95, 90, 80, 70, 60, 50, 40, 35, 30, 25, 22, 20, 18, 16)
"""Limits of the curves, in percent of the unplanned peak."""

BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1)
"""Of torch's activation_memory_budget."""


def joint(model: nn.Module, inputs: Any) -> Graph:
    """The graph of a step with the costs of the roofline."""
    return step(capture(model, inputs), named("roofline"))


def training_step(call: Callable[..., Any], model: nn.Module, inputs: Any) -> Callable[[], None]:
    """A step that holds its loss alone: the outputs are the model's to free."""

    def run() -> None:
        measure.clear(model)
        square_loss(call(*inputs)).backward()

    return run


def floors() -> None:
    """The lowest limit on the step peak, its proof, and what was measured there."""
    rows: list[list[Any]] = []
    for name, make in MODELS.items():
        model, inputs = make()
        plan = fxrecals.plan(model, inputs, limit="100%", peak="step")
        lowest = Frontier(make_problem(bounded(plan))).lowest_peak
        limit = plan.floor_bytes
        small = fxrecals.rewrite(model, inputs, limit=limit, peak="step")
        planned = fxrecals.plan(model, inputs, limit=limit, peak="step")
        taken = measure.step_memory(training_step(small, model, inputs), model)
        rows.append([name, plan.baseline.step_peak_bytes / MIB, limit / MIB, lowest / MIB])
        rows[-1] += [limit / lowest, taken.peak / MIB]
        rows[-1] += [f"{100 * planned.extra_seconds / planned.baseline_seconds:.0f} %"]
    heads = ["model", "unplanned", "floor", "none below", "ratio", "measured", "extra time there"]
    print(tabulate(rows, heads, floatfmt=("", ".1f", ".1f", ".1f", ".3f", ".1f")))


def bounded(plan: fxrecals.Plan) -> Graph:
    """The graph whose charged bytes a plan bounds."""
    return bounded_graph(plan.graph, plan.peak)


def race(rounds: int) -> None:
    """Step time over eager's at the peaks that others reach at best, measured on both sides.

    A limit holds however long the caller keeps the outputs. Here, as with the others, they are
    dropped within the loss, so a second plan gets the bytes that the first one left for them.
    """
    rows: list[list[Any]] = []
    for name, peak in PEER_PEAKS:
        model, inputs = MODELS[name]()
        limit = peak * MIB
        for _ in range(2):
            plan = fxrecals.plan(model, inputs, limit=limit, peak="step")
            small = fxrecals.rewrite(model, inputs, plan)
            steps = {
                "eager": training_step(model, model, inputs),
                "rewritten": training_step(small, model, inputs),
            }
            taken = measure.step_memory(steps["rewritten"], model)
            limit += plan.step_peak_bytes - taken.peak
        times = measure.step_times(steps, rounds)
        low, ratio, high, quiet = measure.against(times["rewritten"], times["eager"])
        rows.append([name, peak, plan.step_peak_bytes / MIB, taken.peak / MIB])
        rows[-1] += [1 + plan.extra_seconds / plan.baseline_seconds]
        rows[-1] += [1 + plan.bound_seconds / plan.baseline_seconds]
        rows[-1] += [ratio, f"{low:.2f} to {high:.2f}", quiet]
    heads = ["model", "peak", "planned", "measured", "planned x", "bound x", "measured x eager"]
    heads += ["quartiles", "fastest tenth x"]
    formats = ("", ".0f", ".1f", ".1f", ".3f", ".3f", ".3f", "", ".3f")
    print(tabulate(rows, heads, floatfmt=formats))


def curves(budgets: bool) -> None:
    """Extra time, in percent of the step, that each solver needs within each limit."""
    drawn: dict[str, list[list[Any]]] = {}
    heads = ["limit %", "bound", "auto", "chain", "greedy"]
    for name, make in MODELS.items():
        model, inputs = make()
        graph = joint(model, inputs)
        frontier = Frontier(make_problem(graph))
        rows: list[list[Any]] = []
        for share in SHARES:
            limit = frontier.baseline_bytes * share // 100
            if limit < frontier.floor.peak_bytes:
                break
            point = frontier.cheapest(limit)
            found = [frontier.bound_seconds(limit), point and point.seconds]
            found += [chained(frontier, limit), greedily(frontier, limit)]
            rows.append([share, *(percent(graph, seconds) for seconds in found)])
        print(f"{name}: extra time in percent of a step\n")
        print(tabulate(rows, heads, floatfmt=".2f", missingval="none"), "\n")
        drawn[name] = rows
    theirs = {name: list(budget_points(name)) for name in MODELS} if budgets else {}
    for name, points in theirs.items():
        print(f"{name}: activation_memory_budget, aot_eager, measured\n")
        print(tabulate(points, ["budget", "peak in % of its own", "extra time %"], floatfmt=".1f"))
        print()
    draw(drawn, heads, theirs)


def percent(graph: Graph, seconds: float | None) -> float | None:
    """Seconds as percent of a step."""
    return None if seconds is None else 100 * seconds / graph.seconds


def chained(frontier: Frontier, limit: int) -> float | None:
    """Extra seconds of the best chain alone."""
    states = [state for chain in frontier.chains if (state := chain.state(limit))]
    return min((s.seconds for s in states if s.peak_bytes <= limit), default=None)


def greedily(frontier: Frontier, limit: int) -> float | None:
    """Extra seconds of greedy eviction alone, and of spending what it leaves."""
    state = frontier.kept.copy()
    if not greedy.lower(state, limit, effort=frontier.effort):
        return None
    refine.spend(state, limit, refine.by_area, effort=frontier.effort)
    return state.seconds


def budget_points(name: str) -> Iterator[list[float]]:
    """Budget, peak of activations and extra time of torch's own planner, both in percent."""
    model, inputs = MODELS[name]()
    plain: tuple[int, float] | None = None
    for budget in (1.0, *BUDGETS):
        torch._dynamo.reset()
        run = training_step(peers.budgeted(model, budget), model, inputs)
        peak = measure.step_memory(run, model).activations
        steps = {"eager": training_step(model, model, inputs), "theirs": run}
        seconds = measure.step_seconds(steps, 15)
        ratio = seconds["theirs"] / seconds["eager"]
        if plain is None:
            plain = (peak, ratio)
        yield [budget, 100 * peak / plain[0], 100 * (ratio / plain[1] - 1)]


def draw(
    drawn: dict[str, list[list[Any]]], heads: list[str], theirs: dict[str, list[list[float]]]
) -> None:
    """Writes the picture, and its figures beside it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "fxrecals"
    colors = dict(zip(heads[1:], ("#8a8f98", "#3b8fd9", "#d9822b", "#d64550"), strict=True))
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(1, len(drawn)), drawn.items(), strict=True):
        for column, head in enumerate(heads[1:], 1):
            points = [(row[0], row[column]) for row in rows if row[column] is not None]
            style = "--" if head == "bound" else "-"
            axes.plot(*zip(*points, strict=True), style, color=colors[head], label=head)
        if points := theirs.get(name):
            axes.plot([p[1] for p in points], [p[2] for p in points], "x", color="#6a51a3",
                      label="activation_memory_budget")  # fmt: skip
        axes.set(title=name, xlabel="peak of activations, % of unplanned", ylim=(-1, 60))
    axes = figure.axes[0]
    axes.set_ylabel("extra time, % of a step")
    axes.legend(frameon=False)
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})
    with PICTURE.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", *heads])
        for name, rows in drawn.items():
            writer.writerows([[name, *row] for row in rows])


def small(graphs: int) -> None:
    """Without and with the optimum among the solvers, on graphs that Hypothesis draws."""
    from tests.quality import against_the_optimum

    rows: list[list[Any]] = []
    for exactly in (False, True):
        found = against_the_optimum(graphs, exactly=exactly)
        gaps = [gap for gap in found if gap is not None]
        rows.append(["with exact" if exactly else "without", len(found), len(found) - len(gaps)])
        rows[-1] += [sum(gap == 0 for gap in gaps), 100 * statistics.mean(gaps), 100 * max(gaps)]
    heads = ["auto", "limits", "no answer", "optimal", "mean gap %", "worst gap %"]
    print(tabulate(rows, heads, floatfmt=".2f"))


def large(blocks: list[int]) -> None:
    """A GPT of ever more blocks at half and a quarter of its unplanned peak."""
    rows: list[list[Any]] = []
    for count in blocks:
        sizes = {"blocks": count, "width": 64, "heads": 4, "tokens": 64, "batch": 2, "vocab": 64}
        model, inputs = yardsticks.gpt(**sizes, dropout=0.1)
        captured = capture(model, inputs)
        begin = time.perf_counter()
        graph = step(captured, named("roofline"))
        read = time.perf_counter()
        frontier = Frontier(make_problem(graph))
        limits = [frontier.baseline_bytes * share // 100 for share in (50, 25)]
        seconds: list[float] = []
        gaps: list[float] = []
        for limit in limits:
            start = time.perf_counter()
            fresh = Frontier(make_problem(graph))
            point = fresh.cheapest(limit)
            seconds.append(time.perf_counter() - start)
            assert point is not None
            gaps.append(100 * (point.seconds - fresh.bound_seconds(limit)) / graph.seconds)
        tracemalloc.start()
        Frontier(make_problem(graph)).cheapest(limits[0])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append([len(graph.ops), read - begin, *seconds, peak / MIB, *gaps])
        del model, captured, graph, frontier
    heads = ["ops", "reading s", "solving 50 % s", "25 % s", "MiB", "gap 50 %", "gap 25 %"]
    print(tabulate(rows, heads, floatfmt=("", ".1f", ".1f", ".1f", ".0f", ".2f", ".2f")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ["floors", "race", "curves", "small", "large"]
    parser.add_argument("figures", nargs="*", default=names, choices=names, metavar="figure")
    parser.add_argument("--rounds", type=int, default=75, help="of each timed step")
    parser.add_argument("--graphs", type=int, default=500, help="small ones")
    parser.add_argument("--no-budgets", action="store_true", help="leave torch's planner out")
    parser.add_argument("--blocks", type=int, nargs="*", default=[11, 27, 109, 326])
    options = parser.parse_args()
    for name in options.figures:
        match name:
            case "floors":
                floors()
            case "race":
                race(options.rounds)
            case "curves":
                curves(not options.no_budgets)
            case "small":
                small(options.graphs)
            case _:
                large(options.blocks)
        print()


if __name__ == "__main__":
    main()
