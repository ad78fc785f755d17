"""The private names of torch that we use, in one place, each with the version it was read in.

Nothing here decides anything. A test calls every function, so that a new torch that moved a
name fails there, by name.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import traceback
import types
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sympy import Integer
from torch import Tensor, fx
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree

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
    from torch._opaque_base import OpaqueBase

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
    """Whether an `autograd.Function` stashed it without `save_for_backward` (torch 2.13)."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def save_without_check(node: fx.Node) -> None:
    """Lets a saved tensor be changed before the backward, as `is_saved_without_check` reads it."""
    node.meta["saved_tensor_with_no_vc_check"] = True


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
    """A Dynamo backend from compilers and a partitioner (torch 2.13).

    Random draws that nobody reads stay in the graph, as they move the generator. Tracing takes
    them out unless Inductor is told to draw as eager does: `Graph.eliminate_dead_code`, read in
    torch 2.13, `fx/graph.py`.
    """
    from torch._dynamo.backends.common import aot_autograd as make
    from torch._inductor import config

    traced = make(**kwargs)

    def compile_(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with config.patch(fallback_random=True):
            return traced(gm, example_inputs)

    return compile_


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

    Read in torch 2.13, `_inductor/custom_graph_pass.py`. The cache pickles all settings, this one
    too, which holds live objects: so it is pickled as its identity.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return identity()

        def __reduce__(self) -> tuple[Any, ...]:
            return tuple, (identity(),)

    return Partitioner()


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: Any,
    patches: dict[str, Any],
    of_half: Callable[[fx.GraphModule], dict[str, Any]],
    may_fuse: Callable[[fx.GraphModule], Callable[[set[str]], bool]],
) -> Callable[..., Any]:
    """Inductor's own compilation of a Dynamo graph, with another partitioner (torch 2.13).

    AOTAutograd's cache is left out: a hit would skip the partitioner, and so the plan. Both halves
    are compiled at once. The settings `of_half` are asked for after the partitioner. `may_fuse`
    tells of a half which nodes may become one kernel, by their names; Inductor may refuse more.
    `InductorChoices.can_fuse`, read in torch 2.13, `_inductor/choices.py`.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    def compile_half(half: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        allows = may_fuse(half)

        class Choices(type(V.choices)):
            @staticmethod
            def can_fuse(scheduler: Any, one: Any, other: Any, score: int) -> bool:
                names = {x.name for node in (one, other) for x in _origins(node)}
                return allows(names) and super(Choices, Choices).can_fuse(
                    scheduler, one, other, score
                )

        with config.patch(of_half(half)), V.set_choices_handler(Choices()):
            return compile_fx_inner(half, *args, **kwargs)

    settings = {"custom_partitioner_fn": partitioner, **patches}
    functorch = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with functorch_config.patch(functorch):
        compiled: Any = compile_fx(
            gm, list(example_inputs), inner_compile=compile_half, config_patches=settings
        )
        return compiled


def ordering_kernels(
    half: fx.GraphModule,
    note: Callable[[int], None],
    free: Collection[int],
    given: Collection[str],
    scratch: Callable[[str], int],
) -> dict[str, Any]:
    """Settings with which Inductor runs the kernels of a half in the order of its nodes, or in one
    of its own that takes less, and tells what that takes.

    Args:
        half: forward or backward.
        note: is called with the bytes that it takes at its peak: buffers, outputs, and inputs that
            are freed.
        free: indices of the backward's outputs that count nothing once they are made.
        given: names of inputs that count nothing: they live in parameters, or belong to the caller.
        scratch: bytes that an op takes beside its outputs, by its name in the graph.

    Inductor's own pass that orders kernels for peak memory runs within: what it gives is final.
    With a pass of this kind, Inductor leaves its cache of graphs out, that of kernels stays.
    `_post_fusion_custom_pass` and `_inductor/memory.py`, read in torch 2.13.
    """
    from torch._inductor import config, ir, memory
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    places = {node.name: place for place, node in enumerate(half.graph.nodes)}
    reorders = config.reorder_for_peak_memory

    def order(nodes: list[Any]) -> list[Any]:
        lowering = V.graph
        scheduler, inputs = lowering.scheduler, OrderedSet(lowering.graph_inputs)
        numbers = (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)
        made = {i: x for i, x in enumerate(lowering.graph_outputs) if not isinstance(x, numbers)}
        outputs = OrderedSet(lowering.get_output_names())
        prepared = scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
        apart = free if lowering.is_backward else ()
        uncounted = {made[i].get_name() for i in apart if i in made}
        inductors = memory.reorder_for_peak_memory(nodes, *prepared)
        readable = memory.get_freeable_input_buf(nodes, inputs)
        readable = {name: x for name, x in readable.items() if name not in given}

        def peak(nodes: list[Any]) -> int:
            buffers, _, _ = memory.compute_memory_timeline(nodes, readable, outputs)
            made_at = {buffer.buffer.get_name(): buffer.start_step for buffer in buffers}
            change = [0] * (len(nodes) + 1)
            for buffer in buffers:
                change[buffer.start_step] += buffer.size_alloc
                if buffer.buffer.get_name() in uncounted:
                    node = getattr(buffer.buffer, "node", None)
                    whole = node.inputs[0].get_name() if isinstance(node, ir.MultiOutput) else ""
                    change[made_at.get(whole, buffer.start_step)] -= buffer.size_free
                elif buffer.end_step != -1:
                    change[buffer.end_step + 1] -= buffer.size_free
            for step, nbytes in _written_in_place(nodes, buffers, outputs):
                change[step] -= nbytes
                change[step + 1] += nbytes
            beside = [_scratch_of(node, ir.ExternKernel, scratch) for node in nodes]
            live = accumulate(change)
            return max((a + b for a, b in zip(live, beside, strict=False)), default=0)

        ours, theirs = _by_place(nodes, places), inductors if reorders else nodes
        least, best = min((peak(ours), ours), (peak(theirs), theirs), key=lambda found: found[0])
        note(least)
        return best

    return {"_post_fusion_custom_pass": _Unpickled(order), "reorder_for_peak_memory": False}


def _written_in_place(
    nodes: list[Any], buffers: list[Any], outputs: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Steps at which a kernel writes over a buffer that it reads as the last one, with its bytes.

    `SchedulerNode.can_inplace`, read in torch 2.13, `_inductor/scheduler.py`.
    """
    last = {x.buffer.get_name(): x for x in buffers if hasattr(x.buffer, "node")}
    for step, node in enumerate(nodes):
        made = [x.size_alloc for x in last.values() if x.start_step == step]
        for inner in node.get_nodes():
            for read in inner.read_writes.reads:
                buffer = last.get(read.name)
                if (
                    buffer is not None
                    and buffer.end_step == step > buffer.start_step
                    and read.name not in outputs
                    and buffer.size_free in made
                    and inner.can_inplace(read)
                ):
                    made.remove(buffer.size_free)
                    del last[read.name]
                    yield step, buffer.size_free


