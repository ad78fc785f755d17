"""The private names of torch that the library rests on, so that a moved one fails here by name."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

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
    ("torch._C._profiler", "_ExtraFields_Allocation"),
    ("torch._C._profiler", "_ExtraFields_TorchOp"),
    ("torch._C._profiler", "_ExtraFields_PyCall"),
    ("torch._C._profiler", "_ExtraFields_PyCCall"),
    ("torch._C._profiler", "RecordScope"),
    ("torch.utils._python_dispatch", "is_traceable_wrapper_subclass"),
    ("torch.cuda._memory_viz", "trace_plot"),
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


@pytest.mark.parametrize("stacks", [False, True])
def test_the_allocator_s_events_tell_where_in_the_program_they_come_from(stacks: bool) -> None:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(layer.parameters())
    with _torch.memory_recorded("of the test ", stacks=stacks) as recorded:
        with torch.profiler.record_function("of the test a"):
            out = torch.tanh(layer(torch.ones(4, 64)))
        out.sum().backward()
        optimizer.step()
    places = {(e.phase, e.span, e.op) for e in recorded() if e.nbytes > 0}
    span = "" if stacks else "a"
    assert {("forward", span, "aten::tanh"), ("backward", span, "TanhBackward0")} <= places
    assert {e.device for e in recorded()} == {"cpu"}
    assert stacks or ("optimizer", "", "Adam.step") in places
    tanh = next(e for e in recorded() if e.op == "TanhBackward0")
    assert bool(tanh.frames) == stacks
    assert not stacks or Path(tanh.frames[0][0]).name == Path(__file__).name


def test_storages_of_a_wrapped_tensor_are_those_inside() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    inner = torch.ones(2), torch.zeros(2)
    found = _torch.storages_of(TwoTensor(*inner))
    assert [each.data_ptr() for each in found] == [t.data_ptr() for t in inner]
    assert [each.nbytes() for each in _torch.storages_of(X)] == [64]
    assert _torch.storages_of(torch.ones(2, 2).to_sparse()) == []
