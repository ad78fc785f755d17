"""Runs some steps of a training program and watches: a `Record`, and the program as it was.

What is watched, and by what:

- saved tensors, by saved-tensor hooks: bytes, lines, which backward reads them, when they die;
- outermost calls of modules and steps of optimizers, by torch's global hooks;
- backwards, batches, `empty_cache()`, copies to a device, by patches that are taken back;
- tensors that outlive a step, and garbage, by `gc`: what was there before is frozen, so that a
  collection looks at what the steps made alone. Automatic collection is off within a step.

None of it changes a tensor or draws a random number.
"""

from __future__ import annotations

import gc
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fxrecals import _torch
from fxrecals.doctoring import holders
from fxrecals.doctoring.gradients import Gradients
from fxrecals.doctoring.record import (
    Allocator,
    Backward,
    CacheCalls,
    Call,
    Copies,
    Cycle,
    Hooks,
    Kept,
    Loader,
    Parameter,
    Record,
    Saved,
)
from fxrecals.doctoring.tensors import (
    all_tensors,
    bytes_of,
    has_bytes,
    is_tensor,
    leaves,
    nodes_of,
    total_bytes,
)

ACCELERATORS = ("cuda", "xpu")
"""Devices to which copies from pageable memory wait."""

LEAST_STEPS = 3
"""Steps from which growth can be told from what one step leaves behind."""

MOST_PATHS = 24
"""Tensors that outlived their step for which a path is looked for: the largest of each step."""

LABEL = "fxrecals step"
"""Key in the metadata of autograd nodes, while they are examined."""

BEFORE = -1
"""The step in which everything was made that is older than the first."""


def observe(step: Callable[[], Any], steps: int) -> tuple[Record, Example | None]:
    """Runs `step` so many times.

    Returns:
        What was seen; and the last call of a module that was trained, with its arguments.
    """
    observer = Observer(_callers(), step, steps)
    try:
        with observer.watching():
            for number in range(steps):
                observer.begin(number)
                step()
                observer.end()
        return observer.record(steps), observer.example
    finally:
        observer.forget()


def _callers() -> list[types.FrameType]:
    """Running functions outside of this library, the innermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if not holders.is_ours(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found


@dataclass
class Example:
    """A call of a module that a backward followed, to plan by."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Packed:
    """What stands for a saved tensor in the graph; it dies with it."""

    __slots__ = ("__weakref__", "entry", "tensor")

    def __init__(self, tensor: Tensor, entry: _Entry) -> None:
        self.tensor, self.entry = tensor, entry


@dataclass
class _Entry:
    """A saved tensor, while it is watched."""

    saved: Saved
    read_by: list[int] = field(default_factory=list)
    packed: weakref.ref[_Packed] | None = None

    @property
    def is_alive(self) -> bool:
        return self.packed is not None and self.packed() is not None