def _by_place(nodes: list[Any], places: Mapping[str, int]) -> list[Any]:
    """Nodes of Inductor's scheduler, sorted by the last place of what each is made of.

    `mpi_node`, read in torch 2.13, `_inductor/memory.py`.
    """
    index = {node: i for i, node in enumerate(nodes)}
    missing = {node: len(node.mpi_node.pred_nodes) for node in nodes}
    ready: list[tuple[int, int]] = []

    def is_ready(node: Any, after: int) -> None:
        made_of = [places[x.name] for x in _origins(node) if x.name in places]
        heappush(ready, (max(made_of, default=after), index[node]))

    for node in nodes:
        if not missing[node]:
            is_ready(node, 0)
    found: list[Any] = []
    while ready:
        place, i = heappop(ready)
        found.append(nodes[i])
        for node in nodes[i].mpi_node.succ_nodes:
            missing[node] -= 1
            if not missing[node]:
                is_ready(node, place)
    return found


def _origins(node: Any) -> Iterator[fx.Node]:
    """The nodes of a graph that a node of Inductor's scheduler is made of (torch 2.13)."""
    for inner in node.get_nodes():
        if inner.node is not None:
            yield from inner.node.origins


def _scratch_of(node: Any, kernel: type, scratch: Callable[[str], int]) -> int:
    """The most that one of the ops in a node of Inductor's scheduler takes beside its outputs."""
    made = (inner.node for inner in node.get_nodes())
    origins = (x.name for ir in made if isinstance(ir, kernel) for x in ir.origins)
    return max(map(scratch, origins), default=0)


class _Unpickled:
    """A function that a cache key has nothing of."""

    def __init__(self, function: Callable[[list[Any]], list[Any]]) -> None:
        self._function = function

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return self._function(nodes)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ()


ALL_LAYOUTS_KEPT = {"layout_optimization": False}
"""Settings with which Inductor runs convolutions in the layouts that they have (torch 2.13)."""


def channels_last_bytes(joint: fx.GraphModule) -> int:
    """Bytes of the copies that Inductor makes of a graph's inputs, parameters among them, to run
    convolutions in channels-last, and keeps for the backward; 0 where it does not.

    `GraphLowering.decide_layout_opt`, read in torch 2.13, `_inductor/graph.py`.
    """
    from torch._inductor.graph import GraphLowering

    if not GraphLowering.decide_layout_opt(joint, is_inference=False):
        return 0
    found: set[fx.Node] = set()
    for node in joint.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution.default
    ):
        read = (node.args[0], node.args[1])
        found |= {x for x in read if isinstance(x, fx.Node) and x.op == "placeholder"}
    values = [node.meta["val"] for node in found]
    copied = (
        x for x in values if x.dim() < 4 or not x.is_contiguous(memory_format=torch.channels_last)
    )
    return sum(map(storage_bytes, copied))


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


_sizes: ContextVar[dict[Any, Any]] = ContextVar("sizes", default={})  # noqa: B039 (never changed)


