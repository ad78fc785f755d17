"""The command doctor: what is wrong with a training step; or versions, devices, a self-test."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

import fxrecals
from fxrecals.cli.output import Output
from fxrecals.cli.targets import add_json, load
from fxrecals.errors import FxrecalsError
from fxrecals.report import table

PACKAGES = ("torch", "numpy", "sympy", "tabulate", "triton", "highspy", "matplotlib")

COMPILERS = ("g++", "clang++", "c++")


ABOUT = """
With a function that runs one training step: runs some steps, and tells of graphs and tensors that
outlive them, reference cycles, graphs that no backward uses, gradients that add up, and more; or,
if nothing is wrong, what a limit would do. It exits with 1 if something is wrong.

Without: versions, devices, what is supported here, and a self-test of some seconds.
"""


def add_verbs(verbs: Any) -> None:
    """Adds the command to a parser."""
    about = "what is wrong with a training step; without one, versions and a self-test"
    verb = verbs.add_parser("doctor", help=about, description=ABOUT)
    verb.add_argument(
        "target",
        metavar="module:step",
        nargs="?",
        help="pkg.module:function, which runs one training step and takes no arguments",
    )
    verb.add_argument("--steps", type=int, default=5, help="how many to run (default: 5)")
    add_json(verb)
    verb.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace, output: Output) -> None:
    if options.target is None:
        _examine_installation(output)
    else:
        _examine_program(options, output)


def _examine_program(options: argparse.Namespace, output: Output) -> None:
    output.progress(f"running {options.target}")
    found = fxrecals.doctor(load(options.target), options.steps)
    output.result(repr(found), found.to_dict())
    if found.findings:
        raise FxrecalsError(f"{options.target} has {len(found.findings)} to mend")


def _examine_installation(output: Output) -> None:
    output.progress("testing")
    start = time.perf_counter()
    test = self_test()
    seconds = time.perf_counter() - start
    data = {
        "versions": _versions(),
        "devices": _devices(),
        "supported": _supported(),
        "self_test": {**test, "seconds": round(seconds, 1)},
    }
    output.result(_text(data), data)
    wrong = [name for name, is_right in test.items() if not is_right]
    if wrong:
        raise FxrecalsError(f"the self-test failed: {', '.join(wrong)}")


def _versions() -> dict[str, str]:
    found = {"fxrecals": fxrecals.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "torch": torch.__version__}


def _devices() -> list[str]:
    found = [f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 1e9
        found.append(f"cuda:{index}: {properties.name}, {memory:.0f} GB")
    return found


def _supported() -> dict[str, str]:
    """What works here, in words."""
    compiler = next(filter(shutil.which, (os.environ.get("CXX", "g++"), *COMPILERS)), None)
    inductor = f"yes, with {compiler}" if compiler else "no: Inductor needs a C++ compiler"
    exact = _versions()["highspy"] != "not installed"
    plots = _versions()["matplotlib"] != "not installed"
    cuda = "there, but fxrecals has not been tried on it" if torch.cuda.is_available() else "none"
    return {
        "rewrite, and backend with inner='eager'": "yes",
        "backend with inner='inductor' on the CPU": inductor,
        "CUDA": cuda,
        "solver='exact'": "yes" if exact else 'no: pip install "fxrecals[milp]"',
        "plots": "yes" if plots else 'no: pip install "fxrecals[plot]"',
    }


def self_test() -> dict[str, bool]:
    """Plans, rewrites and runs a tiny model with dropout, and compares it with plain eager."""
    model, x = _model(), torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    plan = fxrecals.plan(model, x, limit="60%")
    plain = _step(model, x)
    small = _step(fxrecals.rewrite(model, x, plan), x)
    return {
        "the plan recomputes": bool(plan.regions),
        "the plan is within its limit": plan.peak_bytes <= (plan.limit_bytes or 0),
        "outputs and gradients have the same bits": all(map(torch.equal, plain, small)),
    }


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        return nn.Sequential(*blocks)


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, the gradients, and the state of the generator after a step."""
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        out = model(x)
        out.square().mean().backward()
        state = torch.get_rng_state()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None), state]


def _text(data: dict[str, Any]) -> str:
    test = dict(data["self_test"])
    seconds = test.pop("seconds")
    rows = [
        *data["versions"].items(),
        *(device.split(": ", 1) for device in data["devices"]),
        *data["supported"].items(),
        *((name, "yes" if is_right else "NO") for name, is_right in test.items()),
        ("self-test", f"{seconds} s"),
    ]
    return table(("what", "here"), rows, "ll")
