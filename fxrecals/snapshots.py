"""Memory snapshots: what PyTorch dumps, what a step on the CPU does, and what a plan foresees.

    >>> import fxrecals, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    >>> plan = fxrecals.plan(model, torch.randn(512, 64), "100%")
    >>> foreseen = snapshot(plan)
    >>> foreseen.peak_bytes("cpu") == plan.step_peak_bytes
    True

All three are one kind of value, print who holds what at the peak, and are written in the format
of `torch.cuda.memory._dump_snapshot`, which https://pytorch.org/memory_viz draws: plan and
measurement can be looked at side by side. The format was read in torch 2.13,
`torch/cuda/memory.py` and `torch/cuda/_memory_viz.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from fxrecals import _torch
from fxrecals.accounting import Block, Instant, blocks, peak
from fxrecals.errors import FxrecalsError, OptionError
from fxrecals.formats import format_bytes
from fxrecals.ir import Graph, Kind, Value
from fxrecals.plans import Plan
from fxrecals.report import ascii_only, table, tail_of
from fxrecals.schedule import Schedule
from fxrecals.timeline import lifetimes, scratch_device

Frame = tuple[str, int, str]
"""A line of the program: file, line, function."""

ROWS = 12
"""Rows of the table of a device; the rest is one line."""

DEVICES = "fxrecals_devices"
"""Key under which a snapshot that was written here names its devices; viewers pass over it."""

ALIGNMENT = 512
"""Of the addresses that a plan's blocks are given."""

SPAN = "fxrecals records "

UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    UnicodeDecodeError,
    ValueError,
)
"""What a file that is no snapshot may raise while it is read."""


class Traced(NamedTuple):
    """An allocation or, with negative bytes, a free.

    Attributes:
        address: where the block begins.
        nbytes: of it.
        frames: innermost first.
        category: what it is for, if that is known.
    """

    address: int
    nbytes: int
    frames: tuple[Frame, ...] = ()
    category: str = ""


@dataclass(frozen=True)
class Segment:
    """Memory that an allocator has taken from a device.

    Attributes:
        device: its name.
        nbytes: of it.
        active_bytes: of the blocks in it that are in use.
        largest_free_bytes: of the largest block in it that is not.
    """

    device: str
    nbytes: int
    active_bytes: int
    largest_free_bytes: int


@dataclass(frozen=True)
class Holder:
    """Blocks that one line of the program allocated, alive at the peak.

    Attributes:
        nbytes: of all of them.
        count: how many there are.
        frames: the stack, innermost first.
    """

    nbytes: int
    count: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class OutOfMemory:
    """An allocation that failed.

    Attributes:
        device: where.
        asked_bytes: how much was asked for.
        free_bytes: how much the device still had.
    """

    device: str
    asked_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """What was allocated and freed, by device; it prints as a table.

    Attributes:
        traces: events of each device, in order. Blocks that were there before the first are
            allocated at its beginning.
        segments: what the allocators have in reserve; () where there is no such thing.
        failures: allocations that failed.
    """

    traces: Mapping[str, tuple[Traced, ...]]
    segments: tuple[Segment, ...] = ()
    failures: tuple[OutOfMemory, ...] = ()

    def peak(self, device: str) -> Instant:
        """When the most was alive on a device."""
        return peak(self.traces[device])

    def peak_bytes(self, device: str) -> int:
        """Largest live total of a device."""
        return self.peak(device).nbytes

    def holders(self, device: str) -> tuple[Holder, ...]:
        """Who holds what at the peak of a device, by stack; most bytes first."""
        events = self.traces[device]
        at = self.peak(device).index
        found: dict[tuple[Frame, ...], list[Block]] = {}
        for block in blocks(events):
            if block.is_alive_at(at):
                found.setdefault(events[block.born].frames, []).append(block)
        rows = [Holder(sum(b.nbytes for b in own), len(own), at) for at, own in found.items()]
        return tuple(sorted(rows, key=lambda row: -row.nbytes))

    def save(self, path: str | Path) -> Path:
        """Writes the events as PyTorch does; https://pytorch.org/memory_viz draws them.

        Segments are left out, so that its page "Allocator State History" stays empty.

        Returns:
            The path.
        """
        data = {
            "device_traces": [_trace_data(events) for events in self.traces.values()],
            "segments": [],
            DEVICES: list(self.traces),
        }
        Path(path).write_bytes(pickle.dumps(data))
        return Path(path)

    def __repr__(self) -> str:
        parts = [_device_text(self, device) for device in self.traces if self.traces[device]]
        return ascii_only("\n\n".join(parts)) or "nothing was allocated"


