"""The command snapshot: who holds what at the peak of a memory snapshot."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fxrecals.cli.output import Output
from fxrecals.cli.targets import add_json
from fxrecals.snapshots import Snapshot, snapshot

ABOUT = """
Shows who holds what at the peak, by line of the program, and how much of the reserve is free, of a
file that torch.cuda.memory._dump_snapshot or fxrecals.snapshot(...).save wrote. Nothing in the
file is run.
"""


def add_verbs(verbs: Any) -> None:
    """Adds the command to a parser."""
    verb = verbs.add_parser(
        "snapshot", help="who holds what in a memory snapshot", description=ABOUT
    )
    verb.add_argument("file", type=Path, help="the snapshot, a pickle")
    add_json(verb)
    verb.set_defaults(run=_snapshot)


def _snapshot(options: argparse.Namespace, output: Output) -> None:
    found = snapshot(options.file)
    output.result(repr(found), snapshot_data(found))


def snapshot_data(found: Snapshot) -> dict[str, Any]:
    """The figures of a snapshot, under the names of its attributes."""
    return {
        "devices": {
            device: {
                "peak_bytes": found.peak_bytes(device),
                "events": len(events),
                "holders": [asdict(holder) for holder in found.holders(device)],
            }
            for device, events in found.traces.items()
        },
        "segments": [asdict(segment) for segment in found.segments],
        "failures": [asdict(failure) for failure in found.failures],
    }
