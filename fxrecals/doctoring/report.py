"""What an examination says: findings first, then where memory goes, then what a limit would do."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from fxrecals.doctoring.finding import Finding
from fxrecals.formats import format_bytes, format_seconds
from fxrecals.plans import Plan
from fxrecals.report import WIDTH, ascii_only, table


@dataclass(frozen=True)
class Diagnosis:
    """What `fxrecals.doctor` found. It prints as a report.

    Attributes:
        steps: how many were examined.
        findings: what is wrong, the most expensive first.
        bytes_by_category: parameters, gradients, optimizer state, saved for the backward, each at
            its largest.
        plan: where nothing is wrong and activations take the most, what half of their peak as a
            limit would do, or the floor; None otherwise, and where the model cannot be traced.
    """

    steps: int
    findings: tuple[Finding, ...]
    bytes_by_category: dict[str, int]
    plan: Plan | None = None

    @property
    def activations_lead(self) -> bool:
        """Whether what is saved for the backward is the largest category."""
        saved = self.bytes_by_category.get("saved for the backward", 0)
        return 0 < saved == max(self.bytes_by_category.values(), default=0)

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        found: dict[str, Any] = {
            "steps": self.steps,
            "findings": [asdict(finding) for finding in self.findings],
            "bytes_by_category": self.bytes_by_category,
            "limit": None,
        }
        if self.plan is not None:
            names = ("limit_bytes", "peak_bytes", "baseline_peak_bytes", "extra_seconds")
            found["limit"] = {name: getattr(self.plan, name) for name in names}
        return found

    def __repr__(self) -> str:
        parts = [_verdict(self), *map(_finding, self.findings), _categories(self), _advice(self)]
        return ascii_only("\n\n".join(part for part in parts if part))


def _verdict(found: Diagnosis) -> str:
    if not found.findings:
        return f"{found.steps} steps: no fault found"
    count = len(found.findings)
    return f"{found.steps} steps: {count} {'fault' if count == 1 else 'faults'} found"


def _finding(finding: Finding) -> str:
    cost = f"{format_bytes(finding.nbytes)} {finding.when}" if finding.nbytes else finding.when
    place = f"{finding.where}: " if finding.where else ""
    lines = [
        f"{finding.kind}: {cost}",
        *_wrapped(f"{place}{finding.what}"),
        *_wrapped("; ".join(finding.evidence)),
        *_wrapped(f"cure: {finding.cure}"),
    ]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    indent = "  "
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )


def _categories(found: Diagnosis) -> str:
    whole = max(sum(found.bytes_by_category.values()), 1)
    rows = [
        (name, format_bytes(nbytes), f"{100 * nbytes / whole:.0f} %")
        for name, nbytes in found.bytes_by_category.items()
    ]
    return table(("memory goes to", "at most", ""), rows, "lrr")


def _advice(found: Diagnosis) -> str:
    if found.findings:
        return ""
    if not found.activations_lead:
        return (
            "activations are not the most of it: a limit on them saves little; sharding, offload "
            "or an optimizer with less state saves more"
        )
    if found.plan is None:
        return (
            "activations are the most of it; see what a limit would do: fxrecals.compile(model, "
            "limit=...)"
        )
    plan = found.plan
    limit = plan.limit_bytes or 0
    return (
        "activations are the most of it. A limit bounds them:\n"
        f"  peak {format_bytes(plan.peak_bytes)} instead of "
        f"{format_bytes(plan.baseline_peak_bytes)}, +{format_seconds(plan.extra_seconds)} a step "
        f"({100 * plan.extra_seconds / max(plan.baseline_seconds, 1e-12):.0f} % more time)\n"
        f"  model = torch.compile(model, backend=fxrecals.backend(limit={limit}))"
    )
