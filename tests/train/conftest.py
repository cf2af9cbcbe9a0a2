"""The launcher's end of the socket, for tests in which a rank gets notice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.train.launcher import Launcher


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with tempfile.TemporaryDirectory(prefix="el-") as folder:
        made = Launcher(Path(folder))
        yield made
        made.socket.close()
