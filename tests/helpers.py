"""What the tests share: schedules by hand, a small reader of joint graphs, a measured peak.

The reader here, `read`, is simpler than `fxrecals.reading` on purpose: the rewrite is tested
without that one. Steps are judged by `benchmarks.measure`, which knows nothing of how they ran.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from benchmarks.measure import step_memory
from fxrecals import _torch, schedule
from fxrecals.capture import capture, step
from fxrecals.cost import Free
from fxrecals.halves import compilers, split
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value, verify
from fxrecals.schedule import Schedule

Scheduler = Callable[[Graph], Schedule]


# --- schedules by hand -------------------------------------------------------------------------


def just_in_time(graph: Graph) -> Schedule:
    """Saves nothing that can be computed: each backward op is preceded by all that it needs."""
    backward: list[str] = []
    for op in graph.backward:
        wanted: set[str] = set()
        _want(graph, op, wanted)
        backward += [o.name for o in graph.forward if o.name in wanted]
        backward.append(op.name)
    return Schedule(tuple(op.name for op in graph.forward), tuple(backward))


def _want(graph: Graph, op: Op, wanted: set[str]) -> None:
    for name in op.inputs:
        source = graph.producer.get(name)
        if source is not None and source.may_run_again and source.name not in wanted:
            wanted.add(source.name)
            _want(graph, source, wanted)


def at_random(seed: int) -> Scheduler:
    """Runs forward ops again anywhere, in forward order, each time with odds of one in four."""
    dice = random.Random(seed)

    def schedule_of(graph: Graph) -> Schedule:
        backward: list[str] = []
        for op in graph.backward:
            again = [o.name for o in graph.forward if o.may_run_again and dice.random() < 0.25]
            backward += [*again, op.name]
        return Schedule(tuple(op.name for op in graph.forward), tuple(backward))

    return schedule_of


# --- a model as planning sees it ---------------------------------------------------------------


def graph_of(model: nn.Module, example: object, device: str | None = None) -> Graph:
    """The step of a model, priced at nothing."""
    graph = step(capture(model, example, device=device), Free())
    verify(graph)
    return graph


# --- a backend that follows them ---------------------------------------------------------------


@dataclass
class Split:
    """What one compilation gave."""

    joint: fx.GraphModule
    graph: Graph
    schedule: Schedule
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int


@dataclass
class ByHand:
    """A Dynamo backend that runs the schedules of `scheduler`, and keeps what it made."""

    scheduler: Scheduler
    splits: list[Split] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        compile_ = _torch.aot_autograd(
            partition_fn=self._partition, keep_inference_input_mutations=True, **compilers()
        )
        return compile_(gm, example_inputs)

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        mutated = _torch.updated_inputs(joint, num_fwd_outputs)
        graph = read(joint, num_fwd_outputs)
        plan = self.scheduler(graph)
        schedule.verify(graph, plan)
        halves = split(joint, graph, plan, num_fwd_outputs=num_fwd_outputs, mutated_inputs=mutated)
        self.splits.append(Split(joint, graph, plan, *halves, num_fwd_outputs))
        return halves


# --- a small reader of joint graphs ------------------------------------------------------------


def read(joint: fx.GraphModule, num_fwd_outputs: int) -> Graph:
    """A joint graph as planning sees it, with seconds of 1 and no scratch bytes."""
    nodes = list(joint.graph.nodes)
    outputs = [x for x in tree_leaves(nodes[-1].args) if isinstance(x, fx.Node) or x is None]
    written = [node for node in nodes if _torch.writes_arguments(node.target)]
    forward = _ancestors([*written, *(x for x in outputs[:num_fwd_outputs] if x is not None)])
    values: dict[str, Value] = {}
    ops: list[Op] = []
    for node in nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], Tensor):
            kind = Kind.TANGENT if _torch.is_tangent(node) else Kind.PRIMAL
            values[node.name] = _value(node, kind)
        if _is_op(node):
            ops.append(_op(node, forward, values))
    held = [x.name for x in outputs if x is not None and x.name in values]
    held += [name for name, value in values.items() if value.kind is Kind.TANGENT]
    ops.sort(key=lambda op: op.phase is Phase.BACKWARD)
    graph = Graph(tuple(ops), values, tuple(dict.fromkeys(held)))
    verify(graph)
    return graph


def _is_op(node: fx.Node) -> bool:
    taken = node.target is operator.getitem
    return node.op == "call_function" and not taken and not _torch.is_symbol(node)


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _op(node: fx.Node, forward: set[fx.Node], values: dict[str, Value]) -> Op:
    tags = getattr(node.target, "tags", ())
    traits: set[Trait] = set()
    mutates = _torch.writes_arguments(node.target)
    phase = Phase.FORWARD if node in forward else Phase.BACKWARD
    kind = Kind.ACTIVATION if phase is Phase.FORWARD else Kind.BACKWARD
    made = [n for n in _taken(node) if isinstance(n.meta["val"], Tensor)]
    for result in made:
        values[result.name] = _value(result, kind)
    names = [result.name for result in made]
    if mutates:
        traits.add(Trait.MUTATES)
    if torch.Tag.nondeterministic_seeded in tags:
        traits.add(Trait.RANDOM)
        names.append(f"{node.name}:rng")
        values[names[-1]] = Value(names[-1], 5056, names[-1], Kind.RNG_STATE)
    if _torch.draws_seed(node.target):
        traits.add(Trait.OPAQUE)
    inputs = tuple(n.name for n in node.all_input_nodes if n.name in values)
    if any(values[n].storage == values[m.name].storage for n in inputs for m in made):
        traits.add(Trait.VIEW)
    made_names, target = tuple(names), str(node.target)
    return Op(node.name, target, inputs, made_names, phase, 1.0, traits=frozenset(traits))


def _taken(node: fx.Node) -> list[fx.Node]:
    """The tensors that an op makes, as nodes."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    parts = [user for user in node.users if user.target is operator.getitem]
    return [tensor for part in parts for tensor in _taken(part)]


def _value(node: fx.Node, kind: Kind) -> Value:
    storage = node.meta["val"].untyped_storage()
    size = storage.nbytes()
    nbytes = size if isinstance(size, int) else 1
    return Value(node.name, nbytes, str(storage._cdata), kind)


# --- what the allocator handed out -------------------------------------------------------------


def peak_bytes(step: Callable[[], Any], model: nn.Module) -> int:
    """Largest live total of a step on the CPU, parameter gradients left out, above its start."""
    return step_memory(step, model, warmup=0).activations
