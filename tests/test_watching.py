"""What a watch says of small training loops, beside the referee's way of measuring."""

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxrecals
from benchmarks import measure
from benchmarks.yardsticks import gpt, unet
from fxrecals import FxrecalsError, OptionError
from fxrecals.watching import Category, StepUsage, Trend, Watch, verdict

ROWS, WIDTH = 256, 64
ONE = ROWS * WIDTH * 4
"""Bytes of an activation of `mlp`."""

Step = Callable[[], object]


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(ROWS, WIDTH)


def bytes_of(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def watched(step: Step, model: nn.Module | None = None, steps: int = 8) -> Watch:
    with fxrecals.watch(model, share=1) as watch:
        for _ in range(steps):
            step()
            watch.step()
    return watch


def trained(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Step:
    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def end(step: StepUsage, category: Category) -> int:
    return step.live["cpu"].get(category, 0)


# --- against the referee ----------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, lambda: small(gpt), lambda: small(unet)])
def test_peaks_are_those_that_the_referee_measures(make: Callable[[], tuple]) -> None:
    model, x = make()
    step = trained(model, x)
    found = watched(step, model, 4).steps[-1]
    told = measure.step_memory(step, model)
    assert found.activation_bytes == told.activations
    new = {Category.GRADIENTS, Category.SAVED, Category.HELD, Category.OTHER}
    assert sum(n for c, n in found.peaks[0].live.items() if c in new) == told.peak
    assert end(found, Category.GRADIENTS) == bytes_of([p.grad for p in model.parameters()])  # type: ignore[misc]


def small(make: Callable) -> tuple[nn.Module, Tensor]:
    sizes = {"blocks": 2, "width": 32, "tokens": 16} if make is gpt else {"side": 16, "width": 4}
    model, (x,) = make(batch=2, **sizes)
    return model, x


def test_a_monitor_and_a_watch_measure_the_same() -> None:
    model, x = mlp()
    rewritten = fxrecals.rewrite(model, x, "80%")
    monitor = fxrecals.monitor(rewritten, warmup=1)
    for _ in range(3):
        rewritten.zero_grad()
        with monitor:
            rewritten(x).square().mean().backward()
    found = watched(trained(rewritten, x), rewritten, 4).steps[-1]
    peak = found.peaks[0].nbytes - bytes_of(list(model.parameters()))
    assert peak == monitor.steps[-1].measured_bytes


# --- categories -------------------------------------------------------------------------------


def test_parameters_buffers_gradients_and_optimizer_state_are_counted_each() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.Adam(model.parameters())
    found = watched(trained(model, torch.randn(ROWS, WIDTH), optimizer), model, 3).steps[-1]
    whole = bytes_of(list(model.parameters()))
    assert end(found, Category.PARAMETERS) == end(found, Category.GRADIENTS) == whole
    assert end(found, Category.BUFFERS) == bytes_of(list(model.buffers()))
    counters = 4 * len(list(model.parameters()))
    assert end(found, Category.OPTIMIZER) == 2 * whole + counters


def test_the_optimizer_s_state_counts_in_the_step_that_makes_it() -> None:
    model, x = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, second, *_ = watched(trained(model, x, optimizer), model, 3).steps
    whole = bytes_of(list(model.parameters()))
    for step in (first, second):
        assert end(step, Category.OPTIMIZER) == whole
        assert end(step, Category.HELD) == 0


def test_saved_activations_are_what_the_backward_finds() -> None:
    model, x = mlp()
    saved = watched(trained(model, x), model, 3).steps[-1].peaks[0].live[Category.SAVED]
    assert 4 * ONE <= saved <= 4 * ONE + 64  # the four outputs of tanh; and the loss


def test_an_output_that_is_kept_is_held() -> None:
    model, x = mlp()
    kept: list[Tensor] = []

    def step() -> None:
        kept.append(model(x).detach())

    for each in watched(step, model, 4).steps:
        assert end(each, Category.HELD) == ONE


def test_a_tied_parameter_counts_once() -> None:
    first, second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    found = watched(trained(model, torch.randn(ROWS, WIDTH)), model, 3).steps[-1]
    assert end(found, Category.PARAMETERS) == end(found, Category.GRADIENTS) == WIDTH * WIDTH * 4


def test_gradients_that_were_there_before_are_gradients_at_the_peak() -> None:
    model, x = mlp()

    def accumulate() -> None:
        model(x).square().mean().backward()

    whole = bytes_of(list(model.parameters()))
    last = watched(accumulate, model, 4).steps[-1]
    assert last.peaks[0].live[Category.GRADIENTS] == whole == end(last, Category.GRADIENTS)


# --- where the peak falls -----------------------------------------------------------------------


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 16).tanh().mean(1, keepdim=True) + x


def test_a_peak_in_the_forward_names_its_module() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Wide(), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        peak = watched(lambda: model(torch.randn(ROWS, WIDTH)), model, 3).steps[-1].peaks[0]
    assert (peak.phase, peak.module) == ("forward", "1")


def test_a_peak_in_the_backward_names_the_module_of_its_forward() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Wide(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    peak = watched(trained(model, x), model, 3).steps[-1].peaks[0]
    assert (peak.phase, peak.module) == ("backward", "1")


def test_a_peak_in_the_optimizer_is_said_to_be_there() -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    peak = watched(trained(model, torch.randn(2, 512), optimizer), model, 3).steps[-1].peaks[0]
    assert (peak.phase, peak.op) == ("optimizer", "Adam.step")


def test_what_a_checkpoint_runs_again_is_in_the_backward_and_in_its_module() -> None:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), Wide())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]

    model = Checkpointed()
    peak = watched(trained(model, torch.randn(ROWS, WIDTH)), model, 3).steps[-1].peaks[0]
    assert (peak.phase, peak.module) == ("backward", "inner.1")


