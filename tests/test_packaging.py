"""What is installed from a wheel is whole: the page's files are in it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PAGE = """
from fxrecals.ir import Graph, Op, Phase, Value
from fxrecals.plans import Plan
from fxrecals.schedule import Schedule
import fxrecals
assert fxrecals.__file__.startswith({folder!r})
op = Op("sin", "aten.sin", (), ("a",), Phase.FORWARD)
graph = Graph((op,), {{"a": Value("a", 8, "a")}}, outputs=())
print(len(Plan(graph, Schedule(("sin",), ()), 100, floor_bytes=8).to_html()))
"""


def test_a_wheel_makes_pages(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    folder = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(folder)
    # What is installed must be found before the working tree.
    program = f"import sys; sys.path.insert(0, {str(folder)!r})" + PAGE.format(folder=str(folder))
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert int(made.stdout) > 10_000
