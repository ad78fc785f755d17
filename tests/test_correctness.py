"""Where planners go wrong: the same bits as plain eager, and the limit held, by both ways in."""

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch

import fxrecals
from benchmarks.measure import Record, compare, record, total
from benchmarks.promises import Subject
from tests.cases import CASES, Made
from tests.helpers import peak_bytes

TRACED = {"autocast_in_parts", "decisions_with_ties", "channels_last"}
"""Cases in which PyTorch's tracing adds gradients up in another order than eager."""

SCALARS = 64
"""Bytes of the loss itself that may come on top: numbers that the caller adds up."""

OUTSIDE = {"outputs_that_share_memory": 256}
"""Bytes that autograd takes outside the graphs: for the backward of a view that was handed out."""

BROKEN = {"a_break_within", "two_halves", "a_number_of_rows_that_the_data_decide"}
"""Cases of several graphs: a backend warns of the first step, and of what breaks cost."""


@pytest.fixture(autouse=True)
def _compiled_anew(request: pytest.FixtureRequest) -> Iterator[None]:
    torch._dynamo.reset()
    whole = "in_one_graph" in request.node.name
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=whole):
        yield
    torch._dynamo.reset()


@lru_cache
def limits_of(make: Callable[[], Made]) -> tuple[int, ...]:
    """Limits that can be held, in bytes: all of the peak, the floor, and one between."""
    model, inputs = make()
    whole = fxrecals.plan(model, inputs, "100%")
    floor, baseline = whole.floor_bytes, whole.baseline_peak_bytes
    return tuple(dict.fromkeys((baseline, max(floor, baseline * 60 // 100), floor)))


@lru_cache
def expected(name: str) -> Record:
    """What plain eager leaves, or where tracing rounds otherwise, a traced step that keeps all."""
    model, inputs = CASES[name]()
    plain = record(model, model, inputs)
    if name not in TRACED:
        return plain
    model, inputs = CASES[name]()
    traced = record(torch.compile(model, backend="aot_eager"), model, inputs)
    assert compare(plain, traced, rtol=1e-2, atol=0.1) == []
    torch._dynamo.reset()
    return traced


@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_step_is_eagers_within_its_limit(name: str) -> None:
    wanted = expected(name)
    for limit in limits_of(CASES[name]):
        model, inputs = CASES[name]()
        small = fxrecals.rewrite(model, inputs, limit)
        assert compare(wanted, record(small, model, inputs)) == [], limit
        measured = peak_bytes(Subject(name, model, inputs, total).step(small), model)
        assert measured <= limit + SCALARS + OUTSIDE.get(name, 0)


def compiled_within(name: str, limit: int) -> None:
    wanted = expected(name)
    model, inputs = CASES[name]()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        if name in BROKEN:
            warnings.filterwarnings("ignore", ".*planned at its floor|the step is 2 graphs")
        compiled = torch.compile(model, backend=fxrecals.backend(limit, inner="eager"))
        assert compare(wanted, record(compiled, model, inputs)) == [], limit
    measured = peak_bytes(Subject(name, model, inputs, total).step(compiled), model)
    assert measured <= limit + SCALARS + OUTSIDE.get(name, 0)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_is_eagers_at_its_floor(name: str) -> None:
    compiled_within(name, limits_of(CASES[name])[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_is_eagers_within_its_limit(name: str) -> None:
    for limit in limits_of(CASES[name])[:-1]:
        compiled_within(name, limit)
