"""A joint graph of forward and backward, as a ``partition_fn`` gets it, read as `ir`.

    >>> from fxrecals.capture import capture
    >>> from fxrecals.cost import Free
    >>> (joint,) = capture(torch.nn.Linear(4, 4), torch.ones(2, 4)).joints
    >>> graph = read(joint.module, num_fwd_outputs=1, parameter_inputs=(0, 1), cost=Free())
    >>> [(op.name, op.phase.value) for op in graph.ops if not op.is_view]
    [('addmm', 'forward'), ('loss', 'backward'), ('mm', 'backward'), ('sum_1', 'backward')]

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

import operator
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxrecals import _torch, convolutions, policies, rng
from fxrecals.cost import Call, Cost, OpCost
from fxrecals.errors import CALLERS_LOSS
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value, Where

STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Bytes of a generator's state, by device type: those whose draws can be replayed."""

LOSS_TENSORS = 3
"""Tensors of the size of the tangents that the caller's loss holds beside them, at most."""

LOSS_SCALAR_BYTES = 16
"""Bytes of a loss and of the gradient that starts its backward, in any type."""

PINNED = frozenset({Trait.MUTATES, Trait.RANDOM, Trait.OPAQUE, Trait.COLLECTIVE})
"""Traits of ops that stay in the half of the step in which they were traced."""

POLICIES = {
    "MUST_SAVE": Trait.MUST_SAVE,
    "PREFER_SAVE": Trait.PREFER_SAVE,
    "PREFER_RECOMPUTE": Trait.PREFER_RECOMPUTE,
    "MUST_RECOMPUTE": Trait.MUST_RECOMPUTE,
}
"""Traits by the name of the user's checkpoint policy."""


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
            Backwards of convolutions are split in it, in place: `fxrecals.convolutions`. What the
            user's checkpoints must not keep is written twice: `fxrecals.policies`.
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
    if not stands_for:
        convolutions.split(joint)
    program = _program(joint, num_fwd_outputs, stands_for)
    _warn_of_unknown_sizes(program)
    mutated = {*mutated_inputs, *_torch.updated_inputs(joint, num_fwd_outputs)}
    traits = _traits(program, _updated_storages(program, mutated))
    forward = _forward(program, traits)
    not_kept = {node for node in forward if _must_run_again(node, traits[node])}
    if not_kept and policies.run_again(joint, not_kept, *_of_backward(program, traits, forward)):
        program = _program(joint, num_fwd_outputs, stands_for)
        traits = _traits(program, _updated_storages(program, mutated))
        forward = _forward(program, traits)
    order = _order(program, traits, forward)
    gradients = _gradient_storages(program, parameter_inputs)
    prices = cost.price([_call(program, node, traits[node], gradients) for node in order])
    ops = _ops(program, order, forward, traits, prices)
    if program.tangents:
        ops.insert(len(forward), _loss(program))
    values = _values(program, ops, gradients)
    held = [*program.forward_nodes, *program.tangents, *program.backward_nodes]
    outputs = dict.fromkeys(name for node in held for name in program.names(node))
    return with_loss_held(Graph(tuple(ops), values, tuple(outputs)))


# --- a joint graph without its getitems ---------------------------------------------------------


@dataclass
class _Slot:
    """One tensor or number among the outputs of a node, and the name that it gets."""

    path: tuple[Any, ...]
    val: Any
    name: str = ""


class _Output(NamedTuple):
    """What a joint graph returns in one place.

    Attributes:
        node: None for a constant, and where there is no gradient.
        desc: torch's description of it, None where unknown.
    """

    node: fx.Node | None
    desc: Any


