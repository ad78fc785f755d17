"""How long planning takes, apart from the tracing that torch does before it.

python -m benchmarks.planning              the seven models at half their peak
python -m benchmarks.planning --large      and a joint graph of ten thousand ops
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from tabulate import tabulate
from torch import nn

from benchmarks import models, yardsticks
from fxrecals.capture import capture, step
from fxrecals.cost import named
from fxrecals.planning import plan_graph
from fxrecals.units import parse_limit


def row(name: str, model: nn.Module, inputs: Any) -> list[Any]:
    """Seconds of tracing, reading and pricing, and solving at half the unplanned peak."""
    begin = time.perf_counter()
    captured = capture(model, inputs)
    traced = time.perf_counter()
    graph = step(captured, named("roofline"))
    read = time.perf_counter()
    plan_graph(graph, parse_limit("50%"))
    solved = time.perf_counter()
    return [name, len(graph.ops), traced - begin, read - traced, solved - read, solved - traced]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(models.MODELS), metavar="model")
    parser.add_argument("--large", action="store_true", help="and ten thousand ops")
    options = parser.parse_args()
    rows = [row(name, *models.build(name)[:2]) for name in options.models]
    if options.large:
        sizes = {"blocks": 112, "width": 64, "heads": 4, "tokens": 64, "batch": 2, "vocab": 64}
        rows.append(row("gpt, 112 blocks", *yardsticks.gpt(**sizes, dropout=0.1)))
    heads = ["model", "ops", "tracing s", "reading s", "solving s", "planning s"]
    print(tabulate(rows, heads, floatfmt=".1f"))


if __name__ == "__main__":
    main()
