"""Tensors that are alive, their bytes, and the nodes of their graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fxrecals import _torch


def is_tensor(x: Any) -> bool:
    """Whether it is one, asked of its type alone: `isinstance` may run code of the program."""
    return issubclass(type(x), Tensor)


def all_tensors() -> list[Tensor]:
    """All tensors that Python knows of and that have memory, but what `gc` has frozen."""
    kinds = {Tensor, *_subclasses(Tensor)}  # a look-up is quicker than a check, a million times
    return [x for x in gc.get_objects() if type(x) in kinds and not _torch.is_fake(x)]


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def has_bytes(tensor: Tensor) -> bool:
    """Whether it has a storage of its own."""
    return _torch.storage_key(tensor) is not None


def bytes_of(tensor: Tensor) -> int:
    """Of its storage."""
    return _torch.storage_bytes(tensor)


def total_bytes(tensors: Sequence[Any]) -> int:
    """Of their storages, each once.

    >>> import torch
    >>> x = torch.zeros(4, 4)
    >>> total_bytes([x, x[0], torch.zeros(2)])
    72
    """
    unique = {_torch.storage_key(x): bytes_of(x) for x in tensors if has_bytes(x)}
    return sum(unique.values())


def leaves(tree: Any) -> list[Tensor]:
    """Tensors in dicts, lists and other containers that torch knows."""
    return [x for x in pytree.tree_leaves(tree) if is_tensor(x)]


def nodes_of(tensor: Tensor, seen: set[Any]) -> list[Any]:
    """Nodes of a tensor's graph that are not in `seen`, without those of leaves."""
    found, open_ = [], [tensor.grad_fn]
    while open_:
        node = open_.pop()
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        found.append(node)
        open_ += (following for following, _ in node.next_functions)
    return found
