"""Each fault is found, its cure is not, and what only looks like it is not."""

import ast
import builtins
import gc
import importlib.util
import inspect
import linecache
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data.dataloader import _BaseDataLoaderIter

import fxrecals
from fxrecals.doctoring import Finding
from fxrecals.doctoring.findings import findings
from fxrecals.doctoring.record import (
    Allocator,
    CacheCalls,
    Copies,
    Loader,
    Record,
)
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
        methods = {
            f.name
            for n in nodes
            if isinstance(n, ast.ClassDef)
            for f in n.body
            if isinstance(f, ast.FunctionDef)
        }
        known = {*dir(builtins), *programs_own, *used, *methods, "KINDS", "self"}
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


# --- the program is left as it is ---------------------------------------------------------------


def _tensors_after(run: Callable[[Callable[[], Any]], Any]) -> list[Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    run(lambda: programs.update(model, optimizer, torch.randn(8, 16)))
    grads = [p.grad for p in model.parameters()]
    return [*model.state_dict().values(), *grads, torch.get_rng_state()]


def _plainly(step: Callable[[], Any]) -> None:
    for _ in range(4):
        step()


def test_the_steps_have_the_same_bits_as_without_it() -> None:
    plain = _tensors_after(_plainly)
    examined_too = _tensors_after(lambda step: fxrecals.doctor(step, 4, plan=False))
    assert all(map(torch.equal, plain, examined_too))


def _patched_names() -> list[Any]:
    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    return [
        torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
        torch.cuda.empty_cache,
        torch.cuda.memory.empty_cache,
        torch._C._autograd._saved_tensors_hooks_disable,  # type: ignore[attr-defined]
        _BaseDataLoaderIter.__next__,
        Tensor.to,
        *map(len, hooks),
        gc.isenabled(),
        gc.get_debug(),
        gc.get_freeze_count() > 0,
        list(gc.garbage),
    ]


def test_all_is_taken_back_where_a_step_fails() -> None:
    before = _patched_names()

    def step() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fxrecals.doctor(step)
    assert _patched_names() == before
    assert torch.ones(2, requires_grad=True).exp().grad_fn._saved_result is not None  # type: ignore[union-attr]


def test_nothing_of_the_steps_is_held_afterwards() -> None:
    seen: list[weakref.ref[Tensor]] = []
    model, optimizer, _ = programs.parts()

    def step() -> None:
        x = torch.randn(256, 64)
        seen.append(weakref.ref(x))
        programs.update(model, optimizer, x)

    found = fxrecals.doctor(step)
    gc.collect()
    assert found.plan is not None
    assert [ref() for ref in seen] == [None] * 5


def test_a_graph_that_lives_on_can_be_used_and_holds_nothing_else() -> None:
    model, _, x = programs.parts()
    graphs: list[Tensor] = []

    class Local:
        pass

    mine = Local()
    known = weakref.ref(mine)

    def step() -> None:
        graphs.append(model(x).square().mean())

    def examine(local: Local) -> None:
        assert fxrecals.doctor(step, plan=False).findings

    examine(mine)
    del mine
    gc.collect()
    assert known() is None
    graphs[0].backward()
    found = [p.grad for p in model.parameters()]
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert all(
        grad is not None and torch.equal(grad, e) for grad, e in zip(found, expected, strict=True)
    )


def test_transforms_that_refuse_saved_tensor_hooks_work() -> None:
    model, optimizer, x = programs.parts()

    def step() -> Tensor:
        programs.update(model, optimizer, x)
        return torch.func.grad(lambda a: a.square().sum())(x)

    assert fxrecals.doctor(step, plan=False).findings == ()


def test_a_compiled_model_is_examined_and_stays_compiled() -> None:
    torch._dynamo.reset()
    model, optimizer, x = programs.parts()
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=backend)
    assert fxrecals.doctor(lambda: programs.update(compiled, optimizer, x)).findings == ()
    assert len(graphs) == 1


