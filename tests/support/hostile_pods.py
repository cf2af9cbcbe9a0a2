"""How much longer a job's join takes while others attack the rendezvous service.

    python -m tests.support.hostile_pods [--joins 200] [ATTACK...]

The service listens on a port in a process of its own, as in the controller; the attack comes from another process and
another address. Unknown clients have no token, the rogue job has a valid one. Each join is measured by its duration,
and by the processor time that the service uses meanwhile, which is what it does before it gets to the join. The latter
is meaningful on a busy machine, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from elasticctl.api.status import JobStatus
from elasticctl_controller.rendezvous.listener import Listener
from elasticctl_controller.rendezvous.service import RendezvousService
from elasticctl_controller.rendezvous.sockets import raise_file_limit

ROGUE, ROGUE_UID, TOKEN = "default/rogue", "rogue-uid", "benchmark"
AIM_S = 0.1
SPEAKERS = 64
SILENT = 1500
MEMBERS = 10_000
_PAUSE_S = 0.005
_WARMUP_S = 0.5


@dataclass(frozen=True, slots=True)
class Joins:
    """The duration of joins in seconds, at the median and at the 99th percentile.

    `work_s` is how much of a join's duration the service worked at most, whatever else the machine does.
    """

    p50_s: float
    p99_s: float
    work_s: float
    failed: int


Speak = Callable[[int], Awaitable[None]]


def serve(commands: Connection) -> None:
    """The service's process: send its port, then create the jobs whose names it receives."""
    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(_serve(commands))


async def _serve(commands: Connection) -> None:
    raise_file_limit()
    service = RendezvousService(token_for=lambda uid, number: TOKEN, on_change=lambda key: None)
    listener, listening = Listener(service.app(), service), socket.create_server(("127.0.0.1", 0), backlog=4096)
    await listener.open(listening)
    alive = {f"u{number}": f"w{number}" for number in range(8)}
    service.set_group(ROGUE, status=JobStatus(), job_uid=ROGUE_UID, alive=alive, minimum=1)
    commands.send(listening.getsockname()[1])
    while True:
        for name in await asyncio.to_thread(commands.recv):
            service.set_group(f"default/{name}", status=JobStatus(), job_uid=name, alive={"u": "w"}, minimum=1)
        commands.send(None)


def head(job: str, verb: str, size: int, token: str = TOKEN, more: str = "") -> bytes:
    """Return the head of a request."""
    return (
        f"POST /v1/jobs/{job}/{verb} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {size}\r\n{more}\r\n"
    ).encode()


def _world() -> bytes:
    members = [
        {"uid": f"{number:036}", "name": f"rogue-worker-{number}", "host": "10.0.0.1", "port": 29500, "slots": 8}
        for number in range(MEMBERS)
    ]
    return json.dumps({"uid": members[0]["uid"], "generation": 1, "members": members}).encode()


def _again_and_again(request: bytes) -> Speak:
    """Send the same request again as soon as it is answered or refused."""

    async def speak(port: int) -> None:
        reader, writer = await _open(port)
        try:
            while True:
                writer.write(request)
                await writer.drain()
                answer = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        finally:
            writer.transport.abort()

    return speak


def _without_end(beginning: bytes, more: bytes, pause_s: float = 0.0) -> Speak:
    """Begin a request and never complete it."""

    async def speak(port: int) -> None:
        _, writer = await _open(port)
        try:
            writer.write(beginning)
            while True:
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(pause_s)
                if writer.transport.is_closing():
                    return
        finally:
            writer.transport.abort()

    return speak


def _attacks() -> dict[str, tuple[int, Speak]]:
    """Return name -> (number of connections at a time, what is sent on each)."""
    beat, world, bomb = b'{"uid": "u0"}', _world(), gzip.compress(bytes(10 << 20))
    many = b"[" + b"{}," * ((2 << 20) // 3 - 2) + b"{}]"
    return {
        "unknown clients": (SPEAKERS, _again_and_again(head(ROGUE, "join", 2, "wrong") + b"{}")),
        "unknown jobs": (SPEAKERS, _again_and_again(head("default/none", "join", 2, "wrong") + b"{}")),
        "endless bodies": (SPEAKERS, _without_end(head(ROGUE, "join", 1 << 40, "wrong"), bytes(1 << 16))),
        "unknown clients' bombs": (
            SPEAKERS,
            _again_and_again(head(ROGUE, "join", len(bomb), "wrong", "Content-Encoding: gzip\r\n") + bomb),
        ),
        "half heads": (SILENT, _without_end(b"POST /v1/jobs/a/b/join HTTP/1.1\r\n", b"X", 1.0)),
        "nothing": (SILENT, _without_end(b"", b"", 1.0)),
        "garbage": (SPEAKERS, _again_and_again(b"\x00\xff" * 4096)),
        "rogue flood": (SPEAKERS, _again_and_again(head(ROGUE, "heartbeat", len(beat)) + beat)),
        "rogue crowd": (SILENT, _again_and_again(head(ROGUE, "heartbeat", len(beat)) + beat)),
        "rogue worlds": (SPEAKERS, _again_and_again(head(ROGUE, "watch", len(world)) + world)),
        "rogue objects": (SPEAKERS, _again_and_again(head(ROGUE, "report", len(many)) + many)),
        "rogue bombs": (
            SPEAKERS,
            _again_and_again(head(ROGUE, "join", len(bomb), more="Content-Encoding: gzip\r\n") + bomb),
        ),
        "rogue slow bodies": (SPEAKERS, _without_end(head(ROGUE, "watch", 1 << 20), b" ", 0.5)),
    }


NAMES = tuple(_attacks())


async def _open(port: int, source: str = "127.0.0.2") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))


