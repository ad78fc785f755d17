"""Draws rows of `benchmarks.pareto`: a table a model, a plot a model, who is ahead of whom."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.rows import Row, beaten

MIB = 2**20

HEADS = ("system", "setting", "limit", "peak", "met", "time", "quartiles", "/ compile")
RIGHT = ("gradients", "dropout", "buffers")

COLORS = {
    "eager": "#8a8f98",
    "torch.compile": "#4d4f53",
    "checkpoint": "#d9822b",
    "budget": "#6a51a3",
    "budget-inductor": "#9e9ac8",
    "buildz-gpu": "#2ca25f",
    "ckptplan": "#a6761d",
    "fxrecals": "#3b8fd9",
    "fxrecals-engine": "#17becf",
    "fxrecals-inductor": "#d64550",
}

HEAD = """\
# Beside other systems

One step (forward, loss, backward) of each model, by each system at each of its settings. Peaks
are the measured activation bytes, in MiB, without gradients of parameters. Times are over plain
eager's, taken in turn in one run: medians and quartiles. *met* is whether the peak is within the
limit, where a system takes one in bytes; buildz-gpu's number bounds what it keeps.

*gradients*, *dropout*, *buffers*: what two steps from one seed leave beside plain eager's, without
and with dropout, and with BatchNorm's counts. *same*: the same bits. *close*: within rounding.
*WRONG*: so many tensors are neither. -: the model draws no random number, or has no buffer. Systems
with Inductor are compared with `torch.compile`, which draws other numbers than eager. An error in
place of a peak says why a system cannot do it.

"""


PICTURE = "![Step time against peak of {model}, by system](img/pareto/{model}.svg)\n\n"
"""As `draw` writes it beside the page."""

QUICK = " Quick runs: small models at few limits, with eager's kernels alone."


def page(rows: list[Row]) -> str:
    """All of it, as Markdown that says by which commands the rows were made."""
    return f"{HEAD}{_made_by(rows)}\n\n{tables(rows, PICTURE)}\n"


def tables(rows: list[Row], before: str = "") -> str:
    """A table a model, with a text about the model before it, and who is ahead of whom."""
    parts = [
        f"## {model}\n\n{before.format(model=model)}{_table(found)}"
        for model, found in _models(rows).items()
    ]
    return "\n\n".join([*parts, f"## Who is ahead\n\n{_ahead(rows)}"])


def _made_by(rows: list[Row]) -> str:
    runs: dict[tuple[str, ...], None] = {}
    names = ("command", "date", "cpu", "threads", "torch")
    for row in rows:
        if row.machine:
            runs[tuple(row.machine.get(name, "") for name in names)] = None
    made = tabulate(list(runs), names, tablefmt="github", disable_numparse=True)
    quick = all("--quick" in row.machine.get("command", "") for row in rows)
    return f"Made by these commands, and written by `--table`.{QUICK if quick else ''}\n\n{made}"


def _models(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.model, []).append(row)
    return found


def _table(rows: list[Row]) -> str:
    compiled = next((r.times[1] for r in rows if r.system == "torch.compile" and r.times), None)
    shown = [_cells(row, compiled) for row in rows if row.system != "plan"]
    return tabulate(shown, (*HEADS, *RIGHT), tablefmt="github", disable_numparse=True)


def _cells(row: Row, compiled: float | None) -> list[str]:
    if row.peak is None:
        return [row.system, row.setting, mib(row.limit), row.note.partition(":")[0]]
    met = "" if row.limit is None else "yes" if row.peak <= row.limit else "NO"
    cells = [row.system, row.setting, mib(row.limit), mib(row.peak), met]
    if row.times is None:
        cells += [""] * 3
    else:
        low, middle, high = row.times
        cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        cells += [f"{middle / compiled:.2f}" if compiled else ""]
    return [*cells, row.gradients, row.dropout, row.buffers]


def _ahead(rows: list[Row]) -> str:
    found = beaten(rows)
    lost = {ours.key for ours, _, _ in found}
    judged = [row for row in rows if row.ours and row.times is not None]
    counts = [
        f"{sum(r.key in lost for r in judged if r.system == system)} of "
        f"{sum(r.system == system for r in judged)} rows of {system}"
        for system in dict.fromkeys(row.system for row in judged)
    ]
    said_so = f"""\
A peer has a smaller peak and a smaller time, beyond both quartiles, than:
{", ".join(counts) or "no row of ours"}."""
    if not found:
        return said_so
    shown = [
        [ours.model, *said(ours), *said(peer), _wrong(peer), *said(answer)]
        for ours, peer, answer in found
    ]
    each = ("peak", "time")
    heads = ["model", "ours", *each, "peer ahead", *each, "wrong in", "our answer", *each]
    return f"""\
{said_so} *Our answer* is the fastest of our rows that is within that
peer's peak, and not slower beyond both quartiles.

{tabulate(shown, heads, tablefmt="github", disable_numparse=True)}"""


def _wrong(row: Row) -> str:
    words = zip(RIGHT, (row.gradients, row.dropout, row.buffers), strict=True)
    return ", ".join(name for name, word in words if word.startswith("WRONG"))


def said(row: Row | None) -> tuple[str, str, str]:
    """Name, peak and time."""
    if row is None or row.times is None:
        return "none", "", ""
    return row.name, mib(row.peak), f"{row.times[1]:.2f}"


def mib(nbytes: int | None) -> str:
    """Bytes in MiB, or nothing."""
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


# --- plots ------------------------------------------------------------------------------------


def draw(folder: Path, rows: list[Row]) -> None:
    """Writes a plot a model, with its points beside it as CSV."""
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "fxrecals", "svg.fonttype": "none"}):
        for model, found in _models(rows).items():
            path = folder / f"{model}.svg"
            plot(model, found).savefig(path, transparent=True, metadata={"Date": None})
            with path.with_suffix(".csv").open("w", newline="") as file:
                csv.writer(file).writerows(_points(found))


def plot(model: str, rows: list[Row]) -> Any:
    """Peak across, time up, a curve a system, and what we predict and prove behind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in (row for row in rows if row.curve):
        limits, found, bound = zip(*sorted(row.curve), strict=True)
        across = [limit / MIB for limit in limits]
        axes.plot(across, found, color="#3b8fd9", linewidth=0.8, label="predicted")
        axes.plot(across, bound, "--", color="#8a8f98", linewidth=0.8, label="proved bound")
    for system, color in COLORS.items():
        points = sorted(
            (r.peak, r.times) for r in rows if r.system == system and r.peak and r.times
        )
        if points:
            peaks = [peak / MIB for peak, _ in points]
            low, middle, high = zip(*(times for _, times in points), strict=True)
            axes.plot(peaks, middle, ".-", color=color, label=system)
            axes.vlines(peaks, low, high, color=color, linewidth=0.8)
    axes.set(
        title=model, xlabel="measured peak of activations, MiB", ylabel="step time over eager's"
    )
    axes.legend(frameon=False, fontsize="small")
    return figure


def _points(rows: list[Row]) -> Iterator[list[Any]]:
    yield ["system", "setting", "peak MiB", "lower quartile", "median", "upper quartile"]
    for row in rows:
        if row.peak is not None and row.times is not None:
            yield [row.system, row.setting, mib(row.peak), *(f"{t:.3f}" for t in row.times)]
        for limit, found, bound in row.curve:
            yield ["predicted", "", mib(limit), "", f"{found:.3f}", ""]
            yield ["proved bound", "", mib(limit), "", f"{bound:.3f}", ""]
