"""Where a test of the command line starts a local cluster itself, its supervisor is forked."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forks(forked_supervisor: None) -> None:
    """For all tests here."""
