"""The private names of torch that the library rests on, so that a moved one fails here by name."""

import importlib
import inspect

import pytest
import torch

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
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_private_name_is_where_it_was_read(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"torch {torch.__version__} moved it"


def test_the_partitioner_hook_of_inductor_is_there() -> None:
    config = importlib.import_module("torch._inductor.config")
    assert hasattr(config, "custom_partitioner_fn")


def test_dynamo_has_the_settings_that_a_rewrite_patches() -> None:
    config = importlib.import_module("torch._dynamo.config")
    for name in ("fail_on_recompile_limit_hit", "recompile_limit", "accumulated_recompile_limit"):
        assert hasattr(config, name)


def test_fake_tensors_can_be_made_with_static_shapes() -> None:
    fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode
    assert "static_shapes" in inspect.signature(fake.from_tensor).parameters
