"""One training step of a model, traced without running it, as a single graph.

`capture` lets Dynamo and AOTAutograd trace a copy of the model under fake tensors: no activation
is allocated, and the parameters may be on `meta`. `step` joins what was traced, several graphs of
a model that breaks included, into one `ir.Graph`.

    >>> from fxrecals.cost import Free
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    >>> graph = step(capture(model, torch.randn(2, 4)), Free())
    >>> [(op.name, op.where.module) for op in graph.forward if not op.is_view]
    [('addmm', '0'), ('tanh', '1')]
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxrecals import _torch
from fxrecals.cost import Cost, generators_kept, is_there
from fxrecals.errors import CALLERS_LOSS, CaptureError, OptionError
from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value
from fxrecals.reading import LOSS_TENSORS, Ports, caller, ports, read, with_loss_held
from fxrecals.runtime import describe, tensors_of

NUMBER_BYTES = 8
"""Bytes of the widest number: a model that returns no more has computed its loss by itself."""


@dataclass(frozen=True)
class Joint:
    """A joint graph with what its reading needs.

    Attributes:
        module: the joint graph.
        num_fwd_outputs: how many of its outputs the forward returns; the rest are gradients.
        parameter_inputs: indices of the placeholders that are parameters or buffers.
        stands_for: the device that its CPU tensors stand for, "" for the CPU.
        sizes: the symbols in its sizes, with the values to read them with.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    parameter_inputs: tuple[int, ...]
    stands_for: str = ""
    sizes: tuple[tuple[Any, int], ...] = ()


@dataclass(frozen=True)
class Run:
    """One execution of a joint graph's forward within the step.

    Attributes:
        joint: index in `Captured.joints`.
        prefix: what the names of its ops and values begin with in the step's graph.
        sources: by index of placeholder, the run and output that it came from.
        made: indices of the placeholders that were made between two graphs, in plain Python.
        parameters: by index of placeholder, a number that tells parameters apart.
        results: indices of the forward outputs that the model returns.
        given: by index of placeholder, the place in `Signature.names` of what was there before.
    """

    joint: int
    prefix: str
    sources: Mapping[int, tuple[int, int]]
    made: tuple[int, ...]
    parameters: Mapping[int, int]
    results: tuple[int, ...]
    given: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Signature:
    """What the step was traced with and what it returned: enough to run it without the tracer.

    Attributes:
        names: of what was there before the step: ``parameter 0.weight``, ``buffer 1.mean``,
            ``argument 0`` by its place among the leaves of ``(args, kwargs)``, or ``tensor``.
        tensors: parameters and buffers by such a name, in words: ``float32[8, 16]``.
        leaves: the same of all arguments; of those that are no tensors, what `repr` says.
        result: what the model returned, with the indices of forward outputs in place of tensors;
            None where an output cannot be told from another.
        training: whether the model was in training mode.
    """

    names: tuple[str, ...]
    tensors: Mapping[str, str]
    leaves: Mapping[str, str]
    result: Any
    training: bool


@dataclass(frozen=True)
class Captured:
    """What `capture` found.

    Attributes:
        joints: one per compiled graph, in order of first execution.
        runs: executions of them, in order; more than joints where a graph runs several times.
        breaks: why the model is more than one graph, a sentence for each break.
        signature: None where a step was put together from runs.
    """

    joints: tuple[Joint, ...]
    runs: tuple[Run, ...]
    breaks: tuple[str, ...]
    signature: Signature | None = None


# --- tracing ------------------------------------------------------------------------------------


