"""One compilation of a graph of Dynamo's: AOTAutograd or Inductor traces it, and we partition."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxrecals import _torch
from fxrecals.capture import Joint
from fxrecals.errors import InfeasibleLimitError
from fxrecals.halves import compilers, split
from fxrecals.ir import Graph
from fxrecals.ledger import Held
from fxrecals.sites import Part

Halves = tuple[fx.GraphModule, fx.GraphModule]


class Untraced(Exception):
    """AOTAutograd does not trace a graph, for a reason."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Compilation:
    """One compilation of a graph: carries what the partitioner finds out to whoever asked for it.

    Attributes:
        read: from a joint graph to what planning sees.
        decide: from a graph to a plan, or a schedule.
        hold: what a planned graph holds in a step.
        inner: what runs the halves, "eager" or "inductor".
        named: tells settings apart in Inductor's cache.
        sizes: the values of the symbols in its sizes.
        part: what was planned; None as long as nothing needs a gradient.
        refused: why there is no plan.
        was_traced: whether AOTAutograd could trace it.
    """

    read: Callable[[Joint], Graph]
    decide: Callable[[Graph], Any]
    hold: Callable[[Graph, Any], Held]
    inner: str
    named: tuple[str, ...]
    sizes: Mapping[Any, int]
    part: Part | None = None
    refused: InfeasibleLimitError | None = None
    was_traced: bool = False

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
        return _torch.compile_with_inductor(gm, example_inputs, partitioner, patches)

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
            planned = self.decide(graph)
        except InfeasibleLimitError as error:
            self.refused = error
            raise
        self.part = Part(kept, graph, planned, self.hold(graph, planned))
        return split(
            joint,
            graph,
            self.part.schedule,
            num_fwd_outputs=num_fwd_outputs,
            mutated_inputs=_torch.updated_inputs(joint, num_fwd_outputs),
            lowered=self.inner == "inductor",
        )

    def identity(self) -> tuple[str, ...]:
        """What code generated for this compilation must not be shared beyond."""
        runs = self.part.schedule.runs if self.part is not None else ()
        digest = hashlib.sha256(str(runs).encode()).hexdigest() if runs else ""
        return ("fxrecals", *self.named, digest)
