import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxrecals import _torch, cost
from fxrecals.capture import capture, step
from fxrecals.cost import (
    GPUS,
    Call,
    Figures,
    Free,
    Measured,
    Roofline,
    count_flops,
    device_figures,
    measure_scratch,
    named,
    seconds,
    signature,
)
from fxrecals.errors import OptionError

aten = torch.ops.aten
FIGURES = Figures(
    "test",
    launch_seconds=1e-6,
    bytes_per_second=1e9,
    matmul=1e9,
    half_matmul=2e9,
    convolution=1e9,
    attention=1e9,
    costly=1e6,
    norm=1e6,
    batch_norm=5e5,
    pooling=2e6,
    random=1e5,
)
HERE = torch.device("cpu")


def call(target: Any, *args: Any, **options: Any) -> Call:
    return Call(target, args, {}, target(*args), **options)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# --- seconds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (lambda x: call(aten.max_pool2d_with_indices.default, x, [2, 2]), 64 * 64 / 2e6),
        (lambda x: call(aten.max_pool2d_with_indices.default, x, [3], [1]), 62 * 62 * 9 / 2e6),
        (lambda x: call(aten._adaptive_avg_pool2d.default, x, [8, 8]), 64 * 64 / 2e6),
        (
            lambda x: call(
                aten._native_batch_norm_legit_functional.default,
                *(x, None, None, torch.zeros(1), torch.ones(1), True, 0.1, 1e-5),
            ),
            64 * 64 / 5e5,
        ),
    ],
)
def test_poolings_and_batch_norms_have_rates_of_their_own(made: Any, wanted: float) -> None:
    found = made(ones(1, 1, 64, 64))
    assert seconds(found, 0, FIGURES) == pytest.approx(1e-6 + wanted)


def test_a_view_costs_no_time() -> None:
    view = call(aten.t.default, ones(2, 2), is_view=True)
    assert seconds(view, 0, FIGURES) == 0.0


def test_a_pointwise_op_takes_as_long_as_its_traffic() -> None:
    add = call(aten.add.Tensor, ones(1000), ones(1000))
    assert seconds(add, 0, FIGURES) == pytest.approx(1e-6 + 12_000 / 1e9)


def test_a_product_takes_as_long_as_its_arithmetic() -> None:
    product = call(aten.mm.default, ones(100, 100), ones(100, 100))
    assert count_flops(product) == 2 * 100**3
    assert seconds(product, count_flops(product), FIGURES) == pytest.approx(1e-6 + 2e-3)


def test_half_precision_products_are_faster() -> None:
    half = call(
        aten.mm.default,
        ones(100, 100, dtype=torch.bfloat16),
        ones(100, 100, dtype=torch.bfloat16),
    )
    assert seconds(half, 2 * 100**3, FIGURES) == pytest.approx(1e-6 + 1e-3)


