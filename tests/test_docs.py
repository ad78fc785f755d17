"""What the documentation shows is run, and what it says is printed is printed."""

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<out>.*?)^```$)?", re.M | re.S
)
"""Python, and right behind it in a text block, if there is one, what it prints."""

GOLDEN = re.compile(r"^<!-- golden: (?P<name>\S+) -->\n```text\n(?P<out>.*?)^```$", re.M | re.S)
"""What a page shows of the command line, which `test_cli.py` compares with what is printed."""

LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]*)(#[^)]*)?\)")

SMALLER = {"n_layer=6": "n_layer=3"}
"""What is replaced before a page is run, so that the tests stay quick: the model of the README."""

NOT_RUN = "# not run: "
"""How a block begins that the tests leave out; the reason follows."""


@dataclass(frozen=True)
class Block:
    """Python of a page: its text, the line before it, and what it prints if the page says so."""

    code: str
    line: int
    printed: str | None


def _blocks(page: Path) -> list[Block]:
    text = page.read_text()
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return [
        Block(found["code"], text.count("\n", 0, found.start("code")), found["out"])
        for found in BLOCK.finditer(text)
        if not found["code"].startswith(NOT_RUN)
    ]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=_name)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(f"page_{page.stem}".replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks it up
    for block in _blocks(page):
        # Errors then name the line of the page.
        program = compile("\n" * block.line + block.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("default")  # a library's advice is no fault of the page
            exec(program, module.__dict__)
        if block.printed is not None:
            assert printed.getvalue() == block.printed, f"{_name(page)}, line {block.line}"


def test_the_page_of_the_command_shows_what_it_prints() -> None:
    shown = list(GOLDEN.finditer((ROOT / "docs" / "cli.md").read_text()))
    assert len(shown) >= 5
    for found in shown:
        assert found["out"] == (ROOT / "tests" / "golden" / found["name"]).read_text()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = [match[1] for match in LINK.finditer(page.read_text()) if match[1]]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    named = {(index.parent / match[1]).resolve() for match in LINK.finditer(index.read_text())}
    pages = {page.resolve() for page in PAGES if page.parent != ROOT and page != index}
    assert pages - named == set()
