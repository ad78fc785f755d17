import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a first call into torch takes seconds, and a shared machine is slow at times.
# Derandomized: a failure belongs to a change, not to the day.
# `pytest --hypothesis-profile=search` looks further.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is printed into tests/golden"
    )
    parser.addoption("--zoo", metavar="FILE", help="a file of models, with ZOO and build(name)")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden, or writes it there."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} is what was printed before; --update-golden"

    return check
