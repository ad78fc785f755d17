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


# --- reading a joint graph (torch 2.13) --------------------------------------------------------

SYM_MODULES = ("_operator", "math", "torch", "torch.fx.experimental.sym_node")
"""Modules of the functions on numbers, symbolic ones too, that a graph calls (torch 2.13)."""


def gradient_of(desc: Any) -> Any:
    """The input of which a joint graph's output is the gradient; None for other outputs.

    torch._functorch._aot_autograd.descriptors.GradAOTOutput, read in 2.13.
    """
    return getattr(desc, "grad_of", None)


def hint(size: Any) -> int:
    """A size as an int; what it was when traced, where it is symbolic.

    SymNode.hint, read in 2.13. 4096 where nothing is known, as torch's own partitioner takes.
    """
    if isinstance(size, int):
        return size
    known = size.node.hint if size.node.has_hint() else None
    return 4096 if known is None else int(known)


def input_desc(node: fx.Node) -> Any:
    """What a placeholder of a joint graph is. meta["desc"], read in 2.13."""
    return node.meta.get("desc", node.name)


def is_collective(target: Any) -> bool:
    """Whether an op talks to other processes. Namespaces of functional collectives, 2.13."""
    names = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")
    return getattr(target, "namespace", "") in names


def is_effectful(node: fx.Node) -> bool:
    """Whether an op is ordered by an effect token.

    torch._higher_order_ops.effects, read in 2.13: tokens are threaded through `with_effects`;
    asserts and prints carry no outputs.
    """
    target: Any = node.target
    return not target._schema.returns or "_assert" in target._schema.name


def is_tagged_backward(node: fx.Node) -> bool:
    """Whether a node was traced in the backward. meta["partitioner_tag"], read in 2.13."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def must_be_saved(node: fx.Node) -> bool:
    """Whether the user's checkpoint policy forbids recompute. meta["recompute"], read in 2.13."""
    policy = node.meta.get("recompute")
    return getattr(policy, "name", "") == "MUST_SAVE"


def mutated_by(desc: Any) -> Any:
    """The input that the caller overwrites with a forward output; None for other outputs.

    torch._functorch._aot_autograd.descriptors.InputMutationAOTOutput, read in 2.13.
    """
    return getattr(desc, "mutated_input", None)


def output_descs(joint: fx.GraphModule) -> tuple[Any, ...]:
    """What each output of a joint graph is, None where unknown. meta["desc"], read in 2.13."""
    (node,) = joint.graph.find_nodes(op="output")
    outputs = torch.utils._pytree.tree_leaves(node.args[0])
    descs = tuple(node.meta.get("desc") or ())
    return descs if len(descs) == len(outputs) else (None,) * len(outputs)


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage that a tensor lives in, also where sizes are symbolic."""
    if has_storage(tensor):
        return hint(tensor.untyped_storage().nbytes())
    return hint(tensor.numel()) * tensor.element_size()


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has a storage: sparse and wrapped ones do not. read in 2.13."""
    return torch._C._has_storage(tensor)


def storage_key(tensor: Tensor) -> int | None:
    """A number that two live tensors share if they share a storage. _cdata, read in 2.13."""
    return tensor.untyped_storage()._cdata if has_storage(tensor) else None


def tangent_of(node: fx.Node) -> Any:
    """The forward output of which a tangent is the gradient.

    torch._functorch._aot_autograd.descriptors.TangentAOTInput, read in 2.13.
    """
    return getattr(node.meta.get("desc"), "output", None)


def compiled_node(outputs: Any, inputs: Sequence[Any]) -> Any:
    """The autograd node of the compiled graph that made `outputs` from `inputs`, or None.

    An output that is a view hangs a node or two below. What the inputs hang on is older.
    Read in torch 2.13, `_functorch/_aot_autograd/runtime_wrappers.py`, for the node's name.
    """
    older = {_node_of(x) for x in inputs}
    level = [_node_of(x) for x in torch.utils._pytree.tree_leaves(outputs)]
    for _ in range(4):
        level = [node for node in level if node is not None and node not in older]
        for node in level:
            if node.name() == "CompiledFunctionBackward":
                return node
        level = [below for node in level for below, _ in node.next_functions]
    return None


def _node_of(x: Any) -> Any:
    return x.grad_fn if isinstance(x, torch.Tensor) else None


def updated_inputs(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[int, ...]:
    """Indices of the placeholders that the caller overwrites with an output of the forward.

    Updates by an op of the graph itself are not among them (torch 2.13).
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    index = {input_desc(node): i for i, node in enumerate(placeholders)}
    found = (mutated_by(desc) for desc in output_descs(joint)[:num_fwd_outputs])
    return tuple(sorted(index[desc] for desc in found if desc in index))
