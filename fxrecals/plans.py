"""The plan as a value: a graph, a schedule of it, and what follows from both.

A `Plan` prints itself as a report, answers scripts by attributes, and travels as JSON. It holds
no tensor and no fx node; what it was traced from is kept beside it only so that it can be
exported, and is no part of its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fxrecals import charts, page, report, schedule
from fxrecals.errors import FxrecalsError
from fxrecals.explanation import Explanation, explain
from fxrecals.ir import Graph, Kind, Op, Peak, Phase, Trait, Value, Where, bounded_graph
from fxrecals.schedule import Region, Schedule
from fxrecals.timeline import Timeline, simulate

VERSION = 1
"""Of the JSON layout."""


class Exporter(Protocol):
    """Writes what a plan was traced from, rewritten along it, into a folder."""

    def __call__(self, plan: Plan, folder: Path) -> None:
        """`folder` exists."""
        ...


@dataclass(frozen=True)
class Choice:
    """One row of the table limit against extra time.

    Attributes:
        limit_bytes: the limit asked.
        peak_bytes: peak of the plan at that limit.
        extra_seconds: its estimated extra time.
        bound_seconds: proved: no schedule within the limit takes less extra time.
    """

    limit_bytes: int
    peak_bytes: int
    extra_seconds: float
    bound_seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What will be kept and what will run again, for one training step.

    Attributes:
        graph: the step.
        schedule: which op runs when.
        limit_bytes: the limit, or None where none was given.
        floor_bytes: the smallest limit for which a schedule was found.
        choices: limit against extra time, where no limit was given.
        solver: name of the solver.
        notes: what the reader should know: graph breaks, ops that are kept and why.
        peak: what limit, floor and choices are about: the peak of activations, or that of the
            step, with gradients of parameters.
        bound_seconds: a proved lower bound on the extra time of every schedule within the limit,
            at the estimated times of the ops; `fxrecals.solve.bound` has the proof. Where no
            limit was given, within the peak of this plan.
        device_limits: the limit of each device in bytes, where each has one; `limit_bytes` is
            then the largest of them.
        lowest_bytes: proved: no schedule of the ops in their order stays below it.
    """

    graph: Graph
    schedule: Schedule
    limit_bytes: int | None
    floor_bytes: int
    choices: tuple[Choice, ...] = ()
    solver: str = "auto"
    notes: tuple[str, ...] = ()
    peak: Peak = Peak.ACTIVATIONS
    bound_seconds: float = 0.0
    device_limits: tuple[tuple[str, int], ...] = ()
    lowest_bytes: int = 0
    exporter: Exporter | None = field(default=None, repr=False, compare=False)

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at each run: `steps` of ``op, again, live_bytes, gradient_bytes,
        allocated_bytes, freed_bytes``."""
        return simulate(self.graph, self.schedule)

    @cached_property
    def baseline(self) -> Timeline:
        """Live bytes at each run of the step without recompute."""
        return simulate(self.graph, Schedule.keeping_everything(self.graph))

    @cached_property
    def bounded(self) -> Timeline:
        """`timeline`, with all among the live bytes that the limit bounds."""
        return simulate(bounded_graph(self.graph, self.peak), self.schedule)

    @cached_property
    def bounded_baseline(self) -> Timeline:
        """`baseline`, with all among the live bytes that the limit bounds."""
        keep = Schedule.keeping_everything(self.graph)
        return simulate(bounded_graph(self.graph, self.peak), keep)

    @property
    def peak_bytes(self) -> int:
        """Largest live total of activation bytes.

        With ``peak="step"`` possibly a little low: an op may free its scratch before it allocates
        a gradient. Where gradients are not bounded, that scratch counts in full; where they are,
        only what goes beyond the gradient. So the peak that is bounded is exact.
        """
        return self.timeline.peak_bytes

    @property
    def step_peak_bytes(self) -> int:
        """Largest live total, gradients of parameters included.

        With ``peak="activations"`` possibly a little high, by scratch; see `peak_bytes`.
        """
        return self.timeline.step_peak_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """Largest live total of activation bytes without recompute."""
        return self.baseline.peak_bytes

    @property
    def baseline_step_peak_bytes(self) -> int:
        """Largest live total without recompute, gradients of parameters included."""
        return self.baseline.step_peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Activation bytes alive between forward and backward, held outputs included."""
        return self.timeline.saved_bytes

    @property
    def baseline_seconds(self) -> float:
        """Estimated time of the step without recompute, in seconds."""
        return self.graph.seconds

    @cached_property
    def extra_seconds(self) -> float:
        """Estimated time of everything that runs again, in seconds."""
        return schedule.extra_seconds(self.graph, self.schedule)

    @cached_property
    def extra_flops(self) -> int:
        """Floating point operations of everything that runs again."""
        return schedule.extra_flops(self.graph, self.schedule)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Maximal runs of recomputed ops in the backward: `ops`, and the op `before` which they
        run."""
        return schedule.regions(self.graph, self.schedule)

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Names of the values kept from the forward for the backward."""
        return schedule.saved(self.graph, self.schedule)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of ops begin with, for each graph of a step that has several."""
        found = dict.fromkeys(
            name.partition(".")[0] for name in self.schedule.forward if "." in name
        )
        return tuple(f"{name}." for name in found) or ("",)

    def part(self, prefix: str, graph: Graph) -> Schedule | None:
        """The schedule of one of the graphs that the step is made of.

        Args:
            prefix: what the names of its ops begin with in the step.
            graph: the graph by itself, without that prefix.

        Returns:
            A schedule of `graph`, or None if it is not that part of this plan.
        """
        callers = [op.name for op in graph.backward[:1] if Trait.CALLER in op.traits]

        def own(names: tuple[str, ...]) -> tuple[str, ...]:
            ours = (name for name in names if name.startswith(prefix))
            return tuple(
                name.removeprefix(prefix)
                for name in ours
                if Trait.CALLER not in self.graph.op(name).traits
            )

        part = Schedule(own(self.schedule.forward), (*callers, *own(self.schedule.backward)))
        return part if schedule.is_valid(graph, part) and self._has_sizes(prefix, graph) else None

    def _has_sizes(self, prefix: str, graph: Graph) -> bool:
        """Whether the activations of a part are as large as they were planned."""
        planned = {name: value.nbytes for name, value in self.graph.values.items()}
        made = (value for value in graph.values.values() if value.kind is Kind.ACTIVATION)
        return all(planned.get(prefix + value.name) == value.nbytes for value in made)

    def explain(self, name: str) -> Explanation:
        """What becomes of a tensor, or of all that a module makes, and why; print it.

        Args:
            name: of a tensor or an op, as the report prints it, or the path of a module.

        Raises:
            OptionError: the plan knows nothing of that name.
        """
        return explain(self, name)

    def __repr__(self) -> str:
        return report.text(self)

    def to_json(self) -> str:
        """The plan as JSON, byte for byte the same for the same plan; see `from_json`."""
        data = {
            "version": VERSION,
            "limit_bytes": self.limit_bytes,
            "floor_bytes": self.floor_bytes,
            "solver": self.solver,
            "peak": self.peak.value,
            "bound_seconds": self.bound_seconds,
            "device_limits": self.device_limits,
            "lowest_bytes": self.lowest_bytes,
            "notes": self.notes,
            "choices": [asdict(choice) for choice in self.choices],
            "schedule": asdict(self.schedule),
            "graph": _graph_data(self.graph),
        }
        return json.dumps(data, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            FxrecalsError: the text is no plan, or one of a later version.
        """
        try:
            data = json.loads(text)
            if data["version"] == VERSION:
                return _read_plan(data)
        except (ValueError, KeyError, TypeError) as error:
            raise FxrecalsError("this is not a plan that Plan.to_json wrote") from error
        raise FxrecalsError(
            f"the plan has layout {data['version']}; this fxrecals reads layout {VERSION}"
        )

    def to_html(self, path: str | Path | None = None) -> str:
        """The plan as one HTML page that needs no network: live bytes over the step, what is kept
        by module, what runs again and why.

        Args:
            path: a file that the page is written to, if given.

        Returns:
            The page.
        """
        text = page.text(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def export(self, folder: str | Path) -> Path:
        """Writes the plan into a folder: ``plan.json``, ``plan.txt``, ``report.html``,
        ``timeline.txt``, ``memory.csv`` and, for a plan made in this process, the rewritten
        forward and backward as Python.

        Args:
            folder: made if it does not exist.

        Returns:
            The folder.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "plan.json").write_text(self.to_json())
        (path / "plan.txt").write_text(repr(self) + "\n")
        (path / "timeline.txt").write_text(report.timeline_text(self) + "\n")
        (path / "memory.csv").write_text(charts.memory_csv(self), encoding="utf-8")
        self.to_html(path / "report.html")
        if self.exporter is not None:
            self.exporter(self, path)
        return path


def _graph_data(graph: Graph) -> dict[str, Any]:
    return {
        "ops": [_op_data(op) for op in graph.ops],
        "values": [asdict(value) for value in graph.values.values()],
        "outputs": graph.outputs,
    }


def _op_data(op: Op) -> dict[str, Any]:
    return {**asdict(op), "traits": sorted(trait.value for trait in op.traits)}


def _read_plan(data: Mapping[str, Any]) -> Plan:
    return Plan(
        graph=_read_graph(data["graph"]),
        schedule=Schedule(*(tuple(data["schedule"][k]) for k in ("forward", "backward"))),
        limit_bytes=data["limit_bytes"],
        floor_bytes=data["floor_bytes"],
        choices=tuple(Choice(**choice) for choice in data["choices"]),
        solver=data["solver"],
        notes=tuple(data["notes"]),
        peak=Peak(data.get("peak", Peak.ACTIVATIONS)),
        bound_seconds=data.get("bound_seconds", 0.0),
        device_limits=tuple((device, limit) for device, limit in data.get("device_limits", ())),
        lowest_bytes=data.get("lowest_bytes", 0),
    )


def _read_graph(data: Mapping[str, Any]) -> Graph:
    values = [_read_value(value) for value in data["values"]]
    return Graph(
        ops=tuple(_read_op(op) for op in data["ops"]),
        values={value.name: value for value in values},
        outputs=tuple(data["outputs"]),
    )


def _read_value(data: Mapping[str, Any]) -> Value:
    read: dict[str, Any] = {"kind": Kind(data["kind"])}
    return Value(**{**data, **read})


def _read_op(data: Mapping[str, Any]) -> Op:
    read: dict[str, Any] = {
        "inputs": tuple(data["inputs"]),
        "outputs": tuple(data["outputs"]),
        "phase": Phase(data["phase"]),
        "traits": frozenset(Trait(trait) for trait in data["traits"]),
        "where": Where(**data["where"]),
    }
    return Op(**{**data, **read})
