"""What can be wrong: a pure function for each fault, from a `Record` to findings.

>>> from fxrecals.doctoring.record import Kept, Record
>>> kept = Kept("train.losses[*]", "train.py:9", 20, 4_000_000, 80, steps=(0, 1, 2, 3, 4))
>>> [finding] = findings(Record(5, kept=(kept,)))
>>> finding.kind, finding.where, finding.nbytes
('graph kept', 'train.py:9', 800004)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxrecals.doctoring import allocator
from fxrecals.doctoring.finding import Finding
from fxrecals.doctoring.record import Backward, Call, Loader, Record, Saved
from fxrecals.formats import format_bytes, format_count, format_seconds

GROWTH = 4096
"""Bytes a step from which tensors without a graph count as growth: a million steps make 4 GB."""

SMALL = 0.01
"""Part of what is saved for the backward under which an unused graph is let be."""

SHARE = {"float64": 0.1, "float32": 0.5}
"""Part of the saved bytes from which a type that is wider than the parameters' is a fault."""

STATE = 2.5
"""Bytes of optimizer state for each byte of parameters; Adam's two moments make 2."""

HOLDS = 1.0
"""Batches that workers hold ready, as part of parameters and saved tensors together."""


def findings(record: Record) -> tuple[Finding, ...]:
    """All that is wrong, the most expensive first.

    Args:
        record: what was seen in some steps.
    """
    found = [finding for judge in JUDGES for finding in judge(record)]
    order = {judge: i for i, judge in enumerate(dict.fromkeys(f.kind for f in found))}
    return tuple(sorted(found, key=lambda f: (-f.nbytes, order[f.kind], f.where, f.what)))


# --- what outlives its step ---------------------------------------------------------------------


def kept_graphs(record: Record) -> Iterator[Finding]:
    """Tensors that keep their graph from step to step, or one graph into the next step."""
    for kept in record.kept:
        before_last = [step for step in kept.steps if step < record.steps - 1]
        if not kept.nodes or not (before_last or kept.graph_nbytes):
            continue
        grows = len(kept.steps) > 2
        nbytes = kept.nbytes + kept.graph_nbytes
        each = nbytes // len(kept.steps) if grows else nbytes
        yield Finding(
            "graph kept",
            f"{kept.path} keeps the graph of {_steps(kept.steps)}",
            each,
            "each step" if grows else "while the next step runs",
            kept.line,
            (
                f"{format_count(kept.nodes)} nodes are alive after the last step",
                f"they have saved {format_bytes(kept.graph_nbytes)}",
            ),
            "keep a number, `x.item()`, or the value without its graph, `x.detach()`",
        )


def kept_tensors(record: Record) -> Iterator[Finding]:
    """Tensors without a graph of which there are more after each step."""
    for kept in record.kept:
        each = kept.nbytes // max(len(kept.steps), 1)
        if kept.nodes or kept.is_bounded or len(kept.steps) < 3 or each < GROWTH:
            continue
        yield Finding(
            "tensors kept",
            f"{kept.path} grows: tensors of {_steps(kept.steps)} are alive",
            each,
            "each step",
            kept.line,
            (f"{format_bytes(kept.nbytes)} after {record.steps} steps",),
            "keep what is needed of them, a number or a mean; or move them off the device and "
            "empty the container from time to time",
        )


def cycles(record: Record) -> Iterator[Finding]:
    """Objects in a cycle that hold tensors until the collector runs."""
    for cycle in record.cycles:
        if cycle.steps < 2 or cycle.nbytes < GROWTH:
            continue
        yield Finding(
            "reference cycle",
            f"{cycle.path} holds tensors until the garbage collector runs",
            cycle.nbytes,
            "each step, until `gc` runs",
            cycle.line,
            (f"made in {cycle.steps} of {record.steps} steps",),
            "let one of the references be a `weakref`, or delete it where the object is done with",
        )


