"""Chains of ops, whose best schedules are known from the literature."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import comb, inf

from fxrecals.ir import Graph, Kind, Op, Phase, Trait, Value, verify

TWO: tuple[str, ...] = ("cuda:0", "cuda:1")
"""Devices."""


def chain(
    length: int,
    nbytes: int | Sequence[int] = 10,
    seconds: float | Sequence[float] = 1.0,
    gradients: int | Sequence[int] | None = None,
) -> Graph:
    """`length` ops in a row, each of whose outputs the backward op of the next one reads.

    Op k makes ``a{k}`` of ``a{k-1}``; its backward op makes ``d{k}`` of ``a{k-1}`` and the gradient
    from above, which for the last op is its own output.

    Args:
        length: number of ops.
        nbytes: of each ``a{k}``.
        seconds: of each op.
        gradients: bytes of each ``d{k}``; by default those of ``a{k}``.
    """
    sizes = [nbytes] * length if isinstance(nbytes, int) else list(nbytes)
    times = [seconds] * length if isinstance(seconds, float | int) else list(seconds)
    returned = gradients if gradients is not None else sizes
    slopes = [returned] * length if isinstance(returned, int) else list(returned)
    values = {"x": Value("x", 1, "x", Kind.PRIMAL)}
    ops: list[Op] = []
    for k in range(length):
        source = f"a{k - 1}" if k else "x"
        values[f"a{k}"] = Value(f"a{k}", sizes[k], f"a{k}")
        ops.append(Op(f"f{k}", "f", (source,), (f"a{k}",), Phase.FORWARD, seconds=times[k]))
    above = f"a{length - 1}"
    for k in reversed(range(length)):
        source = f"a{k - 1}" if k else "x"
        values[f"d{k}"] = Value(f"d{k}", slopes[k], f"d{k}", Kind.BACKWARD)
        inputs = tuple(dict.fromkeys((above, source)))
        ops.append(Op(f"b{k}", "b", inputs, (f"d{k}",), Phase.BACKWARD, seconds=2.0))
        above = f"d{k}"
    graph = Graph(tuple(ops), values, (above,))
    verify(graph)
    return graph


def mlp(layers: int) -> Graph:
    """Linear layers with tanh between them and a loss, each value of 10 bytes: the peaks lie in the
    loss and in the backward of each linear layer, with room in between."""
    values = {"x": Value("x", 0, "x", Kind.PRIMAL)}
    ops: list[Op] = []

    def add(name: str, *inputs: str, seconds: float, kind: Kind | None = None, scratch: int = 0):
        phase = Phase.FORWARD if kind is Kind.ACTIVATION else Phase.BACKWARD
        traits = frozenset({Trait.CALLER}) if kind is Kind.TANGENT else frozenset[Trait]()
        if kind:
            values[name] = Value(name, 10, name, kind)
        made = (name,) if kind else ()
        ops.append(Op(name, "f", inputs, made, phase, seconds, 0, scratch, traits))

    for k in range(layers):
        add(f"mm{k}", f"tanh{k - 1}" if k else "x", seconds=3, kind=Kind.ACTIVATION)
        add(f"tanh{k}", f"mm{k}", seconds=2, kind=Kind.ACTIVATION)
    add("loss", f"tanh{layers - 1}", seconds=0, kind=Kind.TANGENT, scratch=30)
    above = "loss"
    for k in reversed(range(layers)):
        add(f"slope{k}", f"tanh{k}", above, seconds=2, kind=Kind.BACKWARD)
        above = f"slope{k}"
        if k:
            add(f"input{k}", f"slope{k}", seconds=3, kind=Kind.BACKWARD)
            above = f"input{k}"
        add(f"weight{k}", f"tanh{k - 1}" if k else "x", f"slope{k}", seconds=3)
        add(f"bias{k}", f"slope{k}", seconds=1)
    graph = Graph(tuple(ops), values, (f"tanh{layers - 1}", "loss"))
    verify(graph)
    return graph


def binomial(length: int, slots: int) -> int:
    """Ops that run in all, forward, to reverse a uniform chain with `slots` states, the input's
    among them (Griewank and Walther 2000, Algorithm 799, https://doi.org/10.1145/347837.347846)."""
    sweeps = 0
    while comb(slots + sweeps, slots) < length:
        sweeps += 1
    return sweeps * length - comb(slots + sweeps, sweeps - 1) if sweeps else 0


def rotor(sizes: Sequence[int], times: Sequence[float], slopes: Sequence[int], limit: int) -> float:
    """Least extra seconds of a `chain` within `limit` bytes, by rotor's recursion (Beaumont et al.
    2019, https://hal.inria.fr/hal-02352969); infinite if there is no way."""
    last = len(sizes) - 1
    above = [*slopes[1:], sizes[last]]  # the gradient that the backward of each op reads

    @cache
    def least(s: int, t: int, room: int) -> float:
        """For ops `s` to `t` within `room` bytes, the input of `s` not counted."""
        first = t == last
        if s == t:
            forward = sizes[s] if first else 0
            return 0.0 if room >= max(forward, above[s] + slopes[s]) else inf
        best = inf
        entering = 0 if first else above[t]
        seconds = 0.0
        for i in range(s, t):
            source = sizes[i - 1] if i > s else 0
            if room < entering + source + sizes[i]:
                break
            seconds += 0.0 if first else times[i]
            if room >= sizes[i]:
                right = least(i + 1, t, room - sizes[i])
                best = min(best, seconds + right + least(s, i, room))
        return best

    return least(0, last, limit)


def side_by_side(graphs: list[Graph], devices: tuple[str, ...]) -> Graph:
    """One graph of several that have nothing to do with each other, each on its own device."""
    ops: list[Op] = []
    values: dict[str, Value] = {}
    outputs: list[str] = []
    for phase in Phase:
        for index, graph in enumerate(graphs):
            ops += [
                replace(
                    op,
                    name=f"{index}.{op.name}",
                    inputs=tuple(f"{index}.{name}" for name in op.inputs),
                    outputs=tuple(f"{index}.{name}" for name in op.outputs),
                )
                for op in graph.ops
                if op.phase is phase
            ]
    for index, (graph, device) in enumerate(zip(graphs, devices, strict=True)):
        for value in graph.values.values():
            name = f"{index}.{value.name}"
            storage = f"{index}.{value.storage}"
            values[name] = replace(value, name=name, storage=storage, device=device)
        outputs += [f"{index}.{name}" for name in graph.outputs]
    joined = Graph(tuple(ops), values, tuple(outputs))
    verify(joined)
    return joined
