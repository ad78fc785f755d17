"""The only judge of peak bytes: what is alive at each run of a schedule.

`simulate` walks a schedule as the rewritten program will run. Its rules:

- A storage is allocated by the run that makes its first value and freed after the last read, in
  schedule order, of any value that lives in it. All views of a storage count once.
- While an op runs, its inputs, its outputs and its scratch are alive together.
- An op that runs again makes new storages. Views made of the old ones keep the old ones alive.
- What the caller holds (`Graph.outputs`) is never freed within the step.
- Parameters, buffers and inputs are not charged; gradients of parameters are charged apart.
- The generator state of a random op exists only if the op runs again.

    >>> from fxrecals.ir import Graph, Kind, Op, Phase, Value
    >>> values = {n: Value(n, 8, n) for n in "abc"} | {"x": Value("x", 8, "x", Kind.PRIMAL)}
    >>> ops = (
    ...     Op("f", "sin", ("x",), ("a",), Phase.FORWARD),
    ...     Op("g", "cos", ("a",), ("b",), Phase.FORWARD),
    ...     Op("h", "mul", ("a", "b"), ("c",), Phase.BACKWARD),
    ... )
    >>> graph = Graph(ops, values, outputs=("b", "c"))
    >>> simulate(graph, Schedule.keeping_everything(graph)).peak_bytes
    24
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxrecals.ir import Graph, Kind, Op, Phase, Value, is_charged
from fxrecals.schedule import Schedule, makes, reads

NEVER = -1
"""As the last read of a value that nothing reads."""


@dataclass(frozen=True)
class Step:
    """One run.

    Attributes:
        op: name of the op.
        again: whether this is a recompute.
        live_bytes: activation bytes alive while it runs, scratch included.
        gradient_bytes: bytes of parameter gradients alive while it runs.
        allocated_bytes: activation bytes that it allocates.
        freed_bytes: activation bytes freed when it is done.
    """

    op: str
    again: bool
    live_bytes: int
    gradient_bytes: int
    allocated_bytes: int
    freed_bytes: int


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found: one `Step` per run, in order.

    Attributes:
        steps: the runs.
        forward_runs: how many of them belong to the forward.
        device_peaks: largest live activation bytes of each device.
    """

    steps: tuple[Step, ...]
    forward_runs: int
    device_peaks: Mapping[str, int]

    @cached_property
    def peak_index(self) -> int:
        """Index of the first run at which the most activation bytes are alive."""
        live = [step.live_bytes for step in self.steps]
        return live.index(max(live)) if live else NEVER

    @property
    def peak_bytes(self) -> int:
        """Largest live total of activation bytes: what a limit bounds."""
        return self.steps[self.peak_index].live_bytes if self.steps else 0

    @property
    def peak_at(self) -> str:
        """Name of the op during which the peak is reached."""
        return self.steps[self.peak_index].op if self.steps else ""

    @cached_property
    def step_peak_bytes(self) -> int:
        """Largest live total, gradients of parameters included."""
        return max((step.live_bytes + step.gradient_bytes for step in self.steps), default=0)

    @cached_property
    def saved_bytes(self) -> int:
        """Activation bytes alive between forward and backward, held outputs included."""
        done = self.steps[: self.forward_runs]
        return sum(step.allocated_bytes - step.freed_bytes for step in done)

    @cached_property
    def end_bytes(self) -> int:
        """Activation bytes still alive at the end: what the caller holds."""
        return sum(step.allocated_bytes - step.freed_bytes for step in self.steps)


@dataclass(frozen=True)
class Lifetime:
    """One allocation of a storage.

    Attributes:
        value: the first value that is put into it.
        born: index of the run that allocates it.
        dies: index of the run after which it is freed; None if the caller holds it.
    """

    value: Value
    born: int
    dies: int | None

    @property
    def storage(self) -> str:
        """Name of the storage."""
        return self.value.storage


@dataclass
class _Block:
    """One allocated storage: its size, who pays, and the run after which it is freed."""

    value: Value
    born: int
    dies: float


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """The memory timeline of one step under `schedule`; linear in the number of runs.

    Args:
        graph: a graph that `ir.verify` accepts.
        schedule: a schedule of it that `schedule.verify` accepts.

    Returns:
        A `Timeline`, in bytes.
    """
    runs = _runs(graph, schedule)
    blocks = _blocks(graph, runs)
    return _account(graph, runs, blocks, len(schedule.forward))


