"""How fast the rendezvous service forms a large group, and re-forms it when one member is lost.

    python -m benchmarks.rendezvous [--agents 512] [--repeats 5]

The service runs in a process of its own, as in the supervisor and the controller, and learns over a pipe who is alive.
The agents are simulated without torch: each sends what a launcher sends, on connections that stay open, from one
process. All times are from the first request (or the loss) to the last agent's response.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web

from benchmarks.figures import Figure, show_figures
from benchmarks.programs import count, parser
from elasticctl.api.status import JobStatus
from elasticctl_controller.rendezvous.service import RendezvousService

KEY, JOB_UID, TOKEN = "default/job", "job-uid", "benchmark"
QUIET_S = 0.3
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Round:
    """One round: seconds to form and to re-form, and the service's highest resident memory so far, in MiB."""

    form_s: float
    reform_s: float
    memory_mib: float


def serve(commands: Connection) -> None:
    """The service's process: send its port, then execute what comes over the pipe until that is closed."""
    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(_serve(commands))


async def _serve(commands: Connection) -> None:
    service = RendezvousService(token_for=lambda uid, number: TOKEN, on_change=lambda key: None)
    runner = web.AppRunner(service.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    commands.send(runner.addresses[0][1])
    while True:
        verb, uids = await asyncio.to_thread(commands.recv)
        at = time.monotonic()
        if verb == "lose":
            service.report_loss(KEY, uids[0])
        else:
            service.drop(KEY)
            alive = {uid: f"worker-{uid}" for uid in uids}
            service.set_group(KEY, status=JobStatus(), job_uid=JOB_UID, alive=alive, minimum=1)
        commands.send(at)


class SimulatedAgent:
    """Sends what a launcher's rendezvous handler sends."""

    def __init__(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        self._session, self._url = session, url
        self.uid = f"uid-{number}"
        self._me = {"uid": self.uid, "name": f"worker-{number}", "host": "127.0.0.1", "port": 1024 + number, "slots": 1}

    async def join(self, generation: int) -> bytes:
        """Join the next generation; return the world as the service sent it, once it has formed."""
        while True:
            answer = await self._call("join", json.dumps({**self._me, "generation": generation}).encode())
            if b'"formed"' in answer[:40]:
                return answer

    async def watch(self, world: bytes) -> None:
        """Return once the group of `world` has ended."""
        data = json.dumps({"uid": self.uid, "generation": json.loads(world)["generation"], "draining": False}).encode()
        while b'"stale"' not in await self._call("watch", data):
            continue

    async def _call(self, verb: str, body: bytes) -> bytes:
        async with self._session.post(f"{self._url}/{verb}", data=body) as response:
            answer = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{verb}: HTTP {response.status}: {answer[:200]!r}")
        return answer


async def one_round(agents: Sequence[SimulatedAgent], commands: Connection, service: psutil.Process) -> Round:
    """Form a group of all agents, lose the first, and let the others form a group again."""
    await _command(commands, "alive", [agent.uid for agent in agents])
    began = time.monotonic()
    worlds = await asyncio.gather(*(agent.join(0) for agent in agents))
    form_s = time.monotonic() - began
    _check(worlds, len(agents))
    watches = [asyncio.create_task(_again(agent, worlds[0])) for agent in agents[1:]]
    await _until_quiet(service)  # all of them are waiting now
    lost_at = await _command(commands, "lose", [agents[0].uid])
    again = await asyncio.gather(*watches)
    reform_s = time.monotonic() - lost_at
    _check(again, len(agents) - 1)
    return Round(form_s, reform_s, _highest_memory_mib(service))


async def _again(agent: SimulatedAgent, world: bytes) -> bytes:
    await agent.watch(world)
    return await agent.join(1)


async def _command(commands: Connection, verb: str, uids: list[str]) -> float:
    """Send a message to the service's process; return when that was done, on the clock that both share."""
    commands.send((verb, uids))
    at: float = await asyncio.to_thread(commands.recv)
    return at


def _check(worlds: Sequence[bytes], members: int) -> None:
    if len(set(worlds)) != 1 or len(json.loads(worlds[0])["members"]) != members:
        raise RuntimeError(f"{len(set(worlds))} different worlds were formed, of {members} members expected")


async def _until_quiet(process: psutil.Process) -> None:
    """Wait until the process has used no processor time for a while, so it has nothing left to do."""
    deadline = time.monotonic() + LIMIT_S
    used_s, since = -1.0, time.monotonic()
    while time.monotonic() < since + QUIET_S:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the service was still busy after {LIMIT_S:.0f} s")
        await asyncio.sleep(0.05)
        times = process.cpu_times()
        if times.user + times.system != used_s:
            used_s, since = times.user + times.system, time.monotonic()


def _highest_memory_mib(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return float(process.memory_info().rss) / 2**20
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


async def measure(size: int, repeats: int, commands: Connection, service: psutil.Process) -> list[Round]:
    """Run `repeats` rounds with `size` agents."""
    port = commands.recv()
    url = f"http://127.0.0.1:{port}/v1/jobs/{KEY}"
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        agents = [SimulatedAgent(session, url, number) for number in range(size)]
        return [await one_round(agents, commands, service) for _ in range(repeats)]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a goal was missed."""
    options = parser(__doc__)
    options.add_argument("--agents", type=count, default=512, metavar="N")
    options.add_argument("--repeats", type=count, default=5, metavar="N")
    args = options.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    commands, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        found = asyncio.run(measure(args.agents, args.repeats, commands, psutil.Process(process.pid)))
    finally:
        process.kill()
        process.join()
    figures = [
        Figure(f"{args.agents} agents form a group", "s", [one.form_s for one in found], 1.0),
        Figure(f"{args.agents - 1} form again after a loss", "s", [one.reform_s for one in found], 0.3),
        Figure("the service's highest resident memory", "MiB", [one.memory_mib for one in found], 100.0),
    ]
    return int(not show_figures("rendezvous", figures))


if __name__ == "__main__":
    sys.exit(main())
