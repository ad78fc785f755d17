"""The command fit: the largest size that trains under a limit."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import fxrecals
from fxrecals.cli.output import Output
from fxrecals.cli.planned import plan_data
from fxrecals.cli.targets import add_options, add_target, load, planning_options

ABOUT = """
Finds the largest batch, sequence or image that trains under a limit, by planning alone. The
factory is called with the size by name: `--vary batch` calls make(batch=8). Nothing is trained.
It is taken for granted that a larger size has no lower floor.
"""


def add_verbs(verbs: Any) -> None:
    """Adds the command to a parser."""
    about = "the largest batch, sequence or image that trains under a limit"
    verb = verbs.add_parser("fit", help=about, description=ABOUT)
    add_target(verb)
    verb.add_argument("--limit", required=True, help="4GB, 4GiB or auto (what is free)")
    verb.add_argument(
        "--vary",
        default="batch",
        metavar="KEYWORD",
        help="the factory's keyword for the size (default: batch)",
    )
    verb.add_argument("--start", type=int, help="the size to try first (default: the keyword's)")
    verb.add_argument("--step", type=int, default=1, help="sizes are multiples of it (default: 1)")
    add_options(verb)
    verb.set_defaults(run=_fit)


def _fit(options: argparse.Namespace, output: Output) -> None:
    found = fxrecals.fit(
        load(options.target),
        options.limit,
        vary=options.vary,
        start=options.start,
        step=options.step,
        on_try=lambda size: output.progress(f"planning for {options.vary}={size}"),
        on_progress=output.better,
        **planning_options(options),
    )
    data = {
        "vary": found.vary,
        "size": found.size,
        "next_size": found.next_size,
        "next_floor_bytes": found.next_floor_bytes,
        "is_next_tried": found.is_next_tried,
        "tried": [asdict(each) for each in found.tried],
        "plan": plan_data(found.plan),
    }
    output.result(repr(found), data)
