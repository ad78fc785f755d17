"""The private names of torch that we use, in one place, each with the version it was read in.

Nothing here decides anything. A test calls every function, so that a new torch that moved a
name fails there, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

# --- joint graphs: which placeholder is what (torch 2.13) -------------------------------------


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is the gradient of a forward output.

    Read in torch 2.13, `_functorch/_aot_autograd/utils.py`, which goes by the name as well.
    """
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_backward_seed(node: fx.Node) -> bool:
    """Whether a placeholder is a random seed that only the backward gets (torch 2.13)."""
    target = str(node.target)
    return node.op == "placeholder" and ("bwd_seed" in target or "bwd_base_offset" in target)


def is_backward_state(node: fx.Node) -> bool:
    """Whether a placeholder carries the state of compiled autograd's hooks (torch 2.13)."""
    from torch.fx.experimental._backward_state import BackwardState

    return node.op == "placeholder" and isinstance(node.meta.get("val"), BackwardState)


def is_symbol(node: fx.Node) -> bool:
    """Whether a node is a number that is known only at run time, such as a dynamic size."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_opaque_object(node: fx.Node) -> bool:
    """Whether a node is a script object or another thing that is no tensor (torch 2.13)."""
    from torch._library.fake_class_registry import FakeScriptObject
    from torch._library.opaque_object import OpaqueBase

    return isinstance(node.meta.get("val"), (FakeScriptObject, OpaqueBase))


def symbol_bindings(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The first node that gives each size symbol its value (torch 2.13)."""
    from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes

    return dict(find_symbol_binding_fx_nodes(graph))


def free_symbols_of(value: Any) -> list[Any]:
    """The size symbols in a fake value, by name (torch 2.13)."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
        return []
    return sorted(free_symbols(value), key=str)


def saved_descriptions(with_check: int, without_check: int, others: int) -> list[Any]:
    """What the runtime is told of each saved value, in order (torch 2.13).

    Args:
        with_check: tensors saved through `save_for_backward`.
        without_check: tensors that an `autograd.Function` stashed on its context.
        others: opaque objects and sizes.
    """
    from torch._functorch._aot_autograd.descriptors import (
        SavedForBackwardsAOTOutput,
        SavedForBackwardsNoVcCheckAOTOutput,
    )

    checked, total = with_check, with_check + without_check + others
    unchecked = range(checked, checked + without_check)
    return [
        SavedForBackwardsNoVcCheckAOTOutput(i) if i in unchecked else SavedForBackwardsAOTOutput(i)
        for i in range(total)
    ]


def is_saved_without_check(node: fx.Node) -> bool:
    """Whether an `autograd.Function` stashed the tensor without `save_for_backward` (torch 2.13)."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def writes_arguments(target: Any) -> bool:
    """Whether an op writes to one of its arguments, by its schema."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


# --- running and compiling (torch 2.13) -------------------------------------------------------


def box(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A function of one list, which it empties, so that arguments die after their last use.

    Read in torch 2.13, `fx/graph.py`.
    """
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    """A Dynamo backend from compilers and a partitioner (torch 2.13)."""
    from torch._dynamo.backends.common import aot_autograd as make

    return make(**kwargs)


def run_and_save_rng_state() -> Any:
    """The op ``(op, *args) -> (generator state, result)`` that Inductor can lower (torch 2.13)."""
    from torch._prims import rng_prims

    return rng_prims.run_and_save_rng_state


def run_with_rng_state() -> Any:
    """The op ``(generator state, op, *args) -> result`` that Inductor can lower (torch 2.13)."""
    from torch._prims import rng_prims

    return rng_prims.run_with_rng_state


def traced_inputs() -> Sequence[Any]:
    """What AOTAutograd knows of each input of the joint graph that it has just traced.

    Each has `requires_grad`, `is_leaf` and `mutates_data`. Empty outside a compilation.
    Read in torch 2.13, `_functorch/_aot_autograd/schemas.py`.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.input_info)


def static_inputs() -> Sequence[int]:
    """Indices of the inputs of the traced graph that outlive the step: parameters and buffers.

    Read in torch 2.13, `_functorch/_aot_autograd/schemas.py`.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices or ())


def inductor_partitioner(partition: Callable[..., Any], identity: Callable[[], Any]) -> Any:
    """`partition` as Inductor's `custom_partitioner_fn` takes it; `identity` keys its code cache.

    Read in torch 2.13, `_inductor/custom_graph_pass.py`.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return identity()

    return Partitioner()


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], partitioner: Any, patches: dict[str, Any]
) -> Callable[..., Any]:
    """Inductor's own compilation of a Dynamo graph, with another partitioner (torch 2.13).

    AOTAutograd's cache is left out: a hit would skip the partitioner, and so the plan. Inductor's
    cache of generated code stays.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    config = {"custom_partitioner_fn": partitioner, **patches}
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, list(example_inputs), config_patches=config)


def inductor_mode(mode: str | None) -> dict[str, Any]:
    """The Inductor settings that `torch.compile(mode=...)` stands for (torch 2.13)."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode else {}
