"""What `fxrecals.watch` costs: the time of a step with it over one without.

    python -m benchmarks.watch [gpt resnet unet] [--rounds 5]

A step is forward, backward and Adam on a model of `benchmarks.yardsticks`. Beside the default,
which measures as many steps as stay under its share of the time, stand one always measured
(``share=1``) and one never measured. Rounds of some steps are taken in turn; times are medians of
the rounds' ratios, with their quartiles, and the ratio of the fastest tenth of each, which other
jobs disturb least. ``--cpu`` takes the process's CPU time, which they do not disturb either.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxrecals
from benchmarks import measure
from benchmarks.engine import MODELS
from benchmarks.yardsticks import square_loss
from fxrecals.watching import BURST, SHARE, Watch

Clock = Callable[[], float]


def steps_of(
    model: nn.Module, args: tuple[Tensor, ...]
) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """An optimizer and a step of it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        square_loss(model(*args)).backward()
        optimizer.step()

    return optimizer, step


NEVER = 1e-9
"""A share that allows nothing after the first burst."""

SUBJECTS = {"never measured": NEVER, "by default": SHARE, "each step measured": 1.0}


def round_seconds(
    step: Callable[[], None], clock: Clock, count: int, watched: Watch | None
) -> float:
    """Seconds of a step, of `count` in a row."""
    start = clock()
    for _ in range(count):
        step()
        if watched is not None:
            watched.step()
    return (clock() - start) / count


def watched_round(
    step: Callable[[], None], clock: Clock, count: int, make: Callable[[float], Watch], share: float
) -> tuple[float, int]:
    """Seconds of a step, and how many of them were measured."""
    with make(share) as watched:
        if share == NEVER:
            for _ in range(BURST + 1):
                watched.step()
        before = len(watched.steps)
        seconds = round_seconds(step, clock, count, watched)
    return seconds, sum(each.is_measured for each in watched.steps[before:])


def compared(
    step: Callable[[], None], clock: Clock, make: Callable[[float], Watch], count: int, rounds: int
) -> list[list[Any]]:
    """Times over those of a plain step, a row for each way to watch."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", *SUBJECTS)}
    measured = dict.fromkeys(SUBJECTS, 0)
    for turn in range(rounds):
        for name in list(times)[:: -1 if turn % 2 else 1]:
            if name == "plain":
                times[name].append(round_seconds(step, clock, count, None))
                continue
            seconds, found = watched_round(step, clock, count, make, SUBJECTS[name])
            times[name].append(seconds)
            measured[name] += found
    return [
        [name, f"{found} of {rounds * count}", *measure.against(times[name], times["plain"])]
        for name, found in measured.items()
    ]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40, help="of a plain round, about")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the process, not wall time")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    rows: list[list[Any]] = []
    for name in options.models:
        model, args = MODELS[name]()
        optimizer, step = steps_of(model, args)
        make = partial(fxrecals.watch, model, optimizer)
        count = max(5, round(options.seconds / round_seconds(step, time.perf_counter, 2, None)))
        found = compared(
            step, clock, lambda share, make=make: make(share=share), count, options.rounds
        )
        rows += [[name, *row] for row in found]
    head = ["model", "", "measured", "lower quartile", "time / plain", "upper", "fastest"]
    print(tabulate(rows, head, floatfmt=".3f"))


if __name__ == "__main__":
    main()
