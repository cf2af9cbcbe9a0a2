"""The elastic agent of one worker: join, run the ranks, and join again whenever the group changes.

It is a torch.distributed.elastic agent with a loop of its own. torch's loop polls for news, spends a local restart
budget on a peer's loss and stops ranks with a fixed 30 s; this one waits on events and asks the service for a verdict.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State

from elasticctl_launcher import failure
from elasticctl_launcher.folders import PrivateFolder, create_shared_memory_folder
from elasticctl_launcher.rank_processes import Rank, RankGroup, RankStarter, torchrun_environment
from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.rendezvous import ServiceRendezvous
from elasticctl_launcher.service_client import POLL_TIMEOUT_S, ServiceAway, ServiceError, ServiceRefused
from elasticctl_launcher.worker_output import WorkerOutput

FAIL_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 300.0
LEAVE_TIMEOUT_S = 2.0
WARM_TIMEOUT_S = 60.0
DRAIN_S = 10.0
"""How long ranks get to agree on a step and commit it, once they are told to."""
SPARE_DELAY_S = 2.0
"""Spares are made ready once a generation has run this long: not while its own start needs the processor."""

log = logging.getLogger(__name__)


class End(Enum):
    """Why a generation is over for this worker, or shall be (DRAIN)."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STALE = "stale"
    TERMINATED = "terminated"
    DRAIN = "drain"
    DRAINED = "drained"
    HUNG = "hung"


class Terminated(Exception):
    """SIGTERM arrived while the agent was waiting for a group."""


@dataclass(frozen=True, slots=True)
class _Event:
    """`rank` is set for FAILED (of whatever exit code), `number` is the global rank of DRAINED."""

    kind: End
    rank: Rank | None = None
    generation: int = 0
    number: int = -1


@dataclass(frozen=True, slots=True)
class Limits:
    """`stop_grace_s`: what ranks get between SIGTERM and SIGKILL. `hang_timeout_s`: how long ranks may go without a
    sign of life, once they have given one, before the group re-forms; 0: for ever.
    """

    stop_grace_s: float = 5.0
    hang_timeout_s: float = 0.0


