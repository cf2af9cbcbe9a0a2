"""A small API server for one test of the controller's side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.controller.kube.control import ControlApi


@pytest.fixture
def control() -> Iterator[ControlApi]:
    """An API server on loopback that a controller can work against, empty."""
    api = ControlApi()
    yield api
    api.close()
