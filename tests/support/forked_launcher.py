"""The launcher as a process that is forked from a server which has imported torch: it starts in milliseconds."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

from tests.support.train.ranks import CONTEXT


class ForkedLauncher:
    """What `elasticctl-launch ARGV...` would be, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], folder: Path, log: BinaryIO) -> None:
        arguments = (list(argv), dict(environ), folder, Path(log.name))
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
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _launch(argv: list[str], environ: dict[str, str], folder: Path, log: Path) -> None:
    """Run the launcher in this process, which nobody else has used."""
    from elasticctl_launcher.main import main

    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # the server's
    sys.exit(main(argv))
