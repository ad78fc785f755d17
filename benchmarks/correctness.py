"""Right or refused: two steps of many models under limits, against plain eager, beside others.

    python -m benchmarks.correctness                 the cases of `tests.cases`
    python -m benchmarks.correctness --zoo zoo.py    and the models of a file with ZOO and build
    python -m benchmarks.correctness --by backend    under torch.compile instead of rewritten
    python -m benchmarks.correctness --by inductor   the same with Inductor, at one limit
    python -m benchmarks.correctness dropout two_halves

For each model, and limits of 100 % and 50 % of the unplanned peak and the floor: whether two steps
from one seed leave outputs, gradients, buffers and generator as plain eager does, and whether the
measured activation peak is within the limit. Beside it what `torch.utils.checkpoint` around the
whole model and PyTorch's `activation_memory_budget` leave.

    same      eager's bits, within the limit
    traced    the bits of torch.compile(backend="aot_eager"), which are not eager's here
    close     within 1e-5 of eager (relative to the largest value)
    WRONG     neither
    OVER      more bytes than the limit, in percent
    floor     the limit is under the floor, and refused before anything has run; "floor later" where
              that is so of a later step, as it runs other layers

Under the backend the limits are shares of what plain eager was measured to take, as a model that
cannot be traced in one piece has no plan; nn.LSTM and its like are let in by `allow_rnn`.

Under Inductor, bits are compared with those of Inductor without a limit, as it draws other random
numbers than eager, and rounds otherwise, and with eager's where nothing is drawn. The limit is
50 %, or the floor where that is higher. Each model runs in a process of its own. Rows that
``--rows FILE`` holds already are not run again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxrecals
from benchmarks import measure, peers
from benchmarks.promises import Subject
from fxrecals.formats import format_bytes

Made = tuple[nn.Module, Any, Callable[[Any], Tensor]]

HEADS = {
    "rewrite": ("model", "100 %", "50 %", "floor", "checkpoint", "budget 0.5", "budget 0.0"),
    "backend": ("model", "100 %", "50 %", "floor"),
    "inductor": ("model", "as without limit", "as eager", "limit", "measured", "without limit"),
}
"""Of the table of each way to set a limit."""

CLOSE = 1e-5
"""Of the largest value: what rounding in another order may do."""

LOOSE = 1e-3
"""The same for Inductor against eager: its formulas differ, and it keeps halves in float32."""

STEPS = 8
"""Of a type's resolution, where that is coarser."""

MEASURED = ("same", "traced", "close", "WRONG")
"""Begin the words for steps that ran to their end."""

TRIES = 5
"""Limits that are tried to find a step's floor: each graph of it may have a higher one."""

SECONDS = 900
"""That one model may take, unless told otherwise."""


