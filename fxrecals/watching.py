"""Where the memory of a training loop goes, step by step, while it runs.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with watch(model, optimizer, share=1) as watched:
    ...     for _ in range(4):
    ...         model(torch.randn(512, 64)).square().mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         watched.step()
    >>> step = watched.steps[-1]
    >>> step.live["cpu"][Category.PARAMETERS], step.live["cpu"][Category.OPTIMIZER]
    (33280, 66576)
    >>> step.peaks[0].phase, step.peaks[0].live[Category.SAVED] > 512 * 64 * 4
    ('backward', True)

At the end of each step parameters, gradients and optimizer states are counted; on CUDA also what
the allocator has handed out and what it holds in reserve. Some steps are *measured*: torch's
profiler records the allocators' events, on all devices, and from them come the peak, what was
alive at it, and where in the program it fell. Measuring costs time, so it is done in bursts of
steps, as often as keeps it under a share of the time of all.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fxrecals import _torch
from fxrecals._torch import MemoryEvent
from fxrecals.accounting import Block, blocks
from fxrecals.errors import FxrecalsError, OptionError
from fxrecals.formats import format_bytes
from fxrecals.report import table, tail_of

SHARE = 0.02
"""Part of the time of all steps that measuring may take, as far as it can time itself."""

BURST = 4
"""Steps that are measured one after the other: growth shows between two of them."""

SECONDS_PER_EVENT = 4e-6
"""What recording one event of the allocator and its ops adds to the step, about."""

LEAST_CHANGES = 6
"""Steps whose change must be known for a verdict."""

SPAN = "fxrecals watches "


class Category(str, Enum):
    """What bytes are there for."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"  # of parameters
    OPTIMIZER = "optimizer state"
    SAVED = "saved activations"  # made by the forward, there when the backward begins
    HELD = "held at the end"  # outputs, and what else outlives the step that made it
    OTHER = "other"  # temporaries; at the end on CUDA: all that is none of the above


Usage = Mapping[Category, int]
"""Bytes of each category that has any."""


@dataclass(frozen=True)
class Peak:
    """The instant of a step at which the most bytes of a device were alive.

    Attributes:
        device: as `str(torch.device)` prints it.
        live: bytes of each category then; of what was there before the step, only parameters,
            buffers, gradients and optimizer state are known.
        phase: "forward" (and all else), "backward" or "optimizer".
        module: path of the module that ran, or whose backward ran; "" outside of all.
        op: what allocated.
    """

    device: str
    live: Usage
    phase: str
    module: str
    op: str

    @property
    def nbytes(self) -> int:
        """All that was alive."""
        return sum(self.live.values())

    def __str__(self) -> str:
        where = f" in {tail_of(self.module, 40)}" if self.module else ""
        op = f" ({self.op})" if self.op else ""
        return f"{format_bytes(self.nbytes)} on {self.device}, {self.phase}{where}{op}"


@dataclass(frozen=True)
class StepUsage:
    """One step.

    Attributes:
        number: from 0 on.
        live: bytes of each category at its end, by device.
        peaks: one for each device, if the step was measured; else ().
        activation_bytes: largest live total of what forward and backward allocated, gradients of
            parameters apart: what a limit bounds; None if it was not measured.
        change_bytes: by how much the live bytes grew over the step, or None where that is not
            known. On CUDA the allocator's counter tells; on the CPU this step and the one before
            must have been measured.
        allocated: bytes that the CUDA allocator had handed out at its end, by device.
        reserved: bytes that it had taken from the device.
    """

    number: int
    live: Mapping[str, Usage]
    peaks: tuple[Peak, ...] = ()
    activation_bytes: int | None = None
    change_bytes: int | None = None
    allocated: Mapping[str, int] | None = None
    reserved: Mapping[str, int] | None = None

    @property
    def is_measured(self) -> bool:
        """Whether peaks are known."""
        return self.activation_bytes is not None


