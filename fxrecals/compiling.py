"""One compilation of a graph of Dynamo's: AOTAutograd or Inductor traces it, and we partition."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fxrecals import _torch
from fxrecals.capture import Joint
from fxrecals.errors import InfeasibleLimitError
from fxrecals.halves import AGAIN, compilers, split
from fxrecals.ir import Graph, Peak, Trait, is_charged
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


def handed_bytes(graph: Graph, but: Collection[str] = ()) -> int:
    """Bytes of what the forward of a graph hands to its caller, values of some names apart."""
    forward = (op for op in graph.forward if Trait.CALLER in op.traits)
    handed = (graph.values[name] for op in forward for name in op.inputs if name not in but)
    return sum({value.storage: value.nbytes for value in handed if is_charged(value)}.values())


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
        settings: Inductor's, for the halves.
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
    settings: dict[str, Any] = field(default_factory=dict)
    _lowered: list[_torch.Lowered] = field(default_factory=list)

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
            gm, example_inputs, partitioner, patches, lambda: self.settings
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
        if self.inner == "inductor" and self.is_limited:
            self.settings = self._settings_of_halves(graph, planned, kept)
        return split(
            joint,
            graph,
            self.part.schedule,
            num_fwd_outputs=num_fwd_outputs,
            mutated_inputs=_torch.updated_inputs(joint, num_fwd_outputs),
            lowered=self.inner == "inductor",
        )

    def _settings_of_halves(self, graph: Graph, planned: Any, kept: Joint) -> dict[str, Any]:
        """Inductor's, for the halves: they tell what they take, and make no copies in layouts that
        Inductor prefers, unless these fit beside what was planned."""
        scratch = {op.name: op.scratch_bytes for op in graph.ops}
        free = () if self.peak is Peak.STEP else kept.parameter_inputs
        settings = _torch.noting_lowered(
            self._lowered.append, free, lambda name: scratch.get(name.partition(AGAIN)[0], 0)
        )
        copies = _torch.channels_last_bytes(kept.module)
        limit = planned.limit_bytes if isinstance(planned, Plan) else None
        has_room = limit is not None and planned.bounded.peak_bytes + copies <= limit
        return settings if has_room or not copies else {**settings, **_torch.ALL_LAYOUTS_KEPT}

    def over_bytes(self) -> int:
        """By how much Inductor's halves pass the limit that was planned for; 0 if they do not."""
        planned = self.part.planned if self.part is not None else None
        if self.part is None or not isinstance(planned, Plan) or planned.limit_bytes is None:
            return 0
        given = [name for half in self._lowered if half.is_backward for name in half.given]
        handed = handed_bytes(self.part.graph, set(given))
        peaks = [half.peak_bytes + handed * half.is_backward for half in self._lowered]
        return max(0, max(peaks, default=0) - planned.limit_bytes - self.less_bytes)

    def identity(self) -> tuple[str, ...]:
        """What code generated for this compilation must not be shared beyond."""
        runs = self.part.schedule.runs if self.part is not None else ()
        digest = hashlib.sha256(str(runs).encode()).hexdigest() if runs else ""
        return ("fxrecals", *self.named, digest)