def capture(
    model: nn.Module, example: Any, *, device: str | torch.device | None = None
) -> Captured:
    """Traces one training step of a copy of a model, on fake tensors.

    No activation memory is allocated, and the model, the example and the random generators are
    left as they were.

    Args:
        model: in the mode (train or eval) in which it is to be planned.
        example: what it is called with: a tensor, a tuple or list of positional arguments, or a
            dict of keyword arguments.
        device: where parameters on ``meta`` would be, and the example with them; by default
            where the example is, or the CPU. Parameters elsewhere stay. A device that is not
            there is traced on the CPU, with the CPU's choice of kernels, and written as itself.

    Returns:
        The joint graphs, in order of execution, and why there is more than one.

    Raises:
        CaptureError: the example does not fit the model, nothing requires a gradient, or the
            tracer finds nothing that it can trace.

    >>> capture(torch.nn.Linear(2, 2), torch.ones(1, 2)).breaks
    ()
    """
    model = _torch.original(model)
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"model is a {type(model).__name__}; what works: a torch.nn.Module, "
            "for a function one whose forward calls it"
        )
    _check_gradients(model, example)
    mode = _torch.fake_mode()
    target = _meta_device(example, device)
    absent = "" if is_there(target) else str(target)
    stand_in = torch.device("cpu") if absent else target
    twin, args, kwargs = _fake_twins(mode, model, example, stand_in)
    recorder = _Recorder(_outside(twin, (args, kwargs)), absent)
    try:
        with _undisturbed(), _torch.quiet(), mode:
            compiled = _torch.compile_alone(_call, recorder.backend, 1 << 20)
            result = compiled(twin, *args, **kwargs)
    except Exception as error:
        line = _torch.user_line(error)
        raise CaptureError(
            f"{type(model).__name__} cannot be traced with example={_described(example)}: "
            f"{_torch.root_reason(error)}{f' ({line})' if line else ''}; what works: "
            f"{_remedy(error)}"
        ) from error
    found = recorder.captured(result)
    names = _outside_names(twin, (args, kwargs))
    leaves = pytree.tree_leaves((args, kwargs))
    given = describe({f"argument {i}": x for i, x in enumerate(leaves)})
    tensors, nest = describe(tensors_of(twin)), recorder.nested(result)
    return replace(found, signature=Signature(names, tensors, given, nest, model.training))


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _check_gradients(model: nn.Module, example: Any) -> None:
    if not any(t.requires_grad for t in (*model.parameters(), *_tensors(example))):
        count = sum(1 for _ in model.parameters())
        raise CaptureError(
            f"none of the {count} parameters of {type(model).__name__} requires a gradient, nor "
            "does the example, so there is no backward to plan; what works: "
            "model.requires_grad_(), or an example with requires_grad=True"
        )


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _meta_device(example: Any, device: str | torch.device | None) -> torch.device:
    """Where tensors on meta would be."""
    if device is not None:
        try:
            return torch.device(device)
        except RuntimeError:
            raise OptionError("device", device, 'a device of torch, as in "cuda:0"') from None
    found = (tensor.device for tensor in _tensors(example))
    return next((d for d in found if d.type != "meta"), torch.device("cpu"))


