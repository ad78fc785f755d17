"""The page as a whole: verdict, pictures, tables, notes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from fxrecals.composition import Category, alive_at
from fxrecals.formats import format_bytes, format_count, format_seconds
from fxrecals.ir import Op, Peak
from fxrecals.page import pictures
from fxrecals.page.markup import Column, Markup, element, escaped, joined, table
from fxrecals.report import (
    count_again,
    grouped_regions,
    grouped_saved,
    half_of,
    more_time,
    pattern,
    percent,
    policy_notes,
    verdict,
    which_peak,
)

if TYPE_CHECKING:
    from fxrecals.plans import Plan

ROWS = 12
"""Of a table, before the rest is shown on demand."""

FEW = 6
"""Of the table within a section, likewise."""

ALIVE = 60
"""Tensors that are listed at the peak; the rest is one row."""


def text(plan: Plan) -> str:
    """The page of a plan, the same every time.

    >>> from fxrecals.ir import Graph, Op, Phase, Value
    >>> from fxrecals.plans import Plan
    >>> from fxrecals.schedule import Schedule
    >>> op = Op("sin", "aten.sin", (), ("a",), Phase.FORWARD)
    >>> graph = Graph((op,), {"a": Value("a", 8, "a")}, outputs=())
    >>> page = text(Plan(graph, Schedule(("sin",), ()), 100, floor_bytes=8))
    >>> page.startswith("<!DOCTYPE html>"), "fits 100 B" in page
    (True, True)
    """
    folder = files("fxrecals.page")
    page, style, script = (
        (folder / name).read_text("utf-8") for name in ("page.html", "style.css", "script.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(page).substitute(
        script_hash=f"sha256-{digest}",
        title=escaped(f"fxrecals: {verdict(plan)}"),
        style=style,
        sections="\n".join(_sections(plan)),
        script=script,
    )


def _sections(plan: Plan) -> Iterator[Markup]:
    yield _header(plan)
    yield element("div", *_facts(plan), cls="facts")
    if plan.timeline.steps:
        yield _section(
            "Memory over the step",
            "What is alive at each moment of one training step, forward and backward. Time is "
            "estimated. Point at a moment to see its op.",
            pictures.memory(plan),
            _at_the_peak(plan),
        )
    if plan.saved_bytes or plan.baseline.saved_bytes:
        yield _section(
            "Kept for the backward, by module",
            "An area is as large as its bytes. Where the plan keeps less, its part of the module "
            "is hatched.",
            pictures.treemap(plan),
        )
    if plan.regions:
        yield _section(
            "What runs again",
            "Instead of being kept, these values are made a second time in the backward. Blocks "
            "that are treated alike share a row.",
            _regions(plan),
        )
    if plan.saved:
        yield _section("What is kept, and why", "", _kept(plan))
    if plan.choices:
        yield _section(
            "What another limit would cost",
            "Each point is a plan. No schedule is below the dashed line, at the estimated times.",
            pictures.pareto(plan),
        )
    notes = [*plan.notes, *policy_notes(plan)]
    if notes:
        items = element("ul", *(element("li", note) for note in notes), cls="notes")
        yield _section("Notes", "", items)
    yield _footer(plan)


def _section(title: str, about: str, *content: object) -> Markup:
    soft = element("p", about, cls="soft") if about else ""
    return element("section", element("h2", title), soft, *content)


def _header(plan: Plan) -> Markup:
    kind, name = _badge(plan)
    found = plan.bounded
    before, after = (format_bytes(t.peak_bytes) for t in (plan.bounded_baseline, found))
    title = f"{which_peak(plan)} {before}, nothing runs again"
    if plan.regions:
        more = more_time(plan, plan.extra_seconds)
        title = f"{which_peak(plan)} {after} instead of {before}, for {more}"
    where = ""
    if found.steps:
        op = plan.graph.op(found.peak_at)
        at = joined("The peak is at ", element("code", op.name))
        where = element("p", at, _in(op), _half(plan), cls="soft")
    return element(
        "header",
        element("span", name, cls=f"verdict {kind}"),
        element("h1", title[0].upper() + title[1:]),
        where,
    )


def _in(op: Op) -> Markup:
    module = joined(" in ", element("code", op.where.module)) if op.where.module else ""
    source = joined(", ", element("code", op.where.source)) if op.where.source else ""
    return joined(module, source)


def _half(plan: Plan) -> str:
    half = half_of(plan.bounded, plan.bounded.peak_index)
    return {"again": ", as it runs again."}.get(half, f", {half}.")


def _badge(plan: Plan) -> tuple[str, str]:
    """Class and text of what is said first."""
    if plan.limit_bytes is None:
        return "knee", "no limit given" + (": the knee of the curve" if plan.choices else "")
    devices = ", ".join(f"{format_bytes(most)} on {name}" for name, most in plan.device_limits)
    limit = devices or format_bytes(plan.limit_bytes)
    if not devices and plan.bounded.peak_bytes > plan.limit_bytes:
        return "fails", f"does not fit {limit}"
    return "fits", f"fits {limit}"


def _facts(plan: Plan) -> Iterator[Markup]:
    whole = plan.bounded_baseline.peak_bytes
    nbytes = plan.bounded.peak_bytes
    named = "activations" if plan.peak is Peak.ACTIVATIONS else "activations and gradients"
    yield _fact(
        format_bytes(nbytes),
        f"peak of {named}",
        f"{percent(nbytes, whole)} of {format_bytes(whole)} without recompute",
        nbytes / max(whole, 1),
    )
    yield _fact(more_time(plan, plan.extra_seconds), "extra, estimated", count_again(plan))
    if plan.regions:
        least = more_time(plan, plan.bound_seconds)
        yield _fact(least, "least extra, proved", "no schedule within the limit takes less")
    yield _fact(
        format_bytes(plan.saved_bytes),
        "kept for the backward",
        f"of {format_bytes(plan.baseline.saved_bytes)} without recompute",
        plan.saved_bytes / max(plan.baseline.saved_bytes, 1),
    )
    yield _fact(
        format_bytes(plan.floor_bytes),
        "floor: lowest limit found",
        f"no schedule stays below {format_bytes(plan.lowest_bytes)}",
        plan.floor_bytes / max(whole, 1),
    )


def _fact(value: str, name: str, more: str, share: float | None = None) -> Markup:
    meter = ""
    if share is not None:
        bar = element("i", style=f"width:{100 * min(1.0, share):.1f}%")
        meter = element("div", bar, cls="meter", aria_hidden="true")
    return element(
        "div",
        element("span", name),
        element("b", value),
        meter,
        element("span", more),
        cls="fact",
    )


def _at_the_peak(plan: Plan) -> Markup:
    """A table of what takes the memory at the peak, the largest first."""
    graph, schedule, found = plan.graph, plan.schedule, plan.bounded
    limited = set(pictures.bounded(plan.peak))
    alive = [
        (value, graph.op(schedule.runs[run]), category)
        for value, run, category in alive_at(graph, schedule, found.peak_index)
        if category in limited and value.nbytes
    ]
    about = f"{len(alive)} tensors, {format_bytes(found.peak_bytes)} with scratch"
    rows = [
        [
            format_bytes(value.nbytes),
            _swatch(category),
            value.name,
            op.where.module,
            op.where.source,
        ]
        for value, op, category in alive[:ALIVE]
    ]
    op = graph.op(found.peak_at)
    if op.scratch_bytes:
        name = f"within {op.name}"
        scratch = [format_bytes(op.scratch_bytes), _swatch(Category.SCRATCH), name]
        rows.append([*scratch, op.where.module, op.where.source])
    if len(alive) > ALIVE:
        rest = sum(value.nbytes for value, _, _ in alive[ALIVE:])
        rows.append([format_bytes(rest), f"{len(alive) - ALIVE} more", "", "", ""])
    columns = [
        Column("bytes", "n"),
        Column("what"),
        Column("tensor", "name"),
        Column("made in", "name"),
        Column("line", "name"),
    ]
    return joined(
        element("h3", "Alive at the peak"),
        element("p", about, cls="soft"),
        table("Alive at the peak", columns, rows, FEW),
    )


def _swatch(category: Category) -> Markup:
    color = element("i", cls="swatch", style=f"--c:var(--{category.value})")
    return Markup(color + escaped(pictures.NAMES[category]))


def _regions(plan: Plan) -> Markup:
    groups = grouped_regions(plan)
    rows = [
        [
            pattern(group.places),
            group.what,
            ", ".join(group.readers),
            group.regions,
            group.runs,
            "-".join(map(str, dict.fromkeys([min(group.often), max(group.often)]))),
            format_bytes(group.nbytes),
            format_count(group.flops),
            format_seconds(group.seconds),
        ]
        for group in groups
    ]
    columns = [
        Column("in", "name"),
        Column("what", "name"),
        Column("needed for", "name"),
        Column("regions", "n"),
        Column("runs", "n"),
        Column("times", "n"),
        Column("frees", "n"),
        Column("FLOP", "n"),
        Column("time", "n"),
    ]
    return table("What runs again", columns, rows, ROWS)


def _kept(plan: Plan) -> Markup:
    rows = [
        [
            group.names[0] + (f" and {len(group.names) - 1} more" if len(group.names) > 1 else ""),
            pattern(group.places),
            format_bytes(group.nbytes),
            group.source,
            group.because,
        ]
        for group in grouped_saved(plan)
    ]
    columns = [
        Column("tensor", "name"),
        Column("made in", "name"),
        Column("bytes", "n"),
        Column("line", "name"),
        Column("because"),
    ]
    return table("What is kept, and why", columns, rows, ROWS)


def _footer(plan: Plan) -> Markup:
    ops, runs = len(plan.graph.ops), len(plan.schedule.runs)
    return element(
        "footer",
        f"Made by fxrecals: {ops} ops, {runs} runs, solver {plan.solver}. 1 MB is 1,000,000 bytes. "
        "Bytes are exact sizes of storages; parameters, buffers and inputs are not counted.",
    )
