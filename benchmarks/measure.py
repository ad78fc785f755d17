"""Measures what a training step really did, and whether it was right.

Nothing here knows how fxrecals works. Two questions are answered from outside:

    memory = step_memory(step, model)        # what the allocator handed out
    differences = compare(reference, candidate)   # empty where both steps did the same

Bytes come from the allocator's own events (torch.profiler, profile_memory=True), so scratch
space inside an operator counts too. Parameter gradients are told apart by address: they are
what the step is for, and no recompute can shrink them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

MIB = 2**20


@dataclass(frozen=True)
class StepMemory:
    """Bytes above the level at which the step began.

    peak: largest live total, gradients included.
    activations: largest live total with the parameters' gradients left out; a limit bounds this.
    gradients: bytes of parameter gradients alive at the end.
    kept: bytes still alive at the end that are not gradients (outputs held, or a leak).
    """

    peak: int
    activations: int
    gradients: int
    kept: int

    def __str__(self) -> str:
        return (
            f"peak {self.peak / MIB:.1f} MiB, activations {self.activations / MIB:.1f} MiB, "
            f"gradients {self.gradients / MIB:.1f} MiB, kept {self.kept / MIB:.1f} MiB"
        )


def _allocations(prof: profile) -> list[tuple[int, int, int]]:
    """(time, address, bytes) of every allocator event on the CPU; bytes are negative for a free."""
    found: list[tuple[int, int, int]] = []
    results: Any = prof.profiler
    stack = list(results.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]":
            fields: Any = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found, key=lambda e: e[0])


def step_memory(step: Callable[[], Any], model: nn.Module, warmup: int = 2) -> StepMemory:
    """Runs `step` (forward and backward; it must set the gradients to None first) and measures it.

    On CUDA only `peak` is exact (max_memory_allocated); `activations` is then a lower bound.
    """
    for _ in range(warmup):
        step()
    clear(model)
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        held = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - start
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        kept = torch.cuda.memory_allocated() - start - gradients
        del held
        return StepMemory(peak, peak - gradients, gradients, kept)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        held = step()
        del held
    grads = {
        p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
        for p in model.parameters()
        if p.grad is not None
    }
    events = _allocations(prof)
    last: dict[int, int] = {}  # address -> index of the allocation that a gradient lives in
    for index, (_, address, size) in enumerate(events):
        if size > 0 and address in grads:
            last[address] = index
    gradient_events = set(last.values())
    live = activations = peak = top = gradients = 0
    sizes: dict[int, int] = {}
    for index, (_, address, size) in enumerate(events):
        if size > 0:
            sizes[address] = size
        elif address not in sizes:
            continue  # freed something that was alive before the step
        else:
            del sizes[address]
        live += size
        if index in gradient_events:
            gradients += size
        else:
            activations += size
        peak, top = max(peak, live), max(top, activations)
    return StepMemory(peak, top, gradients, live - gradients)


def step_times(steps: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each step in each round, taken in turn so that a noisy machine hits all alike.

    Every other round goes through the steps backwards: none always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for turn in range(rounds):
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    return times


def step_seconds(steps: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Median seconds of each step, taken in turn."""
    return {name: statistics.median(taken) for name, taken in step_times(steps, rounds).items()}


def against(times: list[float], reference: list[float]) -> tuple[float, float, float, float]:
    """A step's time over another's: lower quartile, median and upper quartile of the rounds'
    ratios, and the ratio of the tenth fastest percent of each, which other jobs disturb least."""
    ratios = (a / b for a, b in zip(times, reference, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    fast, reference_fast = (statistics.quantiles(t, n=10)[0] for t in (times, reference))
    return low, middle, high, fast / reference_fast


def clear(model: nn.Module) -> None:
    """Drops every gradient."""
    for parameter in model.parameters():
        parameter.grad = None


@dataclass(frozen=True)
class Record:
    """Everything that a training step leaves behind."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng: Tensor


def total(out: Any) -> Tensor:
    """A loss that weighs every element of every differentiable output differently."""
    found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    return sum(
        ((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in found),
        start=torch.zeros(()),
    )


def record(
    call: Callable[..., Any],
    model: nn.Module,
    inputs: dict[str, Any] | tuple[Any, ...],
    loss: Callable[[Any], Tensor] = total,
    seed: int = 0,
    steps: int = 2,
) -> Record:
    """Runs `steps` forward/backward steps of `call` from one seed, and records the last state.

    Two steps by default: what the first one leaves behind (generator state, running statistics)
    shows in the second.
    """
    torch.manual_seed(seed)
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
    for _ in range(steps):
        clear(model)
        for leaf in leaves:
            leaf.grad = None
        out = call(**inputs) if isinstance(inputs, dict) else call(*inputs)
        loss(out).backward()
    gradients = {n: _copy(p.grad) for n, p in model.named_parameters()}
    gradients |= {f"input {i}": _copy(t.grad) for i, t in enumerate(leaves)}
    return Record(
        outputs=[t.detach().clone() for t in tree_leaves(out) if isinstance(t, Tensor)],
        gradients=gradients,
        buffers={n: b.clone() for n, b in model.named_buffers()},
        rng=torch.get_rng_state(),
    )


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


def compare(
    reference: Record, candidate: Record, rtol: float = 0.0, atol: float = 0.0
) -> list[str]:
    """What differs, a line each. Tolerance 0 asks for the same bits."""
    wrong: list[str] = []
    if len(reference.outputs) != len(candidate.outputs):
        wrong.append(f"{len(candidate.outputs)} outputs, not {len(reference.outputs)}")
    for name, a, b in pairs(reference, candidate):
        wrong += _difference(name, a, b, rtol, atol)
    if not torch.equal(reference.rng, candidate.rng):
        wrong.append("random generator: left in another state")
    return wrong


def pairs(
    reference: Record, candidate: Record
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """What two records have of each tensor, with its name; None where one has nothing."""
    for i, (a, b) in enumerate(zip(reference.outputs, candidate.outputs, strict=False)):
        yield f"output {i}", a, b
    for name, gradient in reference.gradients.items():
        yield f"gradient of {name}", gradient, candidate.gradients.get(name)
    for name, buffer in reference.buffers.items():
        yield f"buffer {name}", buffer, candidate.buffers.get(name)


def _difference(
    name: str, a: Tensor | None, b: Tensor | None, rtol: float, atol: float
) -> list[str]:
    if a is None and b is None:
        return []
    if a is None or b is None:
        return [f"{name}: {'missing' if b is None else 'unexpected'}"]
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{name}: {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}"]
    if torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
        return []
    gap = (a.double() - b.double()).abs().max().item()
    return [f"{name}: differs by {gap:.3g} (largest value {a.abs().max().item():.3g})"]
