"""The backward of a convolution as two ops: the gradients of weight and bias, then the input's.

`aten.convolution_backward` runs one kernel for the gradient of the input and another for those of
weight and bias. As one op it is charged for all that either needs: the saved input, the incoming
gradient, the new gradient of the input, and the larger scratch. In a network of convolutions
that is the floor. `split` makes two ops of it, and in between, the saved input can be freed.

The second op is not `aten.convolution_backward`, which would want the saved input again. The
gradient of the input of a convolution is a transposed convolution of the incoming gradient, and
that of a transposed one is a plain one (Dumoulin and Visin, 2016, "A guide to convolution
arithmetic for deep learning", chapter 4).

Not a bit may change by that. Which kernel runs depends on processor, types, sizes, groups and
layouts, and oneDNN for one computes some transposed convolutions, with groups and in
``channels_last``, by another kernel than such a gradient. So both ways are tried on random
numbers, on the device and at the sizes in question. An op stays whole

- where a gradient comes out with other bits, or in another layout;
- where it cannot be tried: sizes are symbolic, the device is not there, or the tensors are larger
  than what is run to be measured.

Where the bits are the same the kernels are, so the step takes no longer.

No other op of aten gains by being split. Backwards of normalisations and of fused attention give
several gradients too, but in one pass, or small ones beside that of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxrecals import _torch
from fxrecals.cost import LARGEST_BYTES, is_there

BACKWARD = torch.ops.aten.convolution_backward.default
FORWARD = torch.ops.aten.convolution.default


def split(joint: fx.GraphModule) -> None:
    """Splits each backward of a convolution that gives the gradient of the input beside others.

    In place. What was split stays as it is when it comes here again. The node keeps its name and
    gives the gradients of weight and bias; the next one, called ``..._input``, that of the input.

    Args:
        joint: every node carries ``meta["val"]``.

    >>> from fxrecals.capture import capture
    >>> model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 3), torch.nn.Conv1d(2, 2, 3))
    >>> (joint,) = capture(model, torch.ones(1, 2, 8)).joints
    >>> split(joint.module)
    >>> [n.name for n in joint.module.graph.nodes if "backward" in n.name]
    ['convolution_backward', 'convolution_backward_input', 'convolution_backward_1']
    """
    nodes = joint.graph.find_nodes(op="call_function", target=BACKWARD)
    calls = {node: call for node in nodes if (call := _call(node)) is not None}
    alike = [node for node, call in calls.items() if _is_the_same(call, torch.get_num_threads())]
    for node in alike:
        _split(node, calls[node])
    if alike:
        joint.recompile()


def _split(node: fx.Node, call: _Call) -> None:
    grad_output, _, weight, *_ = node.args
    with node.graph.inserting_after(node):
        gradient = node.graph.call_function(FORWARD, (grad_output, weight, *call.of_input))
    gradient.name = f"{node.name}_input"
    for item in _taking_input(node):
        gradient.meta = dict(item.meta)
        item.replace_all_uses_with(gradient)
        node.graph.erase_node(item)
    node.args = (*node.args[:-1], (False, *call.output_mask[1:]))
    node.meta["val"] = (None, *node.meta["val"][1:])


def _taking_input(node: fx.Node) -> list[fx.Node]:
    """The getitems that take the gradient of the input."""
    return [user for user in node.users if user.args[1] == 0]


# --- what is called -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """What a kernel knows of a tensor before it reads it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> _Layout:
        # A symbol that tracing found to be one number is that number in all but its type.
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return _Layout(shape, stride, tensor.dtype, tensor.device)

    @property
    def numel(self) -> int:
        """Elements of the storage up to the tensor's last."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def random(self, generator: torch.Generator) -> Tensor:
        flat = torch.randn(self.numel, generator=generator, dtype=self.dtype, device=self.device)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Call:
    """The arguments of `aten.convolution_backward`, in order."""

    grad_output: _Layout
    input: _Layout
    weight: _Layout
    bias_sizes: tuple[int, ...] | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    output_mask: tuple[bool, bool, bool]

    @property
    def tensors(self) -> tuple[_Layout, _Layout, _Layout]:
        return self.grad_output, self.input, self.weight

    @property
    def settings(self) -> tuple[Any, ...]:
        """What follows the tensors, up to the mask."""
        window = (self.stride, self.padding, self.dilation)
        return self.bias_sizes, *window, self.transposed, self.output_padding, self.groups

    @property
    def of_input(self) -> tuple[Any, ...]:
        """What follows the weight in the `aten.convolution` that gives the input's gradient."""
        window = (self.stride, self.padding, self.dilation)
        padding = (0,) * len(self.stride) if self.transposed else tuple(self._left_over())
        return None, *window, not self.transposed, padding, self.groups

    def _left_over(self) -> Iterator[int]:
        """Places at the end of each dimension of the input that the last stride does not reach."""
        sizes = (self.input.shape[2:], self.weight.shape[2:])
        window = (self.stride, self.padding, self.dilation)
        for size, kernel, stride, padding, dilation in zip(*sizes, *window, strict=True):
            yield (size + 2 * padding - dilation * (kernel - 1) - 1) % stride


def _call(node: fx.Node) -> _Call | None:
    """What a node calls; None where there is nothing to split, or where a size is symbolic."""
    args: Any = fx.map_arg(node.args, lambda source: source.meta.get("val"))
    tensors = args[:3]
    settings: Any = [tuple(x) if isinstance(x, list) else x for x in args[3:]]
    if not _taking_input(node) or not any(settings[-1][1:]):
        return None
    if not all(isinstance(x, Tensor) for x in tensors):
        return None
    if any(map(_torch.free_symbols_of, pytree.tree_leaves(args))):
        return None
    grad_output, x, weight = map(_Layout.of, tensors)
    return _Call(grad_output, x, weight, *settings)


# --- whether it gives the same ------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _is_the_same(call: _Call, threads: int) -> bool:
    """Whether both ways give the same bits, in the same layout. Kernels may go by `threads`."""
    device = call.input.device
    if not is_there(device) or sum(t.nbytes for t in call.tensors) > LARGEST_BYTES:
        return False
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return _compare(call, torch.Generator(device).manual_seed(0))
    except (RuntimeError, ValueError):
        return False  # it does not run


def _compare(call: _Call, generator: torch.Generator) -> bool:
    grad_output, x, weight = (tensor.random(generator) for tensor in call.tensors)
    of_input, *others = BACKWARD(grad_output, x, weight, *call.settings, call.output_mask)
    mask = (False, *call.output_mask[1:])
    _, *alone = BACKWARD(grad_output, x, weight, *call.settings, mask)
    return all(map(_same, others, alone)) and _same(
        of_input, FORWARD(grad_output, weight, *call.of_input)
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    alike = a.shape == b.shape and a.stride() == b.stride()
    return alike and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
