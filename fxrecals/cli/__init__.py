"""The command `fxrecals`: plans from a terminal, without a script.

    fxrecals plan train:make --limit 4GB

Tables go to standard output, messages to standard error. It exits with 0 if the step fits, 2 for
a command that cannot be used, 3 for a limit below the floor, 1 for anything else that is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fxrecals.cli import examine, fits, planned
from fxrecals.cli.output import Output
from fxrecals.errors import FxrecalsError, InfeasibleLimitError, OptionError

EXAMPLES = """
examples:
  fxrecals plan train:make --limit 4GB
  fxrecals plan train:make --limit 4GB --html plan.html
  fxrecals pareto train:make --plot curve.svg
  fxrecals explain train:make layers.7.mlp --limit 4GB
  fxrecals fit train:make --limit 4GB --vary batch
  fxrecals plan train:make --limit 40GB --gpu H100     # a GPU that is not there

train:make is a function `make` in train.py. It returns a model and what it is called with:
(model, args), (model, args, kwargs) or (model, kwargs).

exit codes: 0 fits, 1 the model cannot be planned, 2 usage, 3 the limit is below the floor
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    Args:
        argv: the arguments, without the name of the program; by default those of the process.

    >>> main(["plan", "nowhere:make", "--limit", "4GB"])
    2
    """
    options = parser().parse_args(argv)
    output = Output(options.json)
    try:
        options.run(options, output)
    except FxrecalsError as error:
        if isinstance(error, InfeasibleLimitError):
            output.infeasible(error)
        output.message(f"fxrecals {options.verb}: {error}")
        return _exit_code(error)
    return 0


def _exit_code(error: FxrecalsError) -> int:
    if isinstance(error, InfeasibleLimitError):
        return 3
    return 2 if isinstance(error, OptionError) else 1


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser(
        prog="fxrecals",
        description="Train PyTorch models under a byte limit: look at plans from a terminal.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = found.add_subparsers(dest="verb", required=True, metavar="command")
    for module in (planned, fits, examine):
        module.add_verbs(verbs)
    return found