@dataclass(frozen=True)
class _Program:
    """A joint graph without its getitems.

    Attributes:
        placeholders: inputs of the graph, tangents included.
        calls: nodes that compute, alive ones only, in traced order.
        slots: outputs of every node; those of a getitem are slots of its source.
        storage_of: name of the storage of each slot, by its name.
        forward_outputs: what the forward returns.
        backward_outputs: what the backward returns.
        stands_for: the device that it would run on, where that is not there; "" for its own.
    """

    placeholders: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    slots: Mapping[fx.Node, Sequence[_Slot]]
    storage_of: Mapping[str, str]
    forward_outputs: tuple[_Output, ...]
    backward_outputs: tuple[_Output, ...]
    stands_for: str

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.placeholders if _torch.is_tangent(n))

    @property
    def forward_nodes(self) -> tuple[fx.Node, ...]:
        return tuple(out.node for out in self.forward_outputs if out.node)

    @property
    def backward_nodes(self) -> tuple[fx.Node, ...]:
        return tuple(out.node for out in self.backward_outputs if out.node)

    def names(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots[node])

    def storages(self, node: fx.Node) -> tuple[str, ...]:
        """Storages of the tensors among a node's outputs."""
        return tuple(self.storage_of[s.name] for s in self.slots[node] if isinstance(s.val, Tensor))

    def inputs(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(dict.fromkeys(x for n in node.all_input_nodes for x in self.names(n)))

    def device(self, tensor: Tensor) -> str:
        return self.stands_for or str(tensor.device)

    def device_type(self, node: fx.Node) -> str:
        """Type of the device on which an op runs."""
        for source in (node, *node.all_input_nodes):
            for slot in self.slots[source]:
                if isinstance(slot.val, Tensor):
                    return self.device(slot.val).partition(":")[0]
        return "cpu"


def _program(joint: fx.GraphModule, num_fwd_outputs: int, stands_for: str = "") -> _Program:
    nodes = list(joint.graph.nodes)
    slots: dict[fx.Node, list[_Slot]] = {}
    for node in nodes:
        slots[node] = _slots(joint, node, slots)
    for node in nodes:
        if not _is_item(node):
            _name_the_rest(node, slots[node])
    outputs = _outputs(joint)
    alive = _alive(nodes, outputs)
    return _Program(
        placeholders=tuple(n for n in nodes if n.op == "placeholder"),
        calls=tuple(n for n in nodes if n in alive and _computes(n)),
        slots=slots,
        storage_of=_storages(nodes, slots),
        forward_outputs=outputs[:num_fwd_outputs],
        backward_outputs=outputs[num_fwd_outputs:],
        stands_for=stands_for,
    )


def _outputs(joint: fx.GraphModule) -> tuple[_Output, ...]:
    (node,) = joint.graph.find_nodes(op="output")
    returned = pytree.tree_leaves(node.args[0])
    return tuple(
        _Output(found if isinstance(found, fx.Node) else None, desc)
        for found, desc in zip(returned, _torch.output_descs(joint), strict=True)
    )


def _slots(
    joint: fx.GraphModule, node: fx.Node, slots: Mapping[fx.Node, list[_Slot]]
) -> list[_Slot]:
    if node.op == "output":
        return []
    if _is_item(node):
        return _item_slots(node, slots)
    val = node.meta.get("val")
    if node.op == "get_attr":
        val = val if isinstance(val, Tensor) else operator.attrgetter(str(node.target))(joint)
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


def _is_item(node: fx.Node) -> bool:
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
    while _is_item(node):
        depth, node = depth + 1, node.args[0]  # type: ignore[assignment]
    return depth


def _op_of(node: fx.Node) -> fx.Node:
    """The op that a node is an item of; any other node itself."""
    while _is_item(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that a node reads, with getitems replaced by what they are items of."""
    return map(_op_of, node.all_input_nodes)


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


def _alive(nodes: Sequence[fx.Node], outputs: Iterable[_Output]) -> set[fx.Node]:
    """Nodes that an output needs, or that do something beside computing their outputs."""
    alive = {out.node for out in outputs if out.node}
    for node in reversed(nodes):
        if node in alive or (node.op not in ("placeholder", "output") and _has_effect(node)):
            alive.add(node)
            alive.update(node.all_input_nodes)
    return alive


def _has_effect(node: fx.Node) -> bool:
    return _mutates(node) or _draws(node) or node.is_impure()


def _computes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output") and not _is_item(node)


def _warn_of_unknown_sizes(program: _Program) -> None:
    """Says which op makes a tensor whose size is known only when the step runs.

    Sizes that come in from a graph before this one are known when that has run, and are planned
    for then.
    """

    def unknown(node: fx.Node) -> set[Any]:
        vals = [slot.val for slot in program.slots[node] if isinstance(slot.val, Tensor)]
        found = [val for val in vals if _torch.is_unbounded(val.numel())]
        return {symbol for val in found for symbol in _torch.free_symbols_of(val)}

    given = {symbol for node in program.placeholders for symbol in unknown(node)}
    for node in program.calls:
        if unknown(node) - given:
            line = source_line(node.meta.get("stack_trace") or "") or "an unknown line"
            warnings.warn(
                f"the size of {node.name} ({line}) is known only when the step runs: each such "
                f"number is counted as {_torch.UNKNOWN_SIZE}, and the limit may not hold beyond; "
                "torch._check(size <= most) in the model sets the number that is counted",
                stacklevel=3,
            )
            return


# --- traits -------------------------------------------------------------------------------------


def _traits(program: _Program, updated: Collection[str]) -> dict[fx.Node, frozenset[Trait]]:
    escaped = _escaping(program)
    return {
        node: frozenset(_node_traits(program, node, updated, escaped)) for node in program.calls
    }


def _node_traits(
    program: _Program, node: fx.Node, updated: Collection[str], escaped: Collection[str]
) -> Iterator[Trait]:
    made = program.storages(node)
    sources = {key for n in node.all_input_nodes for key in program.storages(n)}
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
    policy = _torch.checkpoint_policy(node)
    if policy in POLICIES:
        yield POLICIES[policy]
    stale = not is_view and not sources.isdisjoint(updated)
    if stale and not _only_statistics_are_stale(program, node, updated, escaped):
        yield Trait.OPAQUE
    elif not _is_known(node) or (draws and not _can_be_replayed(program, node)):
        yield Trait.OPAQUE


def _is_known(node: fx.Node) -> bool:
    """Whether an op is known to be a function of its inputs (and of random draws)."""
    if node.op != "call_function" or _torch.draws_seed(node.target):
        return False  # Inductor's seeds are drawn once: what is random from one can run again
    if isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_bitwise in node.target.tags:
            return False
        return node.target.namespace in ("aten", "prims") and not _torch.is_effectful(node)
    return getattr(node.target, "__module__", "") in _torch.SYM_MODULES


def _mutates(node: fx.Node) -> bool:
    return _torch.writes_arguments(node.target)


def _draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return rng.draws(node.target, node.args, node.kwargs)


def _argument(node: fx.Node, name: str) -> Any:
    """The value of an argument by its schema name, its default where it is not given."""
    return rng.argument(node.target, node.args, node.kwargs, name)


def _can_be_replayed(program: _Program, node: fx.Node) -> bool:
    return _argument(node, "generator") is None and program.device_type(node) in STATE_BYTES


def _updated_storages(program: _Program, mutated: Collection[int]) -> frozenset[str]:
    """Storages of inputs that are written to, by an op or by the caller after the forward."""
    inputs = {key for n in program.placeholders for key in program.storages(n)}
    found = {program.storage_of[program.placeholders[i].name] for i in mutated}
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
                    yield from program.storages(leaf)


def _escaping(program: _Program) -> frozenset[str]:
    """Values that reach more than an update of an input: an output, or an op that is no copy."""
    found = {name for n in program.calls if not _mutates(n) for name in _heeded(program, n)}
    returned = [out.node for out in program.forward_outputs if _torch.mutated_by(out.desc) is None]
    for node in (*returned, *program.backward_nodes):
        if node:
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
    given = (_argument(node, name) for name in ("input", "weight", "bias"))
    read = [key for n in given if isinstance(n, fx.Node) for key in program.storages(n)]
    if not set(read).isdisjoint(updated):
        return False
    return all(name not in escaped for name in program.names(node)[3:])


def _must_run_again(node: fx.Node, traits: frozenset[Trait]) -> bool:
    """Whether the user's checkpoints must not keep what an op makes, and it can run twice."""
    if Trait.MUST_RECOMPUTE not in traits or traits & (PINNED | {Trait.RANDOM}):
        return False
    return policies.has_fixed_sizes(node)


def _of_backward(
    program: _Program, traits: Mapping[fx.Node, frozenset[Trait]], forward: Collection[fx.Node]
) -> tuple[Callable[[fx.Node], bool], Callable[[fx.Node], bool]]:
    """Whether a node, or what it is an item of, belongs to the backward; whether it is a view."""
    backward = {node for node in program.calls if node not in forward}
    views = {node for node in backward if Trait.VIEW in traits[node]}
    return lambda node: _op_of(node) in backward, lambda node: _op_of(node) in views


# --- phases and order ---------------------------------------------------------------------------


def _forward(program: _Program, traits: Mapping[fx.Node, frozenset[Trait]]) -> frozenset[fx.Node]:
    """Ops of the forward: what its outputs need, and pinned ops that were traced in it."""
    late = _needs_tangents(program)
    wanted = set(map(_op_of, program.forward_nodes))
    for node in reversed(program.calls):
        pinned = bool(traits[node] & PINNED) and not _torch.is_tagged_backward(node)
        if node in wanted or (pinned and node not in late):
            wanted.add(node)
            wanted.update(_sources(node))
    return frozenset(n for n in program.calls if n in wanted)


def _needs_tangents(program: _Program) -> set[fx.Node]:
    late = set(program.tangents)
    for node in program.calls:
        if any(source in late for source in _sources(node)):
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
            _emit(node, done, waiting)
    for node in program.calls:
        if node not in done:
            _emit(node, done, waiting)
    return tuple(done)


def _emit(node: fx.Node, done: dict[fx.Node, None], waiting: Collection[fx.Node]) -> None:
    """Appends a node to `done`, behind what it waits for."""
    stack = [(node, _sources(node))]
    while stack:
        top, sources = stack[-1]
        following = next((n for n in sources if n in waiting and n not in done), None)
        if following is not None:
            stack.append((following, _sources(following)))
        else:
            stack.pop()
            done.setdefault(top)


# --- ops and values -----------------------------------------------------------------------------


def _gradient_storages(program: _Program, parameters: Collection[int]) -> frozenset[str]:
    """Storages that the backward returns as gradients of parameters."""
    index = {_torch.input_desc(n): i for i, n in enumerate(program.placeholders)}
    wanted = frozenset(parameters)
    found: set[str] = set()
    for place, (node, desc) in enumerate(program.backward_outputs):
        if node and index.get(_torch.gradient_of(desc), place) in wanted:
            found.update(program.storages(node))
    return frozenset(found)


def _call(
    program: _Program, node: fx.Node, traits: frozenset[Trait], gradients: Collection[str]
) -> Call:
    def value(n: fx.Node) -> Any:
        slots = program.slots[n]
        return n.meta["val"] if "val" in n.meta else (slots[0].val if slots else None)

    return Call(
        node.target,
        fx.map_arg(node.args, value),  # type: ignore[arg-type]
        fx.map_arg(node.kwargs, value),  # type: ignore[arg-type]
        node.meta.get("val"),
        frozenset(i for i, key in enumerate(program.storages(node)) if key in gradients),
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
        outputs, scratch_bytes = program.names(node), price.scratch_bytes
        if Trait.RANDOM in traits[node]:
            outputs += (f"{node.name}:rng",)
            scratch_bytes += _state_bytes(program, node)  # a replay keeps the current state aside
        found.append(
            Op(
                node.name,
                node._pretty_print_target(node.target),  # the name that fx prints
                program.inputs(node),
                outputs,
                Phase.FORWARD if node in forward else Phase.BACKWARD,
                price.seconds,
                price.flops,
                scratch_bytes,
                traits[node],
                places.of(node),
            )
        )
    return found


def _state_bytes(program: _Program, node: fx.Node) -> int:
    """Bytes of the state of the generator that an op draws from."""
    return STATE_BYTES.get(program.device_type(node), 0)


def _values(program: _Program, ops: Sequence[Op], gradients: Collection[str]) -> dict[str, Value]:
    """All values in order of creation. What lives in one storage is of one kind: the first's."""
    slots = {slot.name: slot for group in program.slots.values() for slot in group}
    nodes = {node.name: node for node in program.calls}
    kinds: dict[str, Kind] = {}
    found: dict[str, Value] = {}

    def add(name: str, kind: Kind) -> None:
        val, storage = slots[name].val, program.storage_of[name]
        kind = kinds.setdefault(storage, kind)
        if isinstance(val, Tensor):
            nbytes, device = _torch.storage_bytes(val), program.device(val)
            found[name] = Value(name, nbytes, storage, kind, device)
        else:
            found[name] = Value(name, 0, storage, kind)

    for name in _inputs(program, ops):
        add(name, Kind.PRIMAL)
    for op in ops:
        for name in op.outputs:
            if name in slots:
                add(name, _kind(op, program.storage_of[name], gradients))
            else:
                nbytes = _state_bytes(program, nodes[op.name])
                found[name] = Value(name, nbytes, name, Kind.RNG_STATE)
    return found


def _inputs(program: _Program, ops: Sequence[Op]) -> list[str]:
    """Values that no op makes, tangents apart: placeholders, and constants that the trace met."""
    made = {name for op in ops for name in op.outputs}
    given = [name for n in program.placeholders for name in program.names(n)]
    constants = sorted({name for op in ops for name in op.inputs} - made - set(given))
    returned = (*program.forward_nodes, *program.backward_nodes)
    others = [name for n in returned for name in program.names(n) if name not in made]
    tangents = {name for n in program.tangents for name in program.names(n)}
    return [name for name in dict.fromkeys([*given, *constants, *others]) if name not in tangents]


def _kind(op: Op, storage: str, gradients: Collection[str]) -> Kind:
    """What an op's output is, if it is the first value in its storage."""
    if Trait.CALLER in op.traits:
        return Kind.TANGENT
    if op.phase is Phase.FORWARD:
        return Kind.ACTIVATION
    return Kind.GRADIENT if storage in gradients else Kind.BACKWARD


# --- what the caller does -----------------------------------------------------------------------


def caller(
    name: str,
    inputs: Iterable[str],
    outputs: Iterable[str],
    scratch_bytes: int = 0,
    phase: Phase = Phase.BACKWARD,
) -> Op:
    """An op that stands for what the caller does with the graph's outputs.

    >>> caller("loss", ["out"], ["tangents_1"]).may_run_again
    False
    """
    op = Op(name, "caller", tuple(inputs), tuple(outputs), phase, scratch_bytes=scratch_bytes)
    return replace(op, traits=frozenset({Trait.CALLER}))


def with_loss_held(graph: Graph) -> Graph:
    """`graph` with the value of a loss that the caller computes, and the gradient that starts its
    backward: two numbers, held to the end.

    Where the model computes its loss by itself, the caller has no scratch, and nothing is added.
    """
    loss = next((op for op in graph.ops if Trait.CALLER in op.traits and op.scratch_bytes), None)
    if loss is None:
        return graph
    name, device = f"{loss.name}:scalars", graph.values[loss.outputs[0]].device
    held = replace(loss, outputs=(*loss.outputs, name))
    return Graph(
        tuple(held if op is loss else op for op in graph.ops),
        {**graph.values, name: Value(name, LOSS_SCALAR_BYTES, name, Kind.TANGENT, device)},
        (*graph.outputs, name),
    )


def _loss(program: _Program) -> Op:
    """What the caller does between forward and backward.

    Where the model computes no loss, the gradient of ``square().mean()`` holds three more tensors
    of the size of the tangents for a moment; a cross entropy holds two.
    """
    wanted = {_torch.tangent_of(n) for n in program.tangents}
    with_tangents = [out.node for out in program.forward_outputs if out.desc in wanted]
    read = [n for n in with_tangents if n] or program.forward_nodes
    inputs = dict.fromkeys(name for n in read for name in program.names(n))
    outputs = [name for n in program.tangents for name in program.names(n)]
    return caller(_free_name(program, CALLERS_LOSS), inputs, outputs, _loss_scratch(program))


def _free_name(program: _Program, name: str) -> str:
    taken = {node.name for node in program.slots}
    while name in taken:
        name += "_"
    return name


def _loss_scratch(program: _Program) -> int:
    slots = [slot for n in program.tangents for slot in program.slots[n]]
    vals = [slot.val for slot in slots if isinstance(slot.val, Tensor)]
    if any(_torch.hint(val.numel()) == 1 for val in vals):
        return 0  # the model has computed its loss by itself
    return LOSS_TENSORS * sum(map(_torch.storage_bytes, vals))


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
    """The innermost line of a stack trace that is neither torch's own nor ours, as ``file.py:12``.

    >>> source_line('  File "/home/me/net.py", line 12, in forward\\n    x = f(x)\\n')
    'net.py:12'
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    others = tuple(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__))
    own = [frame for frame in frames if not frame[0].startswith(others)]
    if not own:
        return ""
    file, line = own[-1]
    return f"{os.path.basename(file)}:{line}"


# --- what leads into a joint graph and out of it ------------------------------------------------


@dataclass(frozen=True)
class Ports:
    """Names of the values that go into a joint graph and come out of it, as `read` gives them.

    Attributes:
        primals: placeholders that are no tangents, in order.
        outputs: forward outputs, None for constants.
        tangents: tangents, each with the index of the output that it belongs to.
        gradients: by index of placeholder, the value that is its gradient.
    """

    primals: tuple[str, ...]
    outputs: tuple[str | None, ...]
    tangents: Mapping[str, int]
    gradients: Mapping[int, str]


def ports(joint: fx.GraphModule, num_fwd_outputs: int) -> Ports:
    """What leads into a joint graph and out of it. Arguments as for `read`."""
    program = _program(joint, num_fwd_outputs)
    primals = [n for n in program.placeholders if not _torch.is_tangent(n)]
    output = {out.desc: i for i, out in reversed(list(enumerate(program.forward_outputs)))}
    primal = {_torch.input_desc(n): i for i, n in enumerate(primals)}
    gradients = {
        primal.get(_torch.gradient_of(out.desc), place): name
        for place, out in enumerate(program.backward_outputs)
        if (name := _output_name(program, out)) is not None
    }
    return Ports(
        primals=tuple(n.name for n in primals),
        outputs=tuple(_output_name(program, out) for out in program.forward_outputs),
        tangents={
            n.name: output.get(_torch.tangent_of(n), place)
            for place, n in enumerate(program.tangents)
        },
        gradients=gradients,
    )


def _output_name(program: _Program, output: _Output) -> str | None:
    names = program.names(output.node) if output.node else ()
    return names[0] if names else None
