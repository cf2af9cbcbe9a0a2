"""Fixtures that every part shares: a home for one test's local cluster, and patience without sleeps."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticctl.api.errors import ElasticctlError
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl.cluster.local.supervisor_client import shut_down
from elasticctl.settings.contexts import templates_folder
from elasticctl.templates import DEFAULT, SUFFIX, find_template
from elasticctl_launcher.bootstrap import imports_that_stay
from elasticctl_protocol import variables
from tests.support.jobs import light_template
from tests.support.processes import processes_of
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.forked.supervisors import Supervisors

# Else each process that a test starts compiles our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# As in an activated environment: Debian has no program called `python`.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# Started in the background, a process has SIGINT ignored, and so would all it starts: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.support.broken_network",
    "tests.support.cleanup",
    "tests.support.cli",
    "tests.support.clouds",
    "tests.support.control",
    "tests.support.kube",
    "tests.support.launcher_lab",
    "tests.support.ordering",
    "tests.support.randomness",
    "tests.support.requirements",
    "tests.support.slow",
    "tests.support.watching",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and all that they import are no garbage: looking for some takes seconds of each process."""
    with imports_that_stay():
        return (yield)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for ELASTICCTL_HOME, with a short path (sockets go there): what is started in it must end with it."""
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    monkeypatch.setenv(variables.HOME, str(folder))
    paths = local_paths()
    try:
        yield folder
    finally:
        try:
            shut_down(paths, keep_jobs=False, say=print)
        except ElasticctlError as e:  # a test that broke the store on purpose has left nothing running either
            print(f"could not shut down: {e}")
        left = processes_of(folder)
        for process in left:
            process.kill()
        log = paths.supervisor_log.read_text() if paths.supervisor_log.exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes survived the local cluster: {left}"
    assert "Traceback" not in log, log


@pytest.fixture
def light_spares(home: Path) -> None:
    """Have `submit` render a template whose spares do not import torch: see tests/support/jobs.py."""
    folder = templates_folder()
    folder.mkdir(parents=True)
    (folder / f"{DEFAULT}{SUFFIX}").write_text(light_template().text)


@pytest.fixture
def idle_jobs(home: Path) -> None:
    """Have `submit` make suspended jobs: for tests of what is sent, and not of what runs."""
    folder = templates_folder()
    folder.mkdir(parents=True)
    text = find_template(DEFAULT, folder).text
    assert "spec:\n  minReplicas" in text
    idle = text.replace("spec:\n  minReplicas", "spec:\n  suspend: true\n  minReplicas", 1)
    (folder / f"{DEFAULT}{SUFFIX}").write_text(idle)


@pytest.fixture(scope="session")
def supervisors() -> Iterator[Supervisors]:
    """What forks supervisors, once it is asked to."""
    from tests.support.forked.supervisors import Supervisors

    found = Supervisors()
    yield found
    found.close()


@pytest.fixture
def forked_supervisor(supervisors: Supervisors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the supervisor of a local cluster forked, if this very process starts it, and nothing else.

    For tests of what is asked of a local cluster. Those of how it starts and ends do without.
    """
    monkeypatch.setattr("elasticctl.cluster.local.supervisor_client.start_supervisor", supervisors.start)


@pytest.fixture
def forked_workers(home: Path, forked_supervisor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what this test starts on the local cluster forked. Its supervisor must be started by this very process.

    For tests of what becomes of a job that trains. Those of how processes start, end and are found do without.
    """
    from tests.support.forked.cluster import start_supervisor

    monkeypatch.setattr("elasticctl.cluster.local.supervisor_client.start_supervisor", start_supervisor)


@pytest.fixture
def local_cluster(home: Path) -> LocalCluster:
    """An embedded cluster of its own; the supervisor starts on first use."""
    return LocalCluster(local_paths())


@pytest.fixture
def wait_for() -> Callable[..., object]:
    """`wait_for(condition)`: see `wait_until`."""
    return wait_until
