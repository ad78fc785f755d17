import copy
import pickle
import re

import pytest

from fxrecals.errors import (
    CaptureError,
    DoubleBackwardError,
    FxrecalsError,
    InfeasibleLimitError,
    LimitError,
    OptionError,
)
from fxrecals.units import parse_limit

ERRORS = [
    FxrecalsError("something"),
    OptionError("solver", object(), "'auto' or 'greedy'"),
    LimitError("limit", "6", '"6GB"'),
    CaptureError("the example has 2 inputs, the model takes 1"),
    DoubleBackwardError(),
    InfeasibleLimitError(4 * 10**9, 5_200_000_001, "mul_14", "layers.7.mlp", "model.py:88"),
    InfeasibleLimitError(4 * 10**9, 5_200_000_001, device="cuda:0"),
    InfeasibleLimitError(4 * 10**9, 5_200_000_001, "mul_14", peak="step"),
    InfeasibleLimitError(4 * 10**9, 5_200_000_001, shapes=((4, 128), (4,))),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_the_way_from_a_worker_process(error: FxrecalsError, again) -> None:
    same = again(error)
    assert type(same) is type(error)
    assert str(same) == str(error)
    assert same.args == error.args
    assert vars(same) == vars(error)


def test_what_was_given_need_not_survive_pickling_for_the_error_to() -> None:
    error = OptionError("model", lambda: None, "a torch.nn.Module")
    assert "<lambda>" in str(pickle.loads(pickle.dumps(error)))


def test_bad_arguments_are_value_errors() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(LimitError, ValueError)
    assert not issubclass(InfeasibleLimitError, ValueError)


def test_every_error_can_be_caught_as_ours() -> None:
    for kind in (OptionError, LimitError, InfeasibleLimitError, CaptureError, DoubleBackwardError):
        assert issubclass(kind, FxrecalsError)


def test_a_bad_argument_is_named_with_what_came_and_what_works() -> None:
    error = OptionError("inner", "jax", "'inductor' or 'eager'")
    assert str(error) == "inner='jax' does not work; what works: 'inductor' or 'eager'"
    assert (error.argument, error.given, error.expected) == (
        "inner",
        "'jax'",
        "'inductor' or 'eager'",
    )


def test_a_long_argument_is_cut() -> None:
    error = OptionError("example", "x" * 10_000, "a tensor")
    assert len(error.given) == 120
    assert error.given.endswith("...")


def test_a_limit_under_the_floor_says_what_sets_the_floor_and_what_works() -> None:
    error = InfeasibleLimitError(
        4 * 10**9, 5_200_000_001, op="mul_14", module="layers.7.mlp", source="model.py:88"
    )
    assert str(error) == (
        "limit 4.00 GB is below the floor of 5.20 GB, set by mul_14 in layers.7.mlp (model.py:88); "
        "the smallest limit that works is 5.20 GB (limit=5200000001)"
    )


@pytest.mark.parametrize("floor_bytes", [1, 999, 1001, 5_200_000_001, 10**15 + 1])
def test_the_limit_in_the_message_works_when_pasted(floor_bytes: int) -> None:
    message = str(InfeasibleLimitError(floor_bytes - 1, floor_bytes, "f"))
    pasted = re.search(r"limit=(\d+)", message)
    assert pasted is not None
    assert parse_limit(int(pasted[1])).resolve(10**15) == floor_bytes


def test_a_limit_close_below_the_floor_is_told_apart_from_it() -> None:
    message = str(InfeasibleLimitError(5_200_000_000, 5_200_000_001))
    assert message.startswith("limit 5200000000 bytes is below the floor of 5200000001 bytes; ")


def test_what_is_not_known_of_the_floor_is_left_out() -> None:
    assert ", set by mul (a.py:1); " in str(InfeasibleLimitError(1, 2, "mul", source="a.py:1"))
    assert ", set by mul in net; " in str(InfeasibleLimitError(1, 2, "mul", module="net"))
    assert "set by" not in str(InfeasibleLimitError(1, 2))


def test_what_is_proved_of_the_floor_is_said() -> None:
    def proved(lowest: int) -> str:
        message = str(InfeasibleLimitError(1, 200, device="cpu", lowest_bytes=lowest))
        return message.split("; ")[1]

    assert proved(150) == "no schedule gets by with less than 150 B"
    assert proved(200) == "no schedule gets by with less"
    assert proved(0).startswith("the smallest limit that works")
    error = InfeasibleLimitError(1, 200, lowest_bytes=150).bounding("step")
    assert error.lowest_bytes == 150


def test_a_limit_by_device_is_pasted_by_device() -> None:
    message = str(InfeasibleLimitError(1, 2, device="cuda:0"))
    assert message.startswith("limit 1 B on cuda:0 is below")
    assert message.endswith("(limit={'cuda:0': 2})")


def test_a_limit_on_another_peak_is_pasted_with_it() -> None:
    error = InfeasibleLimitError(1, 2, "mul", "net", "a.py:1", "cuda:0").bounding("step")
    assert str(error) == (
        "limit 1 B of the step peak on cuda:0 is below the floor of 2 B, set by mul in net "
        "(a.py:1); the smallest limit that works is 2 B (limit={'cuda:0': 2}, peak=\"step\")"
    )


def test_a_limit_that_a_size_cannot_keep_names_the_sizes() -> None:
    error = InfeasibleLimitError(1, 2, "mul", must_save_bytes=1).of_inputs(((64, 16), (64,)))
    assert ", set by mul, for inputs (64, 16), (64,); " in str(error)
    assert error.must_save_bytes == 1
    assert error.bounding("step").shapes == ((64, 16), (64,))
    many = InfeasibleLimitError(1, 2, shapes=((1,),) * 9)
    assert ", for inputs (1,), (1,), (1,), (1,) and 5 more; " in str(many)