class Trial:
    """A model, built anew for every way to train it."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self.make = make
        self.eager = self.run(lambda model, inputs: model)
        self.compiled: measure.Record | None = None
        self.call: Callable[..., Any] = self.newest.model

    def run(self, way: Callable[[nn.Module, Any], Callable[..., Any]]) -> measure.Record:
        """Two steps of what `way` makes of the model."""
        torch._dynamo.reset()
        self.newest = Subject("", *self.make())
        return self.newest.record(way(self.newest.model, self.newest.inputs))

    def verdict(self, way: Callable[[nn.Module, Any], Callable[..., Any]]) -> str:
        """What two steps leave, in a word."""
        try:
            found = self.run(way)
        except Exception as error:  # a row of the table, whatever it is
            return type(error).__name__
        if not measure.compare(self.eager, found):
            return "same"
        if self.compiled is None:
            self.compiled = self.run(lambda m, x: torch.compile(m, backend="aot_eager"))
        if not measure.compare(self.compiled, found):
            return "traced"
        wrong = far_off(self.eager, found)
        return "close" if not wrong else f"WRONG ({wrong} differ)"

    def within(self) -> list[str]:
        """What fxrecals leaves at 100 % and 50 % of the unplanned peak, and at the floor."""
        try:
            torch._dynamo.reset()
            model, inputs, _ = self.make()
            whole = fxrecals.plan(model, inputs, "100%")
        except fxrecals.FxrecalsError as error:
            return [f"refused: {type(error).__name__}"] * 3
        return [
            self.rewritten(whole),
            self.rewritten(whole.baseline_peak_bytes // 2),
            self.rewritten(whole.floor_bytes),
        ]

    def rewritten(self, limit: int | fxrecals.Plan) -> str:
        """What a rewritten model leaves under a limit."""
        made: list[Callable[..., Any]] = []

        def way(model: nn.Module, inputs: Any) -> Callable[..., Any]:
            made.append(fxrecals.rewrite(model, inputs, limit))
            return made[-1]

        word = self.verdict(way)
        if not made:
            return "floor" if word == "InfeasibleLimitError" else word
        limit_bytes = limit if isinstance(limit, int) else limit.limit_bytes
        return word + self.over(made[-1], limit_bytes or 0)

    def over(self, call: Callable[..., Any], limit_bytes: int) -> str:
        """By what part of the limit the measured peak of activations of a step is above it."""
        subject = self.newest
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                taken = measure.step_memory(subject.step(call), subject.model, warmup=1)
            except fxrecals.InfeasibleLimitError:  # a model that draws which layers it runs
                return ", floor later"
        over = taken.activations / limit_bytes - 1
        return "" if over <= 0 else f", OVER {100 * over:.0f} %"

    def under_backend(self) -> list[str]:
        """What the backend leaves at 100 % and 50 % of eager's measured peak, and at the floor."""
        model = self.newest.model
        whole = measure.step_memory(self.newest.step(model), model, warmup=1).activations
        limits = whole, whole // 2, self.at_least(1)
        return [self.compiled_within(limit) for limit in limits]

    def compiled_within(self, limit: int) -> str:
        """What a model compiled under a limit leaves."""
        word = self.verdict(lambda model, inputs: self.compile(model, limit, "eager"))
        if word == "InfeasibleLimitError":
            return "floor"
        return word + self.over(self.call, limit) if word.startswith(MEASURED) else word

    def compile(self, model: nn.Module, limit: int | None, inner: Any) -> Callable[..., Any]:
        """The model, compiled under a limit; `call` from then on."""
        self.call = torch.compile(model, backend=fxrecals.backend(limit, inner=inner))
        return self.call

    def at_least(self, limit: int) -> int:
        """A limit, or the floor: each error names that of the graph or step that raised it."""
        for _ in range(TRIES):
            try:
                self.run(functools.partial(self._tried, limit))
            except fxrecals.InfeasibleLimitError as error:
                limit = error.floor_bytes
            except Exception:  # the row says what it is
                return limit
            else:
                return limit
        return limit

    def _tried(self, limit: int, model: nn.Module, inputs: Any) -> Callable[..., Any]:
        return self.compile(model, limit, "eager")

    def under_inductor(self) -> list[str]:
        """What the backend with Inductor leaves, and the bytes that it takes."""
        torch._dynamo.reset()
        model, inputs, _ = self.make()
        limit = fxrecals.plan(model, inputs, "100%").baseline_peak_bytes // 2
        try:
            reference, most = self.with_inductor(None)
        except Exception as error:
            return [self.whose(error)]
        try:
            found, taken = self.with_inductor(limit)
        except fxrecals.InfeasibleLimitError as error:
            limit = error.floor_bytes
            found, taken = self.with_inductor(limit)
        wrong = far_off(reference, found)
        word = "close" if measure.compare(reference, found) else "same"
        return [
            f"WRONG ({wrong} differ)" if wrong else word,
            self.beside_eager(found),
            *map(format_bytes, (limit, taken, most)),
        ]

    def whose(self, error: Exception) -> str:
        """An error of the backend with Inductor in a word, and whether Inductor has it alone."""
        try:
            self.run(lambda model, inputs: torch.compile(model))
        except Exception as own:
            return f"{type(own).__name__}, of torch.compile alone too"
        return type(error).__name__

    def with_inductor(self, limit: int | None) -> tuple[measure.Record, int]:
        """What two steps leave with Inductor, and the peak of activations of a third."""
        found = self.run(lambda model, inputs: self.compile(model, limit, "inductor"))
        subject = self.newest
        taken = measure.step_memory(subject.step(self.call), subject.model, warmup=1)
        return found, taken.activations

    def beside_eager(self, found: measure.Record) -> str:
        """What Inductor leaves, against eager where the same numbers are drawn: none."""
        torch.manual_seed(0)
        if not torch.equal(torch.get_rng_state(), self.eager.rng):
            return "draws"
        wrong = far_off(self.eager, found, loosely(self.eager))
        return f"WRONG ({wrong} differ)" if wrong else "close"


