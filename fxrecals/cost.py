"""What one run of an op costs: seconds, floating point operations, scratch bytes.

A `Cost` prices many calls at once, because scratch is measured for all of them in one profiler
session. `Roofline` is the default: a formula over the figures of a device, which are measured
once and remembered, or given. `Measured` times each op. `Free` costs nothing.

    >>> a = torch.ones(4, 8)
    >>> call = Call(torch.ops.aten.mm.default, (a, a.t()), {}, torch.ones(4, 4))
    >>> price, = Roofline(GPUS["A100"], scratch=False).price([call])
    >>> price.flops, price.scratch_bytes, price.seconds > 0
    (256, 0, True)

The formula is the roofline of Williams, Waterman and Patterson (2009): an op takes as long as the
slower of its arithmetic and its traffic, and a launch. Some kinds of op are neither: random
draws, costly functions (exp, erf, tanh), normalisations and poolings have a rate per element of
their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fxrecals import _torch
from fxrecals.errors import OptionError

LARGEST_BYTES = 2 * 10**9
"""Ops whose inputs take more than this are not run to be measured."""

REMEMBERED = 20_000
"""How many scratch figures the cache file holds at most; the oldest go first."""


@dataclass(frozen=True)
class OpCost:
    """One run of an op: seconds, floating point operations, bytes beside inputs and outputs."""

    seconds: float = 0.0
    flops: int = 0
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Call:
    """One op as it would run, with fake tensors for real ones.

    Attributes:
        target: what runs.
        args: positional arguments.
        kwargs: keyword arguments.
        result: what it returns, as it returns it.
        gradients: places among the tensors returned of those that are parameters' gradients.
        is_view: it only makes views.
        is_random: it draws random numbers.
        is_known: it is known to have no side effect, so that it may run to be measured.
        stands_for: the device that it would run on, where that is not there; "" for its own.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    gradients: frozenset[int] = frozenset()
    is_view: bool = False
    is_random: bool = False
    is_known: bool = True
    stands_for: str = ""

    @property
    def packet(self) -> Any:
        """The op without its overload."""
        return getattr(self.target, "overloadpacket", self.target)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments."""
        return tuple(x for x in _leaves((self.args, self.kwargs)) if isinstance(x, Tensor))

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The tensors that it returns."""
        return tuple(x for x in _leaves(self.result) if isinstance(x, Tensor))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        if self.stands_for:
            return torch.device(self.stands_for)
        return next((t.device for t in (*self.made, *self.inputs)), torch.device("cpu"))


class Cost(Protocol):
    """How the cost of ops is known."""

    def price(self, calls: Sequence[Call]) -> tuple[OpCost, ...]:
        """The cost of each call, in order."""
        ...


@dataclass(frozen=True)
class Free:
    """Every op costs nothing: for graphs that are read for their memory alone."""

    def price(self, calls: Sequence[Call]) -> tuple[OpCost, ...]:
        """Zeros."""
        return (OpCost(),) * len(calls)


