"""What can go wrong, in words for the person who has to act on it.

Each message names what was asked, what was found, and the smallest change that works. All of
them survive pickling, so that a worker process can send them home.

    >>> raise OptionError("inner", "jax", "'inductor' or 'eager'")
    Traceback (most recent call last):
    fxrecals.errors.OptionError: inner='jax' does not work; what works: 'inductor' or 'eager'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fxrecals.formats import format_bytes

E = TypeVar("E", bound="FxrecalsError")

CALLERS_LOSS = "loss"
"""Name of the op that stands for what the caller does between forward and backward."""

_SHOWN_CHARACTERS = 120
_SHOWN_SHAPES = 4


class FxrecalsError(Exception):
    """Base of every error that `fxrecals` raises on purpose."""

    # An exception is rebuilt by calling its class with `args`, which is the message alone here.
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return _revive, (type(self), self.args), self.__dict__


class OptionError(FxrecalsError, ValueError):
    """An argument that cannot be used.

    Attributes:
        argument: its name.
        given: what came, as `repr` shows it, cut where it is long.
        expected: what would work.
    """

    def __init__(self, argument: str, given: object, expected: str) -> None:
        self.argument = argument
        self.given = _shown(given)
        self.expected = expected
        super().__init__(f"{argument}={self.given} does not work; what works: {expected}")


class LimitError(OptionError):
    """A limit that cannot be read as bytes. The attributes are those of `OptionError`."""


class InfeasibleLimitError(FxrecalsError):
    """A limit under the floor: no schedule was found that stays below it. Nothing has run.

    >>> error = InfeasibleLimitError(
    ...     4 * 10**9, 5_200_000_001, op="mul_14", module="layers.7.mlp", source="model.py:88"
    ... )
    >>> print(str(error).replace("; ", "\\n"))
    limit 4.00 GB is below the floor of 5.20 GB, set by mul_14 in layers.7.mlp (model.py:88)
    the smallest limit that works is 5.20 GB (limit=5200000001)

    Attributes:
        limit_bytes: the limit, resolved to bytes.
        floor_bytes: the smallest limit for which a schedule was found; it works as a limit.
        op: name of the op that runs at the floor's peak, or "".
        module: its module path (FQN), or "".
        source: its source line, as ``file:line``, or "".
        device: the device that the limit is for, or "" where one limit holds for all.
        peak: what the limit bounds: "activations", or "step" where gradients count too.
        device_floors: where each device has a limit, limits that work together, as pairs.
        lowest_bytes: proved: no schedule of the ops in their order stays below it; 0 where nothing
            is proved.
        must_save_bytes: at the floor, bytes that are kept from forward to backward because the
            user's checkpoint policy says MUST_SAVE.
        so_far: whether the floor is what one op needs, in a step that nobody has planned: ops after
            it may need more.
        shapes: of the inputs of the graph or step that was refused, parameters apart; () where
            the example says it.
    """

    def __init__(
        self,
        limit_bytes: int,
        floor_bytes: int,
        op: str = "",
        module: str = "",
        source: str = "",
        device: str = "",
        peak: str = "activations",
        lowest_bytes: int = 0,
        device_floors: tuple[tuple[str, int], ...] = (),
        must_save_bytes: int = 0,
        so_far: bool = False,
        shapes: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.limit_bytes = limit_bytes
        self.floor_bytes = floor_bytes
        self.op = op
        self.module = module
        self.source = source
        self.device = device
        self.peak = peak
        self.lowest_bytes = lowest_bytes
        self.device_floors = device_floors
        self.must_save_bytes = must_save_bytes
        self.so_far = so_far
        self.shapes = shapes
        super().__init__(_infeasible(self))

    def bounding(self, peak: str) -> InfeasibleLimitError:
        """The same error, of a limit on `peak`."""
        return self._with(peak=peak)

    def of_inputs(self, shapes: tuple[tuple[int, ...], ...]) -> InfeasibleLimitError:
        """The same error, of a graph or step with inputs of these shapes."""
        return self._with(shapes=shapes)

    def _with(self, **changes: Any) -> InfeasibleLimitError:
        given = {name: value for name, value in vars(self).items() if name[0] != "_"}
        return InfeasibleLimitError(**{**given, **changes})


class CaptureError(FxrecalsError):
    """An example that does not fit the model, or a model that cannot be traced."""


class DoubleBackwardError(FxrecalsError, RuntimeError):
    """A gradient of a gradient, which a compiled backward graph does not have."""

    def __init__(self) -> None:
        super().__init__(
            "a gradient of a gradient was asked for (create_graph=True), and compiled backward "
            "graphs have none; what works: for such a step the model that was given to "
            "fxrecals.rewrite or torch.compile, whose parameters are the same, with "
            "torch.utils.checkpoint(..., use_reentrant=False) where memory is short"
        )


def _revive(kind: type[E], args: tuple[Any, ...]) -> E:
    return kind.__new__(kind, *args)


def _shown(given: object) -> str:
    text = repr(given)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return text[: _SHOWN_CHARACTERS - 3] + "..."


def _infeasible(error: InfeasibleLimitError) -> str:
    limit, floor = format_bytes(error.limit_bytes), format_bytes(error.floor_bytes)
    if limit == floor:
        limit, floor = f"{error.limit_bytes} bytes", f"{error.floor_bytes} bytes"
    if error.so_far:
        return (
            f"limit {limit} is below the {floor} that are alive when {error.op} runs, with all "
            f"evicted that can be; what works: at least limit={error.floor_bytes}, if no later op "
            f'needs more, or on_overflow="exceed", with which the step runs all the same, and '
            f"after it stats.peak is a limit that works"
        )
    bounded = "" if error.peak == "activations" else f" of the {error.peak} peak"
    on_device = f" on {error.device}" if error.device else ""
    floors = dict(error.device_floors) or {error.device: error.floor_bytes}
    pasted = floors if error.device else error.floor_bytes
    option = "" if error.peak == "activations" else f', peak="{error.peak}"'
    works = f"the smallest limit that works is {floor}"
    if len(floors) > 1:
        works = "limits that work together are those of the floor"
    return (
        f"limit {limit}{bounded}{on_device} is below the floor of {floor}{_set_by(error)}"
        f"{_with_inputs(error)}; "
        f"{_proved(error)}{works} (limit={pasted}{option}){_must_save(error)}"
    )


def _with_inputs(error: InfeasibleLimitError) -> str:
    if not error.shapes:
        return ""
    shown = ", ".join(map(str, error.shapes[:_SHOWN_SHAPES]))
    more = len(error.shapes) - _SHOWN_SHAPES
    return f", for inputs {shown}" + (f" and {more} more" if more > 0 else "")


def _must_save(error: InfeasibleLimitError) -> str:
    if not error.must_save_bytes:
        return ""
    kept = format_bytes(error.must_save_bytes)
    return f"; your checkpoint policy keeps {kept} by MUST_SAVE: PREFER_SAVE may get by with less"


def _proved(error: InfeasibleLimitError) -> str:
    if not error.lowest_bytes:
        return ""
    if error.lowest_bytes >= error.floor_bytes:
        return "no schedule gets by with less; "
    return f"no schedule gets by with less than {format_bytes(error.lowest_bytes)}; "


def _set_by(error: InfeasibleLimitError) -> str:
    if not error.op:
        return ""
    if error.op == CALLERS_LOSS:
        return ", set by your loss, between forward and backward"
    module = f" in {error.module}" if error.module else ""
    source = f" ({error.source})" if error.source else ""
    return f", set by {error.op}{module}{source}"
