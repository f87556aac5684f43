"""Chromium for the tests of the page: without a window where that is installed, which takes half of the processor."""

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, expect, sync_playwright

PATIENCE_MS = 120_000
"""No promise: a browser on a machine that is taken away for most of the time needs long for what takes it no time."""
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium, else the one that playwright brought, and close it in the end."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        opened = playwright.chromium.launch(executable_path=found, args=arguments, timeout=PATIENCE_MS)
        yield opened
        opened.close()
