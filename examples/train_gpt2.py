"""Trains GPT-2 plainly and under a byte limit, from the same seed, and compares the two.

    python examples/train_gpt2.py                    12 steps of a 6-block GPT-2 under 35 %
    python examples/train_gpt2.py --limit 60MB
    python examples/train_gpt2.py --quick            4 smaller blocks, 3 steps

The model is Hugging Face's own, with random weights and dropout. It gets labels, so it computes
its loss itself, and breaks into two graphs where it logs a warning on the way to that loss; both
are planned together. The text is a made-up language, easy enough to be learned within a few steps.

Exits with 1 if the measured activation peak is over the limit, or if any loss differs in any bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import fxrecals

WORDS = 64
"""Size of the vocabulary of the made-up language."""


@dataclass(frozen=True)
class Size:
    """How large the run is: blocks of the model, its width, its tokens per text, texts."""

    blocks: int = 6
    width: int = 256
    tokens: int = 128
    texts: int = 4


@dataclass(frozen=True)
class Training:
    """What a training left behind: losses, seconds of each timed step, peak in bytes."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    peak_bytes: int


def main() -> int:
    """Runs the comparison; returns the exit code."""
    options = read_options()
    size = Size(blocks=4, width=128, tokens=64) if options.quick else Size()
    steps = options.steps or (3 if options.quick else 12)
    batches = make_batches(steps, size)

    plan = fxrecals.plan(make_model(size), batches[0], limit=options.limit)
    print(plan, end="\n\n")

    model = make_model(size)
    plain = train(model, model, batches)
    model = make_model(size)
    small = train(fxrecals.rewrite(model, batches[0], limit=options.limit), model, batches)

    print_losses(plain, small)
    print_peaks(plain, small, plan)
    return judge(plain, small, plan)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains GPT-2 plainly and under a limit.")
    parser.add_argument("--limit", default="35%", help='such as "35%%" or "60MB" (default: 35%%)')
    parser.add_argument("--steps", type=int, help="of the optimizer (default: 12; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 2:
        parser.error("--steps must be at least 2: the first step compiles, and is not timed")
    return options


def make_model(size: Size) -> GPT2LMHeadModel:
    """GPT-2 in training mode with the same random weights at every call; dropout is 0.1."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=size.tokens,
        n_embd=size.width,
        n_layer=size.blocks,
        n_head=8,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def make_batches(steps: int, size: Size) -> list[dict[str, Tensor]]:
    """Texts in which each word follows from the one before, but for one word in ten."""
    generator = torch.Generator().manual_seed(1)
    after = torch.randperm(WORDS, generator=generator)
    batches: list[dict[str, Tensor]] = []
    for _ in range(steps):
        ids = torch.randint(WORDS, (size.texts, size.tokens), generator=generator)
        stray = torch.rand(ids.shape, generator=generator) < 0.1
        for i in range(1, size.tokens):
            ids[:, i] = torch.where(stray[:, i], ids[:, i], after[ids[:, i - 1]])
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


def train(model: nn.Module, owner: nn.Module, batches: list[dict[str, Tensor]]) -> Training:
    """Trains `model`, whose parameters are those of `owner`; the last step is measured."""
    torch.manual_seed(2)  # of the dropout masks
    optimizer = torch.optim.AdamW(owner.parameters(), lr=3e-4)
    losses: list[float] = []
    seconds: list[float] = []
    peak_bytes = 0

    def forward_and_backward(batch: dict[str, Tensor]) -> Any:
        out = model(**batch)
        out.loss.backward()
        return out

    for number, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        if number == len(batches) - 1:
            peak_bytes, out = measure(lambda batch=batch: forward_and_backward(batch), owner)
        else:
            out = forward_and_backward(batch)
            seconds.append(time.perf_counter() - begin)
        losses.append(out.loss.item())
        del out
        optimizer.step()
    # The first step of a compiled model compiles; it is left out of both trainings alike.
    return Training(tuple(losses), tuple(seconds[1:] or seconds), peak_bytes)


def measure(step: Callable[[], Any], owner: nn.Module) -> tuple[int, Any]:
    """The activation peak of a step in bytes, as the allocator saw it, and what the step returns.

    Activations are all that the step allocates but gradients of parameters, which are told apart
    by their addresses.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        out = step()
    gradients = {
        p.grad.untyped_storage().data_ptr() for p in owner.parameters() if p.grad is not None
    }
    events = memory_events(prof)
    # An address serves many tensors in turn: a gradient is the last one that got its address.
    last = {address: i for i, (address, nbytes) in enumerate(events) if nbytes > 0}
    mine = {last[address] for address in gradients if address in last}
    live = peak = 0
    sizes: dict[int, int] = {}
    for i, (address, nbytes) in enumerate(events):
        if nbytes > 0:
            sizes[address] = 0 if i in mine else nbytes
            live += sizes[address]
        else:
            live -= sizes.pop(address, 0)  # what was there before the step is not counted
        peak = max(peak, live)
    return peak, out


def memory_events(prof: profile) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation, and of each release with negative bytes, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    found = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    found.sort(key=lambda event: event["ts"])
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in found]


def print_losses(plain: Training, small: Training) -> None:
    """Both loss curves side by side."""
    print("step   plain loss   under the limit")
    for number, (one, other) in enumerate(zip(plain.losses, small.losses, strict=True)):
        mark = "same bits" if one == other else "DIFFERENT"
        print(f"{number:4}   {one:10.6f}   {other:15.6f}   {mark}")


def print_peaks(plain: Training, small: Training, plan: fxrecals.Plan) -> None:
    """Both measured peaks against the limit, and both step times."""
    print(f"\nlimit                 {(plan.limit_bytes or 0) / 1e6:8.1f} MB of activations")
    for name, run in (("plain", plain), ("under the limit", small)):
        print(
            f"{name:15} peak  {run.peak_bytes / 1e6:8.1f} MB measured, "
            f"{statistics.median(run.seconds):.3f} s a step"
        )
    print(f"planned         peak  {plan.peak_bytes / 1e6:8.1f} MB")


def judge(plain: Training, small: Training, plan: fxrecals.Plan) -> int:
    """0 if both promises are kept, else 1."""
    kept = small.peak_bytes <= (plan.limit_bytes or 0)
    same = plain.losses == small.losses
    print(f"\nmeasured peak within the limit: {'yes' if kept else 'NO'}")
    print(f"losses equal to the bit:        {'yes' if same else 'NO'}")
    return 0 if kept and same else 1


if __name__ == "__main__":
    raise SystemExit(main())