# --- figures of a device ------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What a device can do.

    Attributes:
        name: of the device.
        launch_seconds: time that any op takes, however small.
        bytes_per_second: traffic of a pointwise op, allocation of its output included.
        matmul: floating point operations per second of a matrix product in float32.
        half_matmul: the same in bfloat16 or float16.
        convolution: the same of a convolution, in float32.
        attention: the same of fused attention, in float32.
        costly: elements per second of gelu, exp, erf, tanh.
        norm: elements per second of softmax and normalisations.
        batch_norm: elements per second of a batch norm in training.
        pooling: elements per second that windows read, in max or average pooling.
        random: elements per second of random draws.
    """

    name: str
    launch_seconds: float
    bytes_per_second: float
    matmul: float
    half_matmul: float
    convolution: float
    attention: float
    costly: float
    norm: float
    batch_norm: float
    pooling: float
    random: float


def _gpu(name: str, terabytes: float, single: float, half: float) -> Figures:
    """A GPU from its data sheet; functions and draws keep up with its memory."""
    elements = terabytes * 1e12 / 8
    return Figures(
        name,
        launch_seconds=5e-6,
        bytes_per_second=terabytes * 1e12,
        matmul=single * 1e12,
        half_matmul=half * 1e12,
        convolution=single * 1e12,
        attention=single * 1e12,
        costly=elements,
        norm=elements,
        batch_norm=elements,
        pooling=elements,
        random=elements / 2,
    )


GPUS: Mapping[str, Figures] = {
    # NVIDIA's data sheets: memory TB/s, float32 without tensor cores, dense bfloat16, TFLOP/s.
    "A100": _gpu("A100", 2.039, 19.5, 312.0),  # A100 80GB SXM, nvidia-a100-datasheet
    "H100": _gpu("H100", 3.35, 67.0, 989.0),  # H100 SXM, nvidia-h100-datasheet, without sparsity
    "H200": _gpu("H200", 4.8, 67.0, 989.0),  # H200 SXM, nvidia-h200-datasheet, without sparsity
    "RTX 4090": _gpu("RTX 4090", 1.008, 82.6, 165.2),  # Ada GPU architecture whitepaper, app. A
}
"""Devices that need not be there, by name."""


def measure(device: torch.device) -> Figures:
    """The figures of a device that is there, to two digits. Takes about a second."""
    with torch.no_grad(), generators_kept():
        return _measured_figures(device)


def _measured_figures(device: torch.device) -> Figures:
    def rate(amount: float, run: Callable[[], Any]) -> float:
        return _two_digits(amount / _seconds(run, device))

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, device=device, dtype=dtype)

    f = torch.nn.functional
    dot = new(1)
    launch = _seconds(lambda: [dot + dot for _ in range(100)], device) / 100
    flat, square, half = new(1 << 21), new(512, 512), new(512, 512, dtype=torch.bfloat16)
    table, image, kernel = new(1024, 1024), new(8, 32, 32, 32), new(32, 32, 3, 3)
    images, q = new(8, 32, 64, 64), new(4, 8, 256, 32)
    return Figures(
        _device_name(device),
        launch_seconds=_two_digits(launch),
        bytes_per_second=rate(3 * flat.nbytes, lambda: flat + flat),
        matmul=rate(2 * 512**3, lambda: square @ square),
        half_matmul=rate(2 * 512**3, lambda: half @ half),
        convolution=rate(2 * 8 * 32**4 * 9, lambda: f.conv2d(image, kernel, padding=1)),
        attention=rate(4 * 32 * 256**2 * 32, lambda: f.scaled_dot_product_attention(q, q, q)),
        costly=rate(1 << 21, lambda: f.gelu(flat)),
        norm=rate(1 << 20, lambda: torch.softmax(table, 1)),
        batch_norm=rate(1 << 20, lambda: f.batch_norm(images, None, None, training=True)),
        pooling=rate(1 << 20, lambda: f.max_pool2d(images, 2, return_indices=True)),
        random=rate(1 << 20, lambda: table.bernoulli(0.5)),
    )


def _two_digits(x: float) -> float:
    return float(f"{x:.2g}")


def _seconds(
    run: Callable[[], Any],
    device: torch.device,
    rounds: int = 7,
    choose: Callable[[list[float]], float] = min,
) -> float:
    """Seconds of a call, after one that does not count; the least, for others may be at work."""
    times: list[float] = []
    for _ in range(rounds + 1):
        _wait(device)
        start = time.perf_counter()
        result = run()
        _wait(device)
        times.append(time.perf_counter() - start)
        del result
    return choose(times[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {_torch.cpu_capability()} x{torch.get_num_threads()}"


def is_there(device: torch.device) -> bool:
    """Whether ops can run on a device."""
    if device.type == "cpu":
        return True
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind is not None and kind.type == device.type


# --- roofline -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roofline:
    """Seconds from a formula over a device's figures; scratch measured where the device is there.

    Attributes:
        figures: of the device; None measures the one that the tensors are on, once, and keeps
            the figures on disk. A100's where there is no such device.
        scratch: whether to measure scratch bytes.
        folder: where figures are kept; None is ``$XDG_CACHE_HOME/fxrecals``.

    >>> Roofline(GPUS["H100"]).price([])
    ()
    """

    figures: Figures | None = None
    scratch: bool = True
    folder: Path | None = None
    _known: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def price(self, calls: Sequence[Call]) -> tuple[OpCost, ...]:
        """The cost of each call, in order."""
        figures = {device: self._figures(device) for device in {c.device for c in calls}}
        scratch = self._scratch(calls) if self.scratch else [0] * len(calls)
        return tuple(
            OpCost(seconds(call, flops, figures[call.device]), flops, nbytes)
            for call, flops, nbytes in zip(calls, map(count_flops, calls), scratch, strict=True)
        )

    def notes(self, calls: Sequence[Call]) -> tuple[str, ...]:
        """What the reader of a plan should know of how these calls were priced."""
        missing = sorted({str(c.device) for c in calls if not is_there(c.device)})
        given = f"the figures of {(self.figures or GPUS['A100']).name}"
        return tuple(
            f"{device} is not there: scratch bytes count as 0, and times are by {given}"
            for device in missing
        )

    def _figures(self, device: torch.device) -> Figures:
        if self.figures is not None:
            return self.figures
        return device_figures(device, self.folder) if is_there(device) else GPUS["A100"]

    def _scratch(self, calls: Sequence[Call]) -> list[int]:
        wanted = {key: call for call in calls if (key := _scratch_key(call)) is not None}
        known = self._known
        if not wanted.keys() <= known.keys():
            known.update(_load(_cache(self.folder) / "scratch.json", dict[str, int]()))
        missing = {key: call for key, call in wanted.items() if key not in known}
        if missing:
            found = measure_scratch(missing)
            known.update(found)
            if found:
                kept = dict(list(known.items())[-REMEMBERED:])
                _store(_cache(self.folder) / "scratch.json", kept)
        keys = (_scratch_key(call) for call in calls)
        return [known.get(key, 0) if key is not None else 0 for key in keys]


def seconds(call: Call, flops: int, figures: Figures) -> float:
    """The roofline's estimate of one run; 0 for views and numbers."""
    if call.is_view or not call.made:
        return 0.0
    arithmetic = flops / _peak(call, figures) if flops else 0.0
    traffic = _traffic(call) / figures.bytes_per_second
    return figures.launch_seconds + max(arithmetic, traffic, _by_element(call, figures))


