"""Every way to train under fewer bytes, in one table: peak, time and rightness.

    python -m benchmarks.pareto --quick              three small models, in two minutes
    python -m benchmarks.pareto                      all models whose packages are installed
    python -m benchmarks.pareto gpt unet --systems eager checkpoint fxrecals
    python -m benchmarks.pareto --zoo zoo.py zoo.t5  a model of a file with ZOO and build
    python -m benchmarks.pareto --table docs/benchmarks.md --plots docs/img/pareto

For each model the peers are measured first. Then `fxrecals` runs at limits in percent of eager's
measured peak, at its floor, and at the peaks that the peers came to: there it has to be as fast.

All that a model is trained by is timed in turn, those with Inductor's kernels apart from the others
and both beside eager, and is then written to `--rows` in one go. Rows that are there are not
measured again, unless `--fresh`. `--table` and `--plots` draw what the rows hold, and run nothing.

Peaks are activation bytes by the allocator's events, without the parameters' gradients. The loss
is part of the model, so that no system holds more of the outputs than another. Of two steps from
one seed are compared, with plain eager's, the gradients, the gradients under dropout, and the
buffers, which BatchNorm counts in:

    same      the same bits
    close     within 1e-5 of the largest value; with Inductor within 1e-3 of torch.compile's
    WRONG     neither, and for how many tensors
    -         the model draws no random number, or has no buffer

torch.compile itself draws other numbers than eager, and is compared where none are drawn.
"""

from __future__ import annotations

import argparse
import functools
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxrecals
from benchmarks import measure, models, pages, peers, rows
from benchmarks.correctness import far_off, loosely, of_file
from benchmarks.promises import Subject, mib, state_kept
from benchmarks.rows import Row

Way = Callable[[nn.Module, Any], Callable[..., Any]]
"""Of a model and its inputs, what to call in place of the model."""

PEERS = ("eager", "checkpoint", "budget", "buildz-gpu", "ckptplan")
OURS = ("fxrecals", "fxrecals-engine")
INDUCTOR = ("torch.compile", "budget-inductor", "fxrecals-inductor")
SYSTEMS = (*PEERS, *OURS, *INDUCTOR)

ROWS = Path(__file__).parent / "rows.jsonl"

MOST_COMPILED = 1000
"""Versions of one function that Dynamo may hold: each system compiles the model anew."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""What `without_dropout` leaves in training mode."""

FEWEST_ROUNDS = 3

DRAWS = "draws others"
"""The word where other random numbers than eager's are drawn, and none can be compared."""

GRAINS = 50
"""Parts of eager's peak within which two peers' peaks are one limit for us."""


@dataclass(frozen=True)
class Effort:
    """How much to run."""

    shares: tuple[int, ...] = (90, 75, 60, 50, 40, 30, 25, 20, 15)
    budgets: tuple[float, ...] = (0.05, *(i / 10 for i in range(1, 11)))
    rounds: int = 15
    met: tuple[str, ...] = (*PEERS, *INDUCTOR)
    """Systems whose peaks are limits of ours."""


QUICK = Effort((50,), (0.3,), 9, ("checkpoint",))


@dataclass(frozen=True)
class Entry:
    """A system with its setting."""

    system: str
    setting: str
    way: Way
    limit: int | None = None


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.loss(self.model(*args, **kwargs))


# --- the systems ------------------------------------------------------------------------------


def eager(model: nn.Module, inputs: Any) -> Callable[..., Any]:
    return model


def by_inductor(model: nn.Module, inputs: Any) -> Callable[..., Any]:
    return torch.compile(model)