def far_off(
    reference: measure.Record,
    found: measure.Record,
    allowed: Callable[[Tensor], float] | None = None,
) -> int:
    """How many tensors differ by more than is allowed: by default, what another order can do."""
    if len(reference.outputs) != len(found.outputs):
        return abs(len(reference.outputs) - len(found.outputs))
    allowed = allowed or (lambda t: CLOSE * max(1e-30, _largest(t)))
    return sum(not _is_close(a, b, allowed) for _, a, b in measure.pairs(reference, found))


def loosely(reference: measure.Record) -> Callable[[Tensor], float]:
    """What Inductor may do to a tensor, where what is zero by mathematics is noise in practice."""
    gradients = (gradient for gradient in reference.gradients.values() if gradient is not None)
    noise = CLOSE * max(map(_largest, gradients), default=0.0)
    return lambda t: max(noise, _rounding(t.dtype) * _largest(t))


def _is_close(a: Tensor | None, b: Tensor | None, allowed: Callable[[Tensor], float]) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((a.double() - b.double()).abs().max() <= allowed(a))


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def _rounding(dtype: torch.dtype) -> float:
    return max(LOOSE, STEPS * torch.finfo(dtype).eps)


def row(name: str, make: Callable[[], Made], by: str) -> list[str]:
    """A row of the table of one way to set a limit."""
    trial = Trial(make)
    if by == "backend":
        with torch._dynamo.config.patch(allow_rnn=True):
            return [name, *trial.under_backend()]
    if by == "inductor":
        return [name, *trial.under_inductor()]
    others = [lambda m, _: peers.at_once(m)]
    others += [lambda m, _, b=budget: peers.budgeted(m, b) for budget in (0.5, 0.0)]
    return [name, *trial.within(), *map(trial.verdict, others)]


def makers(zoo: Path | None) -> dict[str, Callable[[], Made]]:
    """How to make each model, by name."""
    from tests.cases import CASES

    def of_case(name: str) -> Made:
        return *CASES[name](), measure.total

    found: dict[str, Callable[[], Made]] = {name: lambda name=name: of_case(name) for name in CASES}
    return found | ({} if zoo is None else of_file(zoo))


def of_file(zoo: Path) -> dict[str, Callable[[], Made]]:
    """How to make each model of a file that has ``ZOO``, their names, and ``build(name)``."""
    spec = importlib.util.spec_from_file_location("zoo", zoo)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # dataclasses and Dynamo look it up
    spec.loader.exec_module(module)
    return {name: lambda name=name: module.build(name) for name in module.ZOO}


def in_a_process(name: str, options: argparse.Namespace) -> list[str]:
    """The row of one model, or what ended its process."""
    command = [sys.executable, "-m", "benchmarks.correctness", "--alone", name, "--by", options.by]
    if options.zoo is not None:
        command += ["--zoo", str(options.zoo)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return [name, f"over {options.seconds} s"]
    if done.returncode:
        last = done.stderr.strip().splitlines()
        return [name, f"ended by {last[-1][:60] if last else done.returncode}"]
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="model")
    parser.add_argument("--zoo", type=Path, help="a file with ZOO and build(name)")
    parser.add_argument("--by", choices=HEADS, default="rewrite", help="how the limit is set")
    parser.add_argument("--rows", type=Path, help="JSON lines: rows that were run, and are added")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="that one model may take")
    parser.add_argument("--alone", action="store_true", help="one model, here, as JSON")
    options = parser.parse_args()
    found = makers(options.zoo)
    if options.alone:
        warnings.simplefilter("ignore")
        (name,) = options.models
        print(json.dumps(row(name, found[name], options.by)))
        return
    kept = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else []
    done: dict[str, list[str]] = {line[0]: line for line in map(json.loads, kept)}
    for name in options.models or found:
        if name in done:
            continue
        done[name] = in_a_process(name, options)
        print(*done[name], sep=" | ", file=sys.stderr, flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                print(json.dumps(done[name]), file=file)
    rows = [done[name] for name in options.models or found]
    print(tabulate(rows, HEADS[options.by], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