class Observer:
    """Everything that is noted while steps run."""

    def __init__(self, frames: list[types.FrameType], step: Callable[[], Any], steps: int) -> None:
        self.frames = frames
        self.example: Example | None = None
        self.scopes: dict[holders.Scope, None] = dict.fromkeys(holders.scopes_of(step))
        self._codes: set[types.CodeType] = set()
        self._number, self._last = 0, steps - 1
        self._entries: list[_Entry] = []
        self._live: dict[int, list[int]] = {}
        self._storages = 0
        self._saved_nbytes = self._peak_nbytes = self._gradient_nbytes = 0
        self._outside: dict[int, Any] = {}
        self._calls: list[Call] = []
        self._call_modules: list[int] = []
        self._used: set[int] = set()
        self._depth = 0
        self._in_backward: int | None = None
        self._backwards: list[Backward] = []
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._called: set[int] = set()
        self._groups: dict[int, Gradients] = {}
        self._alone = Gradients("", "")
        self._born: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._older: list[weakref.ref[Tensor]] = []
        self._cycles: dict[str, Cycle] = {}
        self._hooks: list[dict[str, int]] = []
        self._cache_calls: dict[str, CacheCalls] = {}
        self._copies: dict[str, Copies] = {}
        self._loaders: dict[int, Loader] = {}
        self._stats: dict[str, dict[str, Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches within; everything is as it was afterwards."""
        with ExitStack() as stack:
            self._find_what_is_there()
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*when there are global hooks on modules")
            stack.enter_context(_own_collection())
            stack.enter_context(_torch.saved_tensors_observed(self._pack, self._unpack))
            stack.enter_context(_torch.backwards_observed(self._backward))
            stack.enter_context(_torch.batches_observed(self._took_batch))
            for handle in (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
                register_optimizer_step_pre_hook(self._before_update),
                register_optimizer_step_post_hook(self._after_update),
            ):
                stack.callback(handle.remove)
            for module in (torch.cuda, torch.cuda.memory):
                stack.enter_context(_patched(module, "empty_cache", self._empty_cache))
            if any(getattr(torch, kind).is_available() for kind in ACCELERATORS):
                stack.enter_context(_patched(Tensor, "to", self._copy))
                stack.enter_context(_patched(Tensor, "cuda", self._copy))
            yield

    def forget(self) -> None:
        """Lets everything go: graphs that live on hold the hooks, and so this object."""
        self.frames, self.example = [], None
        for entry in self._entries:
            entry.packed = None  # and with it the call when it dies
        for noted in (self._entries, self._live, self._outside, self._born, self._older):
            noted.clear()

    # --- steps ---------------------------------------------------------------------------------

    def _find_what_is_there(self) -> None:
        tensors = all_tensors()
        self._older = [weakref.ref(tensor) for tensor in tensors]
        self._label(tensors, BEFORE)
        self._note_outside(tensors)
        self._stats = _allocator_stats()

    def _note_outside(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            key = _torch.storage_key(tensor)
            if key is not None and key not in self._outside:
                self._outside[key] = _torch.weak_storage(tensor)

    def begin(self, number: int) -> None:
        """A step begins."""
        self._number, self._depth = number, 0

    def end(self) -> None:
        """A step has ended: collects, and notes what is still alive."""
        for optimizer in self._groups.values():
            optimizer.look_at_state()
        self._collect()
        self._note_living()
        modules = [(name, m) for root in self._roots() for name, m in _named(root)]
        self._hooks.append({name: _torch.hooks_on(m) for name, m in modules})

    def _collect(self) -> None:
        """Collects garbage; notes the cycle by which most of it was held."""
        before = len(gc.garbage)
        flags = gc.get_debug()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
        finally:
            gc.set_debug(flags)
        found = gc.garbage[before:]
        del gc.garbage[before:]
        tensors = [x for x in found if is_tensor(x)]
        storages = [(_torch.weak_storage(x), bytes_of(x)) for x in tensors if has_bytes(x)]
        unique = {ref.cdata: (ref, nbytes) for ref, nbytes in storages}
        held = sum(entry.saved.nbytes for entry in self._entries if entry.is_alive)
        largest = max(tensors, key=bytes_of, default=None)
        noted = self._describe(largest, found) if largest is not None else None
        largest = None
        tensors.clear()
        found.clear()
        gc.collect()
        freed = sum(nbytes for ref, nbytes in unique.values() if ref.expired())
        freed += held - sum(entry.saved.nbytes for entry in self._entries if entry.is_alive)
        if noted is not None and freed:
            path, line = noted
            was = self._cycles.get(path, Cycle(path, line, 0, 0))
            self._cycles[path] = Cycle(path, line, max(was.nbytes, freed), was.steps + 1)

    def _describe(self, tensor: Tensor, found: list[Any]) -> tuple[str, str] | None:
        garbage = {id(x): x for x in found}
        way = holders.nearest_cycle(tensor, garbage)
        if not way:
            return None
        ring = holders.around(way)
        text = holders.words(ring.names).removeprefix(" -> ")
        return text, holders.line_of_cycle(ring, list(self.scopes))

    def _note_living(self) -> None:
        """Notes new tensors, and which nodes of living graphs are of this step."""
        packed = self._packed_ids()
        living = [x for x in all_tensors() if id(x) not in packed]
        for tensor in living:
            known = self._born.get(id(tensor))
            if known is None or known[0]() is not tensor:
                self._born[id(tensor)] = weakref.ref(tensor), self._number
        older = [x for ref in self._older if (x := ref()) is not None and x.grad_fn is not None]
        self._label([*living, *older], self._number)
        self._note_outside(living)

    def _label(self, tensors: Sequence[Tensor], number: int) -> None:
        """Notes in which step the nodes of their graphs were made."""
        seen: set[Any] = set()
        for tensor in tensors:
            for node in nodes_of(tensor, seen):
                node.metadata.setdefault(LABEL, number)

    def _packed_ids(self) -> set[int]:
        alive = (entry.packed() for entry in self._entries if entry.packed is not None)
        return {id(packed.tensor) for packed in alive if packed is not None}

    def _roots(self) -> list[nn.Module]:
        return [m for ref in self._modules.values() if (m := ref()) is not None]

    # --- saved tensors -------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Packed:
        first, own = holders.lines(sys._getframe(1))
        key, nbytes = _torch.storage_key(tensor), 0
        if key is not None and key not in self._outside:
            nbytes = _torch.storage_bytes(tensor)
        storage = self._hold(key, nbytes)
        call = len(self._calls) - 1 if self._depth else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        saved = Saved(self._number, storage, nbytes, dtype, first, own, call, self._in_backward)
        entry = _Entry(saved)
        packed = _Packed(tensor.detach(), entry)  # the program may hold the tensor itself
        entry.packed = weakref.ref(packed, lambda _: self._let_go(key))
        self._entries.append(entry)
        return packed

    def _hold(self, key: int | None, nbytes: int) -> int:
        """Counts one more that saves a storage; a storage that comes again has its number."""
        if key is None:
            return -1
        if key not in self._live:
            self._storages += 1
            self._live[key] = [self._storages, 0, nbytes]
            self._saved_nbytes += nbytes
            self._peak_nbytes = max(self._peak_nbytes, self._saved_nbytes)
        self._live[key][1] += 1
        return self._live[key][0]

    def _let_go(self, key: int | None) -> None:
        if key is None:
            return
        live = self._live[key]
        live[1] -= 1
        if live[1] == 0:
            self._saved_nbytes -= live[2]
            del self._live[key]

    def _unpack(self, packed: _Packed) -> Tensor:
        if self._in_backward is not None:
            packed.entry.read_by.append(self._in_backward)
        return packed.tensor

    # --- modules -------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._called.add(id(module))
        self._depth += 1
        if self._depth > 1 or self._in_backward is not None:
            return
        _, line = holders.lines(sys._getframe(1))
        self._note_scopes(sys._getframe(1))
        if id(module) not in self._modules:
            self._modules[id(module)] = weakref.ref(module)
            self._note_outside([*module.parameters(), *module.buffers()])
        has_parameters = next(module.parameters(), None) is not None
        name = type(_torch.original(module)).__name__
        self._call_modules.append(id(module))
        self._calls.append(
            Call(self._number, line, name, module.training, has_parameters, False, False)
        )

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._in_backward is not None:
            return
        index = len(self._calls) - 1
        nodes = {x.grad_fn for x in leaves(result) if x.grad_fn is not None}
        if nodes:
            self._calls[index] = replace(self._calls[index], builds_graph=True)
        for node in nodes:
            node.register_prehook(lambda _: self._used.add(index))
        is_last = self._number == self._last  # held any earlier, it would not be collected
        if is_last and nodes and module.training and self._calls[index].has_parameters:
            self.example = Example(module, args, _torch.keywords_of_call(sys._getframe(1)))

    def _note_scopes(self, frame: types.FrameType | None) -> None:
        """Notes which functions of the program are running."""
        while frame is not None:
            code = frame.f_code
            if holders.is_of_the_program(code.co_filename) and code not in self._codes:
                self._codes.add(code)
                self.scopes[holders.scope_of(code)] = None
            frame = frame.f_back

    # --- backwards and updates -----------------------------------------------------------------

    def _backward(self, run: Callable[[], Any], roots: Any, keep: bool, create: bool) -> Any:
        if self._in_backward is not None:
            return run()
        _, line = holders.lines(sys._getframe(1))
        self._note_scopes(sys._getframe(1))
        self._in_backward = len(self._backwards)
        self._backwards.append(Backward(self._number, line, keep, create))
        groups = self._all_groups()
        versions = {id(p): _torch.version(p) for group in groups for p in group.alive()}
        for group in groups:
            group.compare(is_backward=True)
        try:
            return run()
        finally:
            self._in_backward = None
            grads = [p.grad for group in groups for p in group.alive() if p.grad is not None]
            self._gradient_nbytes = max(self._gradient_nbytes, total_bytes(grads))
            for group in groups:
                group.look()
                changed = (id(p) for p in group.alive() if _torch.version(p) != versions[id(p)])
                group.had |= set(changed)  # an update within the backward took the gradient away

    def _all_groups(self) -> list[Gradients]:
        """Optimizers that have stepped; parameters of modules that none of them has."""
        owned = {key for group in self._groups.values() for key in group.parameters}
        for root in self._roots():
            for parameter in root.parameters():
                self._alone.parameters.setdefault(id(parameter), weakref.ref(parameter))
        for key in owned:
            self._alone.parameters.pop(key, None)
            if key in self._alone.had:
                next(g for g in self._groups.values() if key in g.parameters).had.add(key)
        if not self._groups:
            self._note_own_update()
        return [*self._groups.values(), self._alone]

    def _note_own_update(self) -> None:
        """Notes an update that the program made by itself: parameters were written to."""
        versions = {id(p): _torch.version(p) for p in self._alone.alive()}
        before, self._alone.versions = self._alone.versions, versions
        if any(versions[key] != before[key] for key in versions.keys() & before.keys()):
            self._alone.compare(is_backward=False)
            self._alone.update()

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(optimizer) not in self._groups:
            _, line = holders.lines(sys._getframe(1))
            self._note_scopes(sys._getframe(1))
            group = Gradients(type(optimizer).__name__, line, weakref.ref(optimizer))
            self._groups[id(optimizer)] = group
        group = self._groups[id(optimizer)]
        for each in optimizer.param_groups:
            for p in each["params"]:
                group.parameters.setdefault(id(p), weakref.ref(p))
        group.compare(is_backward=False)
        group.update()

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._groups[id(optimizer)].look()

    # --- what is patched -----------------------------------------------------------------------

    def _empty_cache(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _, line = holders.lines(sys._getframe(1))
        start = time.perf_counter()
        result = original(*args, **kwargs)
        seconds = time.perf_counter() - start
        was = self._cache_calls.get(line, CacheCalls(line, 0, 0.0))
        self._cache_calls[line] = CacheCalls(line, was.count + 1, was.seconds + seconds)
        return result

    def _copy(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        kind = result.device.type
        if tensor.device.type == "cpu" and kind in ACCELERATORS and not tensor.is_pinned():
            _, line = holders.lines(sys._getframe(1))
            was = self._copies.get(line, Copies(line, 0, 0, str(result.device)))
            nbytes = was.nbytes + tensor.numel() * tensor.element_size()
            self._copies[line] = replace(was, count=was.count + 1, nbytes=nbytes)
        return result

    def _took_batch(self, iterator: Any, batch: Any) -> None:
        _, line = holders.lines(sys._getframe(1))
        workers = getattr(iterator, "_num_workers", 0)
        prefetch = getattr(iterator, "_prefetch_factor", None) or 0
        was = self._loaders.get(id(iterator), Loader(line, workers, prefetch, 1, 0, 0))
        nbytes = max(was.batch_nbytes, total_bytes(leaves(batch)))
        self._loaders[id(iterator)] = replace(was, batches=was.batches + 1, batch_nbytes=nbytes)
        if was.batches == 0:
            weakref.finalize(iterator, self._retire, id(iterator))

    def _retire(self, key: int) -> None:
        """An iterator is gone: its number may be given to another."""
        if key in self._loaders:
            self._loaders[-len(self._loaders) - 1] = self._loaders.pop(key)

    # --- the record ----------------------------------------------------------------------------

    def record(self, steps: int) -> Record:
        """All that was noted, as values."""
        kept = self._kept()
        groups = [*self._groups.values(), self._alone]
        return Record(
            steps=steps,
            peak_saved_nbytes=self._peak_nbytes,
            saved=tuple(replace(e.saved, read_by=tuple(e.read_by)) for e in self._entries),
            calls=tuple(replace(c, is_used=i in self._used) for i, c in enumerate(self._calls)),
            backwards=tuple(self._backwards),
            kept=tuple(kept),
            cycles=tuple(self._cycles.values()),
            parameters=tuple(self._parameters()),
            updates=tuple(group.updates() for group in groups if group.count),
            hooks=tuple(self._grown_hooks()),
            cache_calls=tuple(self._cache_calls.values()),
            copies=tuple(self._copies.values()),
            loaders=_merged(self._loaders.values()),
            allocators=tuple(_allocators(self._stats)),
            bytes_by_category=self._by_category(),
        )

    def _by_category(self) -> dict[str, int]:
        parameters = {id(p): p for root in self._roots() for p in root.parameters()}
        for group in self._groups.values():
            parameters |= {id(p): p for p in group.alive()}
        return {
            "parameters": total_bytes(list(parameters.values())),
            "gradients": self._gradient_nbytes,
            "optimizer state": sum(group.state_nbytes for group in self._groups.values()),
            "saved for the backward": self._peak_nbytes,
        }

    def _parameters(self) -> Iterator[Parameter]:
        had = {key for group in (*self._groups.values(), self._alone) for key in group.had}
        trained = [m for m in self._roots() if self._was_trained(m)]
        seen: set[int] = set()
        for root in trained:
            routed = _routed(root, self._called)
            for name, p in root.named_parameters():
                if id(p) in seen:
                    continue
                seen.add(id(p))
                dtype = str(p.dtype).removeprefix("torch.")
                shown = f"{type(_torch.original(root)).__name__}.{name}"
                is_routed = name.rpartition(".")[0] in routed
                had_one = id(p) in had or p.grad is not None
                yield Parameter(shown, bytes_of(p), dtype, p.requires_grad, had_one, is_routed)

    def _was_trained(self, module: nn.Module) -> bool:
        return any(self._call_modules[i] == id(module) for i in self._used)

    def _grown_hooks(self) -> Iterator[Hooks]:
        for name in self._hooks[-1] if self._hooks else ():
            counts = tuple(step.get(name, 0) for step in self._hooks)
            if all(a < b for a, b in zip(counts[-3:], counts[-2:], strict=False)):
                line = holders.line_that_calls("hook", self.scopes)
                yield Hooks(name, line, counts)

    # --- what outlived its step ----------------------------------------------------------------

    def _kept(self) -> list[Kept]:
        """Tensors that outlived their step, by the names that hold them."""
        candidates = self._candidates()
        tensors = [tensor for tensor, _ in candidates]
        own = {id(candidates), id(tensors), id(self._born), *map(id, candidates)}
        grouped: dict[str, list[tuple[Tensor, int]]] = {}
        about: dict[str, tuple[str, bool]] = {}
        own |= {id(grouped), id(about)}
        for places in holders.by_holder(tensors, own):
            path = holders.path_to(tensors[places[0]], own, self.frames)
            scopes = (*path.scopes, *self.scopes)
            lines = (holders.line_that_keeps(x, scopes) for x in holders.named(path.names))
            name = holders.pattern(holders.words(path.names))
            is_bounded = holders.is_bounded(tensors[places[0]])
            about.setdefault(name, (next(filter(None, lines), ""), is_bounded))
            group = grouped.setdefault(name, [])
            own.add(id(group))
            group += (candidates[i] for i in places)
        return self._measured(grouped, about)

    def _measured(
        self, grouped: dict[str, list[tuple[Tensor, int]]], about: dict[str, tuple[str, bool]]
    ) -> list[Kept]:
        """Bytes, nodes and steps of each group. What a graph has saved counts for the first."""
        kept, counted, seen = [], set(), set()
        for name, pairs in grouped.items():
            nodes = [node for tensor, _ in pairs for node in nodes_of(tensor, seen)]
            steps = {born for _, born in pairs}
            steps |= {node.metadata[LABEL] for node in nodes if LABEL in node.metadata}
            steps.discard(BEFORE)
            alive = [e.saved for e in self._entries if e.is_alive and e.saved.step in steps]
            new = {x.storage: x.nbytes for x in alive if nodes and x.storage not in counted}
            counted |= new.keys()
            line, is_bounded = about[name]
            nbytes, order = total_bytes([tensor for tensor, _ in pairs]), tuple(sorted(steps))
            kept.append(Kept(name, line, nbytes, sum(new.values()), len(nodes), order, is_bounded))
        for node in seen:
            node.metadata.pop(LABEL, None)
        return kept

    def _candidates(self) -> list[tuple[Tensor, int]]:
        """Living tensors with the step that made them: of each step the largest, graphs first."""
        living = [(x, step) for ref, step in self._born.values() if (x := ref()) is not None]
        older = [x for ref in self._older if (x := ref()) is not None and _grew(x)]
        living += [(x, BEFORE) for x in older]
        mine = self._of_training()
        living = [pair for pair in living if id(pair[0]) not in mine]
        plain = {step for x, step in living if x.grad_fn is None and x.numel() > 1}
        if len(plain) < LEAST_STEPS:  # what has no graph is no fault if it does not grow
            living = [(x, step) for x, step in living if x.grad_fn is not None]
        living.sort(key=lambda pair: (pair[0].grad_fn is None, -bytes_of(pair[0])))
        by_step: dict[int, list[tuple[Tensor, int]]] = {}
        for pair in living:
            by_step.setdefault(pair[1], []).append(pair)
        share = max(1, MOST_PATHS // max(len(by_step), 1))
        return [pair for step in sorted(by_step) for pair in by_step[step][:share]]

    def _of_training(self) -> set[int]:
        """Tensors that have to be there: parameters, gradients, optimizer state, the example."""
        tensors: list[Any] = list(self._packed_ids())
        found = set(tensors)
        for root in self._roots():
            for x in (*root.parameters(), *root.buffers()):
                found |= {id(x), *_plain_gradient(x)}
        for group in self._groups.values():
            optimizer = group.optimizer() if group.optimizer is not None else None
            for p in group.alive():
                found |= {id(p), *_plain_gradient(p)}
            for state in list(optimizer.state.values()) if optimizer is not None else ():
                found |= {id(x) for x in leaves(state)}
        if self.example is not None:
            found |= {id(x) for x in leaves(self.example.args) if x.grad_fn is None}
        return found


# --- helpers ------------------------------------------------------------------------------------


@contextmanager
def _own_collection() -> Iterator[None]:
    """Automatic collection off, and what is there already left out of collections."""
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if had_frozen:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _patched(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Calls ``around(original, *args, **kwargs)`` in place of an attribute."""
    is_own = name in vars(owner)
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, patched)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _plain_gradient(parameter: Tensor) -> tuple[int, ...]:
    """The gradient by its `id`, if there is one and it has no graph of its own."""
    grad = parameter.grad if parameter.is_leaf else None
    return (id(grad),) if grad is not None and grad.grad_fn is None else ()


def _grew(tensor: Tensor) -> bool:
    """Whether a tensor's graph has nodes of an examined step."""
    return any(node.metadata.get(LABEL, BEFORE) > BEFORE for node in nodes_of(tensor, set()))


def _named(root: nn.Module) -> Iterator[tuple[str, Any]]:
    kind = type(root).__name__
    for name, module in root.named_modules():
        yield f"{kind}.{name}" if name else kind, module
    for name, parameter in root.named_parameters():
        yield f"{kind}.{name}", parameter


def _routed(root: nn.Module, called: set[int]) -> set[str]:
    """Names of modules that were not called while others of their list were, and what they hold."""
    found: set[str] = set()
    for name, module in root.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        children = list(module.named_children())
        if any(id(child) in called for _, child in children):
            found |= {
                f"{name}.{key}.{below}".strip(".")
                for key, child in children
                if id(child) not in called
                for below, _ in child.named_modules()
            }
    return found


def _merged(loaders: Any) -> tuple[Loader, ...]:
    """One for each line, with the iterators that it made."""
    found: dict[tuple[str, int, int], Loader] = {}
    for each in loaders:
        key = each.line, each.workers, each.prefetch
        was = found.get(key)
        found[key] = (
            each
            if was is None
            else replace(
                was,
                iterators=was.iterators + each.iterators,
                batches=was.batches + each.batches,
                batch_nbytes=max(was.batch_nbytes, each.batch_nbytes),
            )
        )
    return tuple(found.values())


def _allocator_stats() -> dict[str, dict[str, Any]]:
    if not torch.cuda.is_initialized():
        return {}
    devices = range(torch.cuda.device_count())
    return {f"cuda:{i}": dict(torch.cuda.memory_stats(i)) for i in devices}


def _allocators(before: dict[str, dict[str, Any]]) -> Iterator[Allocator]:
    for device, after in _allocator_stats().items():
        yield Allocator(device, before.get(device, {}), after, _free_blocks(device))


def _free_blocks(device: str) -> tuple[int, ...]:
    """Sizes of free blocks in segments that are in use."""
    index = torch.device(device).index
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == index]
    used = [segment for segment in segments if segment["allocated_size"]]
    blocks = [block for segment in used for block in segment["blocks"]]
    return tuple(sorted(b["size"] for b in blocks if b["state"] == "inactive"))
