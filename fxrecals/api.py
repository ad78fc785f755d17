"""What people call: `plan` and `rewrite`. Capture the joint graph, price its ops, solve, judge."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrecals import _torch
from fxrecals import cost as costing
from fxrecals.capture import Captured, capture, step
from fxrecals.dynamo import backend
from fxrecals.errors import OptionError
from fxrecals.export import write
from fxrecals.ir import Peak
from fxrecals.planning import (
    LimitLike,
    Progress,
    check_solver,
    checked_deadline,
    named_cost,
    named_peak,
    plan_graph,
)
from fxrecals.plans import Plan
from fxrecals.units import parse_limit

IN_EVAL = "the model is in eval mode: in train mode it draws dropout, and needs another plan"

MOST_SIZES = 64
"""Input sizes and modes for which a rewritten module makes a plan each; then it is an error."""


def plan(
    model: nn.Module,
    example: Any,
    limit: LimitLike | None = None,
    *,
    peak: str = "activations",
    cost: str | costing.Cost = "roofline",
    solver: str = "auto",
    deadline: float | None = None,
    on_progress: Progress | None = None,
    device: str | torch.device | None = None,
) -> Plan:
    """What training `model` under `limit` would keep and run again, before any step is taken.

    A copy of the model is traced under fake tensors: no kernel of it runs, and no activation is
    allocated. Its Python does run, once, as a trace needs it: what it changes outside of the model,
    such as a global counter, is changed.

    Args:
        model: in training mode as it will be trained; may be on ``meta``.
        example: what the model is called with: a tensor, a tuple of arguments, or a dict of
            keyword arguments. Only shapes, types and devices matter.
        limit: largest live total: an int of bytes, ``"4GB"``, ``"4GiB"``, ``"50%"`` (of the peak
            without recompute), ``"auto"``, or a dict by device. Without one, the plan is that of
            the knee of the curve limit against time, and prints the curve.
        peak: of what: ``"activations"``, or ``"step"`` for the activations and the gradients of
            parameters together.
        cost: ``"roofline"``, ``"measured"``, or an object with `cost.Cost`'s method.
        solver: ``"auto"``, or ``"exact"`` for the optimum of a small graph (`highspy`). After two
            minutes or the deadline it is the cheapest plan found, and a note says so.
        deadline: about how many seconds the solver may take; tracing comes before. By default it
            does an amount of work that takes some ten seconds for ten thousand ops, and gives the
            same plan on every machine.
        on_progress: called with every better answer: its extra seconds, a proved lower bound on
            them, and the seconds that the solver has taken so far.
        device: where a model on ``meta`` would be trained.

    Raises:
        OptionError: an argument that does not work; `LimitError` if it is the limit.
        InfeasibleLimitError: the limit is under the floor.
        CaptureError: the example does not fit, or nothing can be traced.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    >>> small = plan(model, torch.randn(512, 64), limit="80%")
    >>> small.peak_bytes <= small.limit_bytes < small.baseline_peak_bytes
    True
    >>> smaller = plan(model, torch.randn(512, 64), limit="80%", peak="step")
    >>> smaller.step_peak_bytes <= smaller.limit_bytes < smaller.baseline_step_peak_bytes
    True
    """
    check_solver(solver)
    which = named_peak(peak)
    read = None if limit is None else parse_limit(limit)
    priced = named_cost(cost, which)
    within = checked_deadline(deadline)
    if on_progress is not None and not callable(on_progress):
        raise OptionError("on_progress", on_progress, "a function of three numbers")
    captured = capture(model, example, device=device)
    graph = step(captured, priced)
    notes = (*captured.breaks, *([] if model.training else [IN_EVAL]))
    made = plan_graph(
        graph,
        read,
        solver=solver,
        peak=which,
        notes=notes,
        deadline=within,
        on_progress=on_progress,
        name=type(model).__name__,
    )
    return _with_export(made, captured)


def rewrite(
    model: nn.Module,
    example: Any,
    limit: LimitLike | Plan,
    *,
    peak: str = "activations",
    cost: str | costing.Cost = "roofline",
    solver: str = "auto",
) -> nn.Module:
    """A module with the same parameters that trains under `limit`, without `torch.compile`.

    It shares parameters, buffers and submodules with `model`, has its class and its
    ``state_dict``, and gives plain eager's bits. `model` itself stays as it was. Call ``train()``
    and ``eval()`` on the one that you run: submodules are shared, their root's mode is not.

    An input of another size than `example` is planned when it comes, under the same bytes; the
    graphs of a model that breaks then one by one, as by `backend`.

    Args:
        model: a real model, in training mode as it will be trained.
        example: as for `plan`.
        limit: as for `plan`, or a plan that was made of this model and example.
        peak: as for `plan`; where `limit` is a plan, the plan's.
        cost: as for `plan`.
        solver: as for `plan`.

    Raises:
        FxrecalsError: as `plan` does, before anything has run.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    >>> small = rewrite(model, torch.randn(512, 64), limit="80%")
    >>> small(torch.randn(512, 64)).sum().backward()
    >>> model[0].weight.grad is small[0].weight.grad
    True
    """
    if limit is None:
        raise OptionError("limit", limit, 'a limit, as in "4GB", or a plan')
    which, options = named_peak(peak), {"cost": cost, "solver": solver}
    made = limit if isinstance(limit, Plan) else plan(model, example, limit, peak=peak, **options)
    if which is Peak.STEP and made.peak is not which:
        raise OptionError("peak", peak, 'a plan that was made with peak="step"')
    nbytes = made.limit_bytes or made.bounded.peak_bytes
    twin = copy.copy(model)
    twin.__dict__ = dict(model.__dict__)
    within = backend(nbytes, inner="eager", peak=made.peak.value, given=made, **options)

    # Not twin.compile(): where the class is torch's own, such as nn.Sequential, Dynamo skips
    # every frame of it and compiles nothing. `_call` is a frame that it does not skip.
    # Apart: every rewrite has the code of `_call`, and Dynamo counts by code.
    compiled = _torch.compile_alone(_call, within, MOST_SIZES)
    alive = weakref.ref(twin)  # without a cycle, so that it dies with its last reference

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(alive(), *args, **kwargs)

    # For `monitor`; without the exporter, which holds all that was traced.
    call.plan = replace(made, exporter=None)  # type: ignore[attr-defined]
    twin._compiled_call_impl = call
    return twin


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _with_export(made: Plan, captured: Captured) -> Plan:
    def exporter(plan: Plan, folder: Path) -> None:
        write(plan, captured, folder)

    return replace(made, exporter=exporter)