class Trend(str, Enum):
    """How live bytes go from step to step."""

    FLAT = "flat"
    GROWING = "growing"
    SAWTOOTH = "sawtooth"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """What becomes of the live bytes over many steps.

    Attributes:
        trend: see `Trend`.
        bytes_per_step: by how much they grow, where they do; else 0.
        band_bytes: between the lowest and the highest level at the end of a step.
    """

    trend: Trend
    bytes_per_step: int = 0
    band_bytes: int = 0

    def __str__(self) -> str:
        band = format_bytes(self.band_bytes)
        if self.trend is Trend.GROWING:
            by = format_bytes(self.bytes_per_step)
            return f"growing by {by} a step: something keeps tensors from step to step"
        if self.trend is Trend.SAWTOOTH:
            return f"sawtooth of {band}: tensors wait for the garbage collector, held by cycles"
        if self.trend is Trend.UNKNOWN:
            return f"no verdict yet: fewer than {LEAST_CHANGES} steps whose change is known"
        return f"flat, within {band}"


def verdict(changes: Sequence[int]) -> Verdict:
    """The verdict on changes of the live bytes, a number for each step.

    They grow if, of three equal parts of the steps, each has its lowest level above the highest
    of the part before. They are a sawtooth if they rise in most steps and fall, at least twice,
    by more than they rise in one.

    >>> print(verdict([0] * 9))
    flat, within 0 B
    >>> print(verdict([8000] * 9))
    growing by 8.00 kB a step: something keeps tensors from step to step
    >>> print(verdict([10, 10, 10, -30] * 3))
    sawtooth of 30 B: tensors wait for the garbage collector, held by cycles
    """
    if len(changes) < LEAST_CHANGES:
        return Verdict(Trend.UNKNOWN)
    levels = list(accumulate(changes))
    band = max(levels) - min(levels)
    third = len(levels) // 3
    first, middle, last = levels[:third], levels[third:-third], levels[-third:]
    if max(first) < min(middle) and max(middle) < min(last):
        return Verdict(Trend.GROWING, round((levels[-1] - levels[0]) / (len(levels) - 1)), band)
    rises, falls = [c for c in changes if c > 0], [-c for c in changes if c < 0]
    if len(falls) >= 2 and len(rises) >= 2 * len(falls) and median(falls) > median(rises):
        return Verdict(Trend.SAWTOOTH, 0, band)
    return Verdict(Trend.FLAT, 0, band)


# --- what events say ----------------------------------------------------------------------------


class _Known(NamedTuple):
    """A storage that is known by where it is."""

    category: Category
    nbytes: int
    device: str


Known = Mapping[int, _Known]
"""By address."""


def _categories(
    events: Sequence[MemoryEvent], found: Sequence[Block], gradients: Iterable[int], end: Known
) -> list[Category]:
    """Of each block, what it is there for."""
    addresses = set(gradients)
    made_backward = {
        block.address: block.born
        for block in found
        if block.address in addresses and events[block.born].phase == "backward"
    }
    births = set(made_backward.values())
    next_backward = _next_backward(events)

    def category(block: Block) -> Category:
        if block.born in births:
            return Category.GRADIENTS
        if block.dies is None:
            known = end.get(block.address)
            return Category.HELD if known is None else known.category
        is_forward = events[block.born].phase == "forward"
        return (
            Category.SAVED
            if is_forward and block.dies > next_backward[block.born]
            else Category.OTHER
        )

    return [category(block) for block in found]


def _next_backward(events: Sequence[MemoryEvent]) -> list[int]:
    """For each event, the index of the next one of a backward."""
    found: list[int] = []
    upcoming = len(events)
    for index in range(len(events) - 1, -1, -1):
        if events[index].phase == "backward":
            upcoming = index
        found.append(upcoming)
    return found[::-1]


def _freed(events: Sequence[MemoryEvent], start: Known) -> dict[int, int]:
    """When blocks that were there before were freed: address -> index of the event."""
    found: dict[int, int] = {}
    taken: set[int] = set()
    for index, event in enumerate(events):
        if event.nbytes > 0:
            taken.add(event.address)
        elif event.address in start and event.address not in taken:
            found.setdefault(event.address, index)
    return found


def _there(
    events: Sequence[MemoryEvent], start: Known, freed: Mapping[int, int], end: Known
) -> Known:
    """What of `start` can be said to have been there until it was freed.

    On the CPU a free is recorded only of what was allocated in a step that was measured.
    """
    taken = {event.address for event in events if event.nbytes > 0}
    return {
        address: known
        for address, known in start.items()
        if address in freed
        or (address not in taken and (known.category is not Category.GRADIENTS or address in end))
    }


