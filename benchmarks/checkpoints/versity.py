"""versitygw, a real S3 server, on a folder in shared memory, with the same interface as the sink."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import processes
from benchmarks.checkpoints.base import BUCKET

PROGRAM = "versitygw"
KEY = "benchmark"
_SHARED_MEMORY = Path("/dev/shm")
_START_S = 10.0


class Versity:
    """The server's process. Raises TimeoutError if it does not start."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=_SHARED_MEMORY))
        (self._folder / BUCKET).mkdir()
        port = processes.free_port()
        command = ["setpriv", "--pdeathsig", "KILL", PROGRAM, "--port", f"127.0.0.1:{port}", "posix", str(self._folder)]
        keys = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": KEY}
        self._process = subprocess.Popen(
            command, env=os.environ | keys, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.endpoint = f"http://127.0.0.1:{port}"
        try:
            self._wait(port)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Versity:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, verb: str, *, prefix: str = "") -> dict[str, float]:
        """Send `stats` or `drop`; return the server's processor time."""
        if verb == "drop":
            for path in (self._folder / prefix).iterdir():
                if not path.name.startswith("."):  # its folders for unfinished uploads
                    shutil.rmtree(path)
        times = psutil.Process(self._process.pid).cpu_times()
        return {"cpuS": times.user + times.system}

    def _wait(self, port: int) -> None:
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{PROGRAM} did not start within {_START_S:.0f} s")
