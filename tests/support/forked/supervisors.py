"""Supervisors of local clusters, forked from a server that has imported what they import: half a second for each.

python -m tests.support.forked.supervisors      forks one for each line of JSON; ends with its standard input

What such a supervisor starts is started as ever; see `cluster` for one whose processes are all forked.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from elasticctl.cluster.local import supervisor_client as client
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl_protocol import variables
from tests.support.forked.launcher import take_output
from tests.support.forked.processes import Program, become
from tests.support.train.ranks import ROOM, ROOM_BYTES

ROOT = Path(__file__).parents[3]


class Supervisors:
    """The server, which is started with the first supervisor; to be closed."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def start(self, paths: LocalPaths) -> None:
        """What `elasticctl.cluster.local.supervisor_client.start_supervisor` does."""
        environ = {name: value for name, value in os.environ.items() if name != variables.POD_UID}
        environ[variables.HOME] = str(paths.state.parent)
        paths.supervisor_log.touch(0o600)
        server = self._server = self._server or _start_server()
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps([environ, str(paths.supervisor_log)]), file=server.stdin, flush=True)
        assert server.stdout.readline() == "0\n", paths.supervisor_log.read_text()

    def close(self) -> None:
        """End the server, not its supervisors."""
        if self._server is not None:
            self._server.communicate()


def _start_server() -> subprocess.Popen[str]:
    """It belongs to no test's local cluster, and has room for the environment of the programs that its forks become."""
    environ = {name: value for name, value in os.environ.items() if name != variables.HOME}
    argv = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**environ, ROOM: " " * ROOM_BYTES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    """Serve until standard input ends; print the exit code of each command that starts a supervisor."""
    import elasticctl_controller.local.supervisor  # noqa: F401 (for the forks)

    gc.freeze()
    for line in sys.stdin:
        environ, log = json.loads(line)
        process = os.fork()
        if process == 0:
            _supervise(environ, Path(log))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _supervise(environ: Mapping[str, str], log: Path) -> None:
    from elasticctl_controller.local.supervisor import main as supervise

    os.setsid()
    take_output(log)
    os.chdir("/")
    argv = ["--detach"]
    become(Program([sys.executable, "-m", client.SUPERVISOR, *argv], environ, lambda: supervise(argv)))


if __name__ == "__main__":
    main()
