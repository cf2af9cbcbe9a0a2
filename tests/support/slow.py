"""The marker `slow`, which `make quick` leaves out: tests that start processes, serve, connect or import torch.

A test is marked by the fixtures that it takes and by what its module imports, so it cannot be forgotten; what only
takes long is marked by hand. A test without the marker that starts a process or opens a connection all the same fails.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.selection import only_quick

FIXTURES = {
    "home",
    "start",
    "terminal",
    "chromium",
    "server_ports",
    "api",
    "control",
    "launcher",
    "lab",
    "network",
    "launch",
    "crd",
}
"""They start processes or servers, and so do fixtures that build on them."""
MODULES = ("subprocess", "multiprocessing", "pexpect", "socket", "aiohttp", "http.client", "torch", "benchmarks")
HELPERS = (
    "fakeapi", "servers", "webhooks", "ports", "train", "metadata_server", "cluster_contract", "control", "kube",
    "scripted_rendezvous", "local_worker", "storage_soak",
)  # fmt: skip
_IMPORTS = re.compile(
    rf"^(import|from) (({'|'.join(MODULES)})\b|tests\.support(\.| import )({'|'.join(HELPERS)})\b)", re.M
)
EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind", "socket.connect"}
"""Python's audit events of what a quick test does not do."""

_seen: list[str] | None = None
"""Those of the test that runs, if it is a quick one."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what has no quick test, when only those are wanted: torch alone takes seconds."""
    wanted = not only_quick(config) or collection_path.suffix != ".py" or not _imports_slow_things(collection_path)
    return None if wanted else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what takes such a fixture, or lies in a module that imports what starts or serves something."""
    if only_quick(config) and "torch" in sys.modules:
        raise pytest.UsageError("a module of quick tests imports torch, by way of another. FIX: import it by name, too")
    for item in items:
        if FIXTURES.intersection(getattr(item, "fixturenames", ())) or _imports_slow_things(item.path):
            item.add_marker(pytest.mark.slow)


@functools.cache
def _imports_slow_things(path: Path) -> bool:
    return bool(_IMPORTS.search(path.read_text("utf-8")))


@pytest.fixture(autouse=True)
def _quick_or_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test without the marker that turns out to need it."""
    global _seen
    if request.node.get_closest_marker("slow"):
        yield
        return
    _seen = []
    yield
    seen, _seen = _seen, None
    assert not seen, f"this test is not quick: {', '.join(seen)}. FIX: mark it with @pytest.mark.slow"


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and event in EVENTS and threading.current_thread() is threading.main_thread():
        _seen.append(event)


sys.addaudithook(_audit)
