"""`auto` against the optimum, with its help and without."""

from statistics import mean

import pytest

from tests.quality import LIMITS, against_the_optimum


def check(graphs: int) -> None:
    helped = against_the_optimum(graphs, exactly=None)
    assert len(helped) >= 0.6 * LIMITS * graphs
    assert set(helped) == {0.0}
    alone = against_the_optimum(graphs, exactly=False)
    answered = [gap for gap in alone if gap is not None]
    assert len(answered) >= 0.95 * len(alone)
    assert mean(answered) <= 0.02


def test_auto_is_close_to_the_optimum() -> None:
    check(25)


@pytest.mark.slow
def test_auto_is_close_to_the_optimum_on_many_graphs() -> None:
    check(500)
