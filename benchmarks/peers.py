"""Other ways to train a model under fewer bytes, for the benchmarks to stand beside.

    with checkpointed(blocks): ...            torch.utils.checkpoint around each of some modules
    at_once(model)(x)                         the same around the whole model
    budgeted(model, 0.3)(x)                   PyTorch's activation_memory_budget
    replayed(limit)(lambda: model(x))         buildz-gpu, where it is installed
    planned_blocks(model, (x,), limit)(x)     ckptplan, where it is installed

The last two raise ImportError where the package is not installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._functorch import config
from torch.utils.checkpoint import checkpoint


@contextmanager
def checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, each of the blocks runs in a `torch.utils.checkpoint`."""
    unique = dict.fromkeys(blocks)
    for block in unique:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in unique:
            del block.forward


def at_once(model: nn.Module) -> Callable[..., Any]:
    """The whole model in one `torch.utils.checkpoint`."""
    return functools.partial(checkpoint, model, use_reentrant=False)


def budgeted(model: nn.Module, budget: float, backend: str = "aot_eager") -> Callable[..., Any]:
    """The model under torch's own planner, at a share of the saved bytes."""
    compile_ = lookup_backend(backend)

    def within(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_(graph, inputs)

    return torch.compile(model, backend=within)


def replayed(limit: int) -> Callable[[Callable[[], Tensor]], Tensor]:
    """buildz-gpu's replay from the start, of a forward with its loss.

    Raises:
        ImportError: it is not installed.
    """
    from buildz.gpu.torch import recals_with_rngs  # type: ignore[import-not-found]

    return recals_with_rngs(limit)


def planned_blocks(chain: nn.Sequential, inputs: tuple[Any, ...], limit: int) -> nn.Module:
    """ckptplan's choice of the blocks of a chain to checkpoint, for so many bytes of activations.

    Raises:
        ImportError: it is not installed.
        ckptplan.TimingOnlyProfileError: the chain is on the CPU, where it cannot measure bytes.
    """
    import ckptplan  # type: ignore[import-not-found]

    device = next(chain.parameters()).device
    blocks = ckptplan.declare_blocks(chain, list(chain.named_children()))
    profiles = ckptplan.profile_blocks(blocks, inputs, device=device)
    plan = ckptplan.plan_checkpoints(
        profiles, blocks, target_kind="activation_budget_bytes", target_value=limit
    )
    return ckptplan.apply_plan(blocks, plan, inputs)
