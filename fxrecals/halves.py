"""A joint graph and a schedule become a forward and a backward program.

Each run in the schedule becomes nodes of its own, in the schedule's order: an op that runs again
is called ``x_recompute``, then ``x_recompute_1`` and so on, and whoever reads `x` afterwards reads
the newest run. `torch.fx` frees a name after its last use, so what is alive when the programs
run is what the schedule says. What the backward reads and does not make is saved by the forward.

Three things in the traced program need care:

- An op with several results makes a tuple, which must not outlive the results taken from it and
  cannot be saved. So the `getitem` nodes follow their op at once, and only they are saved.
- Where the forward updates an input (a running statistic), a saved input would be read after the
  update. So the forward keeps a copy of what the backward must see as it was.
- A random op that runs again reads the generator state that its first run started from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxrecals import _torch, rng
from fxrecals.ir import Graph, Phase, Trait
from fxrecals.schedule import Schedule

AGAIN = "_recompute"
"""What the names of nodes that run again end with, or have before a number."""


def split(
    joint: fx.GraphModule,
    graph: Graph,
    schedule: Schedule,
    *,
    num_fwd_outputs: int,
    mutated_inputs: Collection[int] = (),
    lowered: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward that run `schedule`, as AOTAutograd takes them.

    The forward takes the primals and returns its outputs, then the saved tensors, objects and
    sizes. The backward takes sizes, tensors, objects, then the tangents; it returns gradients.

    Args:
        joint: forward and backward in one graph, functional but for final updates of inputs.
        graph: what `fxrecals.reading.read` made of `joint`; ops have the names of its nodes.
        schedule: a valid schedule of `graph`.
        num_fwd_outputs: how many of the joint graph's outputs the forward returns.
        mutated_inputs: indices among the primals of those that the forward's caller updates.
            Updates inside the graph are found without it.
        lowered: write random ops in the form that Inductor can lower.

    Raises:
        ValueError: `schedule` names an op that `joint` has not, or reads what is not yet made.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> from fxrecals.ir import Kind, Op, Value
    >>> def step(primals, tangents):
    ...     y = primals.sin()
    ...     return y.exp(), tangents * y.exp() * primals.cos()
    >>> joint = make_fx(step)(torch.ones(2), torch.ones(2))
    >>> names = [n.name for n in joint.graph.nodes if n.op == "call_function"]
    >>> names
    ['sin', 'exp', 'exp_1', 'mul', 'cos', 'mul_1']
    >>> reads = {"sin": ("primals_1",), "exp": ("sin",), "exp_1": ("sin",),
    ...     "mul": ("tangents_1", "exp_1"), "cos": ("primals_1",), "mul_1": ("mul", "cos")}
    >>> ops = tuple(Op(n, n, reads[n], (n,),
    ...     Phase.FORWARD if n in ("sin", "exp") else Phase.BACKWARD) for n in names)
    >>> kinds = {"primals_1": Kind.PRIMAL, "tangents_1": Kind.TANGENT}
    >>> values = {n: Value(n, 8, n, kinds.get(n, Kind.ACTIVATION)) for n in [*kinds, *names]}
    >>> graph = Graph(ops, values, outputs=("exp", "mul_1"))
    >>> again = Schedule(("sin", "exp"), ("sin", "exp_1", "mul", "cos", "mul_1"))
    >>> forward, backward = split(joint, graph, again, num_fwd_outputs=1)
    >>> [n.name for n in backward.graph.nodes]  # doctest: +NORMALIZE_WHITESPACE
    ['primals_1', 'tangents_1', 'sin_recompute', 'exp_1', 'mul', 'cos', 'mul_1', 'output']
    """
    program = _read(joint, graph, schedule, num_fwd_outputs, mutated_inputs)
    backward, saved = _backward(program, schedule, lowered)
    forward = _forward(program, schedule, saved, lowered)
    return _module(joint, forward), _module(joint, backward)


def compilers() -> dict[str, Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]]:
    """`fw_compiler`, `bw_compiler` and `inference_compiler` that run a graph as it stands.

    The compiled functions take one list and empty it: the executed peak is the schedule's, not
    that plus all the saved tensors in the caller's hands.

    >>> sorted(compilers())
    ['bw_compiler', 'fw_compiler', 'inference_compiler']
    """
    return dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), boxed)


