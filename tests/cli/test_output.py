"""Data and messages next to each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elasticctl.cli.framework.output import emit
from elasticctl.terminal import say


def test_in_one_file_they_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = tmp_path / "both"
    with both.open("a") as stdout, both.open("a") as stderr:  # with buffers, as in a pipe
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        emit("a table")
        say("what it adds up to")
        emit("another table")
    assert both.read_text() == "a table\nwhat it adds up to\nanother table\n"
