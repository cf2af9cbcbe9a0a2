"""Where a test of the command line starts a local cluster itself, its supervisor is forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.settings.contexts import templates_folder
from elasticctl.templates import DEFAULT, SUFFIX, find_template


@pytest.fixture(autouse=True)
def _forks(forked_supervisor: None) -> None:
    """For all tests here."""


@pytest.fixture
def idle_jobs(home: Path) -> None:
    """Have `submit` make suspended jobs: for tests of what is sent, and not of what runs."""
    folder = templates_folder()
    folder.mkdir(parents=True)
    text = find_template(DEFAULT, folder).text
    assert "spec:\n  minReplicas" in text
    idle = text.replace("spec:\n  minReplicas", "spec:\n  suspend: true\n  minReplicas", 1)
    (folder / f"{DEFAULT}{SUFFIX}").write_text(idle)
