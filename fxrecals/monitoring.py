"""Planned against measured peak, step by step, while a model trains.

    >>> import fxrecals
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    >>> x = torch.randn(512, 64)
    >>> small = fxrecals.rewrite(model, x, limit="80%")
    >>> watch = monitor(small)
    >>> for _ in range(3):
    ...     with watch:  # forward, loss and backward; not the optimizer
    ...         small(x).square().mean().backward()
    >>> [0 < each.measured_bytes <= each.planned_bytes for each in watch.steps]
    [True, True]

What is compared is the peak of the step, gradients of parameters included: the bytes that are
alive at once beyond those that were there when the step began. On CUDA they are the allocator's
own count, which costs nothing, and its peak statistics are reset. On the CPU they come from the
profiler's record of the allocator, which makes a step slower: say ``every=100``.

What it cannot see: memory that other libraries allocate by themselves, fragments, what the
allocator holds in reserve, and on the CPU anything while another profiler is running. A tensor of
the step before that is freed within the step makes the measured peak look smaller.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxrecals import _torch
from fxrecals.dynamo import Backend
from fxrecals.errors import OptionError
from fxrecals.formats import format_bytes
from fxrecals.plans import Plan

logger = logging.getLogger("fxrecals")

TOLERANCE = 0.05
"""Part of the planned peak by which the measured one may be above it."""

UNLIKE = 0.5
"""Part of the planned peak under which the measured one is of another step than was planned."""

SPAN = "fxrecals monitored step"


@dataclass(frozen=True)
class Measured:
    """One step that was measured.

    Attributes:
        number: of the step, from 0 on.
        planned_bytes: the planned peak, with gradients.
        measured_bytes: the peak above what was there before.
    """

    number: int
    planned_bytes: int
    measured_bytes: int


class Monitor:
    """What `monitor` returns: a context for each step, or `start` and `stop`.

    Attributes:
        steps: what was measured, in order.
    """

    def __init__(
        self, devices: list[torch.device], planned: Callable[[], int], every: int, warmup: int
    ) -> None:
        self.steps: list[Measured] = []
        self._devices = devices
        self._planned = planned
        self._every = every
        self._warmup = warmup
        self._number = 0
        self._open: AbstractContextManager[Callable[[], int]] | None = None
        self._measured: Callable[[], int] | None = None
        self._has_warned = False

    def start(self) -> None:
        """A step begins."""
        if self._open is not None:
            self._close()  # the step before was left by an error
        since = self._number - self._warmup
        if since >= 0 and since % self._every == 0:
            self._open = _measuring(self._devices)
            self._measured = self._open.__enter__()

    def stop(self) -> None:
        """A step has ended: its backward has run."""
        measured = self._measured
        if measured is not None:
            self._close()
            self._note(Measured(self._number, self._planned(), measured()))
        self._number += 1

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.stop()
        else:
            self._close()

    def __repr__(self) -> str:
        if not self.steps:
            return f"no step measured in {self._number}"
        worst = max(self.steps, key=lambda each: each.measured_bytes)
        return (
            f"{len(self.steps)} of {self._number} steps measured: "
            f"planned peak {format_bytes(worst.planned_bytes)}, "
            f"measured at most {format_bytes(worst.measured_bytes)} (step {worst.number})"
        )

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._measured = None

    def _note(self, step: Measured) -> None:
        self.steps.append(step)
        logger.debug("step %d: planned %d, measured %d bytes", *_fields(step))
        why = _why(step)
        if why and not self._has_warned:
            self._has_warned = True
            planned, measured = map(format_bytes, (step.planned_bytes, step.measured_bytes))
            warnings.warn(
                f"step {step.number} peaked at {measured} where {planned} were planned, gradients "
                f"included: {why}",
                stacklevel=4,
            )


def monitor(
    model: nn.Module,
    planned: Plan | Backend | None = None,
    *,
    every: int = 1,
    warmup: int = 1,
) -> Monitor:
    """Watches whether steps of `model` keep to their plan, and warns once if they do not.

    Args:
        model: the model that is trained; a rewritten one knows its plan.
        planned: its plan, or the backend that it was compiled with, of whose plans the one with
            the highest peak counts.
        every: measure one step of so many. On the CPU a measured step is slower.
        warmup: steps at the start that are not measured: the first one compiles.

    Returns:
        A `Monitor`, to put around each step, forward to backward, by ``with watch`` or by
        ``watch.start()`` and ``watch.stop()``. It prints as a summary.

    Raises:
        OptionError: there is no plan, or the model is neither on the CPU nor on CUDA.
    """
    for name, value, least in (("every", every, 1), ("warmup", warmup, 0)):
        if type(value) is not int or value < least:
            raise OptionError(name, value, f"a whole number from {least} on")
    return Monitor(_devices(model), _planned_by(model, planned), every, warmup)


def _devices(model: nn.Module) -> list[torch.device]:
    found = list(dict.fromkeys(p.device for p in model.parameters())) or [torch.device("cpu")]
    kinds = {device.type for device in found}
    if kinds not in ({"cpu"}, {"cuda"}):
        where = f"{type(model).__name__} on {found[0]}"
        raise OptionError("model", where, "a model whose parameters are on the CPU, or on CUDA")
    return found


def _planned_by(model: nn.Module, planned: Plan | Backend | None) -> Callable[[], int]:
    if isinstance(planned, Backend):
        return lambda: max(
            (plan.step_peak_bytes for plan in planned.plans if isinstance(plan, Plan)), default=0
        )
    call = getattr(model, "_compiled_call_impl", None)
    plan = planned if planned is not None else getattr(call, "plan", None)
    if not isinstance(plan, Plan):
        expected = "a plan, the fxrecals.backend in use, or a model that fxrecals.rewrite returned"
        raise OptionError("planned", planned, expected)
    nbytes = plan.step_peak_bytes
    return lambda: nbytes


def _why(step: Measured) -> str:
    """What is likely to be wrong; "" if nothing is."""
    if step.measured_bytes > (1 + TOLERANCE) * step.planned_bytes:
        return (
            "something allocates that was not planned, such as a loss with large temporaries, "
            "outputs kept from step to step, code that was not traced, or Inductor's own buffers"
        )
    if step.measured_bytes < UNLIKE * step.planned_bytes:
        return "the plan is for another step, such as one with a larger example"
    return ""


def _fields(step: Measured) -> tuple[int, int, int]:
    return step.number, step.planned_bytes, step.measured_bytes


# --- measuring ----------------------------------------------------------------------------------


@contextmanager
def _measuring(devices: list[torch.device]) -> Iterator[Callable[[], int]]:
    """Afterwards, the yielded function tells the peak of what ran within, above its start."""
    if devices[0].type == "cuda":
        before = sum(torch.cuda.memory_allocated(device) for device in devices)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        peaks: list[int] = []
        yield lambda: sum(peaks) - before
        peaks += (torch.cuda.max_memory_allocated(device) for device in devices)
    else:
        with _torch.allocations_recorded() as recorded, torch.profiler.record_function(SPAN):
            yield lambda: _peak(recorded(SPAN)[SPAN])


def _peak(events: list[_torch.Event]) -> int:
    """The largest live total; what was there before does not count when it is freed."""
    live = peak = 0
    alive: dict[int, int] = {}
    for address, nbytes in events:
        if nbytes > 0:
            alive[address] = nbytes
            live += nbytes
        else:
            live -= alive.pop(address, 0)
        peak = max(peak, live)
    return peak