def boxed(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Callable[[list[Any]], Any]:
    """A graph as a function of one list, which it empties.

    >>> from torch.fx import symbolic_trace
    >>> args = [torch.ones(2)]
    >>> boxed(symbolic_trace(lambda x: x + 1))(args), args
    (tensor([2., 2.]), [])
    """
    return _torch.box(_taking_turns(gm))


def _taking_turns(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, in which no other thread's graph draws between the generator state of an
    op and that op, nor in a replay."""
    if not any(
        rng.draws(node.target, node.args, node.kwargs) or node.target is rng.replay
        for node in gm.graph.nodes
    ):
        return gm
    own = _torch.copy_graph(gm)
    graph = own.graph
    for node in list(graph.nodes):
        if node.target is rng.replay:
            node.target = rng.replay_in_turn
        elif rng.draws(node.target, node.args, node.kwargs) and node.prev.target is rng.state:
            _draw_noted(graph, node.prev, node)
        elif rng.draws(node.target, node.args, node.kwargs):
            node.args, node.target = (node.target, *node.args), rng.draw_in_turn
    return own


def _draw_noted(graph: fx.Graph, state: fx.Node, op: fx.Node) -> None:
    both: Any = (state.args[0], op.target, *op.args)
    with graph.inserting_after(op):
        pair = graph.call_function(rng.draw_noted_in_turn, both, dict(op.kwargs))
    with graph.inserting_after(pair):
        drawn = graph.call_function(operator.getitem, (pair, 1))
        noted = graph.call_function(operator.getitem, (pair, 0))
    for old, new in ((op, drawn), (state, noted)):
        new.meta = old.meta
        old.replace_all_uses_with(new)
        graph.erase_node(old)


# --- the traced program, sorted ----------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """A joint graph with what both halves must know of it.

    Attributes:
        nodes: nodes by name.
        of_forward: nodes that the forward can compute; the backward gets them from it.
        outputs: what the forward returns, then what the backward returns; None stands for none.
        descriptions: what the runtime knows of each output.
        updated: nodes whose storage the forward updates in the end, where the backward looks at it.
        statistics: nodes whose storage the forward updates, and whose content the backward ignores.
    """

    joint: fx.GraphModule
    graph: Graph
    nodes: dict[str, fx.Node]
    of_forward: frozenset[fx.Node]
    outputs: tuple[Any, ...]
    descriptions: tuple[Any, ...]
    num_fwd_outputs: int
    updated: frozenset[fx.Node]
    statistics: frozenset[fx.Node]

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.joint.graph.nodes if node.op == "placeholder"]

    def is_op(self, node: fx.Node) -> bool:
        return node.name in self.graph.by_name


def _read(
    joint: fx.GraphModule,
    graph: Graph,
    schedule: Schedule,
    num_fwd_outputs: int,
    mutated_inputs: Collection[int],
) -> _Program:
    nodes = {node.name: node for node in joint.graph.nodes}
    updated = tuple(_updated(joint, graph, mutated_inputs))
    backward = frozenset(schedule.backward)
    output = next(node for node in reversed(joint.graph.nodes) if node.op == "output")
    outputs = tuple(tree_leaves(output.args, is_leaf=lambda x: x is None))
    return _Program(
        joint=joint,
        graph=graph,
        nodes=nodes,
        of_forward=frozenset(_forward_nodes(joint, graph)),
        outputs=outputs,
        descriptions=tuple(output.meta.get("desc", (None,) * len(outputs))),
        num_fwd_outputs=num_fwd_outputs,
        updated=frozenset(node for node in updated if _is_looked_at(node, graph, backward)),
        statistics=frozenset(n for n in updated if not _is_looked_at(n, graph, backward)),
    )


def _is_primal(node: fx.Node) -> bool:
    if node.op != "placeholder" or _torch.is_tangent(node):
        return False
    return not (_torch.is_backward_seed(node) or _torch.is_backward_state(node))


def _forward_nodes(joint: fx.GraphModule, graph: Graph) -> set[fx.Node]:
    """Nodes that are the forward's; those that are no ops (sizes) are where their inputs are."""
    found: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            mine = _is_primal(node)
        elif node.op != "call_function":
            mine = False
        elif node.name in graph.by_name:
            mine = graph.op(node.name).phase is Phase.FORWARD
        else:
            inputs = node.all_input_nodes
            mine = bool(inputs) and all(n in found or n.op == "get_attr" for n in inputs)
        if mine:
            found.add(node)
    return found


def _updated(
    joint: fx.GraphModule, graph: Graph, mutated_inputs: Collection[int]
) -> Iterator[fx.Node]:
    """Primals that the forward updates, and the forward's views of them."""
    primals = [node for node in joint.graph.nodes if _is_primal(node)]
    names = {primals[i].name for i in mutated_inputs if i < len(primals)}
    for node in joint.graph.nodes:
        if node.op == "call_function" and _torch.writes_arguments(node.target):
            op = graph.by_name.get(node.name)
            written = {n.name for n in node.args[:1] if isinstance(n, fx.Node)}
            if op is not None and op.phase is Phase.BACKWARD:
                names -= written  # the backward itself writes there: it needs the input, no copy
            else:
                names |= written
    storages = {graph.values[n].storage if n in graph.values else n for n in names}
    for node in joint.graph.nodes:
        value = graph.values.get(node.name)
        if (value.storage if value else node.name) in storages:
            yield node


def _is_looked_at(node: fx.Node, graph: Graph, backward: Collection[str]) -> bool:
    """Whether a run of the backward part depends on what is in `node`."""
    readers = (user for user in node.users if user.name in backward or user.op == "output")
    return any(not _reads_as_statistics(reader, node) for reader in readers)


def _reads_as_statistics(reader: fx.Node, node: fx.Node) -> bool:
    """Whether a batch norm in training takes `node` as running statistics, only to update them.

    Every batch norm hands its statistics to its backward, and they are updated: this saves a
    copy of each.
    """
    if not isinstance(reader.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in reader.target._schema.arguments]
    given = {**dict(zip(names, reader.args, strict=False)), **reader.kwargs}
    if not any(given.get(flag) is True for flag in ("train", "training")):
        return False
    elsewhere = [x for name, x in given.items() if name not in ("running_mean", "running_var")]
    if any(leaf is node for leaf in tree_leaves(elsewhere)):
        return False
    updated = [user for user in reader.users if user.args[1:] in ((3,), (4,))]
    return all(
        _torch.writes_arguments(user.target) or _reads_as_statistics(user, statistics)
        for statistics in updated
        for user in statistics.users
    )


# --- writing one half --------------------------------------------------------------------------


class _Writer:
    """Copies nodes of the joint graph, run by run, into one half of the step."""

    def __init__(self, program: _Program, fetch: Callable[[fx.Node], fx.Node], lowered: bool):
        self.program = program
        self.graph = fx.Graph()
        self.newest: dict[fx.Node, fx.Node] = {}
        self.states: dict[str, fx.Node] = {}
        self.states_wanted: Collection[str] = ()
        self._fetch = fetch
        self._lowered = lowered

    def read(self, node: fx.Node) -> fx.Node:
        """The newest run of `node`; a constant is copied where it is first read."""
        if node not in self.newest:
            constant = node.op == "get_attr"
            self.newest[node] = self.copy(node, node.name) if constant else self._fetch(node)
        return self.newest[node]

    def copy(self, node: fx.Node, name: str) -> fx.Node:
        """One run of `node`, with what it reads as it is now."""
        args, kwargs = map_arg(node.args, self.read), map_arg(node.kwargs, self.read)
        return self._create(node, node.op, node.target, args, kwargs, name)

    def placeholder(self, node: fx.Node, name: str) -> fx.Node:
        return self._create(node, "placeholder", name, (), {}, name)

    def run(self, name: str, again: bool) -> None:
        """Runs an op, and takes apart what it returns."""
        node = self.program.nodes.get(name)
        if node is None:
            raise ValueError(f"the schedule runs {name!r}, which is no node of the joint graph")
        op = self.program.graph.op(name)
        label = f"{name}{AGAIN}" if again else name
        if op.is_random and again:
            self.newest[node] = self._replay(node, label)
        elif op.is_random and name in self.states_wanted:
            self.newest[node] = self._draw(node)
        else:
            self.newest[node] = self.copy(node, label)
        self._take_apart(node, again)

    def _take_apart(self, node: fx.Node, again: bool) -> None:
        if isinstance(node.meta.get("val"), Tensor):
            return  # a getitem of a tensor is an op of its own
        for user in node.users:
            if user.target is operator.getitem:
                label = f"{user.name}{AGAIN}" if again else user.name
                self.newest[user] = self.copy(user, label)
                self._take_apart(user, again)

    def _draw(self, node: fx.Node) -> fx.Node:
        """The first run of a random op, which notes the generator state."""
        label = f"{node.name}_rng"
        args, kwargs = map_arg(node.args, self.read), map_arg(node.kwargs, self.read)
        if not self._lowered:
            state = self._plain(node, rng.state, (_device(node),), label)
            state.meta["val"] = _state_value(node)
            self.states[node.name] = state
            return self._plain(node, node.target, args, node.name, kwargs)
        both = self._plain(
            node, _torch.run_and_save_rng_state(), (node.target, *args), f"{label}_pair", kwargs
        )
        both.meta["val"] = (_state_value(node), node.meta.get("val"))
        state = self._plain(node, operator.getitem, (both, 0), label)
        state.meta["val"] = _state_value(node)
        self.states[node.name] = state
        return self._plain(node, operator.getitem, (both, 1), node.name)

    def _replay(self, node: fx.Node, name: str) -> fx.Node:
        """A later run of a random op, from the state of its first."""
        args, kwargs = map_arg(node.args, self.read), map_arg(node.kwargs, self.read)
        if node.name not in self.states:
            self.states[node.name] = self.placeholder(node, f"{node.name}_rng")
            self.states[node.name].meta = {"val": _state_value(node)}
        state = self.states[node.name]
        if self._lowered:
            target, before = _torch.run_with_rng_state(), (state, node.target)
        else:
            target, before = rng.replay, (state, _device(node), node.target)
        return self._plain(node, target, (*before, *args), name, kwargs)

    def _plain(
        self, like: fx.Node, target: Any, args: Any, name: str, kwargs: Any = None
    ) -> fx.Node:
        return self._create(like, "call_function", target, args, kwargs or {}, name)

    def _create(
        self, like: fx.Node, op: str, target: Any, args: Any, kwargs: Any, name: str
    ) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs, name, like.type)
        node.meta = dict(like.meta)
        return node

    def finish(self, outputs: Sequence[Any], descriptions: Sequence[Any]) -> fx.Graph:
        out = self.graph.output(tuple(outputs))
        out.meta["desc"] = list(descriptions)
        out.meta["output_stack_traces"] = [
            x.meta.get("stack_trace") if isinstance(x, fx.Node) else None for x in outputs
        ]
        self._prune()
        self.graph.lint()
        return self.graph

    def _prune(self) -> None:
        """Leaves out what was not asked for: results and sizes that nobody reads."""
        asked = {name for name in self.program.graph.by_name}
        for node in reversed(list(self.graph.nodes)):
            unread = node.op in ("call_function", "get_attr") and not node.users
            taken = node.target is operator.getitem and node.name not in asked
            if unread and (node.op == "get_attr" or taken or _torch.is_symbol(node)):
                self.graph.erase_node(node)


def _device(node: fx.Node) -> str:
    """Where an op draws its random numbers: the device of what it makes."""
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, Tensor):
            return str(value.device)
    return "cpu"


