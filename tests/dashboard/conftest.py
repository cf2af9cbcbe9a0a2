"""Headless Chromium, driven by Playwright: Debian's, or the one that $CHROMIUM names. It fails where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.dashboard.process import Dashboard, Serve
from tests.support.dashboard.visitor import CHROMIUM, FLAGS, Visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests of a module; as long as it is there, no other event loop can run."""
    from playwright.sync_api import sync_playwright  # for these tests only: the others go without

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visitor(chromium: Browser) -> Iterator[Visitor]:
    """Opens pages; one that complains on its console fails the test."""
    with Visitor(chromium) as visitor:
        yield visitor
    assert visitor.complaints == []


@pytest.fixture
def serve(home: Path) -> Iterator[Serve]:
    """`serve("--port", "0")`: the dashboard as a process, as it is typed."""
    started: list[Dashboard] = []

    def begin(*args: str) -> Dashboard:
        started.append(Dashboard(*args))
        return started[-1]

    yield begin
    for process in started:
        if process.process.returncode is None:
            process.end()