@contextmanager
def sizes_known(sizes: Mapping[Any, int]) -> Iterator[None]:
    """Reads symbolic sizes as if their symbols had these values, not those that they were traced
    with. Keys are sympy symbols, as `size_symbols` gives them."""
    token = _sizes.set({symbol: Integer(value) for symbol, value in sizes.items()})
    try:
        yield
    finally:
        _sizes.reset(token)


UNKNOWN_SIZE = 4096
"""What a size is taken for that nothing is known of; torch's own partitioner takes the same."""


def hint(size: Any) -> int:
    """A size as an int. Where it is symbolic: by `sizes_known`, or what it was when traced.

    Of a size that the data decide it is the most that it can be, and `UNKNOWN_SIZE` for each
    number in it that may be anything. SymNode.hint, read in 2.13.
    """
    if isinstance(size, (int, float)):
        return int(size)
    sizes = _sizes.get()
    if sizes:
        known = size.node.expr.xreplace(sizes)
        if known.is_number:
            return int(known)
    if size.node.has_hint():
        return int(size.node.hint)
    most = _most(size)
    if most is not None:
        return most
    return int(_with_hints(size).subs(dict.fromkeys(_with_hints(size).free_symbols, UNKNOWN_SIZE)))


def is_unbounded(size: Any) -> bool:
    """Whether a size is decided by the data, and may be anything for all that tracing knows."""
    return not isinstance(size, int) and not size.node.has_hint() and _most(size) is None


def _most(size: Any) -> int | None:
    """The most that a size without a hint can be, None if there is no such number.

    ShapeEnv.bound_sympy, read in 2.13. What torch means as infinite may be ``sys.maxsize``.
    """
    upper = size.node.shape_env.bound_sympy(_with_hints(size)).upper
    return int(upper) if upper.is_Integer and upper < 1 << 48 else None


def _with_hints(size: Any) -> Any:
    """The expression of a size, with all numbers in it that are known or have a hint.

    ShapeEnv.backed_var_to_val, read in 2.13; `var_to_val` before.
    """
    env = size.node.shape_env
    newer = hasattr(env, "backed_var_to_val")
    known = size.node.expr.xreplace(_sizes.get())
    return known.subs(env.backed_var_to_val if newer else env.var_to_val)


def size_symbols(inputs: Sequence[Any]) -> dict[Any, tuple[int, int | None]]:
    """The symbols in the sizes of a graph's inputs, each with the input that gives its value, and
    the dimension of it, None where the input is the number itself.

    Args:
        inputs: fake tensors and symbolic numbers, as `traced_inputs` gives them.
    """
    found: dict[Any, tuple[int, int | None]] = {}
    for index, given in enumerate(inputs):
        sizes = given.shape if isinstance(given, Tensor) else (given,)
        for dim, size in enumerate(sizes):
            expr = size.node.expr if isinstance(size, torch.SymInt) else None
            if expr is not None and expr.is_symbol:
                found.setdefault(expr, (index, dim if isinstance(given, Tensor) else None))
    return found


def traced_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a graph of Dynamo's, as it traced them: fake tensors and symbolic numbers.

    `meta["example_value"]` of its placeholders, read in torch 2.13; the examples themselves where
    there is none, as for the parts of a graph that DDP splits.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [
        node.meta.get("example_value", example)
        for node, example in zip(placeholders, example_inputs, strict=True)
    ]


def compile_lock() -> Any:
    """Lets one thread trace at a time. Read in torch 2.13, `_dynamo/convert_frame.py`."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


def traced_again(inputs: Sequence[Any]) -> Any:
    """A context manager: as if a backend were called by Dynamo with these fake inputs.

    A context of its own, as that of the first call may be one of the parts into which a graph was
    cut for DDP, whose compilations are counted. `torch._guards`, read in torch 2.13.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing

    return tracing(TracingContext(detect_fake_mode(list(inputs))))


def place_in_arguments(desc: Any) -> int | None:
    """The index among a compiled function's arguments, or results, of what a joint graph takes or
    returns; None where it is made up, as the base of two views.

    Read in torch 2.13, `_functorch/_aot_autograd/descriptors.py`.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput

    return desc.idx if isinstance(desc, (PlainAOTInput, PlainAOTOutput)) else None


def weak_storage(tensor: Tensor) -> Any:
    """Keeps the number that `storage_key` gives from being given to another storage, and lets the
    memory go. `StorageWeakRef`, read in torch 2.13, `multiprocessing/reductions.py`.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def input_desc(node: fx.Node) -> Any:
    """What a placeholder of a joint graph is. meta["desc"], read in 2.13."""
    return node.meta.get("desc", node.name)


def input_descs(joint: fx.GraphModule) -> tuple[Any, ...]:
    """What each placeholder of a joint graph is, in order (torch 2.13)."""
    return tuple(map(input_desc, joint.graph.find_nodes(op="placeholder")))


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


def checkpoint_policy(node: fx.Node) -> str:
    """The user's decision on a node in a checkpoint, as `CheckpointPolicy` calls it; "" for none.

    A checkpoint without a policy prefers recompute. meta["recompute"], read in 2.13.
    """
    return getattr(node.meta.get("recompute"), "name", "")