def _state_value(node: fx.Node) -> Tensor:
    """What tracing would see of the op's generator state, which is a tensor on the CPU."""
    nbytes = rng.CPU_STATE_BYTES if torch.device(_device(node)).type == "cpu" else 16
    fakes = (getattr(value, "fake_mode", None) for value in tree_leaves(node.meta.get("val")))
    mode = next((found for found in fakes if found is not None), None)
    if mode is None:
        return torch.empty(nbytes, dtype=torch.uint8)
    with mode:
        return torch.empty(nbytes, dtype=torch.uint8)


# --- the backward ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """What the forward hands to the backward, in the order in which AOTAutograd wants it.

    Attributes:
        tensors: nodes of the joint graph; those saved without a version check come last.
        unchecked: how many those are.
        objects: what is neither tensor nor number.
        symbols: numbers, such as sizes.
        states: names of the random ops whose generator state is saved, first among the tensors.
    """

    tensors: tuple[fx.Node, ...]
    unchecked: int
    objects: tuple[fx.Node, ...]
    symbols: tuple[fx.Node, ...]
    states: tuple[str, ...]


def _backward(program: _Program, schedule: Schedule, lowered: bool) -> tuple[fx.Graph, _Saved]:
    fetched: dict[fx.Node, fx.Node] = {}

    def fetch(node: fx.Node) -> fx.Node:
        if node.op == "placeholder" or node in program.of_forward:
            fetched[node] = writer.placeholder(node, _saved_name(program, node))
            return fetched[node]
        if program.is_op(node) or node.target is operator.getitem:
            raise ValueError(f"the schedule reads {node.name!r} before it is made")
        return writer.copy(node, node.name)

    writer = _Writer(program, fetch, lowered)
    for node in program.placeholders:
        if _torch.is_tangent(node) or _torch.is_backward_seed(node):
            writer.read(node)
    _run(writer, schedule.backward)
    outputs = [_read_output(writer, x) for x in program.outputs[program.num_fwd_outputs :]]
    saved = _sorted(program, [n for n in fetched if n in program.of_forward], writer.states)
    for node in saved.symbols:
        writer.read(node)  # also those that only name a size of another saved value
    graph = writer.finish(outputs, program.descriptions[program.num_fwd_outputs :])
    _order(graph, _inputs(program, saved, fetched, writer))
    _mark_as_backward(graph)
    return graph, saved


def _run(writer: _Writer, names: Sequence[str]) -> None:
    """Runs the ops of a backward part, those of the forward again."""
    for name in names:
        op = writer.program.graph.op(name)
        if Trait.CALLER not in op.traits:
            writer.run(name, again=op.phase is Phase.FORWARD)


def _mark_as_backward(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True


def _read_output(writer: _Writer, output: Any) -> Any:
    return writer.read(output) if isinstance(output, fx.Node) else output


def _saved_name(program: _Program, node: fx.Node) -> str:
    return f"{node.name}_before" if node in program.updated else node.name


def _sorted(program: _Program, saved: Collection[fx.Node], states: Collection[str]) -> _Saved:
    position = {node: i for i, node in enumerate(program.joint.graph.nodes)}
    found = sorted(saved, key=position.__getitem__)
    symbols = [node for node in found if _torch.is_symbol(node)]
    objects = [node for node in found if _torch.is_opaque_object(node)]
    apart = {*symbols, *objects}
    tensors = [node for node in found if node not in apart]
    for node in program.statistics & set(tensors):
        _torch.save_without_check(node)  # another forward may update it before this backward
    tensors.sort(key=_torch.is_saved_without_check)
    return _Saved(
        tensors=tuple(tensors),
        unchecked=sum(map(_torch.is_saved_without_check, tensors)),
        objects=tuple(objects),
        symbols=tuple(_with_bindings(program, symbols, tensors)),
        states=tuple(sorted(states, key=lambda name: position[program.nodes[name]])),
    )


def _with_bindings(
    program: _Program, symbols: Sequence[fx.Node], tensors: Sequence[fx.Node]
) -> Iterator[fx.Node]:
    """The saved sizes, those that define a symbol first, and every symbol of a saved shape."""
    bindings = _torch.symbol_bindings(program.joint.graph)
    tangents = [node for node in program.placeholders if _torch.is_tangent(node)]
    binding = set(bindings.values())
    needed: dict[fx.Node, None] = {n: None for n in symbols if n in binding}
    for node in (*symbols, *tensors, *tangents):
        for symbol in _torch.free_symbols_of(node.meta.get("val")):
            if symbol in bindings and bindings[symbol] in program.of_forward:
                needed[bindings[symbol]] = None
    yield from needed
    yield from (node for node in symbols if node not in needed)


def _inputs(
    program: _Program, saved: _Saved, fetched: dict[fx.Node, fx.Node], writer: _Writer
) -> list[fx.Node]:
    """The backward's placeholders in the order of the calling convention."""
    tangents = [n for n in program.placeholders if _torch.is_tangent(n)]
    seeds = [n for n in program.placeholders if _torch.is_backward_seed(n)]
    hooks = [n for n in program.placeholders if n in fetched and _torch.is_backward_state(n)]
    return [
        *(fetched[n] for n in saved.symbols),
        *(writer.states[name] for name in saved.states),
        *(fetched[n] for n in (*saved.tensors, *saved.objects, *tangents, *seeds, *hooks)),
    ]