def growing_hooks(record: Record) -> Iterator[Finding]:
    """Hooks that are registered again and again."""
    by_line: dict[str, list[str]] = {}
    for hooks in record.hooks:
        by_line.setdefault(hooks.line, []).append(hooks.owner)
    for line, owners in by_line.items():
        first = next(hooks for hooks in record.hooks if hooks.owner == owners[0])
        yield Finding(
            "hooks pile up",
            f"{owners[0]}{_more(owners)} has more hooks after each step",
            0,
            "each step",
            line,
            (f"hooks after each step: {', '.join(map(str, first.counts))}",),
            "register once, before the loop, or call `remove()` on the handle",
        )


# --- graphs and backwards -----------------------------------------------------------------------


def needless_retain(record: Record) -> Iterator[Finding]:
    """Lines whose backward keeps its graph, where nobody goes through it again."""
    by_line: dict[str, list[int]] = {}
    for number, backward in enumerate(record.backwards):
        if backward.keeps_graph:
            by_line.setdefault(backward.line, []).append(number)
    for line, numbers in by_line.items():
        if any(_is_read_again(record.saved, number) for number in numbers):
            continue
        nbytes = max(_bytes_read(record.saved, number) for number in numbers)
        if nbytes:
            yield _retained(record.backwards[numbers[0]], line, nbytes, len(numbers))


def _retained(backward: Backward, line: str, nbytes: int, count: int) -> Finding:
    option = "create_graph=True" if backward.creates_graph else "retain_graph=True"
    return Finding(
        "graph retained",
        f"{option}, and no later backward goes through that graph",
        nbytes,
        "in each backward",
        line,
        (f"{count} backwards from this line kept what they read",),
        f"leave out `{option}`: saved tensors are then freed one by one as the backward goes",
    )


def _is_read_again(saved: Iterable[Saved], number: int) -> bool:
    return any(
        (number in each.read_by and max(each.read_by) > number)
        or (each.made_by == number and each.read_by)
        for each in saved
    )


def _bytes_read(saved: Iterable[Saved], number: int) -> int:
    return sum({each.storage: each.nbytes for each in saved if number in each.read_by}.values())


def unused_graphs(record: Record) -> Iterator[Finding]:
    """Forwards that build a graph no backward ever goes through."""
    by_line: dict[str, list[int]] = {}
    for number, call in enumerate(record.calls):
        if call.has_parameters:
            by_line.setdefault(call.line, []).append(number)
    for line, numbers in by_line.items():
        calls = [record.calls[number] for number in numbers]
        if any(call.is_used for call in calls) or not any(call.builds_graph for call in calls):
            continue
        nbytes = max(_bytes_of_call(record.saved, number) for number in numbers)
        if nbytes > SMALL * record.peak_saved_nbytes:
            yield _unused(calls[0], line, nbytes, len(calls))


def _unused(call: Call, line: str, nbytes: int, count: int) -> Finding:
    mode = "in training mode" if call.is_training else "in evaluation mode"
    return Finding(
        "unused graph" if call.is_training else "evaluation builds graphs",
        f"{call.module} is called {mode} and builds a graph that no backward uses",
        nbytes,
        "in each call",
        line,
        (f"{count} calls from this line, none of them followed by a backward",),
        "call it under `torch.no_grad()` or `torch.inference_mode()`",
    )


def _bytes_of_call(saved: Iterable[Saved], number: int) -> int:
    return sum({each.storage: each.nbytes for each in saved if each.call == number}.values())


def unread_ops(record: Record) -> Iterator[Finding]:
    """Lines outside of modules that save tensors which no backward ever reads."""
    unused = {c.step for c in record.calls if c.builds_graph and not c.is_used}
    by_line: dict[str, list[Saved]] = {}
    for each in record.saved:
        if each.call is None and each.made_by is None:
            by_line.setdefault(each.own, []).append(each)
    for line, group in by_line.items():
        steps = {each.step for each in group}
        if any(each.read_by for each in group) or len(steps) < 3 or steps & unused:
            continue
        largest = max(_distinct(each for each in group if each.step == step) for step in steps)
        if largest >= max(GROWTH, SMALL * record.peak_saved_nbytes):
            yield Finding(
                "unused graph",
                "what this line computes saves tensors that no backward reads",
                largest,
                "in each step",
                line,
                (f"so in {len(steps)} of {record.steps} steps",),
                "compute it under `torch.no_grad()`, or from `x.detach()`",
            )