def snapshot(source: str | Path | Plan | Callable[[], object]) -> Snapshot:
    """A memory snapshot of a file, of a plan, or of what a function does on the CPU.

    Args:
        source: the path of a file that `torch.cuda.memory._dump_snapshot` or `Snapshot.save`
            wrote; or a plan, whose step is foreseen, gradients included; or a function, say one
            step, that is called once and recorded with its lines of Python, many times slower.

    Raises:
        OptionError: the source is none of these.
        FxrecalsError: the file cannot be read, or is no snapshot. It may come from anywhere: a
            pickle that would call anything is refused before it does.
    """
    if isinstance(source, Plan):
        return _foreseen(source.graph, source.schedule)
    if isinstance(source, str | Path):
        return _read(Path(source))
    if callable(source):
        return _recorded(source)
    raise OptionError("source", source, "the path of a snapshot, a plan, or a function to run")


# --- files --------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Numbers, strings, lists, tuples and dicts: a snapshot is made of nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise FxrecalsError(f"a snapshot does not need {module}.{name}, and must not call it")


def _read(path: Path) -> Snapshot:
    try:
        with path.open("rb") as file:
            return _understood(_Unpickler(file).load())
    except OSError as error:
        raise FxrecalsError(f"{path} cannot be read: {error.strerror or error}") from error
    except FxrecalsError as error:
        raise FxrecalsError(f"{path} is refused: {error}") from None
    except UNREADABLE as error:
        raise FxrecalsError(
            f"{path} is no memory snapshot; what works: a file that "
            "torch.cuda.memory._dump_snapshot wrote"
        ) from error


def _understood(data: Mapping[str, Any]) -> Snapshot:
    names = [str(name) for name in data.get(DEVICES, ())] or [
        f"cuda:{i}" for i in range(len(data["device_traces"]))
    ]
    segments = list(data["segments"])
    traces = {
        name: tuple(_events(entries, [s for s in segments if s["device"] == index]))
        for index, (name, entries) in enumerate(zip(names, data["device_traces"], strict=True))
    }
    failures = [
        OutOfMemory(name, int(entry["size"]), int(entry["device_free"]))
        for name, entries in zip(names, data["device_traces"], strict=True)
        for entry in entries
        if entry["action"] == "oom"
    ]
    found = tuple(_segment(names, segment) for segment in segments)
    return Snapshot(traces, found, tuple(failures))


def _events(entries: Iterable[Mapping[str, Any]], segments: Sequence[Any]) -> Iterator[Traced]:
    """The events of a device; before them, blocks that were there when recording began."""
    found = [event for event in map(_traced, entries) if event is not None]
    alive: set[int] = set()
    for event in found:
        if event.nbytes > 0:
            alive.add(event.address)
        elif event.address in alive:
            alive.remove(event.address)
        else:
            yield Traced(event.address, -event.nbytes)  # its frames are those of the free
    for block in _placed(segments):
        if block["state"] != "inactive" and block["address"] not in alive:
            yield Traced(block["address"], int(block["size"]), _frames(block.get("frames", ())))
    yield from found


