"""Each fault is found, its cure is not, and what only looks like it is not."""

import ast
import builtins
import importlib.util
import inspect
import linecache
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import fxrecals
from fxrecals.doctoring import Finding
from tests import doctor_programs as programs

NAMES = sorted(programs.KINDS)


def examined(make: Callable[[], Callable[[], Any]], steps: int = 5) -> tuple[Finding, ...]:
    step = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph")
        return fxrecals.doctor(step, steps, plan=False).findings


def kinds(module: ModuleType, name: str) -> set[str]:
    return {finding.kind for finding in examined(getattr(module, name))}


class _Renamed(ast.NodeTransformer):
    """Other names for all variables, parameters and attributes that the programs define."""

    def __init__(self, tree: ast.Module) -> None:
        programs_own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        nodes = list(ast.walk(tree))
        names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        used = {n.arg for n in nodes if isinstance(n, ast.keyword)}
        stored = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        self.attributes = {n.attr for n in stored} | {"values"}
        self.attributes -= {"grad", "weight"}
        known = {*dir(builtins), *programs_own, *used, "KINDS", "self"}
        self.names = {name: f"q{i}" for i, name in enumerate(sorted(names - known))}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if node.attr in self.attributes:
            node.attr = f"r_{node.attr[::-1]}"
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        for each in node.body:
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                each.targets[0].id = "r_seulav"
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.Nonlocal:
        node.names = [self.names.get(name, name) for name in node.names]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.name = self.names.get(node.name, node.name)
        return node


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    tree = ast.parse(inspect.getsource(programs))
    path = tmp_path_factory.mktemp("renamed") / "other_names.py"
    path.write_text(ast.unparse(_Renamed(tree).visit(tree)))
    spec = importlib.util.spec_from_file_location("other_names", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marked(name: str) -> str:
    """The first line marked in a program, or in what it calls."""
    file = programs.__file__
    lines, start = inspect.getsourcelines(getattr(programs, name))
    number = next((i for i, line in enumerate(lines, start) if line.endswith("# here\n")), 0)
    return f"{os.path.relpath(file)}:{number}" if number else ""


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found_with_its_line(name: str) -> None:
    found = examined(getattr(programs, f"{name}__fault"))
    assert {finding.kind for finding in found} == programs.KINDS[name], found
    line = marked(f"{name}__fault")
    assert not line or line in {finding.where for finding in found}, found
    for finding in found:
        if finding.where:
            path, number = finding.where.rsplit(":", 1)
            assert linecache.getline(path, int(number)).strip()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("twin", ["cure", "innocent"])
def test_a_cure_and_what_looks_alike_are_let_be(name: str, twin: str) -> None:
    assert examined(getattr(programs, f"{name}__{twin}")) == ()


@pytest.mark.parametrize("name", NAMES)
def test_names_do_not_matter(name: str, renamed: ModuleType) -> None:
    assert kinds(renamed, f"{name}__fault") == programs.KINDS[name]
    assert kinds(renamed, f"{name}__cure") == set()
    assert kinds(renamed, f"{name}__innocent") == set()