def _peak(call: Call, figures: Figures) -> float:
    name = str(call.packet)
    half = call.made[0].element_size() == 2
    gain = figures.half_matmul / figures.matmul if half else 1.0
    if "convolution" in name:
        return figures.convolution * gain
    return (figures.attention if "attention" in name else figures.matmul) * gain


_COSTLY = ("gelu", "exp", "tanh", "erf", "sigmoid", "silu", "log", "pow", "sin", "cos", "mish")
_NORMS = ("softmax", "norm", "var", "std", "logsumexp", "cumsum", "sort", "topk")


_POOLS = ("max_pool", "avg_pool")
_POOLED = ("backward", "offsets_to_indices")
"""In the names of ops on poolings that pool nothing."""


def _by_element(call: Call, figures: Figures) -> float:
    """Seconds of an op that traffic alone does not explain; 0 for the others."""
    elements = max(_torch.hint(t.numel()) for t in call.made)
    name = str(call.packet).rpartition(".")[2]
    if call.is_random:
        return elements / figures.random
    if any(word in name for word in _POOLS) and not any(word in name for word in _POOLED):
        return elements * _window(call) / figures.pooling
    if "batch_norm" in name and "backward" not in name and any(x is True for x in call.args):
        return elements / figures.batch_norm
    if any(word in name for word in _NORMS):
        return elements / figures.norm
    if any(name.lstrip("_").startswith(word) for word in _COSTLY):
        return elements / figures.costly
    return 0.0


