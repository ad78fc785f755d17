"""The engine on the cases where others go wrong: the bits of plain eager, and the limit held."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks.measure import clear, compare, record, step_memory, total
from fxrecals import InfeasibleLimitError
from fxrecals.engine import recals
from tests.cases import CASES

SCALARS = 64
"""Bytes of numbers that Python hands to ops, which are tensors within them."""

UNSEEN = {
    # The backward of `prod` takes another formula under a dispatch mode, so it runs without.
    "decisions_with_ties": 2048 + 2 * 256,
    # Scratch of `index_put` by a mask, of which the size is not known.
    "values_that_a_mask_selects": 8192,
    "values_that_a_mask_selects_in_one_graph": 8192,
}
"""Bytes that no ledger sees."""

CHECKPOINTS = 2 * 5056
"""Bytes of generator states that `torch.utils.checkpoint` keeps out of every ledger."""

KEEPS_STATES = {
    "dropout_in_a_checkpoint",
    "all_must_be_kept",
    "all_must_run_again",
    "some_must_run_again_and_some_had_better_stay",
    "a_checkpoint_around_everything",
    "a_reentrant_checkpoint",
    "products_that_must_be_kept",
}


def step_of(call: Callable[..., Any], model: nn.Module, inputs: Any) -> Callable[[], None]:
    def step() -> None:
        clear(model)
        for leaf in inputs if isinstance(inputs, tuple) else inputs.values():
            if isinstance(leaf, Tensor):
                leaf.grad = None
        loss = call(**inputs) if isinstance(inputs, dict) else call(*inputs)
        loss.backward()

    return step


def feasible(limit: int, run: Callable[[int], Any]) -> tuple[int, Any]:
    """The first limit that works, from `limit` on by what each error says, and what `run` gave."""
    for _ in range(200):
        try:
            return limit, run(limit)
        except InfeasibleLimitError as error:
            limit = max(limit + 1, error.floor_bytes)
    raise AssertionError("no end to the errors")


@pytest.mark.parametrize("share", [150, 60, 10])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_eagers_within_the_limit(name: str, share: int) -> None:
    model, inputs = CASES[name]()
    wanted = record(model, model, inputs)
    model, inputs = CASES[name]()
    whole = step_memory(step_of(lambda *a, **k: total(model(*a, **k)), model, inputs), model)

    def run(limit: int) -> int:
        model, inputs = CASES[name]()
        engine = recals(limit)
        assert compare(wanted, record(lambda *a, **k: engine(model, *a, **k), model, inputs)) == []

        def whole_step(*args: Any, **kwargs: Any) -> Tensor:
            return engine(lambda: total(model(*args, **kwargs)))

        return step_memory(step_of(whole_step, model, inputs), model).activations

    limit, measured = feasible(whole.activations * share // 100, run)
    more = (CHECKPOINTS if name in KEEPS_STATES else 0) + UNSEEN.get(name, 0)
    assert measured <= limit + more + SCALARS
    if share == 10:
        assert limit <= whole.activations + 12 * 5056, "the floor is no higher than eager"
