"""Where the command writes: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from fxrecals.errors import InfeasibleLimitError
from fxrecals.formats import format_seconds

FLOOR = ("limit_bytes", "floor_bytes", "lowest_bytes", "op", "module", "source", "peak", "device")
"""What an `InfeasibleLimitError` knows, as keys of the JSON."""


@dataclass
class Output:
    """The two streams of a command.

    Attributes:
        as_json: whether results are JSON.
    """

    as_json: bool
    _shown: int = field(default=0, init=False)

    def result(self, text: str, data: Any) -> None:
        """Prints a result: the text, or the data as JSON."""
        self.progress("")
        print(json.dumps(data, indent=2, sort_keys=True) if self.as_json else text)

    def message(self, text: str) -> None:
        """Says something that is no result."""
        self.progress("")
        print(text, file=sys.stderr)

    def progress(self, text: str) -> None:
        """Replaces the progress line, if anyone looks at it."""
        if not sys.stderr.isatty():
            return
        line = f"\r{text[:78]:<{self._shown}}" if text else f"\r{'':<{self._shown}}\r"
        print(line if self._shown or text else "", end="", file=sys.stderr, flush=True)
        self._shown = len(text[:78])

    def better(self, seconds: float, bound: float, elapsed: float) -> None:
        """Shows how far the solver is."""
        found, least = format_seconds(seconds), format_seconds(bound)
        self.progress(f"solving: +{found} found, at least +{least}; {elapsed:.0f} s")

    def infeasible(self, error: InfeasibleLimitError) -> None:
        """Prints the floor, if results are JSON."""
        if self.as_json:
            self.result("", {"fits": False, **{key: getattr(error, key) for key in FLOOR}})
