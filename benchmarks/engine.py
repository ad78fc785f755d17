"""The engine beside eager and beside replay from the start: every figure of `docs/engine.md`.

    python -m benchmarks.engine race        time at 50, 25 and 12.5 % of the saved bytes, in turn
    python -m benchmarks.engine overhead    time with a limit that is never reached, and of what
    python -m benchmarks.engine zoo --zoo zoo.py     models whose Python depends on their data

`race` puts buildz-gpu beside, where it is installed: `recals_with_rngs` with the same number of
bytes, which bounds what it keeps and not the peak. So the engine runs at that number, and at the
activation peak that buildz-gpu was measured to have. Models are those of `benchmarks.yardsticks`.
Peaks are activation bytes by the allocator's events; times are medians of rounds taken in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxrecals
from benchmarks import measure, peers, yardsticks
from benchmarks.correctness import makers
from benchmarks.yardsticks import square_loss

MIB = measure.MIB
SHARES = (50.0, 25.0, 12.5)
MODELS: dict[str, Callable[[], yardsticks.Made]] = {
    "gpt": yardsticks.gpt,
    "resnet": yardsticks.resnet,
    "unet": yardsticks.unet,
}
Forward = Callable[[Callable[[], Tensor]], Tensor]
"""Runs a forward with its loss, in whatever way."""


@dataclass(frozen=True)
class Subject:
    """A model, its inputs and its loss, and how to make them again."""

    make: Callable[[], Any]
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor]

    @classmethod
    def of(cls, make: Callable[[], Any]) -> Subject:
        """What a factory makes; the loss is a square where it makes none."""
        model, inputs, *loss = make()
        return cls(make, model, inputs, loss[0] if loss else square_loss)

    def whole(self) -> Tensor:
        """The forward and its loss."""
        given = self.inputs
        out = self.model(**given) if isinstance(given, dict) else self.model(*given)
        return self.loss(out)

    def step(self, forward: Forward) -> Callable[[], None]:
        """A step."""

        def run() -> None:
            measure.clear(self.model)
            forward(self.whole).backward()

        return run

    def record(self, forward: Forward) -> measure.Record:
        """What two steps leave, from the start."""
        twin = Subject.of(self.make)
        return measure.record(lambda: forward(twin.whole), twin.model, (), lambda loss: loss)


def plain(whole: Callable[[], Tensor]) -> Tensor:
    """Eager."""
    return whole()


def buildz(limit: int) -> Forward | None:
    """buildz-gpu's replay from the start, if it is there."""
    try:
        return peers.replayed(limit)
    except ImportError:
        return None


def feasible(subject: Subject, limit: int, **options: Any) -> tuple[int, Forward]:
    """The engine at a limit, or at the least above it that its errors lead to, after two steps."""
    for _ in range(1000):
        engine = fxrecals.recals(limit, **options)
        try:
            for _ in range(2):
                subject.step(engine)()
            return limit, engine
        except fxrecals.InfeasibleLimitError as error:
            limit = max(limit + 1, error.floor_bytes)
    raise AssertionError("no end to the errors")


@dataclass(frozen=True)
class Entrant:
    """One way to run the step of a race."""

    system: str
    limit: int
    forward: Forward


def entrants(subject: Subject, nbytes: int, policies: list[str]) -> list[Entrant]:
    """buildz-gpu at so many bytes, the engine there, and at buildz-gpu's measured peak."""
    found: list[Entrant] = []
    peer = buildz(nbytes)
    at = {nbytes}
    if peer is not None:
        found.append(Entrant("buildz-gpu", nbytes, peer))
        at.add(measure.step_memory(subject.step(peer), subject.model).activations)
    for policy in policies:
        for limit in sorted(at):
            reached, engine = feasible(subject, limit, policy=policy)
            found.append(Entrant(f"engine, {policy}", reached, engine))
    return found


