"""Looks at a training program before anything is planned: is it activations, or a fault?

`observe` runs some steps and writes down what it sees, a `Record`, with the help of `tensors`,
`gradients` and `holders` (who holds an object, and in which line). Each function of `findings` and
`allocator` judges one fault by that record alone. `report` says it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fxrecals import api
from fxrecals.doctoring.finding import Finding
from fxrecals.doctoring.findings import findings
from fxrecals.doctoring.observe import LEAST_STEPS, Example, observe
from fxrecals.doctoring.report import Diagnosis
from fxrecals.errors import FxrecalsError, InfeasibleLimitError, OptionError
from fxrecals.factories import by_name
from fxrecals.plans import Plan

__all__ = ["Diagnosis", "Finding", "doctor"]


def doctor(train_step: Callable[[], Any], steps: int = 5, *, plan: bool = True) -> Diagnosis:
    """Runs some steps of a training program, and says what takes memory for nothing.

    It looks for graphs and tensors that outlive their step, reference cycles, graphs that no
    backward uses, ``retain_graph`` for nobody, gradients that add up or are zeroed, parameters
    without gradient, wide types, hooks that pile up, a fragmented or emptied cache, and more. The
    steps train the model as they would without it, to the same bits, only slower.

    Args:
        train_step: one step: forward, loss, backward, update. It is called without arguments.
        steps: how many to run, three at least.
        plan: whether to plan what a limit would do, where no fault is found.

    Returns:
        A `Diagnosis`, which prints as a report.

    Raises:
        OptionError: `train_step` cannot be called, or there are too few steps.
        Exception: what a step raises; everything that was watched is as it was then.

    >>> import torch
    >>> model, losses = torch.nn.Linear(64, 64), []
    >>> def step():
    ...     loss = model(torch.ones(256, 64)).square().mean()
    ...     loss.backward()
    ...     model.zero_grad()
    ...     losses.append(loss)  # should be loss.item()
    >>> [finding.kind for finding in doctor(step).findings]
    ['graph kept']
    """
    if not callable(train_step):
        raise OptionError("train_step", train_step, "a function of no arguments that runs one step")
    if type(steps) is not int or steps < LEAST_STEPS:
        raise OptionError("steps", steps, f"a whole number from {LEAST_STEPS} on")
    record, example = observe(train_step, steps)
    found = Diagnosis(steps, findings(record), record.bytes_by_category)
    if found.findings or not found.activations_lead or example is None or not plan:
        return found
    planned = _planned(example)
    return Diagnosis(steps, found.findings, found.bytes_by_category, planned)


def _planned(example: Example) -> Plan | None:
    """The plan for half of the peak, or for the floor; None where the model cannot be traced."""
    try:
        inputs = by_name(example.module, example.args, example.kwargs)
        return _half_or_floor(example.module, inputs)
    except FxrecalsError:
        return None


def _half_or_floor(module: nn.Module, inputs: Any) -> Plan:
    try:
        return api.plan(module, inputs, "50%")
    except InfeasibleLimitError as error:
        return api.plan(module, inputs, error.floor_bytes)