def test_random_draws_and_costly_functions_have_rates_of_their_own() -> None:
    drop = call(aten.bernoulli.default, ones(1000), is_random=True)
    gelu, add = call(aten.gelu.default, ones(1000)), call(aten.add.Tensor, ones(1000), 1)
    times = [seconds(c, 0, FIGURES) for c in (drop, gelu, add)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(1e-6 + 1e-2)


def test_picking_rows_does_not_read_the_whole_table() -> None:
    table, rows = ones(100_000, 4), torch.zeros(2, dtype=torch.int64)
    pick = call(aten.embedding.default, table, rows)
    assert seconds(pick, 0, FIGURES) < 2e-6


def test_an_expanded_tensor_is_read_once() -> None:
    add = call(aten.add.Tensor, ones(1).expand(1000), ones(1000))
    assert seconds(add, 0, FIGURES) == pytest.approx(1e-6 + 8_004 / 1e9)


def test_operations_of_a_convolutions_backward_are_counted() -> None:
    args = (ones(1, 2, 4, 4), ones(1, 2, 4, 4), ones(2, 2, 3, 3))
    rest = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    backward = call(aten.convolution_backward.default, *args, *rest)
    assert count_flops(backward) == 2 * 2 * (2 * 2 * 9 * 16)


# --- scratch ------------------------------------------------------------------------------------


def scratch(*calls: Call) -> list[int]:
    keyed = {str(i): c for i, c in enumerate(calls)}
    found = measure_scratch(keyed)
    return [found[key] for key in keyed]


@torch.library.custom_op("fxrecals_test::with_scratch", mutates_args=())
def with_scratch(x: Tensor) -> Tensor:
    """Allocates twice the bytes of its input, frees them, and returns a copy."""
    torch.empty(2 * x.numel())
    return x.clone()


def test_scratch_is_what_an_op_frees_before_it_returns() -> None:
    x = ones(1 << 12)
    op = torch.ops.fxrecals_test.with_scratch.default
    assert scratch(call(op, x), call(aten.mm.default, ones(8, 8), ones(8, 8))) == [1 << 14, 0]


def test_an_output_that_is_a_gradient_does_not_hide_scratch() -> None:
    x = ones(1 << 12)
    op = torch.ops.fxrecals_test.with_scratch.default
    plain = call(op, x)
    gradient = Call(op, (x,), {}, x, gradients=frozenset({0}))
    assert scratch(plain, gradient) == [1 << 14, 1 << 15]


def test_an_op_that_fails_on_zeros_has_no_scratch() -> None:
    broken = Call(aten.mm.default, (ones(2, 3), ones(2, 3)), {}, ones(2, 2))
    assert scratch(broken) == [0]


def test_an_op_too_large_to_run_is_not_run() -> None:
    with _torch.fake_mode():
        large = torch.empty(1 << 30)
    assert scratch(Call(aten.sum.default, (large,), {}, ones(1))) == [0]


def test_the_generator_is_left_as_it_was() -> None:
    drop = call(aten.native_dropout.default, ones(64), 0.5, True)
    draw = call(aten.bernoulli.default, ones(64), is_random=True)
    before = torch.get_rng_state()
    scratch(drop)
    Measured(Roofline(FIGURES, scratch=False)).price([draw])
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_is_measured_or_remembered_while_another_profiler_runs(tmp_path: Path) -> None:
    product = call(aten.mm.default, ones(8, 8), ones(8, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_profiling()
        Roofline(FIGURES, folder=tmp_path).price([product])
    assert not (tmp_path / "scratch.json").exists()
    assert not _torch.is_profiling()


def test_a_second_price_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product = call(aten.mm.default, ones(8, 8), ones(8, 8))
    first = Roofline(FIGURES, folder=tmp_path)
    prices = first.price([product])
    monkeypatch.setattr(cost, "measure_scratch", _fails)
    assert first.price([product]) == prices
    assert Roofline(FIGURES, folder=tmp_path).price([product]) == prices


def _fails(*args: object) -> None:
    raise AssertionError("measured again")


def test_shapes_strides_types_and_numbers_make_another_signature() -> None:
    x = ones(2, 4)
    calls = [
        call(aten.sum.dim_IntList, x, [0]),
        call(aten.sum.dim_IntList, x, [1]),
        call(aten.sum.dim_IntList, x.t(), [0]),
        call(aten.sum.dim_IntList, x.double(), [0]),
        call(aten.amax.default, x, [0]),
    ]
    assert len({signature(c) for c in calls}) == len(calls)
    assert signature(calls[0]) == signature(call(aten.sum.dim_IntList, ones(2, 4), [0]))


# --- figures and the cache ----------------------------------------------------------------------


def test_figures_are_measured_once_and_have_two_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = device_figures(HERE, tmp_path)
    assert all(float(f"{x:.2g}") == x for x in vars(first).values() if isinstance(x, float))
    monkeypatch.setattr(cost, "measure", _fails)
    assert device_figures(HERE, tmp_path) == first


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "other"}', '{"unknown": 1}'])
def test_a_torn_or_foreign_cache_file_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(cost, "measure", lambda device: FIGURES)
    device_figures(HERE, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert device_figures(HERE, tmp_path) == FIGURES
    assert Figures(**json.loads(path.read_text())) == FIGURES


def test_a_scratch_file_of_nonsense_is_measured_anew(tmp_path: Path) -> None:
    (tmp_path / "scratch.json").write_text('{"a": ')
    product = call(aten.mm.default, ones(8, 8), ones(8, 8))
    assert Roofline(FIGURES, folder=tmp_path).price([product])[0].scratch_bytes == 0


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(Roofline(FIGURES).price([call(aten.mm.default, ones(8, 8), ones(8, 8))])) == 1


def test_importing_does_no_work_and_writes_nothing(tmp_path: Path) -> None:
    code = "import fxrecals.cost, fxrecals.capture"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    root = Path(cost.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=root)
    assert list(tmp_path.iterdir()) == []


def test_known_gpus_have_figures() -> None:
    assert {"A100", "H100", "H200", "RTX 4090"} == set(GPUS)
    assert GPUS["H200"].bytes_per_second > GPUS["A100"].bytes_per_second


# --- the models of cost -------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_a_device_that_is_not_there_has_no_scratch_and_a_note() -> None:
    product = Call(aten.mm.default, (ones(8, 8), ones(8, 8)), {}, ones(8, 8), stands_for="cuda")
    roofline = Roofline()
    assert roofline.price([product])[0].scratch_bytes == 0
    (note,) = roofline.notes([product])
    assert note.startswith("cuda is not there")
    assert not roofline.notes([call(aten.mm.default, ones(8, 8), ones(8, 8))])


def test_measured_seconds_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    product = call(aten.mm.default, ones(256, 256), ones(256, 256))
    slow = Roofline(FIGURES, scratch=False)
    measured = Measured(slow)
    price = measured.price([product])[0]
    assert 0 < price.seconds < slow.price([product])[0].seconds
    monkeypatch.setattr(cost, "_seconds", _fails)
    assert measured.price([product])[0] == price


@pytest.mark.parametrize(
    "make",
    [
        lambda: Call(aten.mm.default, (ones(2, 3), ones(2, 3)), {}, ones(2, 2)),
        lambda: Call(aten.mm.default, (ones(2, 2),) * 2, {}, ones(2, 2), is_known=False),
        lambda: Call(aten.mm.default, (ones(2, 2),) * 2, {}, ones(2, 2), stands_for="xpu"),
    ],
)
def test_what_cannot_be_timed_falls_back_to_the_roofline(make: Callable[[], Call]) -> None:
    roofline = Roofline(FIGURES, scratch=False)
    assert Measured(roofline).price([make()]) == roofline.price([make()])


def test_costs_go_by_name() -> None:
    assert isinstance(named("roofline"), Roofline)
    assert isinstance(named("measured"), Measured)
    assert named(free := Free()) is free
    with pytest.raises(OptionError, match="roofline"):
        named("cheap")


def test_symbolic_sizes_are_priced_by_their_hints() -> None:
    mode = _torch.fake_mode()
    x = mode.from_tensor(ones(8, 8), static_shapes=False)
    with mode:
        product = Call(aten.mm.default, (x, x), {}, x @ x)
    (price,) = Roofline(FIGURES, scratch=False).price([product])
    assert price.flops == 2 * 8**3


def test_a_step_is_priced_the_same_twice(tmp_path: Path) -> None:
    captured = capture(torch.nn.Linear(4, 4), ones(4, 4))
    roofline = Roofline(folder=tmp_path)
    assert step(captured, roofline) == step(captured, Roofline(folder=tmp_path))
    assert step(captured, roofline).seconds > 0