def mutated_by(desc: Any) -> Any:
    """The input that the caller overwrites with a forward output; None for other outputs.

    torch._functorch._aot_autograd.descriptors.InputMutationAOTOutput, read in 2.13.
    """
    return getattr(desc, "mutated_input", None)


def is_plain_output(desc: Any) -> bool:
    """Whether a forward output is what the traced function returns, or the new value of an input.

    torch._functorch._aot_autograd.descriptors, read in 2.13.
    """
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTOutput

    return isinstance(desc, (PlainAOTOutput, InputMutationAOTOutput))


def output_descs(joint: fx.GraphModule) -> tuple[Any, ...]:
    """What each output of a joint graph is, None where unknown. meta["desc"], read in 2.13."""
    (node,) = joint.graph.find_nodes(op="output")
    outputs = pytree.tree_leaves(node.args[0])
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
    level = [_node_of(x) for x in pytree.tree_leaves(outputs)]
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


# --- running ops as they come (torch 2.13) ------------------------------------------------------


def users_of(storage_key: int) -> int:
    """How many C++ references there are to the storage with a key. `_storage_Use_Count`, 2.13."""
    return torch._C._storage_Use_Count(storage_key)


def users_of_a_storage_alone() -> int:
    """What `users_of` gives for a storage that one tensor lives in, and that is weakly known."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    known = weakref.ref(storage)
    key = storage._cdata
    del storage
    count = users_of(key)
    assert known() is not None
    return count


def alias(tensor: Tensor) -> Tensor:
    """Another tensor in the same place, without a graph, whose version counts the same writes.

    Below the key ADInplaceOrView, where dispatch modes run, a `detach` would count its own. Guards
    read in torch 2.13, `torch/csrc/utils/init.cpp`.
    """
    c: Any = torch._C
    counting = c.DispatchKeySet(c.DispatchKey.ADInplaceOrView)
    with unseen():
        included = c._dispatch_tls_local_include_set()
        excluded = c._dispatch_tls_local_exclude_set()
        with c._ForceDispatchKeyGuard(included, excluded - counting):
            return tensor.detach()


def unseen() -> Any:
    """A context in which no dispatch mode sees what runs.

    `_DisableTorchDispatch`, read in torch 2.13, `csrc/utils/init.cpp`.
    """
    return torch._C._DisableTorchDispatch()


def negated(tensor: Tensor) -> Tensor:
    """A view of a tensor that reads negated. `_neg_view`, read in torch 2.13."""
    return torch._neg_view(tensor)  # pyright: ignore[reportPrivateImportUsage]


def version(tensor: Tensor) -> int:
    """How often a tensor's memory was written to, as autograd counts; 0 where it does not.

    `_version`, read in torch 2.13, `csrc/autograd/python_variable.cpp`.
    """
    return 0 if tensor.is_inference() else tensor._version


def is_in_backward() -> bool:
    """Whether this thread is running a node of a backward. `_current_graph_task_id`, 2.13."""
    return torch._C._current_graph_task_id() != -1


_ONE_OP_A_GRADIENT = ("Addmm", "Mm", "Embedding")
_ONLY_VIEWS = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")


def gradients_made_by(node: Any) -> list[tuple[int, Tensor]]:
    """Parameters' gradients that a node of a backward makes, each by one op, where they can be told
    by their size from the other gradients that it makes: their bytes, and the parameters.

    `_input_metadata`, read in torch 2.13, `csrc/autograd/python_cpp_function.cpp`.
    """
    if not node.name().removesuffix("Backward0").endswith(_ONE_OP_A_GRADIENT):
        return []
    due: list[tuple[int, Tensor]] = []
    others: set[int] = set()
    for below, index in node.next_functions:
        while below is not None and below.name() in _ONLY_VIEWS:
            ((below, index),) = below.next_functions
        parameter = getattr(below, "variable", None)
        if isinstance(parameter, torch.nn.Parameter):
            due.append((parameter.untyped_storage().nbytes(), parameter))
        elif below is not None:
            meta = below._input_metadata[index]
            others.add(meta.dtype.itemsize * torch.Size(meta.shape).numel())
    return [(nbytes, parameter) for nbytes, parameter in due if nbytes not in others]


_ONLY_TURN = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "UnsqueezeBackward0")
_ROUND_OTHERWISE = ("ProdBackward0", "ProdBackward1", "CumprodBackward0")


def may_be_watched(node: Any) -> bool:
    """Whether there is a use in watching a node of a backward, and no harm.

    No use where it turns a view and no more. Harm where it takes another formula under a dispatch
    mode, and rounds otherwise: `areAnyTensorSubclassLike`, read in torch 2.13,
    `csrc/autograd/FunctionsManual.cpp`; the other formulas that ask for it round alike. And where
    it traces its backward, as `torch.cond` does: `_higher_order_ops/cond.py`.
    """
    maker = getattr(node, "_forward_cls", None)
    if maker is not None and maker.__module__.startswith("torch._higher_order_ops"):
        return False
    return node.name() not in (*_ONLY_TURN, *_ROUND_OTHERWISE)


def push_mode(mode: Any) -> None:
    """Puts a dispatch mode on this thread's stack, if it is not there.

    Autograd restores the stack after each node of a backward. `_push_mode`, read in torch 2.13,
    `utils/_python_dispatch.py`.
    """
    if not any(other is mode for other in _python_dispatch._get_current_dispatch_mode_stack()):
        _python_dispatch._push_mode(mode)


def count_writes(tensors: list[Tensor]) -> None:
    """Tells autograd of writes to tensors that it does not count itself."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


