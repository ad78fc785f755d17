"""One compilation of a graph of Dynamo's: AOTAutograd or Inductor traces it, and we partition."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fxrecals import _torch
from fxrecals.capture import Joint
from fxrecals.errors import InfeasibleLimitError
from fxrecals.halves import AGAIN, compilers, split
from fxrecals.ir import Graph, Kind, Peak
from fxrecals.ledger import Held
from fxrecals.plans import Plan
from fxrecals.sites import Part

Halves = tuple[fx.GraphModule, fx.GraphModule]


class Untraced(Exception):
    """AOTAutograd does not trace a graph, for a reason."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


def input_shapes(joint: Joint) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a joint graph's forward takes, parameters and buffers apart."""
    nodes = enumerate(joint.module.graph.find_nodes(op="placeholder"))
    given = (n for i, n in nodes if i not in joint.parameter_inputs and not _torch.is_tangent(n))
    values = (node.meta.get("val") for node in given)
    with _torch.sizes_known(dict(joint.sizes)):
        return tuple(
            tuple(map(_torch.hint, value.shape)) for value in values if isinstance(value, Tensor)
        )


@dataclass
class Compilation:
    """One compilation of a graph: carries what the partitioner finds out to whoever asked for it.

    Attributes:
        read: from a joint graph to what planning sees.
        decide: from a graph, and bytes by which to stay below the limit, to a plan, or a schedule.
        hold: what a planned graph holds in a step.
        inner: what runs the halves, "eager" or "inductor".
        is_limited: whether there is a limit on what they take.
        peak: what the limit bounds.
        named: tells settings apart in Inductor's cache.
        sizes: the values of the symbols in its sizes.
        less_bytes: by how much to plan below the limit.
        part: what was planned; None as long as nothing needs a gradient.
        refused: why there is no plan.
        was_traced: whether AOTAutograd could trace it.
    """

    read: Callable[[Joint], Graph]
    decide: Callable[[Graph, int], Any]
    hold: Callable[[Graph, Any], Held]
    inner: str
    is_limited: bool
    peak: Peak
    named: tuple[str, ...]
    sizes: Mapping[Any, int]
    less_bytes: int = 0
    part: Part | None = None
    refused: InfeasibleLimitError | None = None
    was_traced: bool = False
    _peaks: list[int] = field(default_factory=list)

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None
    ) -> Callable[..., Any]:
        """The compiled graph, as a backend returns it; `mode` is `torch.compile`'s."""
        if self.inner == "eager":
            halves = {"partition_fn": self.partition, **compilers()}
            compile_ = _torch.aot_autograd(keep_inference_input_mutations=True, **halves)
            return compile_(gm, example_inputs)
        partitioner = _torch.inductor_partitioner(self.partition, self.identity)
        patches = _torch.inductor_mode(mode)
        return _torch.compile_with_inductor(
            gm, example_inputs, partitioner, patches, self._settings_of, self._may_fuse
        )

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> Halves:
        """AOTAutograd's partitioner: reads, plans, splits."""
        self.was_traced = True
        parameters, sizes = static_lifetime_input_indices or (), tuple(self.sizes.items())
        kept = Joint(joint, num_fwd_outputs, tuple(parameters), sizes=sizes)
        graph = self.read(kept)
        try:
            planned = self.decide(graph, self.less_bytes)
        except InfeasibleLimitError as error:
            self.refused = error.of_inputs(input_shapes(kept))
            raise self.refused from None
        self.part = Part(kept, graph, planned, self.hold(graph, planned))
        return split(
            joint,
            graph,
            self.part.schedule,
            num_fwd_outputs=num_fwd_outputs,
            mutated_inputs=_torch.updated_inputs(joint, num_fwd_outputs),
            lowered=self.inner == "inductor",
        )

    def _settings_of(self, half: fx.GraphModule) -> dict[str, Any]:
        """Inductor's, for a half: its kernels run in the order of the schedule and tell what they
        take; copies in layouts that Inductor prefers are made where they fit beside the plan."""
        if self.part is None or not self.is_limited:
            return {}
        joint, planned = self.part.joint, self.part.planned
        graph = self.part.graph
        scratch = {op.name: op.scratch_bytes for op in graph.ops}
        given = {name for name, value in graph.values.items() if value.kind is Kind.PRIMAL}
        free = () if self.peak is Peak.STEP else joint.parameter_inputs
        settings = _torch.ordering_kernels(
            half,
            self._peaks.append,
            free,
            given,
            lambda name: scratch.get(name.partition(AGAIN)[0], 0),
        )
        copies = _torch.channels_last_bytes(joint.module)
        limit = planned.limit_bytes if isinstance(planned, Plan) else None
        has_room = limit is not None and planned.bounded.peak_bytes + copies <= limit
        return settings if has_room or not copies else {**settings, **_torch.ALL_LAYOUTS_KEPT}

    def _may_fuse(self, half: fx.GraphModule) -> Callable[[set[str]], bool]:
        """Which nodes may become one kernel: what runs again stays between the products and
        convolutions where the schedule has it. Elsewhere it would take memory for longer."""
        graph = self.part.graph if self.part is not None and self.is_limited else None
        heavy = {op.name for op in graph.ops if op.flops} if graph is not None else set[str]()
        gaps: dict[str, int] = {}
        gap = 0
        for node in half.graph.nodes:
            gaps[node.name] = gap
            gap += node.name.partition(AGAIN)[0] in heavy

        def allows(names: set[str]) -> bool:
            if not any(AGAIN in name for name in names):
                return True
            return len({gaps[name] for name in names if name in gaps}) <= 1

        return allows

    def over_bytes(self) -> int:
        """By how much Inductor's halves pass the limit that was planned for; 0 if they do not."""
        planned = self.part.planned if self.part is not None else None
        if self.part is None or not isinstance(planned, Plan) or planned.limit_bytes is None:
            return 0
        return max(0, max(self._peaks, default=0) - planned.limit_bytes - self.less_bytes)

    def identity(self) -> tuple[str, ...]:
        """What code generated for this compilation must not be shared beyond."""
        runs = self.part.schedule.runs if self.part is not None else ()
        digest = hashlib.sha256(str(runs).encode()).hexdigest() if runs else ""
        return ("fxrecals", *self.named, digest)