def test_recompute_by_checkpoint_is_no_fault() -> None:
    model, optimizer, x = programs.parts()
    for reentrant in (False, True):

        def step(reentrant: bool = reentrant) -> None:
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            checkpoint(model, inputs, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()

        assert fxrecals.doctor(step, plan=False).findings == ()


# --- the report ---------------------------------------------------------------------------------


def test_where_nothing_is_wrong_a_limit_is_planned() -> None:
    found = fxrecals.doctor(programs.no_zero_grad__cure())
    assert found.findings == ()
    assert found.plan is not None
    assert found.plan.peak_bytes < found.plan.baseline_peak_bytes
    assert f"fxrecals.backend(limit={found.plan.limit_bytes})" in repr(found)


def test_where_activations_are_little_no_limit_is_advised() -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    found = fxrecals.doctor(lambda: programs.update(model, optimizer, torch.ones(1, 512)))
    assert found.plan is None
    assert "activations are not the most of it" in repr(found)
    assert found.bytes_by_category["parameters"] == 4 * (512 * 512 + 512)
    assert found.bytes_by_category["gradients"] == found.bytes_by_category["parameters"]


def test_saved_bytes_are_those_of_the_graph() -> None:
    x = torch.randn(1000, requires_grad=True)

    def step() -> None:
        x.grad = None
        y = x.exp()  # 4000 bytes, saved once
        (y * y.sin()).sum().backward()  # saves y and sin(y); sin saves y

    found = fxrecals.doctor(step, plan=False)
    assert found.bytes_by_category["saved for the backward"] == 8000


@pytest.mark.parametrize("wrong", [{"steps": 2}, {"steps": "5"}, {"train_step": 7}])
def test_what_cannot_be_examined_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(fxrecals.OptionError):
        fxrecals.doctor(**{"train_step": lambda: None, **wrong})


# --- devices that are not here ------------------------------------------------------------------

GB = 10**9


def _stats(reserved: int, allocated: int, lost: int, **more: int) -> dict[str, int]:
    return {
        "reserved_bytes.all.current": reserved,
        "allocated_bytes.all.current": allocated,
        "inactive_split_bytes.all.current": lost,
        **more,
    }


def _kinds_of(**parts: Any) -> list[str]:
    return [finding.kind for finding in findings(Record(5, **parts))]


def test_fragments_are_told_from_a_cache() -> None:
    pieces = tuple([GB // 4] * 20)
    split = Allocator("cuda:0", {}, _stats(10 * GB, 4 * GB, 5 * GB), pieces)
    cached = Allocator("cuda:0", {}, _stats(10 * GB, 4 * GB, GB), pieces[:4])
    small = Allocator("cuda:0", {}, _stats(10**7, 10**6, 8 * 10**6), (10**6,))
    assert _kinds_of(allocators=(split,)) == ["fragmented memory"]
    assert _kinds_of(allocators=(cached,)) == _kinds_of(allocators=(small,)) == []
    [finding] = findings(Record(5, allocators=(split,)))
    assert "reserved 10.0 GB for 4.00 GB" in finding.what
    assert "the largest 250 MB" in finding.what
    assert finding.nbytes == 5 * GB


def test_retries_count_from_the_first_step_on() -> None:
    before, after = {"num_alloc_retries": 2}, _stats(GB, GB, 0)
    grown, same = {**after, "num_alloc_retries": 5}, {**after, "num_alloc_retries": 2}
    assert _kinds_of(allocators=(Allocator("cuda:0", before, grown),)) == ["allocations retried"]
    assert _kinds_of(allocators=(Allocator("cuda:0", before, same),)) == []


def test_many_small_tensors_are_found_by_what_rounding_costs() -> None:
    def allocator(blocks: int, asked: int) -> Allocator:
        more = {"active.small_pool.current": blocks, "requested_bytes.all.current": asked}
        return Allocator("cuda:0", {}, {**_stats(GB, GB // 2, 0), **more})

    assert _kinds_of(allocators=(allocator(500_000, GB // 4),)) == ["many small tensors"]
    assert _kinds_of(allocators=(allocator(500_000, GB // 2 - 10**6),)) == []
    assert _kinds_of(allocators=()) == []


def test_an_emptied_cache_says_how_often_the_driver_was_asked() -> None:
    before, after = {"num_device_alloc": 10}, {**_stats(GB, GB, 0), "num_device_alloc": 60}
    [finding] = findings(
        Record(
            5,
            cache_calls=(CacheCalls("train.py:7", 5, 0.02),),
            allocators=(Allocator("cuda:0", before, after),),
        )
    )
    assert finding.evidence == ("5 calls took 20.0 ms", "50 allocations by the driver in 5 steps")


def test_copies_of_each_step_are_told_from_those_of_the_start() -> None:
    assert _kinds_of(copies=(Copies("a.py:1", 5, GB, "cuda:0"),)) == ["pageable copies"]
    assert _kinds_of(copies=(Copies("a.py:1", 1, GB, "cuda:0"),)) == []


def test_copies_to_a_device_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys.modules["fxrecals.doctoring.observe"], "ACCELERATORS", ("meta", "cuda"))
    monkeypatch.setattr(torch, "meta", torch.cuda, raising=False)
    [finding] = examined(lambda: lambda: torch.ones(8).to("meta"))
    assert finding.kind == "pageable copies"
    assert finding.where.startswith("tests/test_doctor.py:")
    assert "to" not in vars(Tensor)


def test_a_loader_that_starts_for_each_batch_is_told_from_one_that_goes_on() -> None:
    batch = 10**6
    each = Loader("a.py:1", workers=4, prefetch=2, iterators=5, batches=5, batch_nbytes=batch)
    once = Loader("a.py:1", workers=4, prefetch=2, iterators=1, batches=5, batch_nbytes=batch)
    alone = Loader("a.py:1", workers=0, prefetch=0, iterators=5, batches=5, batch_nbytes=batch)
    large = {"peak_saved_nbytes": 100 * batch}
    assert _kinds_of(loaders=(each,), **large) == ["loader restarted"]
    assert _kinds_of(loaders=(once,), **large) == _kinds_of(loaders=(alone,)) == []
    assert _kinds_of(loaders=(once,)) == ["loader holds batches"]


def test_batches_of_a_loader_are_counted() -> None:
    model, optimizer, x = programs.parts()
    observe = sys.modules["fxrecals.doctoring.observe"].observe
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=64)
    batches = iter(data)

    def again() -> None:
        (batch,) = next(iter(data))
        programs.update(model, optimizer, batch)

    def on() -> None:
        (batch,) = next(batches)
        programs.update(model, optimizer, batch)

    [loader] = observe(again, 4)[0].loaders
    assert (loader.iterators, loader.batches, loader.batch_nbytes) == (4, 4, 64 * 64 * 4)
    [loader] = observe(on, 4)[0].loaders
    assert (loader.iterators, loader.batches) == (1, 4)


# --- real models --------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_that_are_trained_plainly_have_no_fault(request: pytest.FixtureRequest) -> None:
    path = request.config.getoption("--zoo")
    if path is None:
        pytest.skip("--zoo FILE, with ZOO and build")
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None
    assert spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    wrong = {name: found for name in zoo.ZOO if (found := _wrong_in(*zoo.build(name)))}
    assert wrong == {}


def _wrong_in(model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], Tensor]) -> Any:
    """Findings, but that parameters get no gradient, where that is so."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(**inputs)).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fxrecals.doctor(step, plan=False).findings
    without = sum(p.nbytes for p in trained if p.grad is None)
    right = {"parameters without gradient"} if without else set()
    return [f for f in found if f.kind not in right or f.nbytes > without]
