"""What becomes of gradients between updates: reset, filled with zeros, or left to add up."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxrecals import _torch
from fxrecals.doctoring.record import Updates
from fxrecals.doctoring.tensors import leaves, total_bytes


@dataclass
class Gradients:
    """The parameters of one optimizer, and what its gradients were when last looked at."""

    name: str
    line: str
    optimizer: weakref.ref[Any] | None = None
    parameters: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    seen: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    had: set[int] = field(default_factory=set)
    was_reset: bool = True
    count: int = 0
    added: int = 0
    zeroed: int = 0
    most_nbytes: int = 0
    state_nbytes: int = 0

    def alive(self) -> list[Tensor]:
        """The parameters that there still are."""
        return [p for ref in self.parameters.values() if (p := ref()) is not None]

    def look(self) -> None:
        """Notes what the gradients are now."""
        self.seen = {id(p): _state(p.grad) for p in self.alive() if p.grad is not None}
        self.had |= self.seen.keys()
        grads = [p.grad for p in self.alive() if p.grad is not None]
        self.most_nbytes = max(self.most_nbytes, total_bytes(grads))

    def compare(self, is_backward: bool) -> None:
        """Notes whether someone reset the gradients since they were looked at."""
        if not self.seen:
            return
        known = [p for p in self.alive() if id(p) in self.seen]
        kept = [p.grad for p in known if p.grad is not None]
        if len(kept) < len(known) or any(map(self._was_replaced, known)):
            self.was_reset = True
        changed = [p.grad for p in known if p.grad is not None and self._has_changed(p)]
        if kept and len(changed) == len(kept) and not any(map(_has_values, changed)):
            self.was_reset = True
            self.zeroed += is_backward

    def _was_replaced(self, parameter: Tensor) -> bool:
        grad = parameter.grad
        return grad is not None and _state(grad)[0] != self.seen[id(parameter)][0]

    def _has_changed(self, parameter: Tensor) -> bool:
        grad = parameter.grad
        return grad is not None and _state(grad) != self.seen[id(parameter)]

    def update(self) -> None:
        """An update of the parameters is about to happen."""
        if self.count and not self.was_reset and self.seen:
            self.added += 1
        self.count += 1
        self.was_reset = False

    def look_at_state(self) -> None:
        """Notes how large the optimizer's state is."""
        optimizer = self.optimizer() if self.optimizer is not None else None
        if optimizer is not None:
            self.state_nbytes = total_bytes(leaves(list(optimizer.state.values())))

    def updates(self) -> Updates:
        """What was noted, as a value."""
        return Updates(
            self.name,
            self.line,
            self.count,
            self.added,
            self.zeroed,
            self.most_nbytes,
            total_bytes([p for p in self.alive() if id(p) in self.had]),
            self.state_nbytes,
        )


def _state(grad: Tensor) -> tuple[int | None, int]:
    return _torch.storage_key(grad), _torch.version(grad)


def _has_values(grad: Tensor) -> bool:
    with torch.no_grad():
        return bool(grad.any()) if _torch.has_storage(grad) else True