def _changes(count: int, found: Iterable[Block]) -> list[int]:
    """By how much each of `count` events changes the live bytes of some blocks."""
    changes = [0] * count
    for block in found:
        changes[block.born] += block.nbytes
        if block.dies is not None:
            changes[block.dies] -= block.nbytes
    return changes


def _peak(
    device: str,
    events: Sequence[MemoryEvent],
    found: Sequence[tuple[Block, Category]],
    start: Known,
    freed: Mapping[int, int],
) -> Peak:
    changes = _changes(len(events), (block for block, _ in found))
    for address, index in freed.items():
        changes[index] -= start[address].nbytes
    levels = list(accumulate(changes, initial=0))
    top = levels.index(max(levels)) - 1
    live: dict[Category, int] = {}
    for address, known in start.items():
        if freed.get(address, len(events)) > top:
            live[known.category] = live.get(known.category, 0) + known.nbytes
    for block, category in found:
        if block.is_alive_at(top):
            live[category] = live.get(category, 0) + block.nbytes
    if top < 0:
        return Peak(device, live, "forward", "", "")
    event = events[top]
    return Peak(device, live, event.phase, event.span, event.op)


def _activation_bytes(
    events: Sequence[MemoryEvent], found: Sequence[tuple[Block, Category]]
) -> int:
    """Largest live total of what forward and backward allocate, gradients apart."""
    counted = (
        block
        for block, category in found
        if category is not Category.GRADIENTS and events[block.born].phase != "optimizer"
    )
    return max(accumulate(_changes(len(events), counted), initial=0))


@dataclass(frozen=True)
class _Reading:
    """What the events of one step say."""

    peaks: tuple[Peak, ...]
    activation_bytes: int
    change_bytes: int
    held: Mapping[str, int]


def _read(
    events: Sequence[MemoryEvent], start: Known, gradients: Iterable[int], end: Known
) -> _Reading:
    """What events say, of a step that began with what is at `start` and ended with `end`."""
    all_blocks = blocks(events)
    found = list(zip(all_blocks, _categories(events, all_blocks, gradients, end), strict=True))
    freed = _freed(events, start)
    there = _there(events, start, freed, end)
    devices = dict.fromkeys([k.device for k in there.values()] + [e.device for e in events])
    peaks: list[Peak] = []
    held: dict[str, int] = {}
    for device in sorted(devices):
        own = [(b, c) for b, c in found if events[b.born].device == device]
        known = {address: k for address, k in there.items() if k.device == device}
        gone = {address: index for address, index in freed.items() if address in known}
        peaks.append(_peak(device, events, own, known, gone))
        held[device] = sum(block.nbytes for block, c in own if c is Category.HELD)
    change = sum(event.nbytes for event in events)
    return _Reading(tuple(peaks), _activation_bytes(events, found), change, held)


# --- watching -----------------------------------------------------------------------------------


