"""The launcher as a process that is forked from a server which has imported torch: it starts in milliseconds.

Where it `forks`, its spares are forked from it: ranks have imported torch then. What comes after `exec` is as ever.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

from tests.support.forked.processes import LAUNCHER, ForkingPopen, Program, become, launch
from tests.support.train.ranks import CONTEXT, start_server


class ForkedLauncher:
    """What `elasticctl-launch ARGV...` would be, with those methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], folder: Path, log: BinaryIO, *, forks: bool
    ) -> None:
        arguments = (list(argv), dict(environ), folder, Path(log.name), forks)
        start_server()
        self._process: BaseProcess = CONTEXT.Process(target=_launch, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since: it is the server that waits for it
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _launch(argv: list[str], environ: dict[str, str], folder: Path, log: Path, forks: bool) -> None:
    """Run the launcher in this process, which has run nothing else."""
    take_output(log)
    os.chdir(folder)
    if forks:
        subprocess.Popen = ForkingPopen  # type: ignore[misc, assignment]
    become(Program([LAUNCHER, *argv], environ, lambda: launch(argv)))


def take_output(log: Path) -> None:
    """Have this process print to the end of a file, and read nothing."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate((nothing, output, output)):
        os.dup2(stream, number)
