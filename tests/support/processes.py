"""The processes of a local cluster, found by its home."""

from __future__ import annotations

from pathlib import Path

import psutil

from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.supervisor_client import supervisor_info
from elasticctl_protocol import variables
from tests.support.waiting import wait_until


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process that was started for the local cluster at `home`, wherever it is in the process tree by now."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(variables.HOME) == str(home) or str(home) in " ".join(process.cmdline())
            if mine and process.pid != psutil.Process().pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def has_ended(process: int | psutil.Process) -> bool:
    """Whether this process, or that with this pid, has ended, even if its parent has not noticed."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_supervisor(cluster: LocalCluster) -> None:
    info = supervisor_info(cluster.paths)
    if info is None:
        return
    psutil.Process(info.pid).kill()
    wait_until(lambda: has_ended(info.pid))
