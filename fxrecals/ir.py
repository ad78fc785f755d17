"""The program as planning sees it: ops in order, values with bytes, no torch.

A `Graph` is one training step: the forward ops in execution order, then the backward ops.
Names are those of the fx nodes it was read from, so that a schedule over a `Graph` can be
applied to the traced program without pointers between the two.

    >>> a = Value("a", nbytes=0, storage="a", kind=Kind.PRIMAL)
    >>> b = Value("b", nbytes=8, storage="b")
    >>> f = Op("f", "aten.sin", inputs=("a",), outputs=("b",), phase=Phase.FORWARD)
    >>> graph = Graph(ops=(f,), values={"a": a, "b": b}, outputs=("b",))
    >>> verify(graph)
    >>> graph.op("f").outputs
    ('b',)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property


class Kind(str, Enum):
    """What a value is, which decides who pays for its bytes."""

    PRIMAL = "primal"  # parameter, buffer or input: alive before the step, never charged
    ACTIVATION = "activation"  # made by the forward
    TANGENT = "tangent"  # gradient of a forward output, made by the caller's loss
    BACKWARD = "backward"  # made by the backward
    GRADIENT = "gradient"  # lives in the storage of a parameter's gradient: charged apart
    RNG_STATE = "rng_state"  # generator state from which an op is replayed


class Peak(str, Enum):
    """Which live total a limit bounds."""

    ACTIVATIONS = "activations"  # without the gradients of parameters
    STEP = "step"  # with them


class Phase(str, Enum):
    """Which half of the step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Trait(str, Enum):
    """What planning must know of an op beyond its inputs and outputs."""

    RANDOM = "random"  # draws random numbers: runs again only from a saved generator state
    VIEW = "view"  # every output shares storage with an input: costs no bytes
    MUTATES = "mutates"  # writes to an input
    OPAQUE = "opaque"  # not known to be pure
    COLLECTIVE = "collective"  # talks to other processes
    MUST_SAVE = "must_save"  # the user asked that it not run again
    PREFER_SAVE = "prefer_save"  # the user would rather have it kept
    PREFER_RECOMPUTE = "prefer_recompute"  # the user would rather have it run again
    MUST_RECOMPUTE = "must_recompute"  # the user asked that it not be kept
    CALLER = "caller"  # not in the graph: what the caller does between forward and backward


ONCE = frozenset({Trait.MUTATES, Trait.OPAQUE, Trait.COLLECTIVE, Trait.MUST_SAVE, Trait.CALLER})
"""Traits that forbid a second run."""


@dataclass(frozen=True)
class Value:
    """One tensor of the step.

    Attributes:
        name: unique; the fx node's name.
        nbytes: bytes of the whole storage that it lives in (the same for all its views).
        storage: name of the storage; values that alias each other share it.
        kind: see `Kind`.
        device: as `str(torch.device)` prints it.
    """

    name: str
    nbytes: int
    storage: str
    kind: Kind = Kind.ACTIVATION
    device: str = "cpu"


@dataclass(frozen=True)
class Where:
    """The report's voice: module path (FQN) and source line of an op."""

    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Op:
    """One execution in the traced program.

    Attributes:
        name: unique; the fx node's name.
        target: what runs, as fx prints it.
        inputs: names of the values read, in order, without repeats.
        outputs: names of the values made. Those that no fx node names are called
            ``name:0``, ``name:1`` ...; a random op ends with its generator state,
            ``name:rng``, which only its first run makes and every later run reads.
        phase: forward or backward.
        seconds: estimated time of one run.
        flops: floating point operations of one run.
        scratch_bytes: bytes allocated and freed within one run, beside its outputs.
        traits: see `Trait`.
        where: for people.
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    phase: Phase
    seconds: float = 0.0
    flops: int = 0
    scratch_bytes: int = 0
    traits: frozenset[Trait] = frozenset()
    where: Where = field(default_factory=Where)

    @property
    def is_view(self) -> bool:
        """Whether it costs no bytes."""
        return Trait.VIEW in self.traits

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers; its last output is then its generator state."""
        return Trait.RANDOM in self.traits

    @property
    def may_run_again(self) -> bool:
        """Whether a schedule may recompute it."""
        return self.phase is Phase.FORWARD and not self.traits & ONCE