class _Hook:
    """A hook on a module, which copies and pickles of the module come without."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class Watch:
    """What `watch` returns: a context around a training loop. It prints as a table.

    Attributes:
        steps: what is known of each step that has ended, in order.
    """

    def __init__(
        self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, share: float
    ) -> None:
        self.steps: list[StepUsage] = []
        self._model = model
        self._optimizers = [] if optimizer is None else [optimizer]
        self._is_any_optimizer = optimizer is None
        self._share = share
        self._handles: list[Any] = []
        self._open: AbstractContextManager[Callable[[], list[MemoryEvent]]] | None = None
        self._recorded: Callable[[], list[MemoryEvent]] | None = None
        self._there: Known = {}  # at the end of the step before
        self._gradients: set[int] = set()
        self._in_burst = 0
        self._seconds = 0.0
        self._began = 0.0
        self._allocated: dict[str, int] = {}
        self._is_stepping = False
        self._has_stepped = False
        self._unfound: dict[int, int] = {}  # steps of each optimizer since the last boundary
        self._is_told = False

    @property
    def verdict(self) -> Verdict:
        """What becomes of the live bytes, over the steps whose change is known."""
        return verdict([s.change_bytes for s in self.steps if s.change_bytes is not None])

    def step(self) -> None:
        """A step has ended, and the next one begins.

        Without this a step ends where the model is called again after a step of the optimizer.
        Call it outside of `torch.profiler.record_function`.

        Raises:
            FxrecalsError: nothing is watched now.
        """
        if not self._handles:
            raise FxrecalsError(
                "step() is for within the watch: with fxrecals.watch(...) as watched"
            )
        self._is_told = True
        self._end()
        self._begin()

    def __enter__(self) -> Watch:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        if self._model is not None:
            before = _Hook(self._before_model)
            self._handles.append(self._model.register_forward_pre_hook(before))
            for path, module in self._model.named_modules():
                self._handles += self._mark(path, module)
        self._began = time.perf_counter()
        self._there = self._known()
        self._begin()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if kind is None and self._has_stepped and not self._is_told:
            self._end()
        else:
            self._close()

    def __repr__(self) -> str:
        if not self.steps:
            return "no step has ended: call step() at the end of each"
        measured = [step for step in self.steps if step.is_measured]
        parts = [f"{len(self.steps)} steps, {len(measured)} measured: {self.verdict}"]
        parts.append(_table(self.steps[-1], _worst(measured)))
        parts += [f"peak {peak}, step {number}" for number, peak in _worst(measured).values()]
        parts += _counted(self.steps[-1])
        return "\n".join(parts)

    # --- where steps begin and end ---

    def _mark(self, path: str, module: nn.Module) -> Iterator[Any]:
        """Hooks that put what a module does into a span of the profiler."""
        opened: list[Any] = []

        def enter(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or self._open is None:
                return
            span = torch.profiler.record_function(SPAN + path)
            span.__enter__()
            opened.append(span)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and opened:
                opened.pop().__exit__(None, None, None)

        yield module.register_forward_pre_hook(_Hook(enter))
        yield module.register_forward_hook(_Hook(leave), always_call=True)

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._is_told or self._is_stepping:
            return
        if self._has_stepped:
            self._end()
            self._begin()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            if not self._is_any_optimizer:
                return
            self._optimizers.append(optimizer)
        self._is_stepping = True  # its span is open: the profiler must not change
        if self._open is not None:
            self._gradients |= {
                a for a, k in self._known().items() if k.category is Category.GRADIENTS
            }

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            return
        self._is_stepping, self._has_stepped = False, True
        self._unfound[id(optimizer)] = self._unfound.get(id(optimizer), 0) + 1
        if self._unfound[id(optimizer)] == 2 and not self._is_told:
            warnings.warn(
                "the optimizer stepped twice and the model was not called through its hooks in "
                "between: say where a step ends, by step() at the end of each",
                stacklevel=3,
            )

    def _begin(self) -> None:
        self._has_stepped = False
        self._unfound = {}
        self._gradients = set()
        if self._is_due() and not _torch.is_profiling():
            self._in_burst += 1
            with self._timed():
                self._open = _torch.memory_recorded(SPAN)
                self._recorded = self._open.__enter__()
        else:
            self._in_burst = 0

    def _is_due(self) -> bool:
        if self._share == 1 or 0 < self._in_burst < BURST:
            return True
        return self._seconds <= self._share * (time.perf_counter() - self._began)

    def _end(self) -> None:
        recorded = self._recorded
        with self._timed():
            self._close()
            events = None if recorded is None else recorded()
            self._seconds += SECONDS_PER_EVENT * len(events or ())
            self.steps.append(self._usage(events))

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._recorded = None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    # --- what is there ---

    def _usage(self, events: list[MemoryEvent] | None) -> StepUsage:
        end = self._known()
        gradients = self._gradients | {
            a for a, k in end.items() if k.category is Category.GRADIENTS
        }
        read = None if events is None else _read(events, self._there, gradients, end)
        live: dict[str, dict[Category, int]] = {}
        for known in end.values():
            of_device = live.setdefault(known.device, {})
            of_device[known.category] = of_device.get(known.category, 0) + known.nbytes
        for device, nbytes in ({} if read is None else read.held).items():
            live.setdefault(device, {})[Category.HELD] = nbytes
        allocated, reserved = self._counters()
        for device, nbytes in allocated.items():
            of_device = live.setdefault(device, {})
            of_device[Category.OTHER] = nbytes - sum(of_device.values())
        change = self._change(allocated, read)
        self._allocated, self._there = allocated, end
        return StepUsage(
            number=len(self.steps),
            live=live,
            peaks=() if read is None else read.peaks,
            activation_bytes=None if read is None else read.activation_bytes,
            change_bytes=change,
            allocated=allocated or None,
            reserved=reserved or None,
        )

    def _change(self, allocated: Mapping[str, int], read: _Reading | None) -> int | None:
        if allocated:
            return sum(allocated.values()) - sum(self._allocated.values()) if self.steps else None
        return read.change_bytes if read is not None and self._in_burst > 1 else None

    def _known(self) -> dict[int, _Known]:
        """Every storage of the model and the optimizers."""
        found: dict[int, _Known] = {}
        names: dict[torch.device, str] = {}
        for category, tensor in self._tensors():
            for storage in _torch.storages_of(tensor):
                address, device = storage.data_ptr(), storage.device
                if address and address not in found:
                    if device not in names:
                        names[device] = str(device)
                    found[address] = _Known(category, storage.nbytes(), names[device])
        return found

    def _tensors(self) -> Iterator[tuple[Category, Tensor]]:
        for parameter in self._parameters():
            yield Category.PARAMETERS, parameter
            if parameter.grad is not None:
                yield Category.GRADIENTS, parameter.grad
        for buffer in () if self._model is None else self._model.buffers():
            yield Category.BUFFERS, buffer
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for x in state.values() if isinstance(state, Mapping) else ():
                    if isinstance(x, Tensor):
                        yield Category.OPTIMIZER, x

    def _parameters(self) -> Iterable[nn.Parameter]:
        model = [] if self._model is None else self._model.parameters()
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        return {id(p): p for p in chain(model, *groups)}.values()

    def _counters(self) -> tuple[dict[str, int], dict[str, int]]:
        """What the CUDA allocator counts, of the devices of what is known."""
        used = [
            f"cuda:{index}"
            for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
            if torch.cuda.memory_reserved(index)
        ]
        return (
            {device: torch.cuda.memory_allocated(device) for device in used},
            {device: torch.cuda.memory_reserved(device) for device in used},
        )


def watch(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    share: float = SHARE,
) -> Watch:
    """Watches where the memory of a training loop goes.

    Args:
        model: what is trained. Peaks then name its modules, and steps are found by themselves: one
            ends where the model is called again after a step of the optimizer.
        optimizer: whose state is counted; by default those of every optimizer that steps.
        share: part of the time that measuring may take; with 1, every step is measured.

    Returns:
        A `Watch`: ``with`` around the loop, and ``watched.step()`` at the end of each step if you
        like to say so. Nothing that torch counts is reset, and nothing is computed otherwise.

    Raises:
        OptionError: `share` is not over 0 and at most 1.
    """
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise OptionError("share", share, "a number over 0 and at most 1, as in 0.02")
    return Watch(model, optimizer, share)


# --- the table ----------------------------------------------------------------------------------


def _worst(measured: Sequence[StepUsage]) -> dict[str, tuple[int, Peak]]:
    """The highest peak of each device, with the number of its step."""
    found: dict[str, tuple[int, Peak]] = {}
    for step in measured:
        for peak in step.peaks:
            if peak.device not in found or found[peak.device][1].nbytes < peak.nbytes:
                found[peak.device] = step.number, peak
    return found


def _table(last: StepUsage, worst: Mapping[str, tuple[int, Peak]]) -> str:
    devices = sorted({*last.live, *worst})
    columns: list[tuple[str, Usage]] = []
    for device in devices:
        columns.append((f"{device}: at the end", last.live.get(device, {})))
        if device in worst:
            columns.append(("at the peak", worst[device][1].live))
    rows = [
        (category.value, *(format_bytes(usage.get(category, 0)) for _, usage in columns))
        for category in Category
        if any(usage.get(category) for _, usage in columns)
    ]
    rows.append(("all", *(format_bytes(sum(usage.values())) for _, usage in columns)))
    return table(("bytes", *(name for name, _ in columns)), rows, "l" + "r" * len(columns))


def _counted(last: StepUsage) -> Iterator[str]:
    for device, nbytes in (last.allocated or {}).items():
        reserved = format_bytes((last.reserved or {})[device])
        yield f"{device}: {format_bytes(nbytes)} allocated, {reserved} reserved"
