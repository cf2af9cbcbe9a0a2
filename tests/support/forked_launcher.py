"""The launcher as a process that is forked from a server which has imported torch: it starts in milliseconds.

Where it `forks`, its spares are forked from it: ranks have imported torch then. What comes after `exec` is as ever.
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from elasticctl_launcher import bootstrap
from tests.support.train.ranks import CONTEXT


class ForkedLauncher:
    """What `elasticctl-launch ARGV...` would be, with those methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], folder: Path, log: BinaryIO, *, forks: bool
    ) -> None:
        arguments = (list(argv), dict(environ), folder, Path(log.name), forks)
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


def _launch(argv: list[str], environ: dict[str, str], folder: Path, log: Path, forks: bool) -> None:
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
    if forks:
        subprocess.Popen = ForkedSpare  # type: ignore[misc, assignment]
    sys.exit(main(argv))


class ForkedSpare(subprocess.Popen[bytes]):
    """A spare as a fork of this process; whatever else is started is started as ever."""

    def _execute_child(self, *arguments: Any) -> None:
        plain = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(plain).bind(*arguments).arguments
        command = given["args"]
        if bootstrap.__file__ not in command or "spare" not in command:
            plain(*arguments)
            return
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            argv = command[command.index(bootstrap.__file__) :]
            _become_spare(argv, given["env"], (given["p2cread"], given["c2pwrite"]), given["pass_fds"])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _become_spare(
    argv: list[str], environ: Mapping[str, str], streams: tuple[int, int], pass_fds: Iterable[int]
) -> NoReturn:
    """Be what `python ARGV...` would be, never to return: below are the launcher's frames."""
    code: object = 1
    try:
        os.setsid()
        for number, stream in enumerate((*streams, streams[1])):
            os.dup2(stream, number)
        first = 3
        for kept in (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, kept)
            first = kept + 1
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environ)
        sys.stdin, sys.argv = os.fdopen(0), argv
        sys.path.insert(0, os.path.dirname(argv[0]))
        import torch

        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))  # which torch reads when it is imported
        bootstrap.main()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
