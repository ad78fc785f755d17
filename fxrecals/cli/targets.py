"""The model that a command is about: `pkg.module:factory`, and how it is traced and priced."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

from fxrecals.cost import GPUS, Roofline
from fxrecals.errors import OptionError

TARGET = "pkg.module:factory, a function that makes the model and what it is called with"


def add_target(verb: argparse.ArgumentParser) -> None:
    """Adds the model to what a command takes."""
    verb.add_argument("target", metavar="module:factory", help=TARGET)


def add_options(verb: argparse.ArgumentParser) -> None:
    """Adds what all commands about a model take."""
    verb.add_argument(
        "--peak",
        default="activations",
        choices=("activations", "step"),
        help="what is limited: activations, or with gradients of parameters (default: activations)",
    )
    verb.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"plan for a GPU that need not be there, by its figures: {', '.join(GPUS)}",
    )
    verb.add_argument("--device", help="where the model would be trained, as in cuda:0")
    verb.add_argument(
        "--cost",
        default="roofline",
        choices=("roofline", "measured"),
        help="how the time of ops is known (default: roofline)",
    )
    add_json(verb)


def add_json(verb: argparse.ArgumentParser) -> None:
    """Adds the choice of JSON."""
    verb.add_argument("--json", action="store_true", help="print JSON instead of tables")


def planning_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `fxrecals.plan` that `add_options` stands for.

    Raises:
        OptionError: a GPU whose figures are not known.
    """
    cost: Any = options.cost
    device = options.device
    if options.gpu is not None:
        if options.gpu not in GPUS:
            raise OptionError("--gpu", options.gpu, ", ".join(GPUS))
        cost, device = Roofline(GPUS[options.gpu]), device or "cuda"
    return {"peak": options.peak, "cost": cost, "device": device}


def load(target: str) -> Callable[..., Any]:
    """The function that a target names; the current directory is looked in first.

    Raises:
        OptionError: it names none, with what is missing.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise OptionError("target", target, "a module and a function in it, as in train:make")
    found = _attribute(_module(target, module_name), path, target)
    if not callable(found):
        kind = type(found).__name__
        raise OptionError("target", target, f"a function; {path} is of type {kind}")
    return found


def _module(target: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the module itself needs
        expected = f"a module that Python finds from {os.getcwd()}: no module named {error.name!r}"
        raise OptionError("target", target, expected) from None


def _attribute(module: Any, path: str, target: str) -> Any:
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        public = (key for key, x in vars(module).items() if key[:1] != "_" and _is_own(x, module))
        near = ", ".join(list(public)[:5]) or "none"
        expected = f"a function of {module.__name__}, which has no {path!r}; its own: {near}"
        raise OptionError("target", target, expected) from None


def _is_own(x: Any, module: Any) -> bool:
    return callable(x) and getattr(x, "__module__", "") == module.__name__
