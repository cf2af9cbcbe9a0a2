"""One temporary folder for a whole run, and a process that ends whatever the run leaves.

Every process of a run finds the folder in $TMPDIR, so all that is started below a test can be told from what belongs to
others, a second run included. When the run is over, was interrupted or is killed, its guardian ends what is left of
these processes and removes the folder:

python -m tests.support.cleanup FOLDER PID      is that process, for the run PID; it waits until its standard input ends
"""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticctl.cluster.local.paths import HOME_VARIABLE
from elasticctl_launcher.workspace import SHARED_MEMORY, delete_orphaned_folders

PREFIX = "et-"
"""Short, as sockets lie below."""
TRACKERS_END_S = 10.0
ROUNDS = 100
"""A process that is not gone after so many rounds of a second is held by the kernel, and the run fails."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the folder; pytest-xdist's workers inherit it."""
    if hasattr(config, "workerinput"):
        return
    folder = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
    tempfile.tempdir = None
    os.environ[HOME_VARIABLE] = f"{folder}/home"  # for tests without a home of their own, never the user's
    if config.option.basetemp is None:
        config.option.basetemp = f"{folder}/pytest"
    argv = [sys.executable, "-m", __name__, folder, str(os.getpid())]
    root = Path(__file__).parents[2]
    guardian = subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, start_new_session=True)
    config.add_cleanup(lambda: _end_run(guardian))


def _end_run(guardian: subprocess.Popen[bytes]) -> None:
    """Wait until everything is gone. What multiprocessing removes as Python exits is removed before its folder is."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    guardian.communicate()  # on a busy machine, it takes its time
    if guardian.returncode:
        raise subprocess.CalledProcessError(guardian.returncode, guardian.args)


def memory_folder() -> Path:
    """A new folder in shared memory, if there is any, which is removed with the run's."""
    above = SHARED_MEMORY / Path(os.environ["TMPDIR"]).name if SHARED_MEMORY.is_dir() else None
    if above:
        above.mkdir(mode=0o711, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=above))


def processes_of_run(folder: str) -> Iterator[psutil.Process]:
    """Each process whose environment names the folder."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(folder in text for text in process.environ().values()):
                yield process


def clean_up(folder: str, spared: set[int]) -> None:
    """End the processes, until there are none, and remove the folder and what launchers have left elsewhere.

    The resource trackers of multiprocessing end by themselves once the others have, and remove their semaphores.
    """
    given_up_at = time.monotonic() + TRACKERS_END_S
    for _ in range(ROUNDS):
        if not (left := [process for process in processes_of_run(folder) if process.pid not in spared]):
            break
        for process in left:
            with suppress(psutil.Error):
                if time.monotonic() > given_up_at or "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        psutil.wait_procs(left, timeout=1.0)
    folders = folder, str(SHARED_MEMORY / Path(folder).name)
    for mount in psutil.disk_partitions(all=True):
        if mount.mountpoint.startswith(folders):
            subprocess.run(["umount", "--lazy", mount.mountpoint], check=False)
    for made in folders:
        shutil.rmtree(made, ignore_errors=True)
    for parent in (SHARED_MEMORY, Path("/tmp")):
        delete_orphaned_folders(parent)
    if left:
        sys.exit(f"still there after SIGKILL: {left}")


def main() -> None:
    """Wait until the run is over."""
    folder, run = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.read()
    clean_up(folder, {os.getpid(), run})


if __name__ == "__main__":
    main()