Settings = tuple[bool, bool, bool]


def settings() -> Settings:
    """What ops below autograd look at beside their arguments: whether gradients are enabled (LSTMs
    of oneDNN keep a workspace then), and whether algorithms must be deterministic, or warn.

    `_get_deterministic_algorithms`, read in torch 2.13, `torch/__init__.py`.
    """
    c: Any = torch._C
    deterministic, warns = (
        c._get_deterministic_algorithms(),
        c._get_deterministic_algorithms_warn_only(),
    )
    return torch.is_grad_enabled(), deterministic, warns


@contextmanager
def under_settings(wanted: Settings) -> Iterator[None]:
    """A context in which `settings` are as they were."""
    before = settings()
    if before == wanted:
        yield
        return
    try:
        _set(wanted)
        yield
    finally:
        _set(before)


def _set(wanted: Settings) -> None:
    has_grad, deterministic, warns = wanted
    torch._C._set_grad_enabled(has_grad)
    torch.use_deterministic_algorithms(deterministic, warn_only=warns)


_ABOVE = ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastHPU")


@contextmanager
def below_autograd() -> Iterator[None]:
    """Runs aten ops as autograd and autocast hand them on: nothing is recorded, nothing is cast.

    Guards read in torch 2.13, `torch/csrc/utils/init.cpp`.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_autocast_keys()):
        yield


@cache
def _autocast_keys() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    for name in _ABOVE[1:]:
        key = getattr(torch._C.DispatchKey, name, None)
        keys = keys if key is None else keys | torch._C.DispatchKeySet(key)
    return keys


# --- measuring (torch 2.13) --------------------------------------------------------------------


Event = tuple[int, int]
"""An allocator event: address, bytes; bytes are negative for a free."""


@contextmanager
def allocations_recorded() -> Iterator[Callable[[str], dict[str, list[Event]]]]:
    """Records the allocator's events on the CPU; afterwards, the events of each marked span.

    The yielded function takes a prefix of names of `record_function` spans, and gives for each
    span the events within it, in order of time, also those of other threads. Kineto's event tree,
    read in torch 2.13, `autograd/profiler.py`.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        yield lambda prefix: _span_events(prof, prefix)


def _span_events(prof: Any, prefix: str) -> dict[str, list[Event]]:
    from torch._C._profiler import _EventType

    spans: list[tuple[int, int, str]] = []
    events: list[tuple[int, int, int]] = []
    stack = _roots(prof)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                fields = event.extra_fields
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name.startswith(prefix):
            spans.append((event.start_time_ns, event.end_time_ns, event.name))
    events.sort(key=lambda e: e[0])
    times = [when for when, _, _ in events]
    return {
        name: [e[1:] for e in events[bisect_left(times, start) : bisect_right(times, end)]]
        for start, end, name in spans
    }


def _roots(prof: Any) -> list[Any]:
    """The event tree that kineto recorded."""
    return list(prof.profiler.kineto_results.experimental_event_tree())


Frame = tuple[str, int, str]
"""A line of Python that was running: file, line, function."""

BACKWARD_MARK = "autograd::engine::evaluate_function: "
"""How the span of a node in the backward begins."""

OPTIMIZER_MARK = "Optimizer.step#"
"""How the span of an optimizer's step begins."""


class MemoryEvent(NamedTuple):
    """An allocation or, with negative bytes, a free, on any device.

    phase: "forward" (and all else), "backward" or "optimizer".
    span: what follows the prefix in the name of the innermost marked span; in the backward, of
        the one in which the forward op of the node ran.
    op: the outermost op in that span, or the autograd node.
    frames: innermost first, those of the forward op in the backward; () without stacks.
    """

    address: int
    nbytes: int
    device: str
    phase: str
    span: str
    op: str
    frames: tuple[Frame, ...]


class _Scope(NamedTuple):
    """Where in the program: what is known from the event tree above an event."""

    phase: str = "forward"
    span: str = ""
    op: str = ""
    sequence: int = -1
    stack: Any = None  # the frame and what is above it, as pairs