# --- verdicts -----------------------------------------------------------------------------------


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def test_a_loop_that_keeps_nothing_is_flat() -> None:
    model, x = mlp()
    with collector_off():
        found = watched(trained(model, x, torch.optim.Adam(model.parameters())), model, 9)
    assert (found.verdict.trend, found.verdict.band_bytes) == (Trend.FLAT, 0)


def test_outputs_of_the_last_step_alone_are_no_growth() -> None:
    model, x = mlp()
    held: dict[str, Tensor] = {}

    def step() -> None:
        held["out"] = model(x)

    with collector_off():
        found = watched(step, model, 9)
    assert found.verdict.trend is Trend.FLAT
    assert end(found.steps[-1], Category.HELD) >= ONE


def test_losses_that_are_kept_with_their_graphs_grow_by_their_bytes() -> None:
    model, x = mlp()
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(model(x).square().mean())

    with collector_off():
        found = watched(step, model, 9)
    assert found.verdict.trend is Trend.GROWING
    per_step = found.verdict.bytes_per_step
    assert 4 * ONE <= per_step <= 5 * ONE
    assert per_step == end(found.steps[-1], Category.HELD)
    assert "growing by" in repr(found)


def test_cycles_that_wait_for_the_collector_are_a_sawtooth() -> None:
    model, x = mlp()
    count = 0

    def step() -> None:
        nonlocal count
        cycle: dict[str, object] = {"out": model(x).detach()}
        cycle["self"] = cycle
        count += 1
        if count % 5 == 0:
            gc.collect()

    with collector_off():
        found = watched(step, model, 20)
    assert found.verdict.trend is Trend.SAWTOOTH
    assert found.verdict.band_bytes == 4 * ONE


def test_sizes_that_vary_are_flat_within_a_band() -> None:
    model, x = mlp()
    sizes = iter([3, 9, 4, 8, 2, 7, 9, 3, 5, 8, 2, 6])
    held: dict[str, Tensor] = {}

    def step() -> None:
        held["out"] = model(x[: next(sizes)]).detach()

    with collector_off():
        found = watched(step, model, 12)
    assert found.verdict.trend is Trend.FLAT
    assert found.verdict.band_bytes > 0


def test_what_is_allocated_once_in_the_middle_is_no_growth() -> None:
    assert verdict([0, 0, 0, 0, 0, 800, 0, 0, 0, 0, 0, 0]).trend is Trend.FLAT


def test_few_steps_give_no_verdict() -> None:
    assert verdict([8, 8, 8]).trend is Trend.UNKNOWN
    assert "no verdict" in str(verdict([]))


@given(st.integers(1, 10**9), st.integers(6, 60))
def test_whatever_grows_each_step_is_found(nbytes: int, steps: int) -> None:
    found = verdict([nbytes] * steps)
    assert (found.trend, found.bytes_per_step) == (Trend.GROWING, nbytes)


@given(st.lists(st.integers(-1000, 1000), min_size=6, max_size=60))
def test_levels_that_come_back_are_never_said_to_grow(changes: list[int]) -> None:
    assert verdict([*changes, -sum(changes)]).trend is not Trend.GROWING


# --- steps --------------------------------------------------------------------------------------