def race(names: list[str], rounds: int, policies: list[str]) -> None:
    """Peak, time over eager, and bits."""
    rows: list[list[Any]] = []
    for name in names:
        subject = Subject.of(MODELS[name])
        saved = fxrecals.recals(None).analyze(subject.whole).total
        wanted = subject.record(plain)
        for share in SHARES:
            found = entrants(subject, int(saved * share / 100), policies)
            steps = {"eager": subject.step(plain)}
            steps |= {str(i): subject.step(e.forward) for i, e in enumerate(found)}
            times = measure.step_times(steps, rounds)
            for i, entrant in enumerate(found):
                low, middle, high, _ = measure.against(times[str(i)], times["eager"])
                peak = measure.step_memory(steps[str(i)], subject.model).activations
                wrong = measure.compare(wanted, subject.record(_again(entrant)))
                rows.append(
                    [
                        name,
                        share,
                        entrant.system,
                        entrant.limit / MIB,
                        peak / MIB,
                        middle,
                        f"{low:.2f} to {high:.2f}",
                        "same" if not wrong else f"{len(wrong)} differ",
                    ]
                )
                print(*rows[-1], flush=True)
    head = ["model", "% of saved", "system", "limit", "peak", "time / eager", "quartiles", "bits"]
    print(tabulate(rows, head, floatfmt=("", ".1f", "", ".1f", ".1f", ".2f")))


def _again(entrant: Entrant) -> Forward:
    """The same with nothing learned."""
    if entrant.system == "buildz-gpu":
        made = buildz(entrant.limit)
        assert made is not None
        return made
    return fxrecals.recals(entrant.limit, policy=entrant.system.rpartition(" ")[2])


# --- what it costs to watch -------------------------------------------------------------------


class Passing(TorchDispatchMode):
    """Hands each op on."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def overhead(rounds: int) -> None:
    """Time of the GPT's step over eager, with a limit that is never reached."""
    subject = Subject.of(yardsticks.gpt)

    def hooks(whole: Callable[[], Tensor]) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return whole()

    def mode(whole: Callable[[], Tensor]) -> Tensor:
        with Passing():
            return whole()

    forwards = {
        "eager": plain,
        "saved-tensor hooks that do nothing": hooks,
        "a mode that hands ops on, in the forward": mode,
        "the engine, limit never reached": fxrecals.recals(10**12),
    }
    times = measure.step_times({k: subject.step(f) for k, f in forwards.items()}, rounds)
    rows = [
        [name, *measure.against(taken, times["eager"])]
        for name, taken in times.items()
        if name != "eager"
    ]
    print(
        tabulate(rows, ["", "lower quartile", "time / eager", "upper", "fastest"], floatfmt=".3f")
    )


# --- models whose Python depends on their data ------------------------------------------------


def zoo(path: Path, names: list[str], rounds: int) -> None:
    """The engine at 50, 25 and 12.5 % of the saved bytes, or at the least that works."""
    rows: list[list[Any]] = []
    made = makers(path)
    for name in names:
        subject = Subject.of(made[name])
        saved = fxrecals.recals(None).analyze(subject.whole).total
        wanted = subject.record(plain)
        whole = measure.step_memory(subject.step(plain), subject.model).activations
        for share in SHARES:
            limit, engine = feasible(subject, int(saved * share / 100))
            steps = {"eager": subject.step(plain), "engine": subject.step(engine)}
            times = measure.step_times(steps, rounds)
            _, middle, _, _ = measure.against(times["engine"], times["eager"])
            peak = measure.step_memory(steps["engine"], subject.model).activations
            wrong = measure.compare(wanted, subject.record(fxrecals.recals(limit)))
            bits = "same" if not wrong else f"{len(wrong)} differ"
            rows.append([name, share, whole / MIB, limit / MIB, peak / MIB, middle, bits])
            print(*rows[-1], flush=True)
    head = ["model", "% of saved", "eager peak", "limit", "peak", "time / eager", "bits"]
    print(tabulate(rows, head, floatfmt=("", ".1f", ".1f", ".1f", ".1f", ".2f")))


DATA_DEPENDENT = ("lstm", "opt_layerdrop", "mixtral_loop", "detr", "gat", "ode_adaptive")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=("race", "overhead", "zoo"))
    parser.add_argument("models", nargs="*")
    parser.add_argument("--rounds", type=int, default=15, help="of each timed step")
    parser.add_argument("--policies", nargs="*", default=["dtr"])
    parser.add_argument("--zoo", type=Path, help="a file with ZOO and build(name)")
    options = parser.parse_args()
    if options.figure == "race":
        race(options.models or list(MODELS), options.rounds, options.policies)
    elif options.figure == "overhead":
        overhead(options.rounds)
    else:
        zoo(options.zoo, options.models or list(DATA_DEPENDENT), options.rounds)


if __name__ == "__main__":
    main()
