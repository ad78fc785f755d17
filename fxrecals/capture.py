"""The joint forward and backward graph of a model, traced without running it, and read as `ir`.

`capture` lets Dynamo and AOTAutograd trace a copy of the model under fake tensors: no activation
is allocated, and the parameters may be on `meta`. `read` turns a joint graph, as a
``partition_fn`` gets it, into an `ir.Graph`; `step` joins the graphs of a model that breaks.

    >>> from fxrecals.cost import Free
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    >>> graph = step(capture(model, torch.randn(2, 4)), Free())
    >>> [(op.name, op.where.module) for op in graph.forward if not op.is_view]
    [('addmm', '0'), ('tanh', '1')]

What the reading rests on:

- *Forward* is what the forward outputs need, with what must keep its place (mutation, random
  draws, ops that are not known to be pure). The rest is backward, also where it needs no
  tangent: transposed weights and parts of a formula that only the backward uses. Those move to
  their first reader, or the live sets would hold them from the start.
- *Aliasing* is read off the traced values: two values share a storage if their fake tensors do.
- *Between* forward and backward the caller computes a loss. That is an op here too (trait
  ``CALLER``), which makes the tangents.
"""

from __future__ import annotations

import copy
import operator
import os
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxrecals import _torch
from fxrecals.cost import Call, Cost, OpCost, generators_kept, is_there
from fxrecals.errors import CaptureError
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value, Where

STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Bytes of a generator's state, by device type: those whose draws can be replayed."""

LOSS_TENSORS = 3
"""Tensors of the size of the tangents that the caller's loss holds beside them, at most."""

LOSS_SCALAR_BYTES = 16
"""Bytes of a loss and of the gradient that starts its backward, in any type."""

PINNED = frozenset({Trait.MUTATES, Trait.RANDOM, Trait.OPAQUE, Trait.COLLECTIVE})
"""Traits of ops that stay in the half of the step in which they were traced."""


