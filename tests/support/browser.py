"""Chromium for tests of pages; tests are skipped if it or playwright is not installed."""

import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium; apt-get install chromium"
)


@contextmanager
def launched() -> Iterator[Any]:
    """Return a browser of playwright."""
    if CHROMIUM is None:
        pytest.skip("no Chromium; apt-get install chromium")
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ModuleNotFoundError:
        pytest.skip("pages are tested with playwright, which is not installed")
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
