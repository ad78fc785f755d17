"""Commands that look at one plan: plan, pareto, explain, export."""

from __future__ import annotations

import argparse
import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fxrecals
from fxrecals.cli.output import Output
from fxrecals.cli.targets import add_options, add_target, load, planning_options
from fxrecals.errors import FxrecalsError
from fxrecals.factories import call, call_without_memory
from fxrecals.formats import format_bytes, format_seconds
from fxrecals.plans import Plan
from fxrecals.report import table

FIGURES = (
    "limit_bytes",
    "peak_bytes",
    "step_peak_bytes",
    "baseline_peak_bytes",
    "baseline_step_peak_bytes",
    "floor_bytes",
    "lowest_bytes",
    "saved_bytes",
    "baseline_seconds",
    "extra_seconds",
    "bound_seconds",
    "extra_flops",
)
"""Attributes of a plan that are keys of its JSON."""


def add_verbs(verbs: Any) -> None:
    """Adds the commands to a parser."""
    _add_plan(verbs)
    _add_pareto(verbs)
    _add_explain(verbs)
    _add_export(verbs)


def _add_plan(verbs: Any) -> None:
    verb = verbs.add_parser("plan", help="what training under a limit would keep and run again")
    add_target(verb)
    verb.add_argument("--limit", required=True, help=LIMIT)
    _add_html(verb)
    verb.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw live bytes over the step; needs matplotlib"
    )
    _add_solving(verb)
    add_options(verb)
    verb.set_defaults(run=_plan)


def _add_pareto(verbs: Any) -> None:
    verb = verbs.add_parser("pareto", help="limits against the extra time that they cost")
    add_target(verb)
    verb.add_argument("--csv", action="store_true", help="print the table as CSV")
    _add_html(verb)
    verb.add_argument("--plot", metavar="FILE", type=Path, help="draw the curve; needs matplotlib")
    _add_solving(verb)
    add_options(verb)
    verb.set_defaults(run=_pareto)


def _add_explain(verbs: Any) -> None:
    verb = verbs.add_parser("explain", help="why a tensor is kept or made again, and at what cost")
    add_target(verb)
    verb.add_argument("name", help="a tensor or an op as `plan` prints it, or a module's path")
    verb.add_argument("--limit", required=True, help=LIMIT)
    _add_solving(verb)
    add_options(verb)
    verb.set_defaults(run=_explain)


def _add_export(verbs: Any) -> None:
    verb = verbs.add_parser("export", help="write a plan and its program into a folder")
    add_target(verb)
    verb.add_argument("--limit", required=True, help=LIMIT)
    verb.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="made if missing")
    _add_solving(verb)
    add_options(verb)
    verb.set_defaults(run=_export)


LIMIT = "4GB, 4GiB, 50%% (of the peak without recompute) or auto (what is free)"


def _add_html(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--html", metavar="FILE", type=Path, help="write the report as a web page")


def _add_solving(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--solver", default="auto", choices=("auto", "exact"), help=SOLVER)
    verb.add_argument("--deadline", type=float, metavar="SECONDS", help="how long to solve, about")


SOLVER = "exact finds the optimum of small graphs; needs highspy (default: auto)"


def _made_plan(
    options: argparse.Namespace, output: Output, limit: str | None, with_memory: bool = False
) -> Plan:
    output.progress(f"making {options.target}")
    made = (call if with_memory else call_without_memory)(load(options.target))
    output.progress("tracing")
    return fxrecals.plan(
        made.model,
        made.example,
        limit,
        solver=options.solver,
        deadline=options.deadline,
        on_progress=output.better,
        **planning_options(options),
    )


def plan_data(plan: Plan) -> dict[str, Any]:
    """The figures of a plan, under the names of its attributes."""
    again = {name for region in plan.regions for name in region.ops}
    return {
        "fits": True,
        "peak": plan.peak.value,
        **{key: getattr(plan, key) for key in FIGURES},
        "ops": len(plan.graph.ops),
        "ops_run_again": len(again),
        "regions": len(plan.regions),
        "saved": list(plan.saved),
        "notes": list(plan.notes),
    }


def _plan(options: argparse.Namespace, output: Output) -> None:
    plan = _made_plan(options, output, options.limit)
    _write_html(plan, options, output)
    if options.plot is not None:
        from fxrecals.plot import memory

        _draw(memory(plan), options.plot, output)
    output.result(repr(plan), plan_data(plan))


def _explain(options: argparse.Namespace, output: Output) -> None:
    found = _made_plan(options, output, options.limit).explain(options.name)
    data = {"name": found.name, "tensors": [asdict(story) for story in found.stories]}
    output.result(repr(found), data)


def _export(options: argparse.Namespace, output: Output) -> None:
    plan = _made_plan(options, output, options.limit, with_memory=True)
    folder = plan.export(options.out)
    files = sorted(path.name for path in folder.iterdir())
    lines = [repr(plan).partition("\n")[0], f"{folder}: {', '.join(files)}"]
    output.result("\n".join(lines), {**plan_data(plan), "folder": str(folder), "files": files})


def _pareto(options: argparse.Namespace, output: Output) -> None:
    plan = _made_plan(options, output, None)
    _write_html(plan, options, output)
    if options.plot is not None:
        from fxrecals.plot import pareto

        _draw(pareto(plan), options.plot, output)
    rows = [asdict(choice) for choice in plan.choices]
    knee = plan.bounded.peak_bytes
    data = {
        "peak": plan.peak.value,
        "baseline_seconds": plan.baseline_seconds,
        "floor_bytes": plan.floor_bytes,
        "knee_bytes": knee,
        "choices": rows,
    }
    text = _csv(rows).rstrip() if options.csv else _pareto_text(plan)
    output.result(text, data)


def _write_html(plan: Plan, options: argparse.Namespace, output: Output) -> None:
    if options.html is None:
        return
    try:
        plan.to_html(options.html)
    except OSError as error:
        raise FxrecalsError(f"{options.html} cannot be written: {error}") from error
    output.message(f"written into {options.html}")


def _draw(figure: Any, path: Path, output: Output) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise FxrecalsError(f"{path} cannot be drawn: {error}") from error
    output.message(f"drawn into {path}")


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _pareto_text(plan: Plan) -> str:
    whole, seconds = plan.bounded_baseline.peak_bytes, max(plan.baseline_seconds, 1e-12)
    rows = [
        (
            format_bytes(choice.limit_bytes),
            f"{100 * choice.limit_bytes / max(whole, 1):.0f} %",
            format_bytes(choice.peak_bytes),
            f"+{format_seconds(choice.extra_seconds)}",
            f"+{100 * choice.extra_seconds / seconds:.1f} %",
            f"+{100 * choice.bound_seconds / seconds:.1f} %",
            "<- knee" if choice.peak_bytes == plan.bounded.peak_bytes else "",
        )
        for choice in plan.choices
    ]
    headers = ("limit", "of the peak", "peak", "more time", "found", "at least", "")
    return table(headers, rows, "rrrrrrl")