def attack(name: str, port: int) -> None:
    """The attackers' process."""
    raise_file_limit()
    count, speak = _attacks()[name]

    async def persist() -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
                await speak(port)
            await asyncio.sleep(0)

    async def everyone() -> None:
        await asyncio.gather(*(persist() for _ in range(count)))

    with suppress(KeyboardInterrupt):
        asyncio.run(everyone())


def join(port: int, name: str) -> bool:
    """Join a job of one worker on a new connection; return whether it formed."""
    me = json.dumps({"uid": "u", "name": "w", "host": "h", "port": 1, "slots": 1, "generation": 0}).encode()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20, source_address=("127.0.0.1", 0)) as connected:
            connected.sendall(head(f"default/{name}", "join", len(me), more="Connection: close\r\n") + me)
            answer = b""
            while chunk := connected.recv(65536):
                answer += chunk
    except OSError:
        return False
    return b'"formed"' in answer


def measure(name: str, joins: int, commands: Connection, port: int, pid: int) -> Joins:
    """Join repeatedly during the attack; an empty name means none."""
    jobs = [f"job-{name.replace(' ', '-')}-{number}".replace("'", "") for number in range(joins)]
    commands.send(jobs)
    commands.recv()
    context = multiprocessing.get_context("spawn")
    attacker = context.Process(target=attack, args=(name, port), daemon=True) if name else None
    if attacker is not None:
        attacker.start()
        _until_busy(pid)
    took, worked, failed = [], [], 0
    try:
        for job in jobs:
            began, before_s = time.monotonic(), work_s(pid)
            failed += not join(port, job)
            took.append(time.monotonic() - began)
            worked.append(min(took[-1], work_s(pid) - before_s))  # it has threads, which may work at the same time
            time.sleep(_PAUSE_S)
    finally:
        if attacker is not None:
            attacker.kill()
            attacker.join()
    return Joins(_share(took, 0.5), _share(took, 0.99), _share(worked, 0.99), failed)


def work_s(pid: int) -> float:
    """Return the processor time, in seconds, that all threads of a process have used (Linux)."""
    total_ns = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            total_ns += int(file.read_text().split()[0])
    return total_ns / 1e9


def _until_busy(pid: int) -> None:
    """Wait until the service has worked on the attack."""
    began_s, deadline = work_s(pid), time.monotonic() + 30
    while work_s(pid) - began_s < 0.05 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(_WARMUP_S)


def _share(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def run(names: Sequence[str], joins: int) -> dict[str, Joins]:
    """Measure the attacks, one after the other, and a time without attack before them under the name ""."""
    context = multiprocessing.get_context("spawn")
    commands, theirs = context.Pipe()
    service = context.Process(target=serve, args=(theirs,), daemon=True)
    service.start()
    theirs.close()
    try:
        port = commands.recv()
        return {name: measure(name, joins, commands, port, service.pid or 0) for name in ("", *names)}
    finally:
        service.kill()
        service.join()


def main(argv: list[str] | None = None) -> int:
    """Measure the attacks; return 1 if one of them delays joins for too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", choices=[*NAMES, []], metavar="ATTACK", help=", ".join(NAMES))
    parser.add_argument("--joins", type=int, default=200, metavar="N")
    args = parser.parse_args(argv)
    found = run(args.attacks or NAMES, args.joins)
    calm = found[""]
    for name, joins in found.items():
        print(
            f"{name or 'calm':18} p50 {1e3 * joins.p50_s:6.1f} ms, p99 {1e3 * joins.p99_s:6.1f} ms, "
            f"of the service's time {1e3 * joins.work_s:6.1f} ms, {joins.failed} failed"
        )
    return int(any(joins.failed or joins.p99_s > calm.p99_s + AIM_S for joins in found.values()))


if __name__ == "__main__":
    sys.exit(main())