class Agent(SimpleElasticAgent):
    """Runs what `starter` starts once per local rank, generation after generation; see the module's docstring.

    What ranks print goes to `output`. `outcome` is None or the Failure to be left in the pod's termination message
    once `run` has returned.
    """

    def __init__(
        self, spec: WorkerSpec, handler: ServiceRendezvous, starter: RankStarter, output: WorkerOutput, limits: Limits
    ) -> None:
        super().__init__(spec)
        self._handler, self._starter, self._limits = handler, starter, limits
        self._folder = PrivateFolder(Path(tempfile.gettempdir()))
        self._local_tier = create_shared_memory_folder()
        self._inbox = RankReports(handler.client, self._folder.path, self._on_drained)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._group = RankGroup(starter, output.rank_says, self._on_rank_exit)
        self._joining = False
        self._terminated = False
        self._notice = ""
        self._drained: set[int] = set()
        self._drain_until: float | None = None
        self.outcome: failure.WorkerFailure | None = None
        handler.on_stale = lambda generation: self._events.put(_Event(End.STALE, generation=generation))
        handler.on_drain = lambda generation: self._events.put(_Event(End.DRAIN, generation=generation))

    def terminate(self) -> None:
        """Handle SIGTERM (from the signal handler): leave the group in order, and end."""
        if self._terminated:
            return
        self._terminated = True
        self._events.put(_Event(End.TERMINATED))
        if self._joining:
            raise Terminated

    def give_notice(self, reason: str) -> None:
        """Have this worker leave as SIGTERM would, and say why; from any thread, to a process that handles SIGTERM.

        It goes through the signal, because nothing else interrupts the main thread while it waits for a group.
        """
        self._notice = reason
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Send what ranks have reported last, stop listening to them, and remove what they left on this machine."""
        self._inbox.close()
        self._folder.close()
        if self._local_tier is not None:
            self._local_tier.close()

    def _invoke_run(self, role: str = "default") -> RunResult:
        while True:
            try:
                self._joining = True
                if self._terminated:
                    raise Terminated
                if self._handler.generation == 0:
                    # A newcomer that is not ready would have the others wait for its imports instead of training.
                    self._starter.wait_until_warm(WARM_TIMEOUT_S)
                self._initialize_workers(self._worker_group)
                self._joining = False
            except Terminated:
                self._joining = False
                return self._depart()
            self._drained.clear()
            self._drain_until = None
            result = self._conclude(self._next_event())
            if result is not None:
                return result

    def _next_event(self) -> _Event:
        """Wait for what ends this generation here: a failed rank, all ranks done or drained, or that it is over."""
        while True:
            patience_s = SPARE_DELAY_S if self._drain_until is None else self._drain_until - time.monotonic()
            try:
                event = self._events.get(timeout=max(0.0, patience_s))
            except queue.Empty:
                if self._drain_until is not None:
                    return _Event(End.DRAINED)  # out of patience: the last checkpoint has to do
                self._starter.warm(self._worker_group.spec.local_world_size)
                if self._is_hung():
                    return _Event(End.HUNG)
                continue
            ended = self._weigh(event)
            if ended is not None:
                return ended

    def _weigh(self, event: _Event) -> _Event | None:
        """What an event means for the running generation; None: it goes on."""
        if event.kind is End.TERMINATED:
            return None if self._drain(self._notice or "SIGTERM") else event
        if event.kind is End.FAILED:
            if event.rank not in self._group.ranks or event.rank is None:
                return None  # of an older generation
            if event.rank.code != 0:
                return event
            return _Event(End.SUCCEEDED) if all(rank.code == 0 for rank in self._group.ranks) else None
        if event.generation != self._handler.generation:
            return None
        if event.kind is End.DRAIN:
            return None if self._drain("") else event
        if event.kind is End.DRAINED:
            self._drained.add(event.number)
            return event if self._drained >= {rank.rank for rank in self._group.ranks} else None
        return event

    def _drain(self, notice: str) -> bool:
        """Have the ranks agree on a step, commit it and stop; False when the script cannot, not using our library.

        With a `notice`, this worker is the reason, and the service tells the others.
        """
        if self._inbox.heard < self._handler.generation:
            return False
        if self._drain_until is None:
            self._drain_until = time.monotonic() + DRAIN_S
            Path(self._inbox.notice_file(self._handler.generation)).touch()
        if notice:
            self._tell("notice", notice)
        return True

    def _conclude(self, event: _Event) -> RunResult | None:
        """Act on the end of a generation; None: go on with the next."""
        if event.kind is End.SUCCEEDED:
            self._inbox.flush()
            self._finish()
            return RunResult(State.SUCCEEDED, return_values={rank.rank: None for rank in self._group.ranks})
        if self._terminated:
            return self._depart()
        if event.kind is End.FAILED and event.rank is not None:
            return self._conclude_failure(self._judged(event.rank))
        suspended = self._group.suspended()
        if suspended:
            return self._conclude_failure(failure.WorkerFailure.of_suspended(*self._place(), suspended[0]))
        if event.kind is End.HUNG:
            return self._conclude_failure(failure.WorkerFailure.of_hang(*self._place(), self._limits.hang_timeout_s))
        log.info("generation %d is over (%s)", self._handler.generation, self._handler.stale_reason)
        self._stop_workers(self._worker_group)
        return None

    def _depart(self) -> RunResult:
        """Leave the group for good: this worker was told to go."""
        self._tell("leave", self._notice or "SIGTERM")
        self._stop_workers(self._worker_group)
        self.outcome = failure.WorkerFailure.of_signal("preempted", *self._place(), self._notice)
        return RunResult(State.FAILED)

    def _place(self) -> tuple[str, int]:
        return self._handler.identity.name, self._handler.generation

    def _judged(self, rank: Rank) -> failure.WorkerFailure:
        error_file = self._inbox.error_file(self._handler.generation, rank.rank)
        return failure.WorkerFailure.of_rank(*self._place(), rank, error_file)

    def _is_hung(self) -> bool:
        limit_s = self._limits.hang_timeout_s
        heard = self._inbox.heard >= self._handler.generation
        return heard and 0 < limit_s < self._inbox.silence_s()

    def _conclude_failure(self, found: failure.WorkerFailure) -> RunResult | None:
        """Leave for good when this worker is to blame, else go on with the next generation."""
        log.warning("generation %d: %s", found.generation, found.describe())
        self._inbox.flush()
        of_its_own = found.verdict in (failure.KILLED, failure.STUCK)
        verdict = "exit" if of_its_own else self._verdict(found)
        if verdict == "exit" and not of_its_own:
            found = replace(found, verdict=failure.APPLICATION)  # blamed, whatever it looked like from here
        self._stop_workers(self._worker_group)
        if verdict == "rejoin":
            return None
        self._tell("leave", found.describe())
        self.outcome = found
        return RunResult(State.FAILED)

    def _verdict(self, found: failure.WorkerFailure) -> str:
        """Ask the service whose fault it was; without an answer, one's own."""
        body = {
            "uid": self._handler.identity.uid,
            "generation": self._handler.generation,
            "of_peers": found.verdict == failure.COLLATERAL,
        }
        deadline = time.monotonic() + FAIL_TIMEOUT_S
        try:
            return str(self._handler.client.call_until("fail", body, deadline).get("verdict", "exit"))
        except ServiceError as error:
            log.warning("no verdict: %s", error)
            return "exit"

    def _finish(self) -> None:
        """Wait until the ranks of every member have succeeded, so that no member's store goes while others need it."""
        body = {"uid": self._handler.identity.uid, "generation": self._handler.generation}
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if self._handler.client.call("finish", body, POLL_TIMEOUT_S).get("state") == "done":
                    return
            except ServiceAway:
                time.sleep(1.0)
            except ServiceRefused:
                return  # the job is over

    def _tell(self, verb: str, reason: str) -> None:
        """Say `notice` or `leave`; without an answer, the service finds out by itself."""
        try:
            body = {"uid": self._handler.identity.uid, "reason": reason[:200]}
            self._handler.client.call(verb, body, LEAVE_TIMEOUT_S)
        except ServiceError as error:
            log.warning("%s: %s", verb, error)

    def _on_drained(self, generation: int, number: int) -> None:
        self._events.put(_Event(End.DRAINED, generation=generation, number=number))

    def _on_rank_exit(self, rank: Rank) -> None:
        self._events.put(_Event(End.FAILED, rank, self._handler.generation))

    # What torch's agent asks of an implementation.

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks from the world alone: no exchange over the store is needed."""
        slots = [member["slots"] for member in self._handler.members]
        base, total = sum(slots[:group_rank]), sum(slots)
        return [
            Worker(local, global_rank=base + local, role_rank=base + local, world_size=total, role_world_size=total)
            for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler, inbox = self._handler, self._inbox
        generation = handler.generation
        ours = {
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "ELASTICCTL_GENERATION": str(generation),
            "ELASTICCTL_AGENT_SOCKET": inbox.path,
            "ELASTICCTL_NOTICE_FILE": inbox.notice_file(generation),
        }
        if self._local_tier is not None:
            ours["ELASTICCTL_LOCAL_TIER"] = str(self._local_tier.path)
        environments = [
            (
                worker.global_rank,
                self._starter.environment
                | torchrun_environment(worker_group, worker)
                | {**ours, "TORCHELASTIC_ERROR_FILE": inbox.error_file(generation, worker.global_rank)},
            )
            for worker in worker_group.workers
        ]
        self._group.start(environments)
        return {entry.local_rank: entry.process.pid for entry in self._group.ranks}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        drained = bool(self._drained) and self._drained >= {rank.rank for rank in self._group.ranks}
        self._group.stop(0.0 if drained else self._limits.stop_grace_s)
        self._inbox.flush()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Not used by this agent's loop, which is told of every exit; kept true for torch's callers."""
        codes = [entry.code for entry in self._group.ranks]
        if any(codes):
            return RunResult(State.FAILED)
        return RunResult(State.SUCCEEDED if codes and None not in codes else State.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._group.stop(self._limits.stop_grace_s)
        self._starter.close()
        self._handler.shutdown()