@contextmanager
def memory_recorded(
    prefix: str, *, stacks: bool = False
) -> Iterator[Callable[[], list[MemoryEvent]]]:
    """Records the allocators' events of all devices, and where in the program they come from.

    Afterwards the yielded function gives them, once, in order of time. Kineto's event tree and
    autograd's sequence numbers, which a node of the backward shares with the op that made it; read
    in torch 2.13, `autograd/profiler.py` and `profiler/_memory_profiler.py`.

    Args:
        prefix: what names of the `record_function` spans that count begin with.
        stacks: whether lines of Python are recorded; slower by far, and spans are then not known,
            as in the tree they end with the call that opened them.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=stacks) as prof:
        yield lambda: _memory_events(prof, prefix)


def _memory_events(prof: Any, prefix: str) -> list[MemoryEvent]:
    from torch._C import _profiler

    # Types of fields are told apart: comparing a tag costs ten times as much.
    memory, op = _profiler._ExtraFields_Allocation, _profiler._ExtraFields_TorchOp
    python = (_profiler._ExtraFields_PyCall, _profiler._ExtraFields_PyCCall)
    allocations: list[tuple[int, Any, _Scope]] = []
    makers: dict[int, tuple[int, _Scope]] = {}  # sequence number -> the last op that had it
    stack = [(event, _Scope()) for event in _roots(prof)]
    while stack:
        event, scope = stack.pop()
        fields = event.extra_fields
        kind = type(fields)
        if kind is memory:
            allocations.append((event.start_time_ns, fields, scope))
            continue
        if kind is op:
            scope = _entered(scope, event.name, fields, prefix)
            number = fields.sequence_number
            if number >= 0 and scope.sequence != number:
                when = event.start_time_ns
                if number not in makers or makers[number][0] <= when:
                    makers[number] = when, scope
        elif kind in python:
            scope = scope._replace(stack=(fields.caller, scope.stack))
        for child in event.children:
            stack.append((child, scope))
    prof.profiler.kineto_results = None  # large, and in a cycle that waits for the collector
    allocations.sort(key=lambda a: a[0])
    return [_memory_event(fields, scope, makers) for _, fields, scope in allocations]


def _entered(scope: _Scope, name: str, fields: Any, prefix: str) -> _Scope:
    """Where in the program the children of an op or span are."""
    if name.startswith("aten::"):
        return scope if scope.op else scope._replace(op=name)
    if name.startswith(prefix):
        phase = "forward" if scope.phase == "optimizer" else scope.phase
        return scope._replace(phase=phase, span=name[len(prefix) :], op="", sequence=-1)
    if name.startswith(BACKWARD_MARK):
        node = name[len(BACKWARD_MARK) :].removeprefix("torch::autograd::")
        return _Scope("backward", "", node, fields.sequence_number, scope.stack)
    if name.startswith(OPTIMIZER_MARK):
        return _Scope("optimizer", "", name[len(OPTIMIZER_MARK) :], -1, scope.stack)
    from torch._C._profiler import RecordScope

    is_op = not scope.op and fields.scope != RecordScope.USER_SCOPE
    return scope._replace(op=name) if is_op else scope


def _memory_event(fields: Any, scope: _Scope, makers: dict[int, tuple[int, _Scope]]) -> MemoryEvent:
    maker = makers[scope.sequence][1] if scope.sequence in makers else scope
    return MemoryEvent(
        fields.ptr,
        fields.alloc_size,
        str(fields.device),
        scope.phase,
        maker.span or scope.span,
        scope.op,
        tuple(_frames(maker.stack)),
    )


def _frames(stack: Any) -> Iterator[Frame]:
    while stack is not None:
        frame, stack = stack
        yield frame.file_name, frame.line_number, frame.function_name


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor, or of the tensors that a wrapper such as DTensor is made of.

    `__tensor_flatten__`, read in torch 2.13, `utils/_python_dispatch.py`.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) not in (Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [found for name in names for found in storages_of(getattr(tensor, name))]
    return [tensor.untyped_storage()] if has_storage(tensor) else []


def cpu_capability() -> str:
    """The vector instructions that kernels on this CPU use (torch 2.13)."""
    return torch.backends.cpu.get_cpu_capability()


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Adds JSON to torch's structured trace (TORCH_TRACE), if that is on; else nothing is called.

    Read in torch 2.13, `_logging/_internal.py`.
    """
    from torch._logging._internal import trace_structured

    about = {"name": name, "encoding": "json"}
    trace_structured("artifact", metadata_fn=lambda: about, payload_fn=payload)


def is_profiling() -> bool:
    """Whether a profiler is running: a second one cannot be started (torch 2.13)."""
    from torch._C._autograd import _profiler_enabled

    return _profiler_enabled()


def draws_seed(target: Any) -> bool:
    """Whether an op takes seeds from the generator for Inductor's own random ops.

    Read in torch 2.13, `_inductor/inductor_prims.py`.
    """
    return str(target).startswith("prims.inductor_seed")


# --- several processes (torch 2.13) ------------------------------------------------------------