def lifetimes(graph: Graph, schedule: Schedule) -> tuple[Lifetime, ...]:
    """Every storage that the step allocates, in order, with the runs between which it lives.

    Args:
        graph: as for `simulate`.
        schedule: as for `simulate`.
    """
    blocks = _blocks(graph, _runs(graph, schedule))
    return tuple(
        Lifetime(b.value, b.born, None if b.dies == float("inf") else int(b.dies)) for b in blocks
    )


def _runs(graph: Graph, schedule: Schedule) -> list[tuple[Op, bool]]:
    forward = [(graph.op(name), False) for name in schedule.forward]
    backward = [(graph.op(name), False) for name in schedule.backward]
    return forward + [(op, op.phase is Phase.FORWARD) for op, _ in backward]


def _blocks(graph: Graph, runs: Sequence[tuple[Op, bool]]) -> list[_Block]:
    """Every storage that the step allocates, with its lifetime."""
    inputs = {v.storage for v in graph.values.values() if v.kind is Kind.PRIMAL}
    held = frozenset(graph.outputs)
    current: dict[str, _Block] = {}  # value -> the storage in which its newest run put it
    found: list[_Block] = []
    for index, (op, again) in enumerate(runs):
        sources: dict[str, _Block] = {}
        for name in reads(op, again):
            block = current.get(name)
            if block is not None:
                block.dies = max(block.dies, index)
                sources[block.value.storage] = block
        for name in makes(op, again):
            value = graph.values[name]
            block = sources.get(value.storage)
            if block is None:
                block = sources[value.storage] = _Block(value, index, _unread(value, index))
                found.append(block)
            current[name] = block
            if name in held and not again:
                block.dies = float("inf")
    return [b for b in found if b.dies != NEVER and b.value.storage not in inputs]


def _unread(value: Value, index: int) -> int:
    """When a value dies that nothing reads; a generator state is then not even taken."""
    return NEVER if value.kind is Kind.RNG_STATE else index


def _account(
    graph: Graph, runs: Sequence[tuple[Op, bool]], blocks: Sequence[_Block], forward_runs: int
) -> Timeline:
    born: list[list[Value]] = [[] for _ in runs]
    dead: list[list[Value]] = [[] for _ in runs]
    for block in blocks:
        born[block.born].append(block.value)
        if block.dies < len(runs):
            dead[int(block.dies)].append(block.value)
    steps: list[Step] = []
    live: dict[str, int] = {}
    peaks: dict[str, int] = {}
    gradients = 0
    for (op, again), made, freed in zip(runs, born, dead, strict=True):
        allocated = _charge(live, made, 1)
        gradients += _gradient_bytes(made)
        total = sum(live.values()) + op.scratch_bytes
        device = scratch_device(graph, op)
        for name, nbytes in live.items():
            peaks[name] = max(peaks.get(name, 0), nbytes + op.scratch_bytes * (name == device))
        if op.scratch_bytes and device not in live:
            peaks[device] = max(peaks.get(device, 0), op.scratch_bytes)
        released = _charge(live, freed, -1)
        steps.append(Step(op.name, again, total, gradients, allocated, -released))
        gradients -= _gradient_bytes(freed)
    return Timeline(tuple(steps), forward_runs, peaks)


def _charge(live: dict[str, int], values: Sequence[Value], sign: int) -> int:
    """Adds charged values to the live bytes of their devices; returns the change."""
    change = 0
    for value in values:
        if is_charged(value):
            live[value.device] = live.get(value.device, 0) + sign * value.nbytes
            change += sign * value.nbytes
    return change


def _gradient_bytes(values: Sequence[Value]) -> int:
    return sum(value.nbytes for value in values if value.kind is Kind.GRADIENT)


def scratch_device(graph: Graph, op: Op) -> str:
    """Where an op's scratch lives: with its first output, or else its first input."""
    for name in (*op.outputs, *op.inputs):
        return graph.values[name].device
    return "cpu"
