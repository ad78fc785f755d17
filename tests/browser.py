"""A headless browser for the tests of the page, where there is one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser_path() -> str | None:
    """Where the browser of this machine is."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def opened() -> Iterator[Any]:
    """A `playwright` browser; skips the test, with the reason, where none can be started."""
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        # Chromium's sandbox does not start for root, as in a container.
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
