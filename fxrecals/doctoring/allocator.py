"""Faults that CUDA's caching allocator shows, from its statistics alone.

The names are those of ``torch.cuda.memory_stats()``, described in the documentation of torch.

    >>> stats = {"reserved_bytes.all.current": 10**9, "allocated_bytes.all.current": 4 * 10**8}
    >>> stats["inactive_split_bytes.all.current"] = 5 * 10**8
    >>> used = Allocator("cuda:0", before={}, after=stats, free_blocks=(3 * 10**8, 2 * 10**8))
    >>> [found.kind for found in findings(used, steps=5)]
    ['fragmented memory']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fxrecals.doctoring.finding import Finding
from fxrecals.doctoring.record import Allocator
from fxrecals.formats import format_bytes, format_count

FRAGMENTED = 0.25
"""Part of the reserved bytes that lies free in segments that are in use."""

ROUNDED = 0.1
"""Part of the allocated bytes that nobody asked for."""

LEAST = 64 * 2**20
"""Bytes under which no part of the memory is worth a change."""

UNIT = 512
"""Bytes to which the allocator rounds up."""


def findings(allocator: Allocator, steps: int) -> Iterator[Finding]:
    """What is wrong with how a device's memory is handed out.

    Args:
        allocator: its statistics before and after.
        steps: how many ran between.
    """
    yield from fragmentation(allocator)
    yield from retries(allocator, steps)
    yield from small_blocks(allocator)


def fragmentation(allocator: Allocator) -> Iterator[Finding]:
    """Free memory in pieces: reserved far above allocated, in segments that are in use."""
    reserved = _now(allocator, "reserved_bytes.all")
    lost = _now(allocator, "inactive_split_bytes.all")
    if lost < max(FRAGMENTED * reserved, LEAST):
        return
    allocated = _now(allocator, "allocated_bytes.all")
    largest = max(allocator.free_blocks, default=0)
    yield Finding(
        "fragmented memory",
        f"{allocator.device} has reserved {format_bytes(reserved)} for {format_bytes(allocated)}; "
        f"{format_bytes(lost)} lies free in pieces, the largest {format_bytes(largest)}",
        lost,
        "all the time",
        "",
        (f"{len(allocator.free_blocks)} free pieces: {_sizes(allocator.free_blocks)}",),
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; if sizes change from step to step, pad "
        "them to a few",
    )


def retries(allocator: Allocator, steps: int) -> Iterator[Finding]:
    """Allocations that failed at first, after which the cache was flushed."""
    count = _between(allocator, "num_alloc_retries")
    if count:
        yield Finding(
            "allocations retried",
            f"{allocator.device} ran out {count} times in {steps} steps and flushed its cache",
            0,
            "time, not memory",
            "",
            (f"{device_allocations(allocator)} allocations by the driver",),
            "a lower limit or a smaller batch: the device is full, and each flush waits for it",
        )


def small_blocks(allocator: Allocator) -> Iterator[Finding]:
    """Many small tensors, each rounded up."""
    allocated = _now(allocator, "allocated_bytes.all")
    lost = allocated - _now(allocator, "requested_bytes.all")
    if "requested_bytes.all.current" not in allocator.after or lost < ROUNDED * allocated:
        return
    blocks = _now(allocator, "active.small_pool")
    if lost >= LEAST or blocks * UNIT >= LEAST:
        yield Finding(
            "many small tensors",
            f"{allocator.device} holds {format_count(blocks)} small blocks; each is rounded up to "
            f"{UNIT} bytes",
            lost,
            "all the time",
            "",
            (f"{format_bytes(allocated)} allocated, {format_bytes(allocated - lost)} asked for",),
            "keep them as slices of one tensor, or as numbers",
        )


def device_allocations(allocator: Allocator) -> int:
    """How often the driver was asked for memory."""
    return _between(allocator, "num_device_alloc")


def _now(allocator: Allocator, name: str) -> int:
    return _read(allocator.after, f"{name}.current")


def _between(allocator: Allocator, name: str) -> int:
    return _read(allocator.after, name) - _read(allocator.before, name)


def _read(stats: Mapping[str, Any], name: str) -> int:
    return int(stats.get(name, 0))


def _sizes(blocks: tuple[int, ...]) -> str:
    largest = sorted(blocks, reverse=True)[:4]
    return ", ".join(map(format_bytes, largest)) + (", ..." if len(blocks) > 4 else "")
