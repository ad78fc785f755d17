"""What a few steps of a training program left to be judged: values, and no opinion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd saved for a backward.

    Attributes:
        step: in which it was saved, from 0 on.
        storage: a number for its storage; views share it.
        nbytes: of the storage; 0 where it was there before the step, as parameters are.
        dtype: as ``"float32"``.
        line: the line that saved it, outside of torch.
        own: the line of the program that led there, outside of installed packages.
        call: the outermost call of a module that it belongs to, by its place in `Record.calls`;
            None outside of modules.
        made_by: the number of the backward in which it was saved; None in a forward.
        read_by: numbers of the backwards that read it.
    """

    step: int
    storage: int
    nbytes: int
    dtype: str
    line: str
    own: str
    call: int | None = None
    made_by: int | None = None
    read_by: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """An outermost call of a module.

    Attributes:
        step: in which it was.
        line: of the program.
        module: the name of its class.
        is_training: its mode.
        has_parameters: whether it has any.
        builds_graph: whether a result had a graph.
        is_used: whether a backward went through a result.
    """

    step: int
    line: str
    module: str
    is_training: bool
    has_parameters: bool
    builds_graph: bool
    is_used: bool


@dataclass(frozen=True)
class Backward:
    """A call of ``backward()`` or ``torch.autograd.grad``, numbered by its place in the record."""

    step: int
    line: str
    keeps_graph: bool
    creates_graph: bool


@dataclass(frozen=True)
class Kept:
    """Tensors that are alive after the last step, under one name.

    Attributes:
        path: from a root to them, as ``train.losses[*]``.
        line: that puts them there; "" where it was not found.
        nbytes: of their storages.
        graph_nbytes: of what their graphs have saved.
        nodes: of their graphs.
        steps: in which they, or the nodes of their graphs, were made.
        is_bounded: whether the container lets old ones go, as ``deque(maxlen=2)`` does.
    """

    path: str
    line: str
    nbytes: int
    graph_nbytes: int
    nodes: int
    steps: tuple[int, ...]
    is_bounded: bool = False


@dataclass(frozen=True)
class Cycle:
    """Objects that refer to each other, and the tensors that only the collector could free.

    Attributes:
        path: once around, as ``Trainer.model -> Model.trainer``.
        line: that closes it; "" where it was not found.
        nbytes: that waited at the end of a step, at most.
        steps: in how many steps it was made.
    """

    path: str
    line: str
    nbytes: int
    steps: int


@dataclass(frozen=True)
class Parameter:
    """A parameter of a module that was trained.

    Attributes:
        name: with the class of the module that was called.
        nbytes: of its storage.
        dtype: as ``"float32"``.
        is_trained: whether it requires a gradient.
        had_gradient: whether it ever had one.
        is_routed: whether its module was not called, and others of the same list were.
    """

    name: str
    nbytes: int
    dtype: str
    is_trained: bool
    had_gradient: bool
    is_routed: bool = False


@dataclass(frozen=True)
class Updates:
    """What an optimizer, or the program itself, did with gradients.

    Attributes:
        optimizer: the name of its class; "" where the program updates by itself.
        line: of the update.
        count: of updates.
        added: updates whose gradients held those of the update before.
        zeroed: backwards that began with gradients of zeros.
        gradient_nbytes: of its gradients.
        parameter_nbytes: of its parameters that had gradients.
        state_nbytes: of its state.
    """

    optimizer: str
    line: str
    count: int
    added: int
    zeroed: int
    gradient_nbytes: int
    parameter_nbytes: int = 0
    state_nbytes: int = 0


@dataclass(frozen=True)
class CacheCalls:
    """Calls of ``empty_cache()`` from one line, and how long they took together."""

    line: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Copies:
    """Copies from pageable memory to a device, from one line."""

    line: str
    count: int
    nbytes: int
    device: str


@dataclass(frozen=True)
class Loader:
    """A ``DataLoader`` that was used.

    Attributes:
        line: that made an iterator of it.
        workers: processes.
        prefetch: batches that each of them makes ahead.
        iterators: how many were made.
        batches: how many were taken.
        batch_nbytes: of a batch, at most.
    """

    line: str
    workers: int
    prefetch: int
    iterators: int
    batches: int
    batch_nbytes: int


@dataclass(frozen=True)
class Hooks:
    """Hooks of a module or parameter whose number grew: counts after each step."""

    owner: str
    line: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Allocator:
    """A CUDA device's caching allocator before and after the steps.

    Attributes:
        device: as ``"cuda:0"``.
        before: ``torch.cuda.memory_stats()`` before the first step.
        after: the same after the last.
        free_blocks: sizes of cached blocks that are free and whose segment is not.
    """

    device: str
    before: dict[str, Any]
    after: dict[str, Any]
    free_blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """All that was seen; the parts are described with their types.

    Attributes:
        steps: how many ran.
        peak_saved_nbytes: the most that autograd held at once, a storage counted once.
    """

    steps: int
    peak_saved_nbytes: int = 0
    saved: tuple[Saved, ...] = ()
    calls: tuple[Call, ...] = ()
    backwards: tuple[Backward, ...] = ()
    kept: tuple[Kept, ...] = ()
    cycles: tuple[Cycle, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    updates: tuple[Updates, ...] = ()
    hooks: tuple[Hooks, ...] = ()
    cache_calls: tuple[CacheCalls, ...] = ()
    copies: tuple[Copies, ...] = ()
    loaders: tuple[Loader, ...] = ()
    allocators: tuple[Allocator, ...] = ()
    bytes_by_category: dict[str, int] = field(default_factory=dict)
