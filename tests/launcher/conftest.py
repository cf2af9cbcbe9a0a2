"""Launchers in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launcher_lab import Lab
    from tests.support.scripted_rendezvous import Launch


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Runs the launcher: `launch(handler, *command, options=())` returns its exit code."""
    from tests.support.scripted_rendezvous import launching  # imports torch

    with launching(tmp_path, monkeypatch) as run:
        yield run


@pytest.fixture
def pair(lab: Lab) -> Lab:
    """Two workers whose ranks train."""
    lab.add("a-0", "a-1")
    lab.start_script("a-0")
    lab.start_script("a-1")
    lab.until(lambda: "rank 0 of 2" in lab.output("a-0") and "rank 1 of 2" in lab.output("a-1"))
    return lab