def agreed(key: str, mine: str) -> str:
    """What the first rank to ask gave for a key; `mine` where this process has no other beside it.

    It waits for no other rank, as a collective would: the first one writes to the store of the
    default process group, and later ones read. `mine` too where that store cannot do this.
    `_get_default_store`, read in torch 2.13, `distributed/distributed_c10d.py`.

    >>> agreed("launch_seconds", "1e-6")
    '1e-6'
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return mine
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return _get_default_store().compare_set(f"fxrecals/{key}", "", mine).decode()
    except (RuntimeError, AttributeError):  # a store without it, or no store, as under MPI
        return mine


# --- tracing a model (torch 2.13) --------------------------------------------------------------


def break_reason(gm: fx.GraphModule) -> str:
    """Why Dynamo ended a graph before the model ended, "" where it did not.

    `compile_subgraph_reason`, read in torch 2.13, `_dynamo/output_graph.py`.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    frames = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in reason.user_stack[-1:]]
    return f"graph break at {', '.join(frames)}: {reason.reason.partition(chr(10))[0]}"


def source_of(gm: fx.GraphModule) -> str:
    """The first line of the user's in a graph of Dynamo's, as ``file:line``; "" if none is known.

    `meta["stack_trace"]`, read in torch 2.13, `fx/proxy.py`.
    """
    for node in gm.graph.nodes:
        found = _LINE.findall(node.meta.get("stack_trace") or "")
        if found:
            file, line = found[-1]
            return f"{os.path.basename(file)}:{line}"
    return ""


_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def steers_dynamo(error: BaseException) -> bool:
    """Whether an error tells Dynamo to trace again, or otherwise (torch 2.13, `_dynamo/exc.py`)."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_followed(gm: fx.GraphModule) -> bool:
    """Whether another graph is likely to follow one of Dynamo's in the step: a break ends it, or it
    is one of those into which a graph was cut for DDP's buckets, which are not told of breaks.

    `compile_subgraph_reason`, read in torch 2.13, `_dynamo/backends/distributed.py`.
    """
    return not hasattr(gm, "compile_subgraph_reason") or bool(break_reason(gm))


def compile_alone(
    function: types.FunctionType, backend: Callable[..., Any], recompile_limit: int
) -> Callable[..., Any]:
    """`compile_apart` of a function without closure, whose graphs die with what is returned.

    What Dynamo compiles hangs on the code object, which all functions of one ``def`` share, and
    holds that code object itself. `reset_code`, read in torch 2.13, `_dynamo/eval_frame.py`.
    """
    from torch._C._dynamo.eval_frame import reset_code

    own = types.FunctionType(function.__code__.replace(), function.__globals__)
    compiled = compile_apart(own, backend, recompile_limit)
    weakref.finalize(compiled, reset_code, own.__code__).atexit = False
    return compiled


def compile_apart(
    function: Callable[..., Any], backend: Callable[..., Any], recompile_limit: int = 1 << 20
) -> Callable[..., Any]:
    """`torch.compile` for one size at a time, that neither counts against the user's recompile
    limit nor shares graphs with other compilations of the same code.

    Beyond `recompile_limit` graphs, torch's error is raised: Dynamo would go on without the
    backend, and so without a limit on memory.

    After 256 of these on one class, torch's cap on all compilations of a code object
    (`accumulated_recompile_limit`) stops further ones that are not made here.

    `isolate_recompiles` came after torch 2.11 (read in 2.13, `__init__.py`); without it, and for
    the cap on all compilations of a code object, the limits are lifted while it runs.

    Under DistributedDataParallel, Dynamo would cut a graph at the ends of DDP's buckets
    (`optimize_ddp`): not here, where a plan is one of the whole graph.
    """
    import torch._dynamo

    owner = partial(backend)
    options: dict[str, Any] = {"backend": _weakly(owner), "dynamic": False}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(function, **options)
    settings: dict[str, Any] = {
        "suppress_errors": False,
        "fail_on_recompile_limit_hit": True,
        "recompile_limit": recompile_limit,
        "accumulated_recompile_limit": 1 << 20,
        "optimize_ddp": False,
        "skip_nnmodule_hook_guards": False,
    }

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(settings):
            return compiled(*args, **kwargs)

    run.__dict__["owner"] = owner
    return run


def _weakly(owner: Callable[..., Any]) -> Callable[..., Any]:
    """`owner`, for Dynamo, which keeps every backend that it has seen until it is reset.

    `cached_backends`, read in torch 2.13, `_dynamo/eval_frame.py`.
    """
    alive = weakref.ref(owner)

    def call(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        backend: Any = alive()
        return backend(gm, example_inputs)

    return call


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module with nodes of its own, that shares attributes and values (torch 2.13)."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, copied := {})
    old = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    new = graph.output(output)
    new.meta = dict(old.meta)
    del copied
    return fx.GraphModule(gm, graph)


def default_partition(
    joint: fx.GraphModule, *args: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's partitioner without recompute, for a trace that runs on fake tensors: draws
    that nobody reads are left out, as it fails on those of several results, and so is what the
    user's checkpoints say, as it fails where they mix.

    Read in torch 2.13, `_functorch/partitioners.py`.
    """
    from torch._functorch.partitioners import default_partition as split

    joint.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
    return split(joint, *args, **kwargs)


def fake(mode: Any, tensor: Tensor, device: torch.device | None) -> Tensor:
    """A fake of a tensor, on another device if one is given; parameters stay parameters.

    Read in torch 2.13, `_subclasses/fake_tensor.py`.
    """
    if device is None:
        found = mode.from_tensor(tensor, static_shapes=True)
    else:
        with mode:
            made = torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device
            )
        found = made.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter) and not isinstance(found, torch.nn.Parameter):
        found = torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found


