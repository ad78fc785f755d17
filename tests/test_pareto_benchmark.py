"""The benchmark of every peer: its columns tell right from wrong, and it goes on where it was."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks import models, pages, rows
from benchmarks.pareto import (
    INDUCTOR,
    Bench,
    Effort,
    WithLoss,
    at_peaks,
    eager,
    entries,
    run,
    without_dropout,
)
from benchmarks.promises import Subject
from benchmarks.rows import Row, ahead, answers, beaten, frontier

EFFORT = Effort(shares=(70,), budgets=(0.3,), rounds=3)
ALONE = ("eager", "checkpoint", "budget", "fxrecals", "fxrecals-engine")
"""Systems that need torch alone, with its eager kernels."""


def tiny() -> Subject:
    """A chain with dropout and BatchNorm."""
    torch.manual_seed(0)
    block = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2)]
    chain = nn.Sequential(
        nn.Linear(8, 64), *[nn.Sequential(*block) for _ in range(3)], nn.Linear(64, 2)
    )
    model = WithLoss(chain, lambda out: out.square().mean()).train()
    return Subject("tiny", model, (torch.randn(256, 8),), lambda loss: loss)


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    found: list[Row] = []
    run(tiny(), ALONE, EFFORT, {}, found.extend)
    return found


def test_all_systems_are_measured_beside_eager(measured: list[Row]) -> None:
    assert {row.system for row in measured} == {"plan", *ALONE}
    assert len({row.key for row in measured}) == len(measured)
    for row in measured:
        if row.system != "plan" and not row.note:
            assert row.peak
            assert row.times
            assert 0 < row.times[0] <= row.times[1] <= row.times[2]


def test_ours_are_right_in_every_column_and_within_their_limits(measured: list[Row]) -> None:
    ours = [row for row in measured if row.ours and not row.note]
    assert {"70 %", "as checkpoint each block", "floor"} <= {row.setting for row in ours}
    for row in ours:
        assert (row.gradients, row.dropout, row.buffers) == ("same", "same", "same"), row
        assert row.peak is not None
        assert row.limit is not None
        assert row.peak <= row.limit


def test_a_column_tells_what_is_wrong(measured: list[Row]) -> None:
    row = next(row for row in measured if row.setting == "each block")
    assert (row.gradients, row.dropout) == ("same", "same")
    assert row.buffers.startswith("WRONG")  # BatchNorm counts a batch twice


def test_wrong_dropout_is_not_held_against_gradients() -> None:
    class Redrawn(nn.Module):
        """Draws anew in each call, as a replay that forgets the generator does."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(1)
            return self.model(x)

    bench = Bench(tiny(), {})
    entry = entries("eager", {}, EFFORT)[0]
    right, _ = bench.measured(entry)
    assert (right.gradients, right.dropout, right.buffers) == ("same", "same", "same")
    found = bench.record(Redrawn(bench.subject.model))
    wrong = bench.judged(right, found, lambda model, inputs: Redrawn(model))
    assert wrong.dropout.startswith("WRONG")
    assert wrong.gradients == "same"


def test_what_a_system_cannot_do_is_a_row_that_says_why() -> None:
    bench = Bench(tiny(), {})
    (below,) = entries("fxrecals", {"nothing": 1}, EFFORT)
    row, call = bench.measured(below)
    assert call is None
    assert row.note.startswith("floor ")
    assert row.peak is None


def test_what_is_done_is_not_measured_again(measured: list[Row]) -> None:
    done = {row.key: row for row in measured}
    del done["tiny", "checkpoint", "every second"]
    again: list[Row] = []
    run(tiny(), ALONE, EFFORT, done, again.extend)
    assert [row.key for row in again] == [("tiny", "checkpoint", "every second")]
    assert again[0].times


@pytest.mark.slow
def test_inductor_is_compared_with_inductor() -> None:
    found: list[Row] = []
    run(tiny(), INDUCTOR, Effort((100,), (1.0,), 3), {}, found.extend)
    right = {r.system: r for r in found if r.system != "plan" and r.setting != "floor"}
    assert right.keys() == set(INDUCTOR)
    for row in right.values():
        assert row.gradients in ("same", "close"), row
        assert row.buffers in ("same", "close"), row
    assert right["torch.compile"].dropout == "draws others"
    assert right["fxrecals-inductor"].dropout in ("same", "close")


def test_without_dropout_batch_norm_still_trains() -> None:
    model = tiny().model
    with without_dropout(model):
        training = {type(m) for m in model.modules() if m.training}
    assert training == {nn.BatchNorm1d}
    assert all(m.training for m in model.modules())


def test_limits_of_ours_are_at_the_lowest_of_peaks_that_are_close() -> None:
    peaks = {"a": 500, "b": 505, "c": 800, "whole": 1000, "more": 1200}
    found = [Row("m", "peer", setting, peak=peak) for setting, peak in peaks.items()]
    assert at_peaks([*found, Row("m", "peer", "failed")], 1000) == {
        "as peer a": 500,
        "as peer c": 800,
    }


# --- who is ahead -----------------------------------------------------------------------------


@st.composite
def points(draw: st.DrawFn, system: str | None = None) -> Row:
    name = system or draw(st.sampled_from(("fxrecals", "fxrecals-engine", "checkpoint", "budget")))
    low, middle, high = sorted(draw(st.integers(1, 9)) for _ in range(3))
    times = None if draw(st.integers(0, 9)) == 0 else (float(low), float(middle), float(high))
    peak = draw(st.none() | st.integers(1, 9))
    return Row("m", name, str(draw(st.integers(0, 99))), peak=peak, times=times)


