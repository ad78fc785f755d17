"""Imports go one way, and the pure half never sees torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxrecals

PACKAGE = Path(fxrecals.__file__).parent

LAYERS = {
    "pure": (
        {"formats"},
        {"errors"},
        {"units"},
        {"ir"},
        {"schedule"},
        {"timeline"},
        {"composition"},
        {"solve"},
    ),
    "torch": (
        {"_torch"},
        {"runtime"},
        {"rng"},
        {"cost"},
        {"convolutions"},
        {"policies"},
        {"reading"},
        {"capture"},
        {"halves"},
        {"engine"},
    ),
    "view": ({"report"}, {"explanation", "charts"}, {"plot", "page"}),
    "top": (
        {"plans"},
        {"package"},
        {"export"},
        {"planning"},
        {"ledger"},
        {"sites"},
        {"steps"},
        {"compiling"},
        {"dynamo"},
        {"api"},
        {"factories"},
        {"fitting"},
        {"monitoring"},
        {"fallback"},
        {"doctoring"},
        {"__init__"},
        {"cli"},
        {"__main__"},
    ),
}
"""Each layer may import those before it in its half, its own modules, and the halves below.

The view stands below what is shown, so that a plan can print itself: it reads a plan and imports
its type for annotations only.
"""

HALVES_BELOW = {
    "pure": (),
    "torch": ("pure",),
    "view": ("pure",),
    "top": ("pure", "torch", "view"),
}

NOT_FOR_TORCH = "solve"
"""Planning and running know of each other only through `planning` and `dynamo`."""

FUNCTIONS = {"plan", "rewrite", "backend", "compile", "doctor", "recals", "fit", "load", "monitor"}
"""Public functions: a module of that name would hide them."""


def _half(module: str) -> str:
    return next(half for half, layers in LAYERS.items() if any(module in x for x in layers))


def _rank(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS[_half(module)]) if module in layer)


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    """Where a file stands in the layers: all of `solve/` is one module."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports when it or one of its functions runs."""
    for node in ast.iter_child_nodes(tree):
        if _for_types_only(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from _imports(ast.Module([other], []))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imports(node)


def _our_imports(path: Path) -> Iterator[str]:
    """Our modules that a file imports, each as its place in the layers."""
    known = {module for layers in LAYERS.values() for layer in layers for module in layer}
    for name in _imports(ast.parse(path.read_text())):
        first, _, rest = name.partition(".")
        if first == "fxrecals":
            module = rest.split(".")[0]
            yield module if module in known else "__init__"


def _may_import(module: str, other: str) -> bool:
    if _half(module) == "torch" and other == NOT_FOR_TORCH:
        return False
    if _half(module) == _half(other):
        return _rank(other) <= _rank(module)
    return _half(other) in HALVES_BELOW[_half(module)]


def _id(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_every_module_has_a_layer() -> None:
    placed = {module for layers in LAYERS.values() for layer in layers for module in layer}
    assert {_module(path) for path in _modules()} <= placed, "give it a place in LAYERS"


@pytest.mark.parametrize("path", _modules(), ids=_id)
def test_imports_go_one_way(path: Path) -> None:
    module = _module(path)
    upward = [other for other in _our_imports(path) if not _may_import(module, other)]
    assert not upward, f"{module} must not import {upward}"


@pytest.mark.parametrize("path", _modules(), ids=_id)
def test_pure_modules_do_not_import_torch(path: Path) -> None:
    imported = {name.split(".")[0] for name in _imports(ast.parse(path.read_text()))}
    assert _half(_module(path)) != "pure" or "torch" not in imported


@pytest.mark.parametrize("path", _modules(), ids=_id)
def test_no_module_has_the_name_of_a_public_function(path: Path) -> None:
    assert path.stem not in FUNCTIONS


def test_a_torch_module_must_not_import_a_solver() -> None:
    assert not _may_import("halves", "solve")
    assert _may_import("halves", "timeline")
    assert _may_import("plans", "solve")
    assert not _may_import("ir", "schedule")
    assert not _may_import("timeline", "capture")
    assert not _may_import("report", "plans")
    assert _may_import("plans", "report")


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import torch.fx
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import fxrecals.api
else:
    import one
def f():
    try:
        from fxrecals import solve
    except ImportError:
        from fxrecals.solve.greedy import solve
"""
    assert list(_imports(ast.parse(source))) == [
        "torch.fx",
        "typing.TYPE_CHECKING",
        "one",
        "fxrecals.solve",
        "fxrecals.solve.greedy.solve",
    ]