def is_fake(x: Any) -> bool:
    """Whether something is a tensor without memory (torch 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def fake_mode() -> Any:
    """A mode under which tensors have a shape and no memory (torch 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def original(model: Any) -> Any:
    """The module that `torch.compile` wrapped; any other model as it is (torch 2.13)."""
    return getattr(model, "_orig_mod", model)


def outside_tracing() -> Any:
    """A context in which ops run for real, although a graph is being traced around it.

    torch.utils._python_dispatch._disable_current_modes, read in 2.13.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def depends_on_data(error: BaseException) -> bool:
    """Whether tracing failed because Python asked for the value of a fake tensor.

    Read in torch 2.13, `_subclasses/fake_tensor.py` and `fx/experimental/symbolic_shapes.py`.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )
    return any(isinstance(e, kinds) for e in _chain(error))


def root_reason(error: BaseException) -> str:
    """The first line of what went wrong first, without the layers that Dynamo wraps around it."""
    root = list(_chain(error))[-1]
    first = str(root).strip().partition(chr(10))[0].rstrip(".")
    return f"{type(root).__name__}: {first}"


_USER_CODE = re.compile(r"from user code:?\s+(?:.*\n)*?\s*File ", re.I)
_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_OWN = tuple(str(Path(found).parent) + os.sep for found in (__file__, torch.__file__))


def user_line(error: BaseException) -> str:
    """Where in the user's Python tracing failed, as ``file:line``, or "".

    Dynamo writes the lines into its messages (torch 2.13); what ran as Python has a traceback.
    """
    chain = list(_chain(error))
    said = [x for e in chain if _USER_CODE.search(str(e)) for x in _LINE.findall(str(e))]
    ran = [(f.filename, f.lineno) for e in chain for f in traceback.extract_tb(e.__traceback__)]
    places = [place for place in said or ran if not place[0].startswith(("<", *_OWN))]
    return f"{os.path.basename(places[-1][0])}:{places[-1][1]}" if places else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors that it was raised from or while handling."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        inner = found.__dict__.get("inner_exception")  # BackendCompilerFailed, torch 2.13
        found = found.__cause__ or inner or found.__context__


_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


def _is_heard(record: logging.LogRecord) -> bool:
    return not _is_quiet.get()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging what is raised as an error as well, in this thread (torch 2.13)."""
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_heard)  # once, if it is there
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


# --- watching a training program (torch 2.13) ---------------------------------------------------


@contextmanager
def backwards_observed(around: Callable[..., Any]) -> Iterator[None]:
    """Calls ``around(run, roots, keep_graph, create_graph)`` for each backward; `run` runs it.

    `_engine_run_backward`, which `backward()` and `torch.autograd.grad` both call. Read in torch
    2.13, `autograd/__init__.py`.
    """
    module: Any = torch.autograd
    original_run = module._engine_run_backward

    def run(roots: Any, gradients: Any, keep: Any, create: Any, *args: Any, **kwargs: Any) -> Any:
        now = partial(original_run, roots, gradients, keep, create, *args, **kwargs)
        return around(now, roots, bool(keep), bool(create))

    module._engine_run_backward = run
    try:
        yield
    finally:
        module._engine_run_backward = original_run


@contextmanager
def saved_tensors_observed(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Saved-tensor hooks under which transforms that refuse such hooks work, unobserved.

    `torch.func.grad` raises where hooks are set already, unless it is told to let them be:
    `_saved_tensors_hooks_disable`, read in torch 2.13, `csrc/autograd/init.cpp`.
    """
    c: Any = torch._C
    module = c._autograd
    disable = module._saved_tensors_hooks_disable
    module._saved_tensors_hooks_disable = lambda message, *_: disable(message, False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        module._saved_tensors_hooks_disable = disable


@contextmanager
def batches_observed(took: Callable[[Any, Any], None]) -> Iterator[None]:
    """Calls ``took(iterator, batch)`` for each batch that an iterator of a DataLoader gives.

    `_BaseDataLoaderIter.__next__`, read in torch 2.13, `utils/data/dataloader.py`.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    following = _BaseDataLoaderIter.__next__

    def observed(self: Any) -> Any:
        batch = following(self)
        took(self, batch)
        return batch

    _BaseDataLoaderIter.__next__ = observed
    try:
        yield
    finally:
        _BaseDataLoaderIter.__next__ = following


def keywords_of_call(frame: types.FrameType) -> dict[str, Any]:
    """The keyword arguments of a module's call, seen from the frame that runs a global hook.

    Global hooks are not given them. Read in torch 2.13, `nn/modules/module.py`, `_call_impl`.
    """
    return dict(frame.f_locals.get("kwargs", {}))


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)


def hooks_on(x: Any) -> int:
    """How many hooks a module or a tensor has (torch 2.13)."""
    return sum(len(getattr(x, name, None) or ()) for name in HOOKS)