@given(points(), points(), points())
def test_to_be_ahead_is_a_strict_order(a: Row, b: Row, c: Row) -> None:
    assert not ahead(a, a)
    assert not (ahead(a, b) and ahead(b, a))
    assert ahead(a, c) or not (ahead(a, b) and ahead(b, c))


@given(points(), points())
def test_who_is_ahead_answers_and_is_not_answered(a: Row, b: Row) -> None:
    if ahead(a, b):
        assert answers(a, b)
        assert not answers(b, a)


@given(st.lists(points(), max_size=12))
def test_the_frontier_is_what_nobody_is_ahead_of(found: list[Row]) -> None:
    best = frontier(found)
    assert not any(ahead(other, row) for row in best for other in found)
    for row in found:
        if row.peak is not None and row.times is not None and row not in best:
            assert any(ahead(other, row) for other in best)


@given(st.lists(points(), max_size=12))
def test_only_our_rows_are_named_as_beaten_and_only_by_peers(found: list[Row]) -> None:
    named = beaten(found)
    pairs = [(a, b) for b in found if not b.ours for a in found if a.ours and ahead(b, a)]
    assert [(ours, peer) for ours, peer, _ in named] == pairs
    for _, peer, answer in named:
        can = [row for row in found if row.ours and answers(row, peer)]
        assert (answer in can) if can else answer is None


def test_a_peer_is_not_ahead_in_another_model() -> None:
    ours = Row("one", "fxrecals", peak=9, times=(2.0, 2.0, 2.0))
    peer = Row("two", "checkpoint", peak=1, times=(1.0, 1.0, 1.0))
    assert beaten([ours, peer]) == []


def test_the_spread_keeps_a_peer_from_being_ahead() -> None:
    ours = Row("m", "fxrecals", peak=9, times=(1.1, 1.2, 1.3))
    assert ahead(Row("m", "peer", peak=8, times=(0.9, 1.0, 1.05)), ours)
    assert not ahead(Row("m", "peer", peak=8, times=(0.9, 1.0, 1.1)), ours)
    assert not ahead(Row("m", "peer", peak=9, times=(0.9, 1.0, 1.05)), ours)


# --- rows as lines ----------------------------------------------------------------------------

ROW = Row(
    "m", "plan", "50 %", 10, 9, (1.0, 1.5, 2.0), 0.25, "same", "-", "WRONG (2)", "floor 1",
    ((10, 1.1, 1.0),), {"cpu": "a"},
)  # fmt: skip


def test_a_row_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    assert rows.read(path) == {}
    rows.append(path, [ROW, Row("m", "eager")])
    assert list(rows.read(path).values()) == [ROW, Row("m", "eager")]


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_last_line_that_was_cut_off_is_lost_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.jsonl"
    rows.append(path, [ROW, Row("m", "eager")])
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(rows.read(path).values()) == [ROW]
    rows.append(path, [Row("m", "budget")])
    assert list(rows.read(path).values()) == [ROW, Row("m", "budget")]


def test_the_last_row_of_a_key_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows.append(path, [Row("m", "eager", peak=1), ROW, Row("m", "eager", peak=2)])
    assert rows.read(path)["m", "eager", ""].peak == 2


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"system": "eager"}'])
def test_another_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows.append(path, [ROW])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2"):
        rows.read(path)


# --- pages ------------------------------------------------------------------------------------


def test_a_page_names_commands_and_who_is_ahead(measured: list[Row]) -> None:
    slow = Row(
        "tiny", "fxrecals", "slow", 10**9, 10**9, (9.0, 9.0, 9.0), machine={"command": "run me"}
    )
    page = pages.page([*measured, slow])
    assert "run me" in page
    assert "WRONG" in page
    assert re.search(r"\| tiny +\| fxrecals slow +\|", page)
    assert re.search(r"[1-9]\d* of \d+ rows of fxrecals,", page)
    assert page.count("\n## tiny\n\n![") == 1
    assert pages.QUICK not in page


def test_a_page_says_so_where_nobody_is_ahead() -> None:
    ours = Row("m", "fxrecals", peak=9, times=(1.1, 1.2, 1.3))
    assert "0 of 1 rows of fxrecals." in pages.tables([ours])


def test_time_against_torch_compile_is_the_ratio_of_both_over_eager() -> None:
    compiled = Row("m", "torch.compile", peak=9, times=(0.4, 0.5, 0.6))
    assert "| 2.40" in pages.tables([compiled, Row("m", "fxrecals", peak=8, times=(1.1, 1.2, 1.3))])


def test_a_plot_shows_each_system_and_what_was_predicted(
    tmp_path: Path, measured: list[Row]
) -> None:
    pages.draw(tmp_path, measured)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.csv", "tiny.svg"]
    drawn = (tmp_path / "tiny.svg").read_text()
    assert all(name in drawn for name in (*ALONE, "predicted", "proved bound"))
    systems = {line.partition(",")[0] for line in (tmp_path / "tiny.csv").read_text().splitlines()}
    assert {"predicted", "proved bound", *ALONE} <= systems


# --- models and blocks ------------------------------------------------------------------------

BLOCKS: dict[str, Any] = {
    "gpt-small": ("Block", 4),
    "resnet-small": ("Basic", 12),
    "unet-small": ("Sequential", 7),
    "gpt2": ("GPT2Block", 6),
    "llama": ("LlamaDecoderLayer", 6),
    "bert": ("BertLayer", 6),
    "vit": ("ViTLayer", 6),
    "t5": ("T5Block", 6),
    "moe": ("MixtralDecoderLayer", 4),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_that_one_would_wrap(name: str) -> None:
    found = models.blocks(models.build(name)[0])
    kind, count = BLOCKS[name]
    assert [type(block).__name__ for block in found] == [kind] * count


def test_eager_is_the_model_itself() -> None:
    model = tiny().model
    assert eager(model, ()) is model