@dataclass(frozen=True)
class Joint:
    """A joint graph with what its reading needs.

    Attributes:
        module: the joint graph.
        num_fwd_outputs: how many of its outputs the forward returns; the rest are gradients.
        parameter_inputs: indices of the placeholders that are parameters or buffers.
        mutated_inputs: indices of the placeholders that the forward updates.
        stands_for: the device that its CPU tensors stand for, "" for the CPU.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    parameter_inputs: tuple[int, ...]
    mutated_inputs: tuple[int, ...] = ()
    stands_for: str = ""


@dataclass(frozen=True)
class Run:
    """One execution of a joint graph's forward within the step.

    Attributes:
        joint: index in `Captured.joints`.
        prefix: what the names of its ops and values begin with in the step's graph.
        sources: by index of placeholder, the run and output that it came from.
        made: indices of the placeholders that were made between two graphs, in plain Python.
        parameters: by index of placeholder, a number that tells parameters apart.
        results: indices of the forward outputs that the model returns.
    """

    joint: int
    prefix: str
    sources: Mapping[int, tuple[int, int]]
    made: tuple[int, ...]
    parameters: Mapping[int, int]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """What `capture` found.

    Attributes:
        joints: one per compiled graph, in order of first execution.
        runs: executions of them, in order; more than joints where a graph runs several times.
        breaks: why the model is more than one graph, a sentence for each break.
    """

    joints: tuple[Joint, ...]
    runs: tuple[Run, ...]
    breaks: tuple[str, ...]


# --- a joint graph as ir ------------------------------------------------------------------------


@dataclass
class _Slot:
    """One tensor or number among the outputs of a node, and the name that it gets."""

    path: tuple[Any, ...]
    val: Any
    name: str = ""


@dataclass(frozen=True)
class _Program:
    """A joint graph without its getitems.

    Attributes:
        placeholders: inputs of the graph, tangents included.
        calls: nodes that compute, alive ones only, in traced order.
        slots: outputs of every node; those of a getitem are slots of its source.
        storages: name of the storage of each slot, by its name.
        outputs: the graph's outputs, flat; None where there is no gradient.
        stands_for: the device that it would run on, where that is not there; "" for its own.
    """

    placeholders: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    slots: Mapping[fx.Node, Sequence[_Slot]]
    storages: Mapping[str, str]
    outputs: tuple[Any, ...]
    stands_for: str = ""

    def names(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots[node])

    def keys(self, node: fx.Node) -> tuple[str, ...]:
        """Storages of the tensors among a node's outputs."""
        return tuple(self.storages[s.name] for s in self.slots[node] if isinstance(s.val, Tensor))

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """Nodes that a node reads, with getitems replaced by what they are items of."""
        return (_source(self.slots, n) for n in node.all_input_nodes)

    def inputs(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(dict.fromkeys(x for n in node.all_input_nodes for x in self.names(n)))

    def device(self, tensor: Tensor) -> str:
        return self.stands_for or str(tensor.device)


def read(
    joint: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    parameter_inputs: Collection[int],
    mutated_inputs: Collection[int] = (),
    cost: Cost,
    stands_for: str = "",
) -> Graph:
    """A joint graph, as ``partition_fn`` gets it, as an `ir.Graph`. Linear in its nodes.

    Args:
        joint: placeholders are primals, then tangents; every node carries ``meta["val"]``.
        num_fwd_outputs: how many of the outputs the forward returns.
        parameter_inputs: indices of the placeholders whose gradients are not charged
            (``static_lifetime_input_indices`` of a partition function).
        mutated_inputs: indices of placeholders that the caller updates after the forward, beside
            those that the graph itself says are updated.
        cost: what an op costs.
        stands_for: the device that the traced tensors stand for, where it is not there.

    Returns:
        A graph that `ir.verify` accepts. Ops are named after their nodes; an output that a
        getitem takes is named after the getitem.
    """
    program = _program(joint, stands_for)
    descs = _torch.output_descs(joint)
    updated = _updated_storages(program, descs, num_fwd_outputs, mutated_inputs)
    traits = _traits(program, updated, descs, num_fwd_outputs)
    forward = _forward(program, traits, num_fwd_outputs)
    order = _order(program, traits, forward)
    gradients = _gradient_storages(program, descs, num_fwd_outputs, parameter_inputs)
    prices = cost.price([_call(node, program, traits[node], gradients) for node in order])
    ops = _ops(program, order, forward, traits, prices)
    tangents = [n for n in program.placeholders if _torch.is_tangent(n)]
    first = sum(op.phase is Phase.FORWARD for op in ops)
    if tangents:
        ops.insert(first, _loss(program, joint, tangents, descs, num_fwd_outputs))
    values = _values(program, ops, gradients)
    held = (program.names(n) for n in program.outputs[:num_fwd_outputs] if isinstance(n, fx.Node))
    back = (program.names(n) for n in program.outputs[num_fwd_outputs:] if isinstance(n, fx.Node))
    outside = [*_flat(held), *_flat(program.names(n) for n in tangents), *_flat(back)]
    kept = [name for name in dict.fromkeys(outside) if name in values]
    return _with_loss_held(Graph(tuple(ops), values, tuple(kept)))


def _flat(groups: Iterable[Iterable[str]]) -> list[str]:
    return [name for group in groups for name in group]


def _program(joint: fx.GraphModule, stands_for: str = "") -> _Program:
    nodes = list(joint.graph.nodes)
    slots: dict[fx.Node, list[_Slot]] = {}
    for node in nodes:
        slots[node] = _slots(joint, node, slots)
    for node in nodes:
        if not _is_item(node, slots):
            _name_the_rest(node, slots[node])
    outputs = tuple(pytree.tree_leaves(nodes[-1].args[0]))
    alive = _alive(nodes, outputs)
    calls = tuple(
        n
        for n in nodes
        if n in alive
        and n.op not in ("placeholder", "get_attr", "output")
        and not _is_item(n, slots)
    )
    placeholders = tuple(n for n in nodes if n.op == "placeholder")
    return _Program(placeholders, calls, slots, _storages(nodes, slots), outputs, stands_for)


def _slots(
    joint: fx.GraphModule, node: fx.Node, slots: Mapping[fx.Node, list[_Slot]]
) -> list[_Slot]:
    if node.op == "output":
        return []
    if _is_item(node, slots):
        return _item_slots(node, slots)
    val = node.meta.get("val")
    if node.op == "get_attr":
        val = val if isinstance(val, Tensor) else _attribute(joint, str(node.target))
        return [_Slot((), val, node.name)] if isinstance(val, Tensor) else []
    if val is None:
        return []
    if not isinstance(val, (tuple, list, dict)):
        return [_Slot((), val, node.name)]
    return [_Slot(path, leaf) for path, leaf in _leaves(val, ()) if leaf is not None]


def _leaves(val: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if not isinstance(val, (tuple, list, dict)):
        yield path, val
        return
    items = val.items() if isinstance(val, dict) else enumerate(val)
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _attribute(joint: fx.GraphModule, name: str) -> Any:
    return operator.attrgetter(name)(joint)


def _is_item(node: fx.Node, slots: Mapping[fx.Node, list[_Slot]]) -> bool:
    """Whether a node takes one output of another: then it is no op of its own."""
    if node.target is not operator.getitem:
        return False
    return isinstance(node.args[0], fx.Node) and isinstance(
        node.args[0].meta.get("val"), (tuple, list, dict)
    )


def _item_slots(node: fx.Node, slots: Mapping[fx.Node, list[_Slot]]) -> list[_Slot]:
    """The slots of its source that an item is; a lone tensor takes the item's name."""
    source, key = node.args
    depth = _depth(node) - 1
    found = [s for s in slots[source] if s.path[depth] == key]  # type: ignore[index]
    if not isinstance(node.meta.get("val"), (tuple, list, dict)):
        for slot in found:
            slot.name = slot.name or node.name
    return found


def _depth(node: fx.Node) -> int:
    """How many getitems lie between a node and the op that it is an item of."""
    depth = 0
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        depth, node = depth + 1, node.args[0]
    return depth


def _source(slots: Mapping[fx.Node, Sequence[_Slot]], node: fx.Node) -> fx.Node:
    while _is_item(node, slots):  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node


def _name_the_rest(node: fx.Node, slots: list[_Slot]) -> None:
    for index, slot in enumerate(slots):
        slot.name = slot.name or f"{node.name}:{slot.path[0] if len(slot.path) == 1 else index}"


def _storages(nodes: Iterable[fx.Node], slots: Mapping[fx.Node, list[_Slot]]) -> dict[str, str]:
    """Storage names: that of the first value that lives in it."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for node in nodes:
        for slot in slots[node]:
            if slot.name in found:
                continue
            key = _torch.storage_key(slot.val) if isinstance(slot.val, Tensor) else None
            found[slot.name] = slot.name if key is None else first.setdefault(key, slot.name)
    return found


def _alive(nodes: Sequence[fx.Node], outputs: Sequence[Any]) -> set[fx.Node]:
    """Nodes that an output needs, or that do something beside computing their outputs."""
    alive = {n for n in outputs if isinstance(n, fx.Node)}
    for node in reversed(nodes):
        if node in alive or (node.op not in ("placeholder", "output") and _has_effect(node)):
            alive.add(node)
            alive.update(node.all_input_nodes)
    return alive


def _has_effect(node: fx.Node) -> bool:
    return _mutates(node) or _draws(node) or node.is_impure()


# --- traits -------------------------------------------------------------------------------------


def _traits(
    program: _Program, updated: Collection[str], descs: Sequence[Any], num_fwd_outputs: int
) -> dict[fx.Node, frozenset[Trait]]:
    escaped = _escaping(program, descs, num_fwd_outputs)
    return {
        node: frozenset(_node_traits(program, node, updated, escaped)) for node in program.calls
    }


def _node_traits(
    program: _Program, node: fx.Node, updated: Collection[str], escaped: Collection[str]
) -> Iterator[Trait]:
    made = program.keys(node)
    sources = {key for n in node.all_input_nodes for key in program.keys(n)}
    mutates = _mutates(node)
    is_view = bool(made) and sources.issuperset(made) and not mutates
    draws = _draws(node)
    if is_view:
        yield Trait.VIEW
    if mutates:
        yield Trait.MUTATES
    if draws:
        yield Trait.RANDOM
    if _torch.is_collective(node.target):
        yield Trait.COLLECTIVE
    if _torch.must_be_saved(node):
        yield Trait.MUST_SAVE
    stale = not is_view and not sources.isdisjoint(updated)
    if stale and not _only_statistics_are_stale(program, node, updated, escaped):
        yield Trait.OPAQUE
    elif not _is_known(node) or (draws and not _can_be_replayed(program, node)):
        yield Trait.OPAQUE


def _is_known(node: fx.Node) -> bool:
    """Whether an op is known to be a function of its inputs (and of random draws)."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in ("aten", "prims") and not _torch.is_effectful(node)
    return getattr(node.target, "__module__", "") in _torch.SYM_MODULES


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers; the tag alone also marks fused attention without."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return _argument(node, "dropout_p") != 0.0 and not _is_idle_dropout(node)


def _is_idle_dropout(node: fx.Node) -> bool:
    if _argument(node, "train") is False or _argument(node, "training") is False:
        return True
    return "dropout" in str(node.target) and _argument(node, "p") == 0.0


def _argument(node: fx.Node, name: str) -> Any:
    """The value of an argument by its schema name, its default where it is not given."""
    if name in node.kwargs:
        return node.kwargs[name]
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[index] if index < len(node.args) else argument.default_value
    return None


def _can_be_replayed(program: _Program, node: fx.Node) -> bool:
    return _argument(node, "generator") is None and _device(program, node) in STATE_BYTES


def _device(program: _Program, node: fx.Node) -> str:
    """Type of the device on which an op runs."""
    for tensor in _tensors(program, node):
        return program.device(tensor).partition(":")[0]
    return "cpu"


def _tensors(program: _Program, node: fx.Node) -> Iterator[Tensor]:
    for source in (node, *node.all_input_nodes):
        yield from (s.val for s in program.slots[source] if isinstance(s.val, Tensor))


def _updated_storages(
    program: _Program, descs: Sequence[Any], num_fwd_outputs: int, mutated: Collection[int]
) -> frozenset[str]:
    """Storages of inputs that are written to, by an op or by the caller after the forward."""
    inputs = {key for n in program.placeholders for key in program.keys(n)}
    found = {program.storages[program.placeholders[i].name] for i in mutated}
    by_desc = {_torch.input_desc(n): n.name for n in program.placeholders}
    for desc in descs[:num_fwd_outputs]:
        name = by_desc.get(_torch.mutated_by(desc))
        if name is not None:
            found.add(program.storages[name])
    for node in program.calls:
        if _mutates(node):
            found.update(inputs.intersection(_written(program, node)))
    return frozenset(found)


def _written(program: _Program, node: fx.Node) -> Iterator[str]:
    """Storages that a mutating op writes to."""
    for argument in node.target._schema.arguments:  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in pytree.tree_leaves(_argument(node, argument.name)):
                if isinstance(leaf, fx.Node):
                    yield from program.keys(leaf)


def _escaping(program: _Program, descs: Sequence[Any], num_fwd_outputs: int) -> frozenset[str]:
    """Values that reach more than an update of an input: an output, or an op that is no copy."""
    found = {name for n in program.calls if not _mutates(n) for name in _heeded(program, n)}
    for index, node in enumerate(program.outputs):
        is_update = index < num_fwd_outputs and _torch.mutated_by(descs[index]) is not None
        if isinstance(node, fx.Node) and not is_update:
            found.update(program.names(node))
    return frozenset(found)


def _heeded(program: _Program, node: fx.Node) -> Iterator[str]:
    """Inputs that an op's outputs depend on: in training, no running statistics."""
    ignored: list[Any] = []
    if str(node.target).startswith("aten.native_batch_norm_backward"):
        if _argument(node, "train") is True:
            ignored = [_argument(node, "running_mean"), _argument(node, "running_var")]
    for source in node.all_input_nodes:
        if source not in ignored:
            yield from program.names(source)


def _only_statistics_are_stale(
    program: _Program, node: fx.Node, updated: Collection[str], escaped: Collection[str]
) -> bool:
    """Whether a batch norm in training reads updated statistics only to update them.

    A second run then computes other statistics, but nobody reads those: its outputs proper do
    not depend on them.
    """
    if not str(node.target).startswith("aten._native_batch_norm_legit_functional"):
        return False
    if _argument(node, "training") is not True:
        return False
    for name in ("input", "weight", "bias"):
        argument = _argument(node, name)
        if isinstance(argument, fx.Node) and not set(program.keys(argument)).isdisjoint(updated):
            return False
    return all(name not in escaped for name in program.names(node)[3:])


# --- phases and order ---------------------------------------------------------------------------


def _forward(
    program: _Program, traits: Mapping[fx.Node, frozenset[Trait]], num_fwd_outputs: int
) -> frozenset[fx.Node]:
    """Ops of the forward: what its outputs need, and pinned ops that were traced in it."""
    late = _needs_tangents(program)
    wanted = {
        _source(program.slots, n)
        for n in program.outputs[:num_fwd_outputs]
        if isinstance(n, fx.Node)
    }
    for node in reversed(program.calls):
        pinned = bool(traits[node] & PINNED) and not _torch.is_tagged_backward(node)
        if node in wanted or (pinned and node not in late):
            wanted.add(node)
            wanted.update(program.sources(node))
    return frozenset(n for n in program.calls if n in wanted)


def _needs_tangents(program: _Program) -> set[fx.Node]:
    late = {n for n in program.placeholders if _torch.is_tangent(n)}
    for node in program.calls:
        if any(source in late for source in program.sources(node)):
            late.add(node)
    return late


def _order(
    program: _Program,
    traits: Mapping[fx.Node, frozenset[Trait]],
    forward: Collection[fx.Node],
) -> tuple[fx.Node, ...]:
    """Forward ops as traced, then backward ops as traced, save those that can wait for a reader."""
    late = _needs_tangents(program)
    done = dict.fromkeys(n for n in program.calls if n in forward)
    waiting = {
        n for n in program.calls if n not in done and n not in late and not traits[n] & PINNED
    }
    for node in program.calls:
        if node not in waiting and node not in done:
            _emit(program, node, done, waiting)
    for node in program.calls:
        if node not in done:
            _emit(program, node, done, waiting)
    return tuple(done)


def _emit(
    program: _Program, node: fx.Node, done: dict[fx.Node, None], waiting: Collection[fx.Node]
) -> None:
    """Appends a node to `done`, behind what it waits for."""
    stack = [(node, iter(tuple(program.sources(node))))]
    while stack:
        top, sources = stack[-1]
        following = next((n for n in sources if n in waiting and n not in done), None)
        if following is not None:
            stack.append((following, iter(tuple(program.sources(following)))))
        else:
            stack.pop()
            done.setdefault(top)


# --- ops and values -----------------------------------------------------------------------------


def _gradient_storages(
    program: _Program, descs: Sequence[Any], num_fwd_outputs: int, parameters: Collection[int]
) -> frozenset[str]:
    """Storages that the backward returns as gradients of parameters."""
    index = {_torch.input_desc(n): i for i, n in enumerate(program.placeholders)}
    wanted = frozenset(parameters)
    found: set[str] = set()
    for place, node in enumerate(program.outputs[num_fwd_outputs:]):
        input_index = index.get(_torch.gradient_of(descs[num_fwd_outputs + place]), place)
        if isinstance(node, fx.Node) and input_index in wanted:
            found.update(program.keys(node))
    return frozenset(found)


def _call(
    node: fx.Node, program: _Program, traits: frozenset[Trait], gradients: Collection[str]
) -> Call:
    def value(n: fx.Node) -> Any:
        slots = program.slots[n]
        return n.meta["val"] if "val" in n.meta else (slots[0].val if slots else None)

    return Call(
        node.target,
        fx.map_arg(node.args, value),  # type: ignore[arg-type]
        fx.map_arg(node.kwargs, value),  # type: ignore[arg-type]
        node.meta.get("val"),
        frozenset(i for i, key in enumerate(program.keys(node)) if key in gradients),
        is_view=Trait.VIEW in traits,
        is_random=Trait.RANDOM in traits,
        is_known=_is_known(node),
        stands_for=program.stands_for,
    )


def _ops(
    program: _Program,
    order: Sequence[fx.Node],
    forward: Collection[fx.Node],
    traits: Mapping[fx.Node, frozenset[Trait]],
    prices: Sequence[OpCost],
) -> list[Op]:
    places = _Places(program.calls)
    found: list[Op] = []
    for node, price in zip(order, prices, strict=True):
        state = (f"{node.name}:rng",) if Trait.RANDOM in traits[node] else ()
        found.append(
            Op(
                node.name,
                _target(node),
                program.inputs(node),
                program.names(node) + state,
                Phase.FORWARD if node in forward else Phase.BACKWARD,
                price.seconds,
                price.flops,
                price.scratch_bytes + _replay_bytes(program, node, traits[node]),
                traits[node],
                places.of(node),
            )
        )
    return found


def _replay_bytes(program: _Program, node: fx.Node, traits: frozenset[Trait]) -> int:
    """A replay keeps the generator's own state aside while it runs."""
    if Trait.RANDOM not in traits:
        return 0
    return STATE_BYTES.get(torch.device(_device(program, node)).type, 0)


def _target(node: fx.Node) -> str:
    return node._pretty_print_target(node.target)  # the name that fx prints


def _loss(
    program: _Program,
    joint: fx.GraphModule,
    tangents: Sequence[fx.Node],
    descs: Sequence[Any],
    num_fwd_outputs: int,
) -> Op:
    """What the caller does between forward and backward.

    Where the model computes no loss, the gradient of ``square().mean()`` holds three more tensors
    of the size of the tangents for a moment; a cross entropy holds two.
    """
    wanted = {_torch.tangent_of(n) for n in tangents}
    held = [n for n in program.outputs[:num_fwd_outputs] if isinstance(n, fx.Node)]
    pairs = zip(program.outputs[:num_fwd_outputs], descs, strict=False)
    read = [n for n, desc in pairs if isinstance(n, fx.Node) and desc in wanted]
    inputs = dict.fromkeys(_flat(program.names(n) for n in read or held))
    taken = {n.name for n in joint.graph.nodes}
    name = "loss"
    while name in taken:
        name += "_"
    vals = [s.val for n in tangents for s in program.slots[n] if isinstance(s.val, Tensor)]
    outputs = _flat(program.names(n) for n in tangents)
    return _caller(name, tuple(inputs), tuple(outputs), _loss_scratch(vals))


def _with_loss_held(graph: Graph) -> Graph:
    """`graph` with the value of a loss that the caller computes, and the gradient that starts its
    backward: two numbers, held to the end."""
    at = next(
        (i for i, op in enumerate(graph.ops) if op.target == "caller" and op.scratch_bytes), -1
    )
    if at < 0:
        return graph
    loss = graph.ops[at]
    like = graph.values[loss.outputs[0]]
    name = f"{loss.name}:scalars"
    scalars = Value(name, LOSS_SCALAR_BYTES, name, Kind.TANGENT, like.device)
    held = replace(loss, outputs=(*loss.outputs, name))
    return Graph(
        (*graph.ops[:at], held, *graph.ops[at + 1 :]),
        {**graph.values, name: scalars},
        (*graph.outputs, name),
    )


def _caller(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    scratch_bytes: int,
    phase: Phase = Phase.BACKWARD,
) -> Op:
    return Op(
        name,
        "caller",
        inputs,
        outputs,
        phase,
        scratch_bytes=scratch_bytes,
        traits=frozenset({Trait.CALLER}),
    )


def _loss_scratch(tangents: Sequence[Tensor]) -> int:
    if any(_torch.hint(t.numel()) == 1 for t in tangents):
        return 0  # the model has computed its loss by itself
    return LOSS_TENSORS * sum(_torch.storage_bytes(t) for t in tangents)


def _values(program: _Program, ops: Sequence[Op], gradients: Collection[str]) -> dict[str, Value]:
    slots = {s.name: s for group in program.slots.values() for s in group}
    tangents = {x for n in program.placeholders if _torch.is_tangent(n) for x in program.names(n)}
    made = {name for op in ops for name in op.outputs}
    read = {name for op in ops for name in op.inputs}
    inputs = [s.name for n in program.placeholders for s in program.slots[n]]
    inputs += sorted(read - made - set(inputs))  # constants that the trace met
    returned = [x for n in program.outputs if isinstance(n, fx.Node) for x in program.names(n)]
    inputs = list(dict.fromkeys([*inputs, *(x for x in returned if x not in made)]))
    kinds: dict[str, Kind] = {}  # of a storage: decided by the first value that lives in it
    found: dict[str, Value] = {}

    def add(name: str, kind: Kind) -> None:
        slot = slots[name]
        storage = program.storages[name]
        kind = kinds.setdefault(storage, kind)
        if isinstance(slot.val, Tensor):
            nbytes, device = _torch.storage_bytes(slot.val), program.device(slot.val)
            found[name] = Value(name, nbytes, storage, kind, device)
        else:
            found[name] = Value(name, 0, storage, kind)

    for name in inputs:
        if name not in tangents:
            add(name, Kind.PRIMAL)
    for op in ops:
        for name in op.outputs:
            if name not in slots:
                found[name] = _rng_state(name, op, slots, program)
            elif Trait.CALLER in op.traits:
                add(name, Kind.TANGENT)
            elif op.phase is Phase.FORWARD:
                add(name, Kind.ACTIVATION)
            else:
                add(name, _backward_kind(program.storages[name], gradients))
    return found


def _backward_kind(storage: str, gradients: Collection[str]) -> Kind:
    return Kind.GRADIENT if storage in gradients else Kind.BACKWARD


def _rng_state(name: str, op: Op, slots: Mapping[str, _Slot], program: _Program) -> Value:
    vals = (slots[n].val for n in (*op.outputs[:-1], *op.inputs) if n in slots)
    device = next((program.device(v) for v in vals if isinstance(v, Tensor)), "cpu")
    kind = device.partition(":")[0]
    return Value(name, STATE_BYTES.get(kind, 0), name, Kind.RNG_STATE)


# --- where an op comes from ---------------------------------------------------------------------


class _Places:
    """Module and source line of nodes; a backward node has those of its forward node."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self.forward: dict[int, fx.Node] = {}
        for node in nodes:
            number = node.meta.get("seq_nr")
            if number is not None and node.meta.get("nn_module_stack"):
                self.forward.setdefault(number, node)
        self.lines: dict[str, str] = {}
        self.modules: dict[str, str] = {}

    def of(self, node: fx.Node) -> Where:
        twin = self.forward.get(node.meta.get("seq_nr", -1))
        module = self.module(node) or (self.module(twin) if twin else "")
        source = self.source(node) or (self.source(twin) if twin else "")
        return Where(module, source)

    def module(self, node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack:
            return ""
        path = str(next(reversed(stack.values()))[0])
        if path not in self.modules:
            self.modules[path] = module_path(path)
        return self.modules[path]

    def source(self, node: fx.Node) -> str:
        trace = node.meta.get("stack_trace")
        if not trace:
            return ""
        if trace not in self.lines:
            self.lines[trace] = source_line(trace)
        return self.lines[trace]


def module_path(path: str) -> str:
    """A module path as the user would write it.

    >>> module_path("L['self'].layers[0].attention"), module_path("L['fn'].3.1")
    ('layers.0.attention', '3.1')
    >>> module_path("L['self']._modules['head']"), module_path("L['fn']")
    ('head', '')
    """
    path = re.sub(r"^(?:L|G)\['\w+'\]", "", path)
    path = re.sub(r"\._modules\b|\.__closure__\[\d+\]\.cell_contents", "", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return path.strip(".")


def source_line(trace: str) -> str:
    """The innermost line of a stack trace that is not torch's own, as ``file.py:12``.

    >>> source_line('  File "/home/me/net.py", line 12, in forward\\n    x = f(x)\\n')
    'net.py:12'
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    here = os.path.dirname(torch.__file__)
    own = [frame for frame in frames if not frame[0].startswith(here)]
    if not own:
        return ""
    file, line = own[-1]
    return f"{os.path.basename(file)}:{line}"


# --- the whole step -----------------------------------------------------------------------------


def step(captured: Captured, cost: Cost) -> Graph:
    """The graphs of a model as one step: all forwards, the loss, the backwards from last to first.

    Names of run number i begin with ``g<i>.``, unless there is one run only. Between two graphs
    stands an op of trait ``CALLER``: ``g1.inputs`` hands over what the next forward reads,
    ``g0.tangents`` what the previous backward does. A forward op of one graph can run again in
    the backward of that graph only.

    Args:
        captured: what `capture` found.
        cost: what an op costs.

    Returns:
        A graph that `ir.verify` accepts.
    """
    if len(captured.runs) == 1:
        joint = captured.joints[captured.runs[0].joint]
        return _read_joint(joint, joint.parameter_inputs, cost)
    parts = _parts(captured, cost)
    forward: list[Op] = []
    for part in parts:
        forward += [*_handed_inputs(part, parts), *part.graph.forward]
    values = {name: value for part in parts for name, value in part.graph.values.items()}
    aliases: dict[str, Value] = {}  # storage -> the value whose storage it really is
    for part in parts:
        aliases.update(_input_aliases(part, parts, values))
    backward, tangent_aliases = _joined_backward(parts, values)
    aliases.update(tangent_aliases)
    ops = (*forward, *backward)
    return _with_loss_held(Graph(ops, _merged(ops, values, aliases, parts), _held(parts)))


@dataclass(frozen=True)
class _Part:
    """One run of a joint graph, renamed, with what leads into it and out of it.

    Attributes:
        run: the run.
        graph: its own graph, without the loss.
        primals: names of its placeholders that are no tangents.
        outputs: names of its forward outputs, None for what is no tensor.
        tangents: names of its tangents, with the index of the output that each belongs to.
        gradients: by index of placeholder, the value that is its gradient.
        extra: values that add to a parameter's gradient which a later run has made before.
    """

    run: Run
    graph: Graph
    primals: tuple[str, ...]
    outputs: tuple[str | None, ...]
    tangents: Mapping[str, int]
    gradients: Mapping[int, str]
    extra: frozenset[str]


def _read_joint(joint: Joint, parameters: Collection[int], cost: Cost) -> Graph:
    return read(
        joint.module,
        num_fwd_outputs=joint.num_fwd_outputs,
        parameter_inputs=parameters,
        mutated_inputs=joint.mutated_inputs,
        cost=cost,
        stands_for=joint.stands_for,
    )


def _parts(captured: Captured, cost: Cost) -> list[_Part]:
    found: list[_Part] = []
    given: set[int] = set()  # parameters that a later run, earlier in the backward, has served
    for run in reversed(captured.runs):
        joint = captured.joints[run.joint]
        own = [i for i in joint.parameter_inputs if run.parameters.get(i) not in given]
        graph = _renamed(_without_loss(_read_joint(joint, own, cost)), run.prefix)
        found.append(_part(joint, run, graph, own))
        given.update(run.parameters[i] for i in own if i in run.parameters)
    return found[::-1]


def _without_loss(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(op for op in graph.ops if Trait.CALLER not in op.traits))


def _renamed(graph: Graph, prefix: str) -> Graph:
    def new(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    ops = tuple(
        replace(op, name=prefix + op.name, inputs=new(op.inputs), outputs=new(op.outputs))
        for op in graph.ops
    )
    values = {
        prefix + v.name: replace(v, name=prefix + v.name, storage=prefix + v.storage)
        for v in graph.values.values()
    }
    return Graph(ops, values, new(graph.outputs))


def _part(joint: Joint, run: Run, graph: Graph, own: Collection[int]) -> _Part:
    nodes = [n for n in joint.module.graph.nodes if n.op == "placeholder"]
    primals = [n for n in nodes if not _torch.is_tangent(n)]
    program = _program(joint.module)
    descs = _torch.output_descs(joint.module)
    count = joint.num_fwd_outputs
    outputs = [_output_name(program, n, run.prefix) for n in program.outputs]
    by_desc = {desc: i for i, desc in reversed(list(enumerate(descs[:count])))}
    tangents = {
        run.prefix + n.name: by_desc.get(_torch.tangent_of(n), place)
        for place, n in enumerate(n for n in nodes if _torch.is_tangent(n))
    }
    index = {_torch.input_desc(n): i for i, n in enumerate(primals)}
    gradients = {
        index.get(_torch.gradient_of(descs[count + i]), i): name
        for i, name in enumerate(outputs[count:])
        if name is not None
    }
    extra = {gradients[i] for i in joint.parameter_inputs if i in gradients and i not in own}
    return _Part(
        run,
        graph,
        tuple(run.prefix + n.name for n in primals),
        tuple(outputs[:count]),
        tangents,
        gradients,
        frozenset(extra),
    )


def _output_name(program: _Program, node: Any, prefix: str) -> str | None:
    if not isinstance(node, fx.Node) or not program.slots[node]:
        return None
    return prefix + program.slots[node][0].name


def _handed_inputs(part: _Part, parts: Sequence[_Part]) -> Iterator[Op]:
    """What makes those inputs of a graph that were made within the step."""
    made = sorted({*part.run.sources, *part.run.made})
    outputs = tuple(part.primals[i] for i in made)
    sources = (parts[run].outputs[k] for run, k in part.run.sources.values())
    inputs = tuple(dict.fromkeys(name for name in sources if name is not None))
    if outputs:
        yield _caller(f"{part.run.prefix}inputs", inputs, outputs, 0, Phase.FORWARD)


def _input_aliases(
    part: _Part, parts: Sequence[_Part], values: Mapping[str, Value]
) -> Iterator[tuple[str, Value]]:
    for i, (run, k) in part.run.sources.items():
        source = parts[run].outputs[k]
        if source is not None:
            yield values[part.primals[i]].storage, values[source]


def _joined_backward(
    parts: Sequence[_Part], values: Mapping[str, Value]
) -> tuple[list[Op], dict[str, Value]]:
    loss = _loss_tangents(parts, values)
    returned = [p.outputs[k] for p in parts for k in p.run.results if k < len(p.outputs)]
    read_by_loss = tuple(dict.fromkeys(name for name in returned if name in values))
    sizes = [values[name].nbytes for name in loss]
    scratch = 0 if any(n <= 8 for n in sizes) else LOSS_TENSORS * sum(sizes)
    name = "loss"
    ops = [_caller(name, read_by_loss, tuple(loss), scratch)]  # type: ignore[arg-type]
    aliases: dict[str, Value] = {}
    previous: tuple[str, ...] = ()
    for index in reversed(range(len(parts))):
        part = parts[index]
        rest = tuple(t for t in part.tangents if t not in loss)
        sources = {t: _contributions(parts, index, part.tangents[t]) for t in rest}
        read = dict.fromkeys([*_flat(sources.values()), *previous])
        if rest or previous:
            ops.append(_caller(f"{part.run.prefix}tangents", tuple(read), rest, 0))
        for tangent, given in sources.items():
            if len(given) == 1:
                aliases[values[tangent].storage] = values[given[0]]
        ops += part.graph.backward
        previous = tuple(part.tangents)
    return ops, aliases


def _contributions(parts: Sequence[_Part], index: int, output: int) -> list[str]:
    """Gradients that later graphs return for one output of a graph."""
    return [
        part.gradients[i]
        for part in parts[index + 1 :]
        for i, source in part.run.sources.items()
        if source == (index, output) and i in part.gradients
    ]


def _loss_tangents(parts: Sequence[_Part], values: Mapping[str, Value]) -> list[str]:
    """Tangents that the caller's loss makes: of the scalar that the model returns, or of all."""
    found = [
        tangent
        for index, part in enumerate(parts)
        for tangent, k in part.tangents.items()
        if k in part.run.results and not _contributions(parts, index, k)
    ]
    scalars = [t for t in found if values[t].nbytes <= 8]
    return scalars or found


def _merged(
    ops: Sequence[Op],
    values: Mapping[str, Value],
    aliases: Mapping[str, Value],
    parts: Sequence[_Part],
) -> dict[str, Value]:
    """All values in order of creation, in the storages that they really have."""
    inputs_made = {o for op in ops if Trait.CALLER in op.traits for o in op.outputs}
    made = {
        values[o].storage
        for op in ops
        if Trait.CALLER in op.traits and op.phase is Phase.FORWARD
        for o in op.outputs
    }
    order = [name for name in values if values[name].kind is Kind.PRIMAL]
    order = [name for name in order if name not in inputs_made]
    order += [o for op in ops for o in op.outputs]
    found: dict[str, Value] = {}
    for name in dict.fromkeys(order):
        value = values[name]
        root = value
        while root.storage in aliases:
            root = aliases[root.storage]
        kind = Kind.ACTIVATION if root.storage in made else root.kind
        kind = value.kind if value.kind is Kind.RNG_STATE else kind
        found[name] = replace(value, storage=root.storage, nbytes=root.nbytes, kind=kind)
    return found


def _held(parts: Sequence[_Part]) -> tuple[str, ...]:
    """What someone holds to the end: results, the first graph's tangents, gradients."""
    results = [p.outputs[k] for p in parts for k in p.run.results if k < len(p.outputs)]
    passed = {part.gradients[i] for part in parts for i in part.run.sources if i in part.gradients}
    grads = [g for p in parts for g in p.gradients.values() if g not in p.extra]
    names = [*results, *parts[0].tangents, *(g for g in grads if g not in passed)]
    return tuple(dict.fromkeys(name for name in names if name is not None))


# --- tracing ------------------------------------------------------------------------------------


def capture(
    model: nn.Module, example: Any, *, device: str | torch.device | None = None
) -> Captured:
    """Traces one training step of a copy of a model, on fake tensors.

    No activation memory is allocated, and the model, the example and the random generators are
    left as they were.

    Args:
        model: in the mode (train or eval) in which it is to be planned.
        example: what it is called with: a tensor, a tuple or list of positional arguments, or a
            dict of keyword arguments.
        device: where parameters on ``meta`` would be, and the example with them; by default
            where the example is, or the CPU. Parameters elsewhere stay. A device that is not
            there is traced on the CPU, with the CPU's choice of kernels, and written as itself.

    Returns:
        The joint graphs, in order of execution, and why there is more than one.

    Raises:
        CaptureError: the example does not fit the model, nothing requires a gradient, or the
            tracer finds nothing that it can trace.

    >>> capture(torch.nn.Linear(2, 2), torch.ones(1, 2)).breaks
    ()
    """
    model = _torch.original(model)
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"model is a {type(model).__name__}; what works: a torch.nn.Module, "
            "for a function one whose forward calls it"
        )
    _check_gradients(model, example)
    mode = _torch.fake_mode()
    target = _meta_device(example, device)
    absent = "" if is_there(target) else str(target)
    stand_in = torch.device("cpu") if absent else target
    twin, args, kwargs = _fake_twins(mode, model, example, stand_in)
    recorder = _Recorder(_outside(twin, (args, kwargs)), absent)
    with _undisturbed(), _torch.quiet(), mode:
        out = _run(recorder, twin, args, kwargs, model, example)
    return recorder.captured(out)


def _check_gradients(model: nn.Module, example: Any) -> None:
    tensors = [*model.parameters(), *(x for x in pytree.tree_leaves(example) if _is_tensor(x))]
    if not any(t.requires_grad for t in tensors):
        count = sum(1 for _ in model.parameters())
        raise CaptureError(
            f"none of the {count} parameters of {type(model).__name__} requires a gradient, nor "
            "does the example, so there is no backward to plan; what works: "
            "model.requires_grad_(), or an example with requires_grad=True"
        )


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _meta_device(example: Any, device: str | torch.device | None) -> torch.device:
    """Where tensors on meta would be."""
    if device is not None:
        return torch.device(device)
    found = (x.device for x in pytree.tree_leaves(example) if _is_tensor(x))
    return next((d for d in found if d.type != "meta"), torch.device("cpu"))


def _fake_twins(
    mode: Any, model: nn.Module, example: Any, target: torch.device
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A copy of the model and the arguments, with fake tensors in place of all their own."""
    moved = any(p.device.type == "meta" for p in [*model.parameters(), *model.buffers()])
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(mode, tensor, target)
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for tracing: {error}; what works: a model "
            "that copy.deepcopy accepts"
        ) from error

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return memo[id(x)] if id(x) in memo else _fake(mode, x, target, moved)

    args, kwargs = _arguments(pytree.tree_map(fake, example))
    return twin, args, kwargs


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        leaves = pytree.tree_leaves({k: v for k, v in vars(module).items() if k[0] != "_"})
        yield from (x for x in leaves if isinstance(x, Tensor))


def _fake(mode: Any, tensor: Tensor, target: torch.device, moved: bool = False) -> Tensor:
    to = target if tensor.device.type == "meta" or moved else None
    return _torch.fake(mode, tensor, to)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def _outside(model: nn.Module, arguments: Any) -> dict[int, int]:
    """Storages that exist before the step, with a number each."""
    tensors = [*_tensors_of(model), *(x for x in pytree.tree_leaves(arguments) if _is_tensor(x))]
    keys = (_torch.storage_key(t) for t in tensors)
    return {key: i for i, key in enumerate(dict.fromkeys(k for k in keys if k is not None))}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients on; random generators of torch and Python are put back."""
    state = random.getstate()
    try:
        with generators_kept(), torch.inference_mode(False), torch.enable_grad():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
    finally:
        random.setstate(state)


def _run(
    recorder: _Recorder,
    twin: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module,
    example: Any,
) -> Any:
    compiled = _torch.compile_apart(twin, recorder.backend)
    try:
        return compiled(*args, **kwargs)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be traced with example={_described(example)}: "
            f"{_torch.root_reason(error)}; what works: {_remedy(error)}"
        ) from error


def _remedy(error: Exception) -> str:
    if _torch.depends_on_data(error):
        return (
            "a model whose Python does not branch on values of tensors, or "
            "torch.compile(model, backend=fxrecals.backend(limit)), which plans each graph when "
            "the step reaches it"
        )
    return (
        "an example with which the model runs, as a tensor, a tuple of arguments or a dict of "
        "keyword arguments; if it does run, torch.compile cannot trace it, and "
        "torch.utils.checkpoint around parts of it is the way"
    )


def _described(example: Any) -> str:
    """An example in words, tensors by shape."""
    if isinstance(example, Tensor):
        return f"Tensor{tuple(example.shape)} {str(example.dtype).removeprefix('torch.')}"
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{k!r}: {_described(v)}" for k, v in example.items()) + "}"
    if isinstance(example, (tuple, list)):
        return "(" + ", ".join(_described(x) for x in example) + ")"
    return repr(example)[:60]


@dataclass(frozen=True)
class _Executed:
    """One execution of a compiled forward: which joint, storages that came in and went out."""

    joint: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


class _Recorder:
    """A Dynamo backend that keeps joint graphs, and notes which values pass between them."""

    def __init__(self, outside: dict[int, int], stands_for: str) -> None:
        self.outside = outside
        self.stands_for = stands_for
        self.joints: list[Joint] = []
        self.executed: list[_Executed] = []
        self.breaks: list[str] = []
        self.graphs = 0
        self.alive: list[Any] = []  # storages are compared by address: none may be freed meanwhile
        self._pending: Joint | None = None
        self._aot = _torch.aot_autograd(
            fw_compiler=self._compile_forward,
            bw_compiler=lambda gm, inputs: _torch.box(gm),
            inference_compiler=lambda gm, inputs: _torch.box(gm),
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        reason = _torch.break_reason(gm)
        if reason:
            self.breaks.append(reason)
        return self._aot(gm, inputs)

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = tuple(options.get("static_lifetime_input_indices") or ())
        kept = _torch.copy_graph(joint)
        self._pending = Joint(kept, num_fwd_outputs, static, stands_for=self.stands_for)
        return _torch.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def _compile_forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self._pending is not None, "AOTAutograd partitions before it compiles a forward"
        index, joint = len(self.joints), self._pending
        self.joints.append(joint)
        run = _torch.box(gm)

        def forward(args: list[Any]) -> Any:
            keys = tuple(self._key(x) for x in args)
            out = run(args)
            made = tuple(self._key(x) for x in out[: joint.num_fwd_outputs])
            self.executed.append(_Executed(index, keys, made))
            return out

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def _key(self, x: Any) -> int | None:
        if not isinstance(x, Tensor):
            return None
        self.alive.append(x)
        return _torch.storage_key(x)

    def captured(self, result: Any) -> Captured:
        if not self.executed:
            raise CaptureError(self._nothing())
        returned = {self._key(x) for x in pytree.tree_leaves(_plain(result))}
        runs = tuple(self._run(i, returned) for i in range(len(self.executed)))
        return Captured(tuple(self.joints), runs, tuple(self.breaks))

    def _nothing(self) -> str:
        if self.graphs:
            return (
                "no traced graph needs a gradient: what was traced runs under no_grad, or is "
                "detached; what works: a model whose output requires a gradient"
            )
        return (
            "nothing could be traced: torch.compile skips this model (an nn.LSTM or nn.GRU, a "
            "disabled compiler, or a break in every line); what works: for recurrent layers "
            "torch._dynamo.config.allow_rnn = True, else torch.utils.checkpoint"
        )

    def _run(self, index: int, returned: Collection[int | None]) -> Run:
        run = self.executed[index]
        joint = self.joints[run.joint]
        before = {
            key: (i, k)
            for i, earlier in enumerate(self.executed[:index])
            for k, key in enumerate(earlier.outputs)
            if key is not None and key not in self.outside
        }
        known = [(i, k) for i, k in enumerate(run.inputs) if k is not None]
        return Run(
            joint=run.joint,
            prefix=f"g{index}." if len(self.executed) > 1 else "",
            sources={i: before[key] for i, key in known if key in before},
            made=tuple(i for i, k in known if k not in before and k not in self.outside),
            parameters={
                i: self.outside[key]
                for i, key in known
                if i in joint.parameter_inputs and key in self.outside
            },
            results=tuple(
                k for k, key in enumerate(run.outputs) if key is not None and key in returned
            ),
        )


def _plain(result: Any) -> Any:
    """A result with its dataclasses as dicts, so that tensors in them are found."""
    if isinstance(result, Mapping):
        return {key: _plain(x) for key, x in result.items()}
    if isinstance(result, (tuple, list)):
        return [_plain(x) for x in result]
    if hasattr(result, "__dict__") and not isinstance(result, Tensor):
        return {key: x for key, x in vars(result).items() if isinstance(x, (Tensor, tuple, list))}
    return result
