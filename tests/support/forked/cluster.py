"""The local cluster with all its processes forked from a server that has imported torch.

The supervisor forks shims, a shim its launcher, and a launcher its ranks: each is the child of the one that starts it,
as ever, and takes a hundredth of a second of a processor instead of seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elasticctl.cluster.local import supervisor_client as client
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl_protocol import variables
from tests.support.forked.launcher import take_output
from tests.support.forked.processes import ForkingPopen, Program, become
from tests.support.train.ranks import CONTEXT, start_server

PATIENCE_S = 240.0
"""The server may have to import torch first, on a machine that is busy."""


def start_supervisor(paths: LocalPaths) -> None:
    """What `elasticctl.cluster.local.supervisor_client.start_supervisor` does."""
    environ = {name: value for name, value in os.environ.items() if name != variables.POD_UID}
    environ[variables.HOME] = str(paths.state.parent)
    paths.supervisor_log.touch(0o600)
    start_server()
    process = CONTEXT.Process(target=_supervise, args=(environ, paths.supervisor_log))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0, paths.supervisor_log.read_text()


def _supervise(environ: dict[str, str], log: Path) -> None:
    from elasticctl_controller.local.supervisor import main

    os.setsid()
    take_output(log)
    os.chdir("/")
    subprocess.Popen = ForkingPopen  # type: ignore[misc, assignment]
    argv = ["--detach"]
    become(Program([sys.executable, "-m", client.SUPERVISOR, *argv], environ, lambda: main(argv)))