def _order(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in placeholders:
        first.prepend(node)
    graph.lint()


# --- the forward -------------------------------------------------------------------------------


def _forward(program: _Program, schedule: Schedule, saved: _Saved, lowered: bool) -> fx.Graph:
    def fetch(node: fx.Node) -> fx.Node:
        raise ValueError(f"the forward reads {node.name!r} before it is made")

    writer = _Writer(program, fetch, lowered)
    writer.states_wanted = frozenset(saved.states)
    keeper = _Keeper(writer, saved)
    primals = [node for node in program.placeholders if _is_primal(node)]
    for node in primals:
        writer.newest[node] = writer.placeholder(node, str(node.target))
    for node in primals:
        keeper.made(node)
    for name in schedule.forward:
        if Trait.CALLER not in program.graph.op(name).traits:
            writer.run(name, again=False)
            keeper.made(program.nodes[name])
    outputs = [_forward_output(writer, x) for x in program.outputs[: program.num_fwd_outputs]]
    states = [writer.states[name] for name in saved.states]
    kept = [keeper.kept(n) for n in (*saved.tensors, *saved.objects, *saved.symbols)]
    checked = len(states) + len(saved.tensors) - saved.unchecked
    others = len(saved.objects) + len(saved.symbols)
    descriptions = _torch.saved_descriptions(checked, saved.unchecked, others)
    mine = program.descriptions[: program.num_fwd_outputs]
    return writer.finish([*outputs, *states, *kept], [*mine, *descriptions])


def _forward_output(writer: _Writer, output: Any) -> Any:
    """What the forward returns; of an update that the backward makes, the input it will update."""
    if not isinstance(output, fx.Node):
        return output
    updates = output.target is torch.ops.aten.copy_.default
    if updates and output not in writer.program.of_forward:
        return writer.read(output.args[0])  # type: ignore[arg-type]
    return writer.read(output)


class _Keeper:
    """Follows each run with what hangs on its results: sizes, and copies of what will change."""

    def __init__(self, writer: _Writer, saved: _Saved):
        self._writer = writer
        self._copies = {n: n for n in saved.tensors if n in writer.program.updated}
        self._before: dict[fx.Node, fx.Node] = {}
        self._followers = _followers(writer.program)

    def made(self, node: fx.Node) -> None:
        if node in self._copies:
            self._before[node] = self._copy(node)
        for user in node.users:
            if user.target is operator.getitem and user in self._writer.newest:
                self.made(user)
        for follower in self._followers.get(node, ()):
            writer = self._writer
            writer.newest[follower] = writer.copy(follower, follower.name)
            self.made(follower)

    def kept(self, node: fx.Node) -> fx.Node:
        return self._before[node] if node in self._before else self._writer.read(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        now = self._writer.newest[node]
        copy = self._writer.graph.call_function(torch.ops.aten.clone.default, (now,))
        copy.name = f"{node.name}_before"
        copy.meta = dict(node.meta)
        value = node.meta.get("val")
        copy.meta["val"] = value.clone() if isinstance(value, Tensor) else value
        return copy


def _followers(program: _Program) -> dict[fx.Node, list[fx.Node]]:
    """Sizes that the forward computes and that are no ops, each under the last of its inputs."""
    found: dict[fx.Node, list[fx.Node]] = {}
    order = {node: i for i, node in enumerate(program.joint.graph.nodes)}
    for node in program.joint.graph.nodes:
        if program.is_op(node) or node not in program.of_forward or not _torch.is_symbol(node):
            continue
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
        if inputs:
            found.setdefault(max(inputs, key=order.__getitem__), []).append(node)
    return found


def _module(joint: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(joint, graph)
