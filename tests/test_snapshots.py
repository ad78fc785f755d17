"""Snapshots of files, runs and plans; files that would run something are refused."""

import functools
import json
import operator
import os
import pickle
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

import fxrecals
from benchmarks import measure
from fxrecals import FxrecalsError, OptionError, Plan
from fxrecals.cli import main
from fxrecals.ir import Graph
from fxrecals.schedule import Schedule
from fxrecals.snapshots import Snapshot, Traced, snapshot
from tests.cli_models import blocks
from tests.strategies import graphs_with_schedules

MIB = 2**20


def frame(line: int, file: str = "train.py", name: str = "step") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def entry(action: str, address: int, size: int, *lines: int) -> dict[str, Any]:
    frames = [frame(7, "/lib/torch/nn/linear.py", "forward"), *map(frame, lines)]
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}


def block(address: int, size: int, state: str, *lines: int) -> dict[str, Any]:
    frames = list(map(frame, lines))
    return {
        "address": address, "size": size, "requested_size": size, "state": state, "frames": frames
    }  # fmt: skip


def cuda_dump() -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot` returns where three tensors were allocated, one of them
    before recording began, one more was freed, and a last one did not fit."""
    trace = [
        entry("alloc", 4 * MIB, MIB, 10, 3),
        entry("alloc", 5 * MIB, 3 * MIB, 11, 3),
        entry("free_requested", 5 * MIB, 3 * MIB, 12),
        entry("free_completed", 5 * MIB, 3 * MIB, 12),
        entry("alloc", 8 * MIB, MIB, 13, 3),
        entry("free_requested", 2 * MIB, MIB, 14),
        entry("free_completed", 2 * MIB, MIB, 14),
        {"action": "oom", "size": 64 * MIB, "device_free": 2 * MIB, "stream": 0, "frames": []},
        {"action": "snapshot", "size": 0, "stream": 0, "frames": []},
    ]
    placed = [
        block(0, 2 * MIB, "active_allocated", 1),
        block(2 * MIB, 2 * MIB, "inactive"),
        block(4 * MIB, MIB, "active_allocated", 10, 3),
        block(5 * MIB, 3 * MIB, "inactive"),
        block(8 * MIB, MIB, "active_allocated", 13, 3),
        block(9 * MIB, MIB, "inactive"),
    ]
    segment = {
        "device": 0, "address": 0, "total_size": 10 * MIB, "allocated_size": 4 * MIB,
        "active_size": 4 * MIB, "stream": 0, "segment_type": "large", "blocks": placed,
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [trace, []]}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(cuda_dump()))
    return path


# --- files of PyTorch ---------------------------------------------------------------------------


def test_the_peak_counts_what_was_there_before_recording_began(dump: Path) -> None:
    found = snapshot(dump)
    assert found.peak_bytes("cuda:0") == (2 + 1 + 1 + 3) * MIB
    assert found.peak_bytes("cuda:1") == 0


def test_holders_are_told_apart_by_their_stacks(dump: Path) -> None:
    rows = snapshot(dump).holders("cuda:0")
    assert [(row.nbytes // MIB, row.frames[-2:]) for row in rows] == [
        (3, (("train.py", 11, "step"), ("train.py", 3, "step"))),
        (2, (("train.py", 1, "step"),)),
        (1, ()),
        (1, (("train.py", 10, "step"), ("train.py", 3, "step"))),
    ]


def test_the_reserve_tells_what_is_free_and_the_largest_free_block(dump: Path) -> None:
    found = snapshot(dump)
    (segment,) = found.segments
    assert (segment.nbytes, segment.active_bytes) == (10 * MIB, 4 * MIB)
    assert segment.largest_free_bytes == 3 * MIB
    text = repr(found)
    assert "10.5 MB reserved in 1 segment, 4.19 MB in use, 6.29 MB free" in text
    assert "the largest free block has 3.15 MB" in text
    assert "out of memory: 67.1 MB asked for, 2.10 MB free on the device" in text
    assert "linear.py" not in text, "lines of torch are passed over"


def test_blocks_without_addresses_are_placed_one_after_the_other(tmp_path: Path) -> None:
    data = cuda_dump()
    for placed in data["segments"][0]["blocks"]:
        del placed["address"]
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(data))
    assert snapshot(tmp_path / "old.pickle").peak_bytes("cuda:0") == 7 * MIB


# --- files that are none ------------------------------------------------------------------------


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def hidden(malice: object) -> dict[str, Any]:
    """A snapshot that is right but for what one of its frames is."""
    data = cuda_dump()
    data["device_traces"][0][0]["frames"].append(malice)
    return data


MALICE: dict[str, Callable[[str], object]] = {
    "a command of the system": lambda mark: Calls(os.system, f"touch {mark}"),
    "eval": lambda mark: Calls(eval, f"open({mark!r}, 'w')"),
    "exec": lambda mark: Calls(exec, f"open({mark!r}, 'w')"),
    "a file": lambda mark: Calls(open, mark, "w"),
    "a process": lambda mark: Calls(subprocess.Popen, ["touch", mark]),
    "getattr": lambda mark: Calls(getattr, "", "join"),
    "in a list": lambda mark: [[{"deep": (1, [Calls(os.system, f"touch {mark}")])}]],
    "in a frame": lambda mark: hidden(Calls(os.system, f"touch {mark}")),
    "a call of a call": lambda mark: Calls(
        functools.reduce, operator.add, [Calls(os.system, f"touch {mark}")]
    ),
    "a pickle in a pickle": lambda mark: Calls(
        pickle.loads, pickle.dumps(Calls(os.system, f"touch {mark}"))
    ),
    "a class": lambda mark: Path,
    "a tensor": lambda mark: torch.ones(2),
}


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", MALICE)
def test_a_pickle_that_would_call_anything_is_refused_before_it_does(
    name: str, protocol: int, tmp_path: Path
) -> None:
    mark, path = tmp_path / "was_run", tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(MALICE[name](str(mark)), protocol=protocol))
    with pytest.raises(FxrecalsError, match=r"is refused: a snapshot does not need [a-z_.]+\."):
        snapshot(path)
    assert not mark.exists()


def test_the_malice_of_these_tests_is_real(tmp_path: Path) -> None:
    mark = tmp_path / "was_run"
    pickle.loads(pickle.dumps(MALICE["in a frame"](str(mark))))
    assert mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({}),
        pickle.dumps({"segments": 3, "device_traces": [[]]}),
        pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}),
        pickle.dumps({"segments": [{"device": 9}], "device_traces": [[]]}),
        pickle.dumps(cuda_dump())[:-40],
        b"Pmark\n.",
    ],
)
def test_what_is_no_snapshot_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(content)
    with pytest.raises(FxrecalsError, match="is no memory snapshot"):
        snapshot(path)


@given(st.binary(max_size=80))
def test_no_bytes_raise_another_error(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.pickle"
    path.write_bytes(content)
    with pytest.raises(FxrecalsError):
        snapshot(path)


def test_a_file_that_is_not_there_and_a_source_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FxrecalsError, match="cannot be read: No such file"):
        snapshot(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="source=3"):
        snapshot(3)  # type: ignore[arg-type]


# --- what is written ----------------------------------------------------------------------------


def saved_and_read(found: Snapshot, path: Path) -> Snapshot:
    return snapshot(found.save(path))


@given(graphs_with_schedules())
def test_the_peak_of_a_plan_s_snapshot_is_that_of_its_timeline(
    tmp_path_factory: Any, given: tuple[Graph, Schedule]
) -> None:
    plan = Plan(*given, limit_bytes=None, floor_bytes=0)
    found = snapshot(plan)
    again = saved_and_read(found, tmp_path_factory.getbasetemp() / "plan.pickle")
    assert again == found
    if len(found.traces) == 1:
        assert again.peak_bytes(*found.traces) == plan.step_peak_bytes
    without = Snapshot({d: _without_gradients(t) for d, t in again.traces.items()})
    peaks = {device: without.peak_bytes(device) for device in without.traces}
    assert {d: n for d, n in peaks.items() if n} == {
        d: n for d, n in plan.timeline.device_peaks.items() if n
    }


def _without_gradients(events: Sequence[Traced]) -> tuple[Traced, ...]:
    return tuple(event for event in events if event.category != "gradient")


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 10**12), st.booleans()), max_size=40)


@given(EVENTS)
def test_a_snapshot_is_read_back_as_it_was_written(
    tmp_path_factory: Any, drawn: list[tuple[int, int, bool]]
) -> None:
    events: list[Traced] = []
    alive: dict[int, Traced] = {}
    for address, nbytes, has_category in drawn:
        if address in alive:
            born = alive.pop(address)
            events.append(born._replace(nbytes=-born.nbytes))
        else:
            frames = (("a.py", nbytes % 9, "f"), ("b.py", 2, "g"))
            born = Traced(address, nbytes, frames, "saved" if has_category else "")
            alive[address] = born
            events.append(born)
    found = Snapshot({"cpu": tuple(events)})
    assert saved_and_read(found, tmp_path_factory.getbasetemp() / "events.pickle") == found


def test_a_run_has_the_peak_that_the_referee_measures() -> None:
    model, x = blocks()

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    told = measure.step_memory(step, model)
    model.zero_grad()
    assert snapshot(step).peak_bytes("cpu") == told.peak


def test_a_run_names_the_lines_of_the_model_and_of_its_backward(tmp_path: Path) -> None:
    model, x = blocks()
    found = snapshot(lambda: model(x).square().mean().backward())
    text = repr(found)
    assert "cli_models.py:15 aten::gelu" in text
    assert "cli_models.py:15 AddmmBackward0" in text
    assert repr(saved_and_read(found, tmp_path / "run.pickle")) == text


def test_plan_and_run_lie_side_by_side() -> None:
    model, x = blocks()
    plan = fxrecals.plan(model, x, "40%")
    small = fxrecals.rewrite(model, x, plan)
    small(x).square().mean().backward()
    model.zero_grad()
    foreseen, run = snapshot(plan), snapshot(lambda: small(x).square().mean().backward())
    assert 0.7 * foreseen.peak_bytes("cpu") < run.peak_bytes("cpu") <= foreseen.peak_bytes("cpu")


@pytest.mark.parametrize("source", ["plan", "run", "dump"])
def test_torch_s_own_viewer_reads_what_is_written(source: str, tmp_path: Path, dump: Path) -> None:
    model, x = blocks()
    made = {
        "plan": lambda: snapshot(fxrecals.plan(model, x, "40%")),
        "run": lambda: snapshot(lambda: model(x).mean().backward()),
        "dump": lambda: snapshot(dump),
    }[source]()
    data = pickle.loads(made.save(tmp_path / "made.pickle").read_bytes())
    allocated = sum(event.nbytes > 0 for events in made.traces.values() for event in events)
    assert _memory_viz.trace(data).count(" = MEM[") == allocated
    assert "Active Memory Timeline" in _memory_viz.trace_plot(data)
    assert "total_reserved: 0.0B" in _memory_viz.segsum(data)
    kept = _memory_viz.filter_alloc_free_pairs(data)["device_traces"]
    assert sum(e["action"] == "alloc" for t in kept for e in t) < allocated


# --- the command --------------------------------------------------------------------------------


def test_the_command_prints_who_holds_what(
    dump: Path, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["snapshot", str(dump)]) == 0
    golden("snapshot.txt", capsys.readouterr().out)
    assert main(["snapshot", str(dump), "--json"]) == 0
    text = capsys.readouterr().out
    golden("snapshot.json", text)
    assert json.loads(text)["devices"]["cuda:0"]["peak_bytes"] == 7 * MIB


def test_the_command_refuses_a_file_that_would_run_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(MALICE["eval"](str(tmp_path / "was_run"))))
    assert main(["snapshot", str(path)]) == 1
    assert "is refused: a snapshot does not need builtins.eval" in capsys.readouterr().err