def _distinct(saved: Iterable[Saved]) -> int:
    return sum({each.storage: each.nbytes for each in saved}.values())


# --- gradients, parameters, optimizer -----------------------------------------------------------


def added_gradients(record: Record) -> Iterator[Finding]:
    """Gradients that nobody resets between updates."""
    for updates in record.updates:
        if updates.added and updates.added >= updates.count - 1:
            yield Finding(
                "gradients add up",
                "gradients are never reset: each update gets those of all steps before, too",
                updates.gradient_nbytes,
                "while each forward runs",
                updates.line,
                (f"{updates.added} of {updates.count} updates had old gradients in theirs",),
                "call `optimizer.zero_grad()` after each update",
            )


def zeroed_gradients(record: Record) -> Iterator[Finding]:
    """Gradients that are set to zeros, and take memory in the forward."""
    for updates in record.updates:
        if updates.zeroed >= 2 and not updates.added:
            yield Finding(
                "gradients zeroed",
                "gradients are filled with zeros and stay in memory while the forward runs",
                updates.gradient_nbytes,
                "while each forward runs",
                updates.line,
                (f"{updates.zeroed} backwards began with gradients of zeros",),
                "`zero_grad(set_to_none=True)`, which is the default, or `p.grad = None`",
            )


def parameters_without_gradient(record: Record) -> Iterator[Finding]:
    """Parameters that require a gradient and never get one."""
    never = [p for p in record.parameters if p.is_trained and not (p.had_gradient or p.is_routed)]
    trained = [p for p in record.parameters if p.had_gradient]
    if never and trained:
        names = [p.name for p in never]
        yield Finding(
            "parameters without gradient",
            f"{', '.join(names[:3])}{_more(names[2:])} never gets a gradient",
            sum(p.nbytes for p in never),
            "all the time",
            "",
            (f"{len(never)} parameters require a gradient and had none in {record.steps} steps",),
            "take them out of the model if nothing uses them; if they are to be frozen, "
            "`requires_grad_(False)`; if they are to be trained, the graph to them is cut",
        )


def optimizer_state(record: Record) -> Iterator[Finding]:
    """Optimizers whose state is much larger than what they train."""
    for updates in record.updates:
        if updates.state_nbytes > STATE * updates.parameter_nbytes > 0:
            ratio = updates.state_nbytes / updates.parameter_nbytes
            yield Finding(
                "large optimizer state",
                f"the state of {updates.optimizer} is {ratio:.1f} times its parameters",
                updates.state_nbytes,
                "all the time",
                updates.line,
                (f"its parameters take {format_bytes(updates.parameter_nbytes)}",),
                "an optimizer with less state (shorter history, no amsgrad, 8-bit or factored "
                "moments), or its state sharded over processes",
            )


# --- types --------------------------------------------------------------------------------------


def wide_types(record: Record) -> Iterator[Finding]:
    """Saved tensors of a type that is wider than that of the parameters."""
    of_parameters = _most_common(record)
    whole = _distinct(record.saved)
    for dtype, narrower in (("float64", _NARROW), ("float32", _HALF)):
        wide = [each for each in record.saved if each.dtype == dtype and each.nbytes]
        nbytes = _distinct(wide)
        if of_parameters not in narrower or nbytes <= SHARE[dtype] * max(whole, 1):
            continue
        first = wide[0]
        yield Finding(
            f"{dtype} tensors",
            f"{dtype} is saved for the backward, where parameters are {of_parameters}",
            nbytes // record.steps,
            "each step",
            first.own,
            (f"{nbytes / whole:.0%} of all saved bytes; the first is saved in {first.line}",),
            f"convert what comes in: `x.to(torch.{of_parameters})`",
        )


_HALF = ("bfloat16", "float16")
_NARROW = ("float32", *_HALF)


