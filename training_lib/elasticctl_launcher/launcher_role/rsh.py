"""`ssh` for the launcher program: runs a command on another worker of this job.

    python -m elasticctl_launcher.launcher_role.rsh [ssh's options] WORKER COMMAND...

As with ssh, the words of the command are joined and passed to the worker's shell. Input, both outputs and the exit code
are those of the command, and signals are forwarded. ssh's options are accepted and ignored, except -n. Exit code 255
means that the worker could not be reached, or that the connection broke.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from elasticctl_launcher.launcher_role.commands import CHUNK_BYTES, FORWARDED, FrameKind, WorkerConnection
from elasticctl_launcher.launcher_role.hosts import address_of
from elasticctl_launcher.peers.copy_protocol import PeerError, read_peer_key
from elasticctl_protocol import variables

WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"
"""ssh's options that take a value."""
CONNECT_S = 10.0
UNREACHABLE = 255


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, or 255."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags, words = _without_options(words)
    host, rest = (words[0], words[1:]) if words else ("", [])
    more, rest = _without_options(rest)  # ssh accepts options after the host, too
    if not host or not rest:
        return _give_up("a worker and a command are needed. FIX: ssh WORKER COMMAND")
    try:
        address = address_of(Path(os.environ[variables.HOSTFILE]), host.rpartition("@")[2])
        key = read_peer_key()
    except KeyError as error:
        return _give_up(f"{error.args[0]} is not set. FIX: run it in a worker of a job with --launcher")
    except PeerError as error:
        return _give_up(str(error))
    except OSError as error:
        return _give_up(f"{error.filename}: {error.strerror}")
    if address is None:
        return _give_up(f"{host} is not a worker of this job at present")
    try:
        with socket.create_connection(address, CONNECT_S) as connected:
            line = WorkerConnection(connected, key, calls=True)
            line.send(FrameKind.RUN, os.fsencode(" ".join(rest)))
            line.stay_open()
            return _talk(line, reads_input="n" not in flags + more)
    except (OSError, PeerError) as error:
        return _give_up(f"{host}: {error}")


def _talk(line: WorkerConnection, *, reads_input: bool) -> int:
    def pass_on(number: int, _: object) -> None:
        _in_thread(lambda: line.send(FrameKind.SIGNAL, str(number).encode()))  # another thread may be blocked in a send

    for number in FORWARDED:
        signal.signal(number, pass_on)
    _in_thread(lambda: _send_input(line) if reads_input else line.send(FrameKind.INPUT))
    while True:
        kind, data = line.receive()
        if kind is FrameKind.EXIT:
            return int(data)
        _write(1 if kind is FrameKind.OUTPUT else 2, data)


def _send_input(line: WorkerConnection) -> None:
    while data := os.read(0, CHUNK_BYTES):
        line.send(FrameKind.INPUT, data)
    line.send(FrameKind.INPUT)


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader has gone
        while data:
            data = data[os.write(descriptor, data) :]


def _in_thread(do: Callable[[], None]) -> None:
    def run() -> None:
        with contextlib.suppress(OSError):  # the main thread notices that the other end has gone
            do()

    threading.Thread(target=run, daemon=True).start()


def _without_options(words: Sequence[str]) -> tuple[str, list[str]]:
    """The letters of the leading options, and the words that follow them."""
    left, letters = list(words), ""
    while left and left[0].startswith("-") and len(left[0]) > 1:
        word = left.pop(0)
        if word == "--":
            break
        at = next((at for at, letter in enumerate(word) if at and letter in WITH_VALUE), None)
        letters += word[1:at]
        if at == len(word) - 1 and left:
            left.pop(0)
    return letters, left


def _give_up(why: str) -> int:
    sys.stderr.write(f"elasticctl: {why}\n")
    return UNREACHABLE


if __name__ == "__main__":
    sys.exit(main())
