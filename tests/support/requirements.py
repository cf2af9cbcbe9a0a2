"""What a test needs besides git, make, Python and a POSIX shell: `@pytest.mark.needs("mpirun")`.

Where it is missing, the test is skipped, and the summary says in one line how many tests are missing it and how to get
it. Nothing else may skip a test in CI: `make test-skipped` runs what the last `make test` has skipped, on a machine
where everything is installed, and fails for each test that is skipped there and is not in `EXCEPTIONS`.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

import pytest

PROGRAMS: Mapping[str, str] = {
    "bash": "apt-get install bash",
    "buildah": "apt-get install buildah",
    "debootstrap": "apt-get install debootstrap",
    "docker-registry": "apt-get install docker-registry",
    "fake-gcs-server": "put fake-gcs-server 1.5x on the PATH",
    "fish": "apt-get install fish",
    "mpirun": "apt-get install openmpi-bin",
    "promtool": "apt-get install prometheus",
    "toxiproxy-server": "put toxiproxy 2.x on the PATH",
    "versitygw": "put versitygw 1.x on the PATH",
    "zsh": "apt-get install zsh",
}
"""Each program, and how to install it."""
FIXTURES: Mapping[str, str] = {
    "filler": "tmpfs", "network": "toxiproxy-server", "small_disk": "tmpfs", "versity": "versitygw",
}  # fmt: skip
"""What a test needs that takes the fixture."""
CACHE = "elasticctl/skipped"
EXCEPTIONS: Mapping[str, str] = {
    "tests/on_cluster/test_deadlines.py::*": "plays recorded traces for 20 minutes, by hand: $ELASTICCTL_TEST_TRACES",
    "tests/on_cluster/test_gangs.py::*": "Kubernetes serves no gangs by default: the gate GenericWorkload is closed",
}
"""Node ids, as patterns, of what may be skipped where everything is installed, and why."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options, for CI."""
    group = parser.getgroup("requirements")
    group.addoption("--skipped", action="store_true", help="run only the tests that the last run has skipped")
    group.addoption("--no-skips", action="store_true", help="a test that is skipped fails, unless it is an exception")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; in the process that hears of all tests, keep count."""
    config.addinivalue_line("markers", "needs(name): a program or right, see tests/support/requirements.py")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config), "skips")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs something that is missing here."""
    if config.getoption("skipped"):
        _keep_only(config, items, frozenset(config.cache.get(CACHE, [])) if config.cache else frozenset())
    for item in items:
        taken = FIXTURES.keys() & set(getattr(item, "fixturenames", ()))
        for name in {mark.args[0] for mark in item.iter_markers("needs")} | {FIXTURES[fixture] for fixture in taken}:
            if not is_here(name):
                item.add_marker(pytest.mark.skip(reason=f"needs {name}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI's run of all that was skipped, a test that is skipped once more fails."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.config.getoption("no_skips") and not _may_be_skipped(item.nodeid):
        report.outcome, report.longrepr = "failed", f"skipped, and not an exception: {report.longrepr}"
    return report


@functools.cache
def is_here(name: str) -> bool:
    """Whether this program is on the PATH, or we have this right. Raises KeyError for a name that is in no table."""
    return shutil.which(name) is not None if name in PROGRAMS else RIGHTS[name][0]()


def _is_linux() -> bool:
    return sys.platform == "linux"


def _unpacks_safely() -> bool:
    return hasattr(tarfile, "data_filter")  # what `elasticctl cp` and the runs of other releases need


def _is_root() -> bool:
    return os.geteuid() == 0


def _mounts_tmpfs() -> bool:
    if not _is_root() or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return mounted.returncode == 0


RIGHTS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "linux": (_is_linux, "run the tests on Linux"),
    "python 3.11.4": (_unpacks_safely, "make clean test PYTHON=python3.12"),
    "root": (_is_root, "run the tests as root"),
    "tmpfs": (_mounts_tmpfs, "run the tests as root, where file systems can be mounted"),
}
"""What else is needed: whether it is here, and how to have it."""


class Skips:
    """The tests that were skipped, for the summary and for the next run with `--skipped`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that is skipped, and what it needs."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skipped[report.nodeid] = reason.removeprefix("Skipped: ")
        elif report.when == "call":
            self._skipped.pop(report.nodeid, None)  # its first process had died before it began

    def pytest_sessionfinish(self) -> None:
        """Keep the list; a run of what was skipped leaves it as it is, so that it can be repeated."""
        if self._config.cache is not None and not self._config.getoption("skipped"):
            self._config.cache.set(CACHE, sorted(self._skipped))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each program or right that was missing."""
        for reason, count in sorted(Counter(self._skipped.values()).items()):
            name = reason.removeprefix("needs ")
            advice = RIGHTS[name][1] if name in RIGHTS else PROGRAMS.get(name)
            tests = "1 test" if count == 1 else f"{count} tests"
            terminalreporter.write_line(f"skipped {tests}: {reason}" + (f" ({advice})" if advice else ""))


def _may_be_skipped(nodeid: str) -> bool:
    return any(fnmatchcase(nodeid, pattern) for pattern in EXCEPTIONS)


def _keep_only(config: pytest.Config, items: list[pytest.Item], wanted: frozenset[str]) -> None:
    left = [item for item in items if item.nodeid not in wanted]
    items[:] = [item for item in items if item.nodeid in wanted]
    config.hook.pytest_deselected(items=left)
