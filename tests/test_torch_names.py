"""The private names of torch that the library rests on, so that a moved one fails here by name."""

import importlib
import inspect
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from fxrecals import _torch
from fxrecals.capture import capture

X = torch.ones(4, 4)

NAMES = [
    ("torch.fx.graph", "_BoxedCodeGen"),
    ("torch._dynamo.backends.common", "aot_autograd"),
    ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._prims.rng_prims", "run_and_save_rng_state"),
    ("torch._prims.rng_prims", "run_with_rng_state"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("torch._functorch._aot_autograd.descriptors", "GradAOTOutput"),
    ("torch.utils.flop_counter", "flop_registry"),
    ("torch._logging._internal", "trace_structured"),
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    ("torch._C._dynamo.eval_frame", "reset_code"),
    ("torch.autograd", "_engine_run_backward"),
    ("torch._C._autograd", "_saved_tensors_hooks_disable"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_private_name_is_where_it_was_read(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"torch {torch.__version__} moved it"


def test_the_partitioner_hook_of_inductor_is_there() -> None:
    config = importlib.import_module("torch._inductor.config")
    assert hasattr(config, "custom_partitioner_fn")


def test_dynamo_has_the_settings_that_a_rewrite_patches() -> None:
    config = importlib.import_module("torch._dynamo.config")
    limits = ("fail_on_recompile_limit_hit", "recompile_limit", "accumulated_recompile_limit")
    others = ("suppress_errors", "optimize_ddp", "skip_nnmodule_hook_guards")
    for name in (*limits, *others):
        assert hasattr(config, name)


def test_fake_tensors_can_be_made_with_static_shapes() -> None:
    fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
    assert "static_shapes" in inspect.signature(fake.from_tensor).parameters


def test_sizes_are_ints_when_they_are_known() -> None:
    assert _torch.hint(3) == 3


def test_tensors_share_a_storage_key_exactly_if_they_share_a_storage() -> None:
    assert _torch.storage_key(X) == _torch.storage_key(X.t())
    assert _torch.storage_key(X) != _torch.storage_key(X.clone())
    assert _torch.storage_bytes(X[:1]) == 64


def test_descriptions_tell_gradients_tangents_and_updates_apart() -> None:
    joint = capture(nn.BatchNorm1d(4), X).joints[0].module
    descs = _torch.output_descs(joint)
    assert any(_torch.gradient_of(d) is not None for d in descs)
    tangents = [n for n in joint.graph.nodes if _torch.is_tangent(n)]
    assert all(_torch.tangent_of(n) in descs for n in tangents)
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    assert {_torch.gradient_of(d) for d in descs} & {_torch.input_desc(n) for n in placeholders}
    assert any(_torch.is_tagged_backward(n) for n in joint.graph.nodes)
    assert _torch.mutated_by(object()) is None


def test_collectives_are_known_by_their_namespace() -> None:
    target = torch.ops._c10d_functional.all_reduce.default
    assert _torch.is_collective(target)
    assert not _torch.is_collective(torch.ops.aten.mm.default)


def test_an_artifact_for_a_trace_that_is_off_does_no_harm() -> None:
    _torch.trace_artifact("a_plan", lambda: "{}")


def test_without_other_processes_each_agrees_with_itself() -> None:
    assert [_torch.agreed("figures", mine) for mine in ("a", "b")] == ["a", "b"]


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_processes_agree_on_what_the_first_of_them_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    assert [_torch.agreed("figures", mine) for mine in ("a", "b")] == ["a", "a"]
    assert _torch.agreed("others", "b") == "b"


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_a_store_that_cannot_compare_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(c10d, "_get_default_store", c10d.Store)
    assert _torch.agreed("figures", "mine") == "mine"


def test_ops_without_results_and_asserts_have_effects() -> None:
    graph = torch.fx.Graph()
    assert _torch.is_effectful(graph.call_function(torch.ops.aten._assert_async.default, ()))
    assert not _torch.is_effectful(graph.call_function(torch.ops.aten.mm.default, ()))


def test_a_copied_graph_has_its_own_nodes_and_the_same_values() -> None:
    joint = capture(nn.Linear(4, 4), X).joints[0].module
    twin = _torch.copy_graph(joint)
    pairs = list(zip(joint.graph.nodes, twin.graph.nodes, strict=True))
    assert all(a is not b and a.name == b.name for a, b in pairs)
    assert all(a.meta.get("val") is b.meta.get("val") for a, b in pairs)


def test_dynamo_says_where_in_the_users_code_it_failed() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.sum() > 0 else x

    with pytest.raises(RuntimeError) as caught:
        torch.compile(branches, backend="eager", fullgraph=True)(X)
    line = branches.__code__.co_firstlineno + 1
    assert _torch.user_line(caught.value) == f"test_torch_names.py:{line}"


def test_fake_tensors_log_what_they_raise_unless_they_are_quiet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> None:
        mode = _torch.fake_mode()
        with pytest.raises(RuntimeError), mode:
            torch.mm(torch.empty(3, 5), torch.empty(4, 4))

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with _torch.quiet():
            fails()
        assert caplog.records == []
        fails()
        assert "failed while attempting to run meta" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_an_alias_that_is_made_within_a_mode_counts_the_same_writes() -> None:
    x, aliases = torch.randn(3), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            aliases.append(_torch.alias(x))
            return func(*args, **(kwargs or {}))

    with Watch():
        x.exp()
    x.mul_(2)
    assert [alias._version for alias in aliases] == [x._version] == [1]


def test_both_ways_into_a_backward_are_observed() -> None:
    seen = []

    def around(run, roots, keep, create):
        seen.append((len(roots), keep, create))
        return run()

    x = torch.ones(2, requires_grad=True)
    with _torch.backwards_observed(around):
        x.sin().sum().backward(retain_graph=True)
        torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    x.cos().sum().backward()
    assert seen == [(1, True, False), (1, True, True)]


def test_saved_tensors_are_observed_where_transforms_refuse_hooks() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    with _torch.saved_tensors_observed(pack, lambda packed: packed):
        torch.func.grad(lambda a: a.sin().sum())(x.detach())
        x.sin()
    assert seen == [(2,)]


def test_batches_are_observed() -> None:
    seen = []
    with _torch.batches_observed(lambda iterator, batch: seen.append(batch)):
        taken = list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[:3])))
    assert len(seen) == len(taken) == 3


def test_a_global_hook_sees_the_keywords_of_a_call() -> None:
    seen = []

    def hook(module, args, out):
        seen.append(_torch.keywords_of_call(inspect.currentframe().f_back))  # type: ignore[union-attr,arg-type]

    handle = nn.modules.module.register_module_forward_hook(hook)
    nn.Identity()(input=X)
    handle.remove()
    assert list(seen[0]) == ["input"]


def test_hooks_are_counted() -> None:
    layer = nn.Linear(2, 2)
    assert _torch.hooks_on(layer) == _torch.hooks_on(layer.weight) == 0
    layer.register_forward_hook(lambda *_: None)
    layer.register_full_backward_pre_hook(lambda *_: None)
    layer.weight.register_hook(lambda grad: grad)
    layer.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert _torch.hooks_on(layer) == _torch.hooks_on(layer.weight) == 2
    assert all(hasattr(layer, name) for name in _torch.HOOKS[:4])
    assert all(hasattr(layer.weight, name) for name in _torch.HOOKS[2::2])
