"""Access to local workers keeps the contract, and their folder is where a command runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import NotFoundError
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.worker_access import LocalWorkerAccess
from tests.support.local_worker import UID, local_worker
from tests.support.worker_access_contract import RunningWorker, WorkerAccessContract


class TestLocalWorkerAccess(WorkerAccessContract):
    @pytest.fixture
    def running(self, tmp_path: Path) -> Iterator[RunningWorker]:
        paths = LocalPaths(tmp_path / "state", tmp_path / "sockets")
        with local_worker(paths, tmp_path, MARK="here it is") as worker:
            yield RunningWorker(LocalWorkerAccess(paths), worker, tmp_path)

    def test_a_command_runs_in_the_workers_folder(self, running: RunningWorker) -> None:
        assert running.run("sh", "-c", 'pwd; echo "$PWD"') == (0, f"{running.folder}\n{running.folder}\n".encode(), b"")

    def test_a_pid_that_belongs_to_another_process_by_now(self, running: RunningWorker) -> None:
        (running.folder / "state" / "pods" / UID / "started.json").write_text(json.dumps({"pid": os.getpid()}))
        with pytest.raises(NotFoundError, match="shell-worker-0 has ended"):
            running.run("true")