def _most_common(record: Record) -> str:
    nbytes: dict[str, int] = {}
    for p in record.parameters:
        nbytes[p.dtype] = nbytes.get(p.dtype, 0) + p.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype], default="")


def wide_parameters(record: Record) -> Iterator[Finding]:
    """Parameters in float64 among others that are not."""
    usual = _most_common(record)
    wide = [p for p in record.parameters if p.dtype == "float64"]
    if wide and usual in _NARROW:
        names = [p.name for p in wide]
        yield Finding(
            "float64 tensors",
            f"{names[0]}{_more(names)} is float64, where parameters are {usual}",
            sum(p.nbytes for p in wide),
            "all the time",
            "",
            (f"{len(wide)} parameters",),
            f"make it with `dtype=torch.{usual}`",
        )


# --- data ---------------------------------------------------------------------------------------


def pageable_copies(record: Record) -> Iterator[Finding]:
    """Copies to a device that have to wait for memory that is not pinned."""
    for copies in record.copies:
        if copies.count >= record.steps:
            yield Finding(
                "pageable copies",
                f"{copies.count} copies to {copies.device} come from pageable memory",
                0,
                "time, not memory",
                copies.line,
                (f"{format_bytes(copies.nbytes)} in {record.steps} steps",),
                "`DataLoader(..., pin_memory=True)` and `x.to(device, non_blocking=True)`",
            )


def loaders(record: Record) -> Iterator[Finding]:
    """Loaders that are started for each batch, or hold more than the step needs."""
    known = record.bytes_by_category
    whole = known.get("parameters", 0) + record.peak_saved_nbytes
    for loader in record.loaders:
        ready = loader.workers * loader.prefetch
        if ready and loader.iterators >= record.steps and loader.batches <= loader.iterators:
            yield _restarted(loader, ready)
        elif ready * loader.batch_nbytes > max(HOLDS * whole, 1):
            yield Finding(
                "loader holds batches",
                f"{loader.workers} workers hold {ready} batches ready",
                ready * loader.batch_nbytes,
                "of host memory, all the time",
                loader.line,
                (f"a batch is {format_bytes(loader.batch_nbytes)}",),
                "fewer `num_workers`, or a smaller `prefetch_factor`",
            )


def _restarted(loader: Loader, ready: int) -> Finding:
    return Finding(
        "loader restarted",
        f"each batch starts {loader.workers} workers, which make {ready} batches for one",
        ready * loader.batch_nbytes,
        "of host memory, each step",
        loader.line,
        (f"{loader.iterators} iterators, {loader.batches} batches",),
        "make one iterator before the loop: `for batch in loader:`",
    )


# --- the allocator ------------------------------------------------------------------------------


def emptied_cache(record: Record) -> Iterator[Finding]:
    """`empty_cache()` in the loop."""
    for calls in record.cache_calls:
        if calls.count >= record.steps:
            again = sum(map(allocator.device_allocations, record.allocators))
            yield Finding(
                "cache emptied",
                "empty_cache() is called in each step: it waits for the device, and the next "
                "step asks the driver for its memory again",
                0,
                "time, not memory",
                calls.line,
                (
                    f"{calls.count} calls took {format_seconds(calls.seconds)}",
                    f"{again} allocations by the driver in {record.steps} steps",
                ),
                "leave it out; it helps other processes, and never this one",
            )


def allocators(record: Record) -> Iterator[Finding]:
    """What the caching allocators tell: see `fxrecals.doctoring.allocator`."""
    for each in record.allocators:
        yield from allocator.findings(each, record.steps)


JUDGES = (
    kept_graphs,
    kept_tensors,
    cycles,
    growing_hooks,
    needless_retain,
    unused_graphs,
    unread_ops,
    added_gradients,
    zeroed_gradients,
    parameters_without_gradient,
    optimizer_state,
    wide_types,
    wide_parameters,
    pageable_copies,
    loaders,
    emptied_cache,
    allocators,
)
"""Every fault that is looked for."""


def _steps(steps: tuple[int, ...]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
