"""Debian's Chromium, driven by Playwright, for tests of pages."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_START_MS = 90_000


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:
    """Start the browser, or skip the test if there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=list(_FLAGS), timeout=_START_MS
        )
        try:
            yield browser
        finally:
            browser.close()
