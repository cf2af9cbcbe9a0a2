"""A run of tests that is interrupted or killed leaves no process and no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes import has_ended
from tests.support.waiting import wait_until

MESSY = """
import multiprocessing, os, signal, subprocess, sys, tempfile, time
from pathlib import Path

def test_that_leaves_things_behind():
    folder = tempfile.mkdtemp(prefix="left-")
    (Path("/dev/shm") / Path(os.environ["TMPDIR"]).name).mkdir()
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    daemon = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
    daemon.stdout.readline()
    tracked = multiprocessing.get_context("forkserver").Lock()
    semaphore = Path("/dev/shm/sem." + tracked._semlock.name.removeprefix("/"))
    assert semaphore.exists()
    Path(os.environ["NOTE"]).write_text(f"{daemon.pid} {os.environ['TMPDIR']} {folder} {semaphore} \\n")
    time.sleep(600)
"""


@pytest.mark.parametrize(("workers", "number"), [("2", signal.SIGINT), ("0", signal.SIGKILL)])
def test_nothing_is_left(tmp_path: Path, workers: str, number: signal.Signals) -> None:
    (tmp_path / "test_messy.py").write_text(MESSY)
    (tmp_path / "pytest.ini").touch()
    note = tmp_path / "note"
    argv = [sys.executable, "-m", "pytest", "-p", "tests.support.cleanup", "-n", workers, str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    run = subprocess.Popen(
        argv, cwd=Path(__file__).parents[1], env={**environ, "NOTE": str(note)}, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
    daemon, *folders = note.read_text().split()
    processes = psutil.Process(run.pid).children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as Ctrl-C does
        run.wait()
    else:
        run.kill()
        run.wait()
        psutil.wait_procs(processes, timeout=60)
    assert has_ended(int(daemon))
    assert all(has_ended(process) for process in processes)
    left = [*folders, f"/dev/shm/{Path(folders[0]).name}"]
    assert not [path for path in left if Path(path).exists()]