def test_steps_are_found_by_the_optimizer_and_the_next_call_of_the_model() -> None:
    model, x = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    step = trained(model, x, optimizer)
    with fxrecals.watch(model, optimizer, share=1) as watch:
        for _ in range(5):
            model(x).square().mean().backward()  # half a batch
            step()
    assert [each.number for each in watch.steps] == [0, 1, 2, 3, 4]
    assert {end(each, Category.GRADIENTS) for each in watch.steps} == {
        bytes_of(list(model.parameters()))
    }


def test_an_optimizer_that_was_not_given_is_not_counted_where_one_was() -> None:
    (model, x), (other, _) = mlp(), mlp()
    own, another = (torch.optim.Adam(m.parameters()) for m in (model, other))
    with fxrecals.watch(model, own, share=1) as watch:
        trained(other, x, another)()
        trained(model, x)()
        watch.step()
    assert end(watch.steps[-1], Category.OPTIMIZER) == 0


def test_a_model_that_is_not_called_through_its_hooks_is_warned_of() -> None:
    model, x = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(watch: Watch) -> None:
        with watch:
            for _ in range(3):
                model.forward(x).mean().backward()
                optimizer.step()

    watch = fxrecals.watch(model)
    with pytest.warns(UserWarning, match="say where a step ends") as caught:
        train(watch)
    assert len(caught) == len(watch.steps) == 1
    assert caught[0].filename == __file__


def test_without_a_model_gradients_are_found_by_the_optimizer() -> None:
    model, x = mlp()
    found = watched(trained(model, x, torch.optim.SGD(model.parameters(), lr=0.1)), None, 3)
    whole = bytes_of(list(model.parameters()))
    assert end(found.steps[-1], Category.GRADIENTS) == whole
    assert end(found.steps[-1], Category.PARAMETERS) == whole


def test_few_steps_are_measured_where_the_share_is_small() -> None:
    model, x = mlp()
    with fxrecals.watch(model, share=1e-9) as watch:
        for _ in range(20):
            trained(model, x)()
            watch.step()
    assert [step.number for step in watch.steps if step.is_measured] == [0, 1, 2, 3]
    assert all(end(step, Category.PARAMETERS) for step in watch.steps)
    assert "20 steps, 4 measured" in repr(watch)


def test_while_another_profiler_runs_no_step_is_measured() -> None:
    model, x = mlp()
    with torch.profiler.profile(), fxrecals.watch(model, share=1) as watch:
        trained(model, x)()
        watch.step()
    assert not watch.steps[0].is_measured


def test_an_error_in_the_loop_leaves_no_hook_and_no_profiler() -> None:
    model, x = mlp()
    watch = fxrecals.watch(model, share=1)
    with pytest.raises(RuntimeError, match="shapes"), watch:
        model(x[:, :3])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    with pytest.raises(FxrecalsError, match="within the watch"):
        watch.step()
    assert repr(watch) == "no step has ended: call step() at the end of each"


@pytest.mark.parametrize("how", ["eager", "rewritten", "compiled"])
def test_a_watched_loop_has_the_same_bits(how: str) -> None:
    def parameters(is_watched: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model, x = mlp()
        call: nn.Module = model
        if how == "rewritten":
            call = fxrecals.rewrite(model, x, "80%")
        if how == "compiled":
            backend = fxrecals.backend("80%", inner="eager")
            call = torch.compile(model, backend=backend)  # type: ignore[assignment]
        step = trained(call, x, torch.optim.Adam(model.parameters()))
        if is_watched:
            assert len(watched(step, call, 3).steps) == 3
        else:
            for _ in range(3):
                step()
        return [p.detach() for p in model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, parameters(False), parameters(True)))


def test_a_model_is_copied_and_saved_within_the_watch_without_it() -> None:
    model, x = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxrecals.watch(model, optimizer, share=1) as watch:
        for _ in range(2):
            model(x).mean().backward()
            optimizer.step()
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            assert torch.equal(copies[0](x), copies[1](x))
    assert len(watch.steps) == 2


def test_a_share_that_is_none_is_refused() -> None:
    for share in (0, 2, "often", -0.1):
        with pytest.raises(OptionError, match="share="):
            fxrecals.watch(share=share)  # type: ignore[arg-type]


def test_the_table_names_categories_devices_and_the_peak() -> None:
    model, x = mlp()
    text = repr(watched(trained(model, x), model))
    assert "saved activations" in text
    assert "cpu: at the end" in text
    last = text.splitlines()[-1]
    assert last.startswith("peak ")
    assert "on cpu, backward (PowBackward0)" in last