@dataclass(frozen=True)
class Graph:
    """A training step.

    Attributes:
        ops: forward ops in execution order, then backward ops in execution order.
        values: every value by name, in order of creation.
        outputs: names of the values that someone outside holds until the step ends: what the
            forward returns, the tangents, and what the backward returns.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    outputs: tuple[str, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        """The ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """The op that makes each value; inputs of the step have none."""
        return {name: op for op in self.ops for name in op.outputs}

    def op(self, name: str) -> Op:
        """The op of that name; `KeyError` where there is none."""
        return self.by_name[name]

    @cached_property
    def forward(self) -> tuple[Op, ...]:
        """The forward ops, in order."""
        return tuple(op for op in self.ops if op.phase is Phase.FORWARD)

    @cached_property
    def backward(self) -> tuple[Op, ...]:
        """The backward ops, in order."""
        return tuple(op for op in self.ops if op.phase is Phase.BACKWARD)

    @property
    def seconds(self) -> float:
        """Estimated time of the step when nothing runs twice."""
        return sum(op.seconds for op in self.ops)


def is_charged(value: Value) -> bool:
    """Whether a value's storage counts as activation bytes."""
    return value.kind not in (Kind.PRIMAL, Kind.GRADIENT)


def bounded_graph(graph: Graph, peak: Peak) -> Graph:
    """`graph` with all of its bytes charged that a limit on `peak` bounds.

    Names stay, so that a schedule of the one is a schedule of the other.

    >>> gradient = Value("g", nbytes=8, storage="g", kind=Kind.GRADIENT)
    >>> graph = Graph((), {"g": gradient}, outputs=("g",))
    >>> [is_charged(bounded_graph(graph, peak).values["g"]) for peak in Peak]
    [False, True]
    """
    if peak is Peak.ACTIVATIONS:
        return graph
    values = {
        name: replace(value, kind=Kind.BACKWARD) if value.kind is Kind.GRADIENT else value
        for name, value in graph.values.items()
    }
    return replace(graph, values=values)


def gradient_bytes(graph: Graph) -> int:
    """Bytes of all the gradients of parameters that a step makes."""
    gradients = (value for value in graph.values.values() if value.kind is Kind.GRADIENT)
    return sum({value.storage: value.nbytes for value in gradients}.values())


def verify(graph: Graph) -> None:
    """Raises `ValueError` with every reason, a sentence each, why a graph is not well formed."""
    wrong = list(_faults(graph))
    if wrong:
        raise ValueError("not a valid graph:\n" + "\n".join(f"- {line}" for line in wrong))


def _faults(graph: Graph) -> Iterator[str]:
    yield from _op_faults(graph)
    for name, value in graph.values.items():
        if name != value.name:
            yield f"value {value.name!r} is filed under {name!r}"
        if value.nbytes < 0:
            yield f"value {name!r} has {value.nbytes} bytes"
    sizes: dict[str, int] = {}
    for value in graph.values.values():
        if sizes.setdefault(value.storage, value.nbytes) != value.nbytes:
            yield f"value {value.name!r} gives storage {value.storage!r} another size"
    for name in graph.outputs:
        if name not in graph.values:
            yield f"output {name!r} is not a value"


def _op_faults(graph: Graph) -> Iterator[str]:
    made = {op_output for op in graph.ops for op_output in op.outputs}
    known = set(graph.values) - made
    seen: set[str] = set()
    backward = False
    for op in graph.ops:
        if op.name in seen:
            yield f"op {op.name!r} appears twice"
        seen.add(op.name)
        if backward and op.phase is Phase.FORWARD:
            yield f"forward op {op.name!r} follows a backward op"
        backward = backward or op.phase is Phase.BACKWARD
        for name in op.inputs:
            if name not in known:
                yield f"op {op.name!r} reads {name!r} before it is made"
        for name in op.outputs:
            if name in known:
                yield f"op {op.name!r} makes {name!r} a second time"
            if name not in graph.values:
                yield f"op {op.name!r} makes {name!r}, which is not a value"
            known.add(name)