def checkpointed(every: int, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    assert isinstance(model, WithLoss)
    blocks = models.blocks(model.model)[::every]
    if not blocks:
        raise LookupError("the model has no blocks to wrap")

    def call(*args: Any, **kwargs: Any) -> Any:
        with peers.checkpointed(blocks):
            return model(*args, **kwargs)

    return call


def budgeted(budget: float, backend: str, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    return peers.budgeted(model, budget, backend)


def replayed(limit: int, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    return _inside(peers.replayed(limit), model)


def on_the_engine(limit: int, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    return _inside(fxrecals.recals(limit), model)


def _inside(run: Callable[[Callable[[], Any]], Any], model: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(functools.partial(model, *args, **kwargs))


def planned_blocks(limit: int, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    assert isinstance(model, WithLoss)
    if not isinstance(model.model, nn.Sequential):
        raise LookupError("the model is no chain of blocks")
    planned = peers.planned_blocks(model.model, inputs, limit)
    return lambda *args: model.loss(planned(*args))


def rewritten(limit: int, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    return fxrecals.rewrite(model, inputs, limit)


def with_inductor(limit: int, model: nn.Module, inputs: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=fxrecals.backend(limit, inner="inductor"))


TAKE_BYTES: dict[str, Callable[[int, nn.Module, Any], Callable[..., Any]]] = {
    "buildz-gpu": replayed,
    "ckptplan": planned_blocks,
    "fxrecals": rewritten,
    "fxrecals-engine": on_the_engine,
    "fxrecals-inductor": with_inductor,
}


PACKAGES = {"buildz-gpu": "buildz", "ckptplan": "ckptplan"}
"""That a system needs beside torch."""


def installed(system: str) -> bool:
    """Whether a system's package is there."""
    return find_spec(PACKAGES.get(system, "torch")) is not None


def entries(system: str, limits: dict[str, int], effort: Effort) -> list[Entry]:
    """A system with all its settings; `limits` are those of the systems that take bytes."""
    if system in TAKE_BYTES:
        way = TAKE_BYTES[system]
        return [
            Entry(system, setting, functools.partial(way, limit), limit)
            for setting, limit in limits.items()
        ]
    if system.startswith("budget"):
        backend = "inductor" if system in INDUCTOR else "aot_eager"
        return [
            Entry(system, str(budget), functools.partial(budgeted, budget, backend))
            for budget in effort.budgets
        ]
    if system == "checkpoint":
        ways = (functools.partial(checkpointed, every) for every in (1, 2))
        return [
            Entry(system, setting, way)
            for setting, way in zip(("each block", "every second"), ways, strict=True)
        ]
    return [Entry(system, "", eager if system == "eager" else by_inductor)]


def at_peaks(found: Iterable[Row], whole: int) -> dict[str, int]:
    """Limits at the peaks that peers came to, of a whole peak of so many bytes: the lowest of
    those that are close together.

    >>> two = [Row("gpt", "checkpoint", s, peak=p) for s, p in (("a", 300), ("b", 301))]
    >>> at_peaks([*two, Row("gpt", "budget", "1.0", peak=1002)], 1000)
    {'as checkpoint a': 300}
    """
    limits: dict[int, Row] = {}
    for row in sorted(found, key=lambda row: row.peak or whole):
        if row.peak is not None and row.peak < whole:
            limits.setdefault(row.peak * GRAINS // whole, row)
    return {f"as {row.name}": row.peak or 0 for row in limits.values()}


# --- one model --------------------------------------------------------------------------------


class Bench:
    """A model, and all that is measured of it."""

    def __init__(self, subject: Subject, machine: dict[str, str]) -> None:
        self.subject, self.machine = subject, machine
        self.restore = state_kept(subject)
        self.records: dict[tuple[str, bool], measure.Record] = {}
        self.eager = self.wanted("eager", quiet=False)
        self.whole = self.peak(subject.model)

    def record(self, call: Callable[..., Any]) -> measure.Record:
        """What two steps leave; the model is then as before."""
        try:
            return self.subject.record(call)
        finally:
            self.restore()

    def peak(self, call: Callable[..., Any]) -> int:
        """The measured peak of activations of a step."""
        try:
            return measure.step_memory(self.subject.step(call), self.subject.model).activations
        finally:
            self.restore()

    @property
    def draws(self) -> bool:
        """Whether a step of the model draws random numbers."""
        torch.manual_seed(0)
        return not torch.equal(torch.get_rng_state(), self.eager.rng)

    def wanted(self, system: str, quiet: bool) -> measure.Record:
        """What two steps by eager or torch.compile leave, without dropout if `quiet`."""
        if (system, quiet) not in self.records:
            way = eager if system == "eager" else by_inductor
            with without_dropout(self.subject.model) if quiet else nullcontext():
                call = way(self.subject.model, self.subject.inputs)
                self.records[system, quiet] = self.record(call)
        return self.records[system, quiet]

    def measured(self, entry: Entry) -> tuple[Row, Callable[..., Any] | None]:
        """All but the time, and what to call for that; nothing where the system cannot do it."""
        row = Row(self.subject.name, entry.system, entry.setting, entry.limit, machine=self.machine)
        try:
            call = entry.way(self.subject.model, self.subject.inputs)
            row = self.judged(row, self.record(call), entry.way)
            return replace(row, peak=self.peak(call)), call
        except fxrecals.InfeasibleLimitError as error:
            return replace(row, note=f"floor {mib(error.floor_bytes)} MiB"), None
        except Exception as error:  # a row of the table, whatever it is
            return replace(row, note=f"{type(error).__name__}: {error}".splitlines()[0][:90]), None

    def judged(self, row: Row, found: measure.Record, way: Way) -> Row:
        """The row with a word for gradients, dropout and buffers.

        Where dropout goes wrong, the others are judged without it.
        """
        quiet = False
        dropout = self.gradients(row.system, found, quiet) if self.draws else "-"
        if dropout.startswith(("WRONG", DRAWS)):
            quiet = True
            with without_dropout(self.subject.model):
                found = self.record(way(self.subject.model, self.subject.inputs))
        return replace(
            row,
            gradients=self.gradients(row.system, found, quiet),
            dropout=dropout,
            buffers=self.buffers(row.system, found, quiet),
        )

    def gradients(self, system: str, found: measure.Record, quiet: bool) -> str:
        """What became of outputs and gradients, in a word."""
        if system == "torch.compile" and self.draws and not quiet:
            return DRAWS
        return self.verdict(system, replace(found, buffers={}), quiet)

    def buffers(self, system: str, found: measure.Record, quiet: bool) -> str:
        """What became of buffers, in a word."""
        if not self.eager.buffers:
            return "-"
        return self.verdict(system, replace(found, outputs=[], gradients={}), quiet)

    def verdict(self, system: str, found: measure.Record, quiet: bool) -> str:
        """What became of the parts that are found; a system with Inductor is beside Inductor."""
        inductor = system in INDUCTOR
        peer = "torch.compile" if inductor and system != "torch.compile" else "eager"
        wanted = self.wanted(peer, quiet)
        allowed = loosely(wanted) if inductor else None
        outputs = wanted.outputs if found.outputs else []
        gradients = wanted.gradients if found.gradients else {}
        buffers = wanted.buffers if found.buffers else {}
        wanted = measure.Record(outputs, gradients, buffers, found.rng)
        return compared(wanted, found, allowed)

    def timed(self, found: list[tuple[Row, Callable[..., Any] | None]], rounds: int) -> list[Row]:
        """The rows with their times, taken in turn beside eager."""
        calls = {row.name: call for row, call in found if call is not None}
        calls = {"eager": self.subject.model} | calls
        steps = {name: self.subject.step(call) for name, call in calls.items()}
        taken = measure.step_times(steps, rounds)
        self.restore()
        return [self._timed(row, taken) for row, _ in found]

    def _timed(self, row: Row, taken: dict[str, list[float]]) -> Row:
        if row.name not in taken:
            return row
        times = measure.against(taken[row.name], taken["eager"])[:3]
        return replace(row, times=times, seconds=statistics.median(taken[row.name]))

    def planned(self) -> Row:
        """The curve that we predict, with the bound that is proved; its limit is the floor."""
        row = Row(self.subject.name, "plan", machine=self.machine)
        try:
            plan = fxrecals.plan(self.subject.model, self.subject.inputs)
        except fxrecals.FxrecalsError as error:
            return replace(row, note=type(error).__name__)
        whole = plan.baseline_seconds
        curve = (
            (c.limit_bytes, 1 + c.extra_seconds / whole, 1 + c.bound_seconds / whole)
            for c in plan.choices
        )
        return replace(row, limit=plan.floor_bytes, curve=tuple(curve))


def compared(
    wanted: measure.Record,
    found: measure.Record,
    allowed: Callable[[Tensor], float] | None = None,
) -> str:
    """What two steps left of what was wanted, in a word; see the module."""
    if not measure.compare(wanted, found):
        return "same"
    wrong = far_off(wanted, found, allowed)
    return f"WRONG ({wrong})" if wrong else "close"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Within it, nothing but BatchNorm is in training mode."""
    quiet = [m for m in model.modules() if m.training and not isinstance(m, NORMS)]
    for module in quiet:
        module.training = False
    try:
        yield
    finally:
        for module in quiet:
            module.training = True


def run(
    subject: Subject,
    systems: Iterable[str],
    effort: Effort,
    done: dict[rows.Key, Row],
    write: Callable[[list[Row]], None],
    machine: dict[str, str] | None = None,
) -> None:
    """Measures a model in all ways that are not done, and writes the rows as they are whole."""
    torch._dynamo.reset()
    bench = Bench(subject, machine or {})
    known = {key: row for key, row in done.items() if key[0] == subject.name}
    if (subject.name, "plan", "") not in known:
        row = bench.planned()
        known[row.key] = row
        write([row])
    shares = {f"{share} %": bench.whole * share // 100 for share in effort.shares}
    floor = known[subject.name, "plan", ""].limit
    for family in ((*PEERS, *OURS), INDUCTOR):
        found: list[tuple[Row, Callable[..., Any] | None]] = []
        for system in (s for s in family if s in systems and installed(s)):
            limits = dict(shares)
            if system.startswith("fxrecals"):
                met = (r for r in known.values() if r.system in effort.met and not r.ours)
                limits |= at_peaks(met, bench.whole)
                limits |= {"floor": floor} if floor else {}
            for entry in entries(system, limits, effort):
                if (subject.name, entry.system, entry.setting) in known:
                    continue
                row, call = one(bench, entry)
                known[row.key] = row
                found.append((row, call))
        if found:
            write(bench.timed(found, effort.rounds))


def one(bench: Bench, entry: Entry) -> tuple[Row, Callable[..., Any] | None]:
    """Measures one entry, with a line of progress."""
    begin = time.perf_counter()
    row, call = bench.measured(entry)
    words = f"{row.gradients}, {row.dropout}, {row.buffers}"
    said = row.note or f"{mib(row.peak or 0)} of {mib(bench.whole)} MiB: {words}"
    seconds = time.perf_counter() - begin
    print(f"{row.model}: {row.name}: {said} ({seconds:.1f} s)", file=sys.stderr, flush=True)
    return row, call


# --- the command ------------------------------------------------------------------------------


def facts() -> dict[str, str]:
    """Of the machine and this run."""
    return {
        "cpu": _cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks.pareto", *sys.argv[1:]]),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def subject_of(name: str, zoo: dict[str, Callable[[], models.Made]]) -> Subject:
    """A model that returns its loss, from seed 0."""
    torch.manual_seed(0)
    model, inputs, loss = zoo[name]() if name in zoo else models.build(name)
    return Subject(name, WithLoss(model, loss).train(), inputs, lambda found: found)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("models", nargs="*", metavar="model")
    made.add_argument("--quick", action="store_true", help="small models, few limits, no Inductor")
    made.add_argument("--zoo", type=Path, help="a file with ZOO and build(name): zoo.NAME")
    made.add_argument("--rows", type=Path, default=ROWS, help="JSON lines, read and added to")
    made.add_argument("--rounds", type=int, help="of each timed step")
    made.add_argument("--systems", nargs="+", choices=SYSTEMS, help="all, by default")
    made.add_argument("--fresh", action="store_true", help="measure what is in the rows again")
    made.add_argument("--table", type=Path, metavar="PAGE.md", help="write the rows as a page")
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the rows, a plot a model")
    return made


def main() -> None:
    options = parser().parse_args()
    if options.table or options.plots:
        found = list(rows.read(options.rows).values())
        if not found:
            parser().error(f"{options.rows} has no rows; make them by a run without --table")
        if options.plots:
            pages.draw(options.plots, found)
        if options.table:
            options.table.write_text(pages.page(found))
        return
    if options.rounds is not None and options.rounds < FEWEST_ROUNDS:
        parser().error(f"--rounds {options.rounds}: quartiles need at least {FEWEST_ROUNDS}")
    effort = QUICK if options.quick else Effort()
    if options.rounds:
        effort = replace(effort, rounds=options.rounds)
    systems = options.systems or ((*PEERS, *OURS) if options.quick else SYSTEMS)
    zoo = {f"zoo.{n}": make for n, make in of_file(options.zoo).items()} if options.zoo else {}
    names = (
        options.models or list(zoo) or list(models.SMALL if options.quick else models.installed())
    )
    warnings.simplefilter("ignore")
    with torch._dynamo.config.patch(
        recompile_limit=MOST_COMPILED, accumulated_recompile_limit=MOST_COMPILED
    ):
        for name in names:
            done = {} if options.fresh else rows.read(options.rows)
            write = functools.partial(rows.append, options.rows)
            run(subject_of(name, zoo), systems, effort, done, write, facts())
    found = [row for row in rows.read(options.rows).values() if row.model in names]
    print(pages.tables(found))


if __name__ == "__main__":
    main()
