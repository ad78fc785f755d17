"""What a checkpoint policy forbids to keep is written into the joint graph a second time.

An op of which the user says ``MUST_RECOMPUTE`` has readers in the forward and in the backward.
Those in the backward get an op of their own, which computes the same from the same inputs, and is
part of the backward as they are. So the first result need not be kept, whatever is planned, and
the step without recompute is the one that the user wrote.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def step(primals, tangents):
    ...     y = primals.sin()
    ...     return y.exp(), tangents * y
    >>> joint = make_fx(step)(torch.ones(2), torch.ones(2))
    >>> for node in joint.graph.nodes:
    ...     node.meta["val"] = torch.ones(2)
    >>> sin, exp, product = (n for n in joint.graph.nodes if n.op == "call_function")
    >>> run_again(joint, {sin}, lambda node: node is product)
    True
    >>> product.args[1].name, exp.args[0].name
    ('sin_again', 'sin')
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree


def run_again(
    joint: fx.GraphModule,
    ops: Collection[fx.Node],
    is_backward: Callable[[fx.Node], bool],
    is_view: Callable[[fx.Node], bool] = lambda node: False,
) -> bool:
    """Gives the backward copies of forward ops, in place, where it reads them.

    Args:
        joint: forward and backward in one graph; every node carries ``meta["val"]``.
        ops: pure forward ops, none of which draws or writes.
        is_backward: whether an op is one of the backward.
        is_view: whether what an op makes lives in the storage of an input.

    Returns:
        Whether anything was copied. A second time there is nothing left to copy.
    """
    copies: dict[fx.Node, fx.Node] = {}
    moved: set[fx.Node] = set()  # what lives in the storage of a copy

    def copied(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        item = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
        if not (node in ops or (item and copied(node.args[0]) is not node.args[0])):  # type: ignore[arg-type]
            return node
        copies[node] = _copy(node, copied)
        moved.add(copies[node])
        return copies[node]

    for node in list(joint.graph.nodes):
        if not is_backward(node):
            continue
        with joint.graph.inserting_before(node):
            node.args = fx.map_arg(node.args, copied)
            node.kwargs = fx.map_arg(node.kwargs, copied)  # type: ignore[assignment]
        if is_view(node) and not moved.isdisjoint(node.all_input_nodes):
            node.meta["val"] = _value(node)
            moved.add(node)
    if copies:
        joint.recompile()
    return bool(copies)


def _copy(node: fx.Node, copied: Callable[[fx.Node], fx.Node]) -> fx.Node:
    args, kwargs = fx.map_arg(node.args, copied), fx.map_arg(node.kwargs, copied)
    name = f"{node.name}_again"
    copy = node.graph.create_node(node.op, node.target, args, kwargs, name, node.type)  # type: ignore[arg-type]
    copy.meta = {**node.meta, "partitioner_tag": "is_backward", "val": _value(copy)}
    return copy


def _value(node: fx.Node) -> Any:
    """What the copy makes, in storages of its own: values that share one are taken for views."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])  # type: ignore[misc]
    fakes = (getattr(x, "fake_mode", None) for x in pytree.tree_leaves((args, kwargs)))
    mode = next((mode for mode in fakes if mode is not None), None)
    with torch.no_grad():
        if mode is None:
            return target(*args, **kwargs)
        with mode:
            return target(*args, **kwargs)


def has_fixed_sizes(node: fx.Node) -> bool:
    """Whether all sizes of what an op makes are numbers."""
    made = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return all(isinstance(size, int) for x in made for size in x.shape)