def _traced(entry: Mapping[str, Any]) -> Traced | None:
    sign = {"alloc": 1, "free_completed": -1, "free": -1}.get(entry["action"])
    if sign is None or not entry["size"]:
        return None
    frames = _frames(entry.get("frames", ()))
    return Traced(int(entry["addr"]), sign * int(entry["size"]), frames, entry.get("category", ""))


def _placed(segments: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Blocks with their addresses, which older snapshots leave out."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            yield {"address": address, **block}
            address += block["size"]


def _segment(names: Sequence[str], data: Mapping[str, Any]) -> Segment:
    free = [int(block["size"]) for block in data["blocks"] if block["state"] == "inactive"]
    total = int(data["total_size"])
    return Segment(names[int(data["device"])], total, total - sum(free), max(free, default=0))


def _frames(data: Iterable[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple((str(f["filename"]), int(f["line"]), str(f["name"])) for f in data)


def _trace_data(events: Sequence[Traced]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, event in enumerate(events):
        frames = [{"filename": f, "line": line, "name": name} for f, line, name in event.frames]
        actions = ("alloc",) if event.nbytes > 0 else ("free_requested", "free_completed")
        for action in actions:
            entry = {
                "action": action,
                "addr": event.address,
                "size": abs(event.nbytes),
                "stream": 0,
                "time_us": index,
                "frames": frames,
            }
            found.append({**entry, "category": event.category} if event.category else entry)
    return found


# --- runs and plans -----------------------------------------------------------------------------


def _recorded(run: Callable[[], object]) -> Snapshot:
    with _torch.memory_recorded(SPAN, stacks=True) as recorded:
        run()
    traces: dict[str, list[Traced]] = {}
    for event in recorded():
        inside = takewhile(lambda frame: not _is_here(frame), event.frames)
        frames = ((event.phase, 0, event.op), *inside)
        traces.setdefault(event.device, []).append(Traced(event.address, event.nbytes, frames))
    return Snapshot({device: tuple(_born_here(own)) for device, own in sorted(traces.items())})


def _is_here(frame: Frame) -> bool:
    """Whether a frame is of `_recorded`: what is above it is not of the run."""
    file, _, function = frame
    return function == _recorded.__name__ and Path(file).name == Path(__file__).name


def _born_here(events: Sequence[Traced]) -> Iterator[Traced]:
    """Without frees of what was there before."""
    alive: set[int] = set()
    for event in events:
        if event.nbytes > 0:
            alive.add(event.address)
        elif event.address not in alive:
            continue
        else:
            alive.remove(event.address)
        yield event


def _foreseen(graph: Graph, schedule: Schedule) -> Snapshot:
    """What `timeline.simulate` charges, and gradients of parameters, as events."""
    runs = (*schedule.forward, *schedule.backward)
    made: dict[str, Value] = {}
    for value in graph.values.values():
        made.setdefault(value.storage, value)
    inputs = {v.storage for v in graph.values.values() if v.kind is Kind.PRIMAL}
    born: dict[int, list[tuple[int, Value]]] = {}
    dead: dict[int, list[tuple[int, Value]]] = {}
    for number, life in enumerate(lifetimes(graph, schedule), start=1):
        if life.storage not in inputs and made[life.storage].nbytes:
            born.setdefault(life.born, []).append((number, made[life.storage]))
            if life.dies is not None:
                dead.setdefault(life.dies, []).append((number, made[life.storage]))
    traces: dict[str, list[Traced]] = {}
    room = ALIGNMENT * (max((v.nbytes for v in made.values()), default=0) // ALIGNMENT + 1)
    for index, name in enumerate(runs):
        frames = _frames_of(graph, name)
        for number, value in born.get(index, ()):
            event = Traced(number * room, value.nbytes, frames, value.kind.value)
            traces.setdefault(value.device, []).append(event)
        scratch = graph.op(name).scratch_bytes
        if scratch:
            own = traces.setdefault(scratch_device(graph, graph.op(name)), [])
            own += [Traced(0, sign * scratch, frames, "scratch") for sign in (1, -1)]
        for number, value in dead.get(index, ()):
            event = Traced(number * room, -value.nbytes, frames, value.kind.value)
            traces.setdefault(value.device, []).append(event)
    return Snapshot({device: tuple(events) for device, events in sorted(traces.items())})


def _frames_of(graph: Graph, name: str) -> tuple[Frame, ...]:
    op = graph.op(name)
    file, _, line = op.where.source.rpartition(":")
    number = int(line) if line.isdigit() else 0
    return ((file or "plan", number, f"{op.name} in {op.where.module}".removesuffix(" in ")),)


# --- the table ----------------------------------------------------------------------------------


def _device_text(found: Snapshot, device: str) -> str:
    instant = found.peak(device)
    total = len(found.traces[device])
    holders = _by_place(found.holders(device))
    rows = [(format_bytes(h.nbytes), str(h.count), *_places(h.frames)) for h in holders[:ROWS]]
    rest = holders[ROWS:]
    if rest:
        more, count = sum(h.nbytes for h in rest), sum(h.count for h in rest)
        rows.append((format_bytes(more), str(count), f"and {len(rest)} more", ""))
    head = f"{device}: peak {format_bytes(instant.nbytes)}, at event {instant.index} of {total}"
    parts = [head, "", table(("bytes", "blocks", "allocated in", "called from"), rows, "rrll")]
    return "\n".join([*parts, *_reserve(found, device), *_failed(found, device)])


def _by_place(holders: Sequence[Holder]) -> list[Holder]:
    """Holders that print alike, together."""
    found: dict[tuple[str, str], Holder] = {}
    for h in holders:
        place = _places(h.frames)
        before = found.get(place, Holder(0, 0, h.frames))
        found[place] = Holder(before.nbytes + h.nbytes, before.count + h.count, before.frames)
    return sorted(found.values(), key=lambda h: -h.nbytes)


def _places(frames: Sequence[Frame]) -> tuple[str, str]:
    """The innermost two lines of Python outside of torch, or else the innermost of all.

    >>> _places([("backward", 0, "MmBackward0"), ("torch/nn/x.py", 1, "f"), ("train.py", 7, "go")])
    ('train.py:7 MmBackward0', '')
    """
    own = [frame for frame in frames if _is_own(frame)] or list(frames[:1])
    first, second = (*map(_place, own[:2]), "", "")[:2]
    if frames and not frames[0][1] and own[0] is not frames[0]:  # an op, then lines of Python
        first = _place((*own[0][:2], frames[0][2]))
    return first or "(before recording began)", second


def _is_own(frame: Frame) -> bool:
    file, line, _ = frame
    parts = file.replace("\\", "/").split("/")
    is_python = file.endswith(".py") or file.startswith("<")
    return bool(line) and is_python and "torch" not in parts[:-1]


def _place(frame: Frame) -> str:
    file, line, name = frame
    short = tail_of(file.replace("\\", "/").rpartition("/")[2], 28)
    at = f"{short}:{line}" if line else short
    return f"{at} {tail_of(name, 36)}".strip()


def _reserve(found: Snapshot, device: str) -> Iterator[str]:
    own = [segment for segment in found.segments if segment.device == device]
    if not own:
        return
    reserved, active = sum(s.nbytes for s in own), sum(s.active_bytes for s in own)
    largest = max(s.largest_free_bytes for s in own)
    free = reserved - active
    yield ""
    yield (
        f"at the end {format_bytes(reserved)} reserved in {_count(len(own), 'segment')}, "
        f"{format_bytes(active)} in use, {format_bytes(free)} free; "
        f"the largest free block has {format_bytes(largest)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _failed(found: Snapshot, device: str) -> Iterator[str]:
    for failure in found.failures:
        if failure.device == device:
            asked, free = map(format_bytes, (failure.asked_bytes, failure.free_bytes))
            yield f"out of memory: {asked} asked for, {free} free on the device"