def _fake_twins(
    mode: Any, model: nn.Module, example: Any, target: torch.device
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A copy of the model and the arguments, with fake tensors in place of all their own."""
    moved = any(p.device.type == "meta" for p in [*model.parameters(), *model.buffers()])
    memo: dict[int, Any] = {}
    for tensor in _own_tensors(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(mode, tensor, target)
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for tracing: {error}; what works: "
            f"{_copy_remedy(model)}"
        ) from error

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return memo[id(x)] if id(x) in memo else _fake(mode, x, target, moved)

    args, kwargs = _arguments(pytree.tree_map(fake, example))
    return twin, args, kwargs


def _copy_remedy(model: nn.Module) -> str:
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return (
                "fxrecals.plan or fxrecals.rewrite before fully_shard, or after it "
                "torch.compile(model, backend=fxrecals.backend(limit))"
            )
    return "a model that copy.deepcopy accepts, or fxrecals.recals(limit), which copies nothing"


def _own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from _tensors({k: v for k, v in vars(module).items() if k[0] != "_"})


def _fake(mode: Any, tensor: Tensor, target: torch.device, moved: bool = False) -> Tensor:
    to = target if tensor.device.type == "meta" or moved else None
    return _torch.fake(mode, tensor, to)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def _outside(model: nn.Module, arguments: Any) -> dict[int, int]:
    """Storages that exist before the step, with a number each."""
    keys = (_torch.storage_key(t) for t in (*_own_tensors(model), *_tensors(arguments)))
    return {key: i for i, key in enumerate(dict.fromkeys(k for k in keys if k is not None))}


def _outside_names(model: nn.Module, arguments: Any) -> tuple[str, ...]:
    """Names of what `_outside` numbers, in its order."""
    named = [
        *((tensor, name) for name, tensor in tensors_of(model).items()),
        *((tensor, "tensor") for tensor in _own_tensors(model)),
        *((x, f"argument {i}") for i, x in enumerate(pytree.tree_leaves(arguments))),
    ]
    found: dict[int, str] = {}
    for tensor, name in named:
        key = _torch.storage_key(tensor) if isinstance(tensor, Tensor) else None
        if key is not None:
            found.setdefault(key, name)
    return tuple(found.values())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients on; random generators of torch and Python are put back."""
    state = random.getstate()
    try:
        with generators_kept(), torch.inference_mode(False), torch.enable_grad():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
    finally:
        random.setstate(state)


def _remedy(error: Exception) -> str:
    if _torch.depends_on_data(error):
        return (
            "a model whose Python does not branch on values of tensors, or fxrecals.recals(limit), "
            "which runs any Python, or torch.compile(model, backend=fxrecals.backend(limit)), "
            "which plans each graph when the step reaches it"
        )
    return (
        "an example with which the model runs, as a tensor, a tuple of arguments or a dict of "
        "keyword arguments; if it does run, torch.compile cannot trace it, and "
        "fxrecals.recals(limit), which runs any Python, is the way"
    )


def _described(example: Any) -> str:
    """An example in words, tensors by shape."""
    if isinstance(example, Tensor):
        return f"Tensor{tuple(example.shape)} {str(example.dtype).removeprefix('torch.')}"
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{k!r}: {_described(v)}" for k, v in example.items()) + "}"
    if isinstance(example, (tuple, list)):
        return "(" + ", ".join(_described(x) for x in example) + ")"
    return repr(example)[:60]


@dataclass(frozen=True)
class _Executed:
    """One execution of a compiled forward: which joint, storages that came in and went out."""

    joint: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


