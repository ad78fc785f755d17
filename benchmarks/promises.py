"""Are the promises kept? Peak under the limit, the same bits, no slower than checkpointing.

    python -m benchmarks.promises              all models
    python -m benchmarks.promises gpt unet     some of them
    python -m benchmarks.promises --no-time    peaks and bits only

For each model, the activation peak without recompute is measured, then at each limit the planned
peak, the measured one, and whether outputs, gradients, buffers and generator are left by two
steps as plain eager leaves them. Then the step is timed, in turn, against per-block
`torch.utils.checkpoint` at the activation peak which that reaches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxrecals
from benchmarks import measure, models, peers

SHARES = (100, 75, 50, 35, 25)


@dataclass(frozen=True)
class Subject:
    """A model with all that its steps need."""

    name: str
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor]

    def call(self, module: Callable[..., Any]) -> Any:
        if isinstance(self.inputs, dict):
            return module(**self.inputs)
        return module(*self.inputs)

    def step(self, module: Callable[..., Any]) -> Callable[[], Any]:
        """A step whose output is held to its end, as training loops do."""

        def run() -> Any:
            measure.clear(self.model)
            out = self.call(module)
            self.loss(out).backward()
            return out

        return run

    def record(self, module: Callable[..., Any]) -> measure.Record:
        return measure.record(module, self.model, self.inputs, self.loss)


def state_kept(subject: Subject) -> Callable[[], None]:
    """Remembers the model's state; returns the way back, so that every run starts alike."""
    kept = {k: v.clone() for k, v in subject.model.state_dict().items()}
    return lambda: subject.model.load_state_dict(kept) and None


def limits(subject: Subject) -> list[list[Any]]:
    """A row for each limit."""
    restore = state_kept(subject)
    plain = subject.record(subject.model)
    restore()
    rows: list[list[Any]] = []
    for share in SHARES:
        torch._dynamo.reset()
        begin = time.perf_counter()
        try:
            plan = fxrecals.plan(subject.model, subject.inputs, f"{share}%")
            limit = plan.limit_bytes or 0
        except fxrecals.InfeasibleLimitError as error:
            rows.append([subject.name, f"{share} %", mib(error.limit_bytes), "under the floor"])
            rows[-1].append(mib(error.floor_bytes))
            continue
        seconds = time.perf_counter() - begin
        small = fxrecals.rewrite(subject.model, subject.inputs, plan)
        restore()
        wrong = measure.compare(plain, subject.record(small))
        restore()
        taken = measure.step_memory(subject.step(small), subject.model)
        restore()
        rows.append([
            subject.name, f"{share} %", mib(limit), mib(plan.peak_bytes),
            mib(taken.activations), f"{100 * (plan.peak_bytes / taken.activations - 1):+.1f} %",
            "yes" if taken.activations <= limit else "NO",
            "the same" if not wrong else f"{len(wrong)} DIFFER: {wrong[0]}",
            f"{100 * plan.extra_seconds / plan.baseline_seconds:.1f} %", f"{seconds:.1f} s",
        ])  # fmt: skip
    return rows


def race(subject: Subject, rounds: int) -> list[Any]:
    """Peaks and times of plain eager, per-block checkpoint, and a rewrite at checkpoint's peak."""
    torch._dynamo.reset()
    eager = measure.step_memory(subject.step(subject.model), subject.model)
    blocks = models.blocks(subject.model)
    with peers.checkpointed(blocks):
        theirs = measure.step_memory(subject.step(subject.model), subject.model)
    row = [subject.name, mib(eager.activations), mib(theirs.activations)]
    try:
        plan = fxrecals.plan(subject.model, subject.inputs, theirs.activations)
    except fxrecals.InfeasibleLimitError as error:
        return [*row, mib(error.floor_bytes), "floor too high"]
    row.append(mib(plan.floor_bytes))
    small = fxrecals.rewrite(subject.model, subject.inputs, plan)
    ours = measure.step_memory(subject.step(small), subject.model)
    step = subject.step(subject.model)

    def with_checkpoint() -> None:
        with peers.checkpointed(blocks):
            step()

    steps = {"eager": step, "checkpoint": with_checkpoint, "fxrecals": subject.step(small)}
    took = measure.step_seconds(steps, rounds)
    return [
        *row, mib(ours.activations), f"{took['checkpoint'] / took['eager']:.2f}",
        f"{took['fxrecals'] / took['eager']:.2f}",
        f"{took['fxrecals'] / took['checkpoint']:.2f}",
    ]  # fmt: skip


def mib(nbytes: int) -> str:
    return f"{nbytes / measure.MIB:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(models.MODELS), metavar="model")
    parser.add_argument("--no-time", action="store_true", help="peaks and bits only")
    parser.add_argument("--no-limits", action="store_true", help="times only")
    parser.add_argument("--rounds", type=int, default=7, help="of each timed step")
    options = parser.parse_args()
    subjects = [Subject(name, *models.build(name)) for name in options.models]
    if not options.no_limits:
        heads = ["model", "limit", "MiB", "planned", "measured", "off", "kept", "bits", "extra"]
        rows = [row for subject in subjects for row in limits(subject)]
        print(tabulate(rows, [*heads, "plan()"], disable_numparse=True))
    if not options.no_time:
        heads = ["model", "eager MiB", "checkpoint MiB", "floor MiB", "fxrecals MiB"]
        heads += ["checkpoint x", "fxrecals x", "fxrecals / checkpoint"]
        rows = [race(subject, options.rounds) for subject in subjects]
        print(tabulate(rows, heads, disable_numparse=True))


if __name__ == "__main__":
    main()