def _window(call: Call) -> int:
    """Elements that a pooling reads for each that it makes; of adaptive ones, on average."""
    if "adaptive" in str(call.packet):
        read, made = call.inputs[0].numel(), call.made[0].numel()
        return max(1, _torch.hint(read) // max(1, _torch.hint(made)))
    kernel = call.args[1]
    digit = str(call.packet).partition("pool")[2][:1]  # none in those that Inductor lowers to
    dims = int(digit) if digit.isdigit() else len(kernel)
    return math.prod(kernel) if len(kernel) == dims else kernel[0] ** dims


_GATHERS = ("embedding", "index", "index_select", "gather", "select_scatter", "slice_scatter")


def _traffic(call: Call) -> int:
    """Bytes read and written; an op that picks rows reads no more than it writes."""
    written = sum(_nbytes(t) for t in call.made)
    inputs = [_nbytes(t) for t in call.inputs]
    if str(call.packet).rpartition(".")[2] in _GATHERS:
        inputs = [min(nbytes, written) for nbytes in inputs]
    return written + sum(inputs)


def _nbytes(t: Tensor) -> int:
    """Bytes of the elements, or of the storage where elements repeat."""
    return min(_torch.hint(t.numel()) * t.element_size(), _torch.storage_bytes(t))


# --- floating point operations ------------------------------------------------------------------


def count_flops(call: Call) -> int:
    """Floating point operations of one run, from shapes alone; 0 for what is no product.

    Formulas are `torch.utils.flop_counter`'s, and ours for what it leaves out.

    >>> q = torch.ones(1, 2, 16, 8)
    >>> call = Call(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    ...     (q, q, q), {}, q)
    >>> count_flops(call)
    16384
    """
    if call.is_view:
        return 0
    name = str(call.packet)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(call.args[:3], products=2)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention_flops(call.args[1:4], products=5)
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(call.packet)
    if formula is None:
        return 0
    try:
        return _torch.hint(formula(*call.args, **call.kwargs, out_val=call.result))
    except (TypeError, ValueError, IndexError, AssertionError):
        return 0  # a formula that does not know this use of its op


def _attention_flops(qkv: Sequence[Tensor], products: int) -> int:
    """Matrix products of query length by key length; the backward computes one of them again."""
    query, key, value = qkv
    batch, heads, length, width = map(_torch.hint, query.shape)
    widths = width + _torch.hint(value.shape[-1])
    return products * batch * heads * length * _torch.hint(key.shape[-2]) * widths


# --- scratch ------------------------------------------------------------------------------------

_PLAIN = ("copy_", "clone", "fill", "full", "empty", "zeros", "ones", "arange", "cat", "stack")


def _scratch_key(call: Call) -> str | None:
    """What tells calls with different scratch apart; None where there is none to measure."""
    if call.is_view or not call.is_known or not call.made or not is_there(call.device):
        return None
    if not isinstance(call.target, torch._ops.OpOverload):
        return None
    if str(call.packet).rpartition(".")[2].startswith(_PLAIN):
        return None
    return signature(call)


def signature(call: Call) -> str:
    """What a measurement depends on, as a short text: op, shapes, strides, types, numbers.

    >>> call = Call(torch.ops.aten.sin.default, (torch.ones(2),), {}, torch.ones(2))
    >>> len(signature(call))
    24
    """
    parts = (
        torch.__version__,
        torch.get_num_threads(),
        _device_name(call.device),
        str(call.target),
        [_sign(x) for x in call.args],
        sorted((k, _sign(v)) for k, v in call.kwargs.items()),
        sorted(call.gradients),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _sign(x: Any) -> Any:
    if isinstance(x, Tensor):
        shape, strides = map(_torch.hint, x.shape), map(_torch.hint, x.stride())
        filled = "ones" if x.dtype is torch.bool else "zeros"
        return (filled, tuple(shape), tuple(strides), str(x.dtype), x.device.type)
    if isinstance(x, (tuple, list)):
        return [_sign(y) for y in x]
    if isinstance(x, torch.SymInt):
        return _torch.hint(x)
    return str(x)


def measure_scratch(calls: Mapping[str, Call]) -> dict[str, int]:
    """Bytes that each call allocates and frees within one run, beside its outputs.

    Runs each once, on inputs of zeros, and on masks that select all. A call that does not run has
    none. Nothing is found while another profiler is running.
    """
    sized = {key: call for key, call in calls.items() if _input_bytes(call) <= LARGEST_BYTES}
    on_cpu = {key: call for key, call in sized.items() if call.device.type == "cpu"}
    elsewhere = {key: call for key, call in sized.items() if key not in on_cpu}
    found = {key: 0 for key in calls if key not in sized}
    with torch.no_grad(), generators_kept():
        if on_cpu and not _torch.is_profiling():
            found |= _cpu_scratch(on_cpu)
        return found | {key: _device_scratch(call) for key, call in elsewhere.items()}


def _input_bytes(call: Call) -> int:
    return sum(_torch.storage_bytes(t) for t in (*call.inputs, *call.made))


def _cpu_scratch(calls: Mapping[str, Call]) -> dict[str, int]:
    made: dict[str, _Made] = {}
    with _torch.allocations_recorded() as recorded:
        for key, call in calls.items():
            found = _run_marked(call, f"fxrecals {key}")
            if found is not None:
                made[key] = found
    events = recorded("fxrecals ")
    return {key: _scratch_of(events.get(f"fxrecals {key}", []), made.get(key)) for key in calls}


@dataclass(frozen=True)
class _Made:
    """The new storages among the outputs of one run, bytes by address; gradients apart."""

    charged: Mapping[int, int]
    gradients: Mapping[int, int]


def _scratch_of(events: Sequence[_torch.Event], made: _Made | None) -> int:
    """The largest live total within one run, less the outputs.

    Gradients of parameters are charged apart, so a moment counts without them: an op may free
    its scratch before it allocates a gradient.
    """
    if made is None:
        return 0
    last = {address: i for i, (address, size) in enumerate(events) if size > 0}
    live = peak = 0
    for index, (address, size) in enumerate(events):
        if not (address in made.gradients and last[address] == index):
            live += size
            peak = max(peak, live)
    return max(0, peak - sum(made.charged.values()))


def _run_marked(call: Call, mark: str) -> _Made | None:
    """Runs a call under a name; the storages that it made, None if it did not run."""
    try:
        args, kwargs = realize((call.args, dict(call.kwargs)))
        with torch.profiler.record_function(mark):
            out = call.target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    old = {t.untyped_storage().data_ptr() for t in _leaves((args, kwargs)) if _is_tensor(t)}
    fresh = [t.untyped_storage() for t in _leaves(out) if _is_tensor(t)]
    sizes = [(i, s.data_ptr(), s.nbytes()) for i, s in enumerate(fresh)]
    new = [entry for entry in sizes if entry[1] not in old]
    return _Made(
        {address: nbytes for i, address, nbytes in new if i not in call.gradients},
        {address: nbytes for i, address, nbytes in new if i in call.gradients},
    )


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _device_scratch(call: Call) -> int:
    """The same on another device, from its allocator; the first run pays for its libraries."""
    try:
        args, kwargs = realize((call.args, dict(call.kwargs)))
        call.target(*args, **kwargs)
        torch.cuda.reset_peak_memory_stats(call.device)
        before = torch.cuda.memory_allocated(call.device)
        out = call.target(*args, **kwargs)
        torch.cuda.synchronize(call.device)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return 0
    held = torch.cuda.memory_allocated(call.device) - before
    del out
    return max(0, torch.cuda.max_memory_allocated(call.device) - before - held)


def realize(x: Any) -> Any:
    """Real tensors for fake ones, laid out alike; everything else as it is.

    Zeros, and True where they are masks: what a mask selects is then the most that it can be.
    """
    if isinstance(x, Tensor):
        shape, strides = [_torch.hint(n) for n in x.shape], [_torch.hint(n) for n in x.stride()]
        made = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        return made.fill_(x.dtype is torch.bool)
    if isinstance(x, (list, tuple)):
        return type(x)(realize(y) for y in x)
    if isinstance(x, dict):
        return {key: realize(y) for key, y in x.items()}
    return _torch.hint(x) if isinstance(x, torch.SymInt) else x


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves the process's random generators as they were, NumPy's too."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    before = np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(before)


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _leaves(y)
    elif isinstance(x, Mapping):
        for y in x.values():
            yield from _leaves(y)
    else:
        yield x


# --- measured -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Each distinct op is run on its device, and takes the median of its times.

    Ranks of a distributed run take the time that the first of them measured.

    Attributes:
        otherwise: prices what cannot run, and counts operations and scratch.
        rounds: how often each op runs.
    """

    otherwise: Roofline = field(default_factory=Roofline)
    rounds: int = 5
    _known: dict[str, float] = field(default_factory=dict, compare=False, repr=False)

    def price(self, calls: Sequence[Call]) -> tuple[OpCost, ...]:
        """The cost of each call, in order."""
        with torch.no_grad(), generators_kept():
            return tuple(
                OpCost(self._time(call, cost.seconds), cost.flops, cost.scratch_bytes)
                for call, cost in zip(calls, self.otherwise.price(calls), strict=True)
            )

    def notes(self, calls: Sequence[Call]) -> tuple[str, ...]:
        """What the reader of a plan should know of how these calls were priced."""
        return self.otherwise.notes(calls)

    def _time(self, call: Call, estimate: float) -> float:
        if call.is_view or not call.is_known or not call.made or not is_there(call.device):
            return estimate
        if not isinstance(call.target, torch._ops.OpOverload) or call.target._schema.is_mutable:
            return estimate
        if _input_bytes(call) > LARGEST_BYTES:
            return estimate
        key = signature(call)
        if key not in self._known:
            mine = self._measure(call, estimate)
            self._known[key] = float(_torch.agreed(f"seconds-{key}", repr(mine)))
        return self._known[key]

    def _measure(self, call: Call, estimate: float) -> float:
        try:
            args, kwargs = realize((call.args, dict(call.kwargs)))
            run = lambda: call.target(*args, **kwargs)  # noqa: E731
            return _two_digits(_seconds(run, call.device, self.rounds, statistics.median))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return estimate


# --- what is kept between processes -------------------------------------------------------------


def device_figures(device: torch.device, folder: Path | None = None) -> Figures:
    """The figures of a device: from the cache, or measured and put there.

    Ranks of a distributed run take those of the first among them, for each name of a device: from
    other figures, they might make other plans.
    """
    key = hashlib.sha256(f"{torch.__version__} {_device_name(device)}".encode()).hexdigest()[:16]
    path = _cache(folder) / f"device-{key}.json"
    try:
        return _agreed(key, Figures(**_load(path, {})))
    except TypeError:  # nothing there, or written by another version
        figures = _agreed(key, measure(device))
        _store(path, asdict(figures))
        return figures


def _agreed(key: str, figures: Figures) -> Figures:
    """The figures that all ranks use, as the first of them wrote them."""
    return Figures(**json.loads(_torch.agreed(f"device-{key}", json.dumps(asdict(figures)))))


def _cache(folder: Path | None) -> Path:
    if folder is not None:
        return folder
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "fxrecals"


def _load(path: Path, empty: dict[str, Any]) -> dict[str, Any]:
    """A JSON object from a file; `empty` if there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return empty
    return found if isinstance(found, dict) else empty


def _store(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON object at once or not at all; a home that cannot be written to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, path)
    except OSError:
        return


# --- what callers ask for by name ---------------------------------------------------------------

NAMES = ("roofline", "measured")


def named(cost: str | Cost) -> Cost:
    """The cost model of a name, or the one that was given.

    Raises:
        OptionError: neither a known name nor an object with a ``price`` method.

    >>> type(named("roofline")).__name__
    'Roofline'
    """
    if cost == "roofline":
        return Roofline()
    if cost == "measured":
        return Measured()
    if isinstance(cost, str) or not hasattr(cost, "price"):
        expected = " or ".join(map(repr, NAMES)) + ", or an object with a price() method"
        raise OptionError("cost", cost, expected)
    return cost


def free_bytes(device: str) -> int:
    """Memory that can still be allocated on a device.

    Raises:
        OptionError: the device is not here, or does not tell.
    """
    here = torch.device(device)
    if here.type == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if here.type == "cuda" and is_there(here):
        free, _ = torch.cuda.mem_get_info(here)
        return free + torch.cuda.memory_reserved(here) - torch.cuda.memory_allocated(here)
    raise OptionError("limit", "auto", f"a limit in bytes: {device} does not tell its free memory")