class _Recorder:
    """A Dynamo backend that keeps joint graphs, and notes which values pass between them."""

    def __init__(self, outside: dict[int, int], stands_for: str) -> None:
        self.outside = outside
        self.stands_for = stands_for
        self.joints: list[Joint] = []
        self.executed: list[_Executed] = []
        self.breaks: list[str] = []
        self.graphs = 0
        self.alive: list[Any] = []  # storages are compared by address: none may be freed meanwhile
        self._pending: Joint | None = None
        self._aot = _torch.aot_autograd(
            fw_compiler=self._compile_forward,
            bw_compiler=lambda gm, inputs: _torch.box(gm),
            inference_compiler=lambda gm, inputs: _torch.box(gm),
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        reason = _torch.break_reason(gm)
        if reason:
            self.breaks.append(reason)
        return self._aot(gm, inputs)

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = tuple(options.get("static_lifetime_input_indices") or ())
        kept = _torch.copy_graph(joint)
        self._pending = Joint(kept, num_fwd_outputs, static, stands_for=self.stands_for)
        return _torch.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def _compile_forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self._pending is not None, "AOTAutograd partitions before it compiles a forward"
        index, joint = len(self.joints), self._pending
        self.joints.append(joint)
        run = _torch.box(gm)

        def forward(args: list[Any]) -> Any:
            keys = tuple(self._key(x) for x in args)
            out = run(args)
            made = tuple(self._key(x) for x in out[: joint.num_fwd_outputs])
            self.executed.append(_Executed(index, keys, made))
            return out

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def _key(self, x: Any) -> int | None:
        if not isinstance(x, Tensor):
            return None
        self.alive.append(x)
        return _torch.storage_key(x)

    def captured(self, result: Any) -> Captured:
        if not self.executed:
            raise CaptureError(self._nothing())
        returned = {self._key(x) for x in pytree.tree_leaves(_plain(result))}
        runs = tuple(self._run_at(i, returned) for i in range(len(self.executed)))
        return Captured(tuple(self.joints), runs, tuple(self.breaks))

    def nested(self, result: Any) -> Any:
        """A result with the indices of the only graph's outputs in place of tensors.

        None where there are several graphs, where a leaf is neither an output nor None, or where
        two outputs share a storage.
        """
        outputs = self.executed[0].outputs
        if len(self.executed) > 1 or len(set(outputs)) < len(outputs):
            return None
        places: dict[int | None, int] = {key: k for k, key in enumerate(outputs)}
        places.pop(None, None)
        leaves, shape = pytree.tree_flatten(_plain(result))
        found = [places.get(self._key(x)) for x in leaves]
        known = all(k is not None or x is None for k, x in zip(found, leaves, strict=True))
        return pytree.tree_unflatten(found, shape) if known else None

    def _nothing(self) -> str:
        if self.graphs:
            return (
                "no traced graph needs a gradient: what was traced runs under no_grad, or is "
                "detached; what works: a model whose output requires a gradient"
            )
        return (
            "nothing could be traced: torch.compile skips this model (an nn.LSTM or nn.GRU, a "
            "disabled compiler, a break in every line, or no op at all); what works: "
            "fxrecals.recals(limit), which runs any Python, or for recurrent layers "
            "torch._dynamo.config.allow_rnn = True"
        )

    def _run_at(self, index: int, returned: Collection[int | None]) -> Run:
        run = self.executed[index]
        joint = self.joints[run.joint]
        before = {
            key: (i, k)
            for i, earlier in enumerate(self.executed[:index])
            for k, key in enumerate(earlier.outputs)
            if key is not None and key not in self.outside
        }
        known = [(i, k) for i, k in enumerate(run.inputs) if k is not None]
        return Run(
            joint=run.joint,
            prefix=f"g{index}." if len(self.executed) > 1 else "",
            sources={i: before[key] for i, key in known if key in before},
            made=tuple(i for i, k in known if k not in before and k not in self.outside),
            parameters={
                i: self.outside[key]
                for i, key in known
                if i in joint.parameter_inputs and key in self.outside
            },
            results=tuple(
                k for k, key in enumerate(run.outputs) if key is not None and key in returned
            ),
            given={i: self.outside[key] for i, key in known if key in self.outside},
        )


def _plain(result: Any) -> Any:
    """A result with its dataclasses as dicts, so that tensors in them are found."""
    if isinstance(result, Mapping):
        return {key: _plain(x) for key, x in result.items()}
    if isinstance(result, (tuple, list)):
        return [_plain(x) for x in result]
    if hasattr(result, "__dict__") and not isinstance(result, Tensor):
        return {key: x for key, x in vars(result).items() if isinstance(x, (Tensor, tuple, list))}
    return result


# --- the whole step -----------------------------------------------------------------------------


def step(captured: Captured, cost: Cost) -> Graph:
    """The graphs of a model as one step: all forwards, the loss, the backwards from last to first.

    Names of run number i begin with ``g<i>.``, unless there is one run only. Between two graphs
    stands an op of trait ``CALLER``: ``g1.inputs`` hands over what the next forward reads,
    ``g0.tangents`` what the previous backward does. A forward op of one graph can run again in
    the backward of that graph only.

    Args:
        captured: what `capture` found.
        cost: what an op costs.

    Returns:
        A graph that `ir.verify` accepts.
    """
    if len(captured.runs) == 1:
        joint = captured.joints[captured.runs[0].joint]
        return _read(joint, joint.parameter_inputs, cost)
    parts = _parts(captured, cost)
    values = {name: value for part in parts for name, value in part.graph.values.items()}
    forward = [op for part in parts for op in (*_handed_inputs(part, parts), *part.graph.forward)]
    backward, tangent_aliases = _joined_backward(parts, values)
    aliases = {**_input_aliases(parts, values), **tangent_aliases}
    ops = (*forward, *backward)
    return with_loss_held(Graph(ops, _merged(ops, values, aliases), _held(parts)))


@dataclass(frozen=True)
class _Part:
    """One run of a joint graph, renamed, with what leads into it and out of it.

    Attributes:
        run: the run.
        graph: its own graph, without the loss.
        ports: the names of what leads into it and out of it.
        extra: values that add to a parameter's gradient which a later run has made before.
    """

    run: Run
    graph: Graph
    ports: Ports
    extra: frozenset[str]


def _read(joint: Joint, parameters: Collection[int], cost: Cost) -> Graph:
    with _torch.sizes_known(dict(joint.sizes)):
        return read(
            joint.module,
            num_fwd_outputs=joint.num_fwd_outputs,
            parameter_inputs=parameters,
            cost=cost,
            stands_for=joint.stands_for,
        )


def _parts(captured: Captured, cost: Cost) -> list[_Part]:
    found: list[_Part] = []
    given: set[int] = set()  # parameters that a later run, earlier in the backward, has served
    for run in reversed(captured.runs):
        joint = captured.joints[run.joint]
        own = [i for i in joint.parameter_inputs if run.parameters.get(i) not in given]
        graph = _renamed(_without_loss(_read(joint, own, cost)), run.prefix)
        named = _renamed_ports(ports(joint.module, joint.num_fwd_outputs), run.prefix)
        others = set(joint.parameter_inputs).difference(own)
        extra = frozenset(name for i, name in named.gradients.items() if i in others)
        found.append(_Part(run, graph, named, extra))
        given.update(run.parameters[i] for i in own if i in run.parameters)
    return found[::-1]


def _without_loss(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(op for op in graph.ops if Trait.CALLER not in op.traits))


def _renamed(graph: Graph, prefix: str) -> Graph:
    def new(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    ops = tuple(
        replace(op, name=prefix + op.name, inputs=new(op.inputs), outputs=new(op.outputs))
        for op in graph.ops
    )
    values = {
        prefix + v.name: replace(v, name=prefix + v.name, storage=prefix + v.storage)
        for v in graph.values.values()
    }
    return Graph(ops, values, new(graph.outputs))


def _renamed_ports(found: Ports, prefix: str) -> Ports:
    return Ports(
        primals=tuple(prefix + name for name in found.primals),
        outputs=tuple(None if name is None else prefix + name for name in found.outputs),
        tangents={prefix + name: k for name, k in found.tangents.items()},
        gradients={i: prefix + name for i, name in found.gradients.items()},
    )


def _handed_inputs(part: _Part, parts: Sequence[_Part]) -> Iterator[Op]:
    """What makes those inputs of a graph that were made within the step."""
    made = sorted({*part.run.sources, *part.run.made})
    sources = (parts[run].ports.outputs[k] for run, k in part.run.sources.values())
    inputs = dict.fromkeys(name for name in sources if name is not None)
    if made:
        outputs = [part.ports.primals[i] for i in made]
        yield caller(f"{part.run.prefix}inputs", inputs, outputs, phase=Phase.FORWARD)


def _input_aliases(parts: Sequence[_Part], values: Mapping[str, Value]) -> dict[str, Value]:
    """By storage of an input that is an earlier graph's output: that output."""
    found: dict[str, Value] = {}
    for part in parts:
        for i, (run, k) in part.run.sources.items():
            source = parts[run].ports.outputs[k]
            if source is not None:
                found[values[part.ports.primals[i]].storage] = values[source]
    return found


def _joined_backward(
    parts: Sequence[_Part], values: Mapping[str, Value]
) -> tuple[list[Op], dict[str, Value]]:
    """The loss and all backwards; by storage of a tangent that is one gradient: that gradient."""
    by_loss = _loss_tangents(parts, values)
    scratch_bytes = _loss_scratch([values[name] for name in by_loss])
    ops = [caller(CALLERS_LOSS, dict.fromkeys(_results(parts)), by_loss, scratch_bytes)]
    aliases: dict[str, Value] = {}
    later: tuple[str, ...] = ()  # tangents of the graph whose backward ran just before
    for index, part in reversed(list(enumerate(parts))):
        sources = {
            tangent: _contributions(parts, index, k)
            for tangent, k in part.ports.tangents.items()
            if tangent not in by_loss
        }
        given = [name for names in sources.values() for name in names]
        if sources or later:
            read = dict.fromkeys([*given, *later])
            ops.append(caller(f"{part.run.prefix}tangents", read, sources))
        for tangent, names in sources.items():
            if len(names) == 1:
                aliases[values[tangent].storage] = values[names[0]]
        ops += part.graph.backward
        later = tuple(part.ports.tangents)
    return ops, aliases


def _contributions(parts: Sequence[_Part], index: int, output: int) -> list[str]:
    """Gradients that later graphs return for one output of a graph."""
    return [
        part.ports.gradients[i]
        for part in parts[index + 1 :]
        for i, source in part.run.sources.items()
        if source == (index, output) and i in part.ports.gradients
    ]


def _loss_tangents(parts: Sequence[_Part], values: Mapping[str, Value]) -> list[str]:
    """Tangents that the caller's loss makes: of the number that the model returns, or of all."""
    found = [
        tangent
        for index, part in enumerate(parts)
        for tangent, k in part.ports.tangents.items()
        if k in part.run.results and not _contributions(parts, index, k)
    ]
    numbers = [tangent for tangent in found if _is_number(values[tangent])]
    return numbers or found


def _loss_scratch(tangents: Sequence[Value]) -> int:
    if any(map(_is_number, tangents)):
        return 0
    return LOSS_TENSORS * sum(tangent.nbytes for tangent in tangents)


def _is_number(value: Value) -> bool:
    return value.nbytes <= NUMBER_BYTES


def _results(parts: Sequence[_Part]) -> list[str]:
    """What the model returns."""
    found = [p.ports.outputs[k] for p in parts for k in p.run.results if k < len(p.ports.outputs)]
    return [name for name in found if name is not None]


def _merged(
    ops: Sequence[Op], values: Mapping[str, Value], aliases: Mapping[str, Value]
) -> dict[str, Value]:
    """All values in order of creation, in the storages that they really have."""
    callers = [op for op in ops if Trait.CALLER in op.traits]
    by_caller = {name for op in callers for name in op.outputs}
    handed = [name for op in callers if op.phase is Phase.FORWARD for name in op.outputs]
    made = {values[name].storage for name in handed}
    order = [n for n, v in values.items() if v.kind is Kind.PRIMAL and n not in by_caller]
    order += [name for op in ops for name in op.outputs]
    found: dict[str, Value] = {}
    for name in order:
        value = root = values[name]
        while root.storage in aliases:
            root = aliases[root.storage]
        kind = Kind.ACTIVATION if root.storage in made else root.kind
        kind = value.kind if value.kind is Kind.RNG_STATE else kind
        found[name] = replace(value, storage=root.storage, nbytes=root.nbytes, kind=kind)
    return found


def _held(parts: Sequence[_Part]) -> tuple[str, ...]:
    """What someone holds to the end: results, the first graph's tangents, gradients."""
    gradients = [name for part in parts for name in part.ports.gradients.values()]
    passed = {
        part.ports.gradients[i]
        for part in parts
        for i in part.run.sources
        if i in part.ports.gradients
    }
    extra = {name for part in parts for name in part.extra}
    kept = [name for name in gradients if name not in passed and name not in extra]
    return tuple(dict.fromkeys([*_results(parts), *parts[0].ports.tangents, *kept]))
