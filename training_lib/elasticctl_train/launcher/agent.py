"""The elastic agent of one worker: join, run the ranks, and join again whenever the group changes.

It is a torch.distributed.elastic agent with a loop of its own. torch's loop polls for news, spends a local restart
budget on a peer's loss and stops ranks with a fixed 30 s; this one waits on events and asks the service for a verdict.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elasticctl_train.launcher import failure
from elasticctl_train.launcher.inbox import Inbox
from elasticctl_train.launcher.ranks import Rank, RankGroup
from elasticctl_train.launcher.rendezvous import ServiceRendezvous
from elasticctl_train.launcher.service import POLL_TIMEOUT_S, ServiceAway, ServiceError, ServiceRefused
from elasticctl_train.launcher.spares import Starter

FAIL_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 300.0
LEAVE_TIMEOUT_S = 2.0
SPARE_DELAY_S = 2.0
"""Spares are made ready once a generation has run this long: not while its own start needs the processor."""

log = logging.getLogger(__name__)


class End(Enum):
    """Why a generation is over for this worker."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STALE = "stale"
    TERMINATED = "terminated"


class Terminated(Exception):
    """SIGTERM arrived while the agent was waiting."""


@dataclass(frozen=True, slots=True)
class _Event:
    kind: End
    rank: Rank | None = None
    generation: int = 0


class Agent(SimpleElasticAgent):
    """Runs what `starter` starts once per local rank, generation after generation; see the module's docstring.

    `stop_grace_s` is how long ranks get between SIGTERM and SIGKILL. `outcome` is None or the Failure to be left in the
    pod's termination message once `run` has returned.
    """

    def __init__(
        self, spec: WorkerSpec, handler: ServiceRendezvous, starter: Starter, inbox: Inbox, stop_grace_s: float
    ) -> None:
        super().__init__(spec)
        self._handler, self._starter, self._inbox, self._stop_grace_s = handler, starter, inbox, stop_grace_s
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._group = RankGroup(starter, self._on_rank_exit)
        self._waiting = False
        self._terminated = False
        self.outcome: failure.Failure | None = None
        handler.on_stale = lambda: self._events.put(  # type: ignore[method-assign]
            _Event(End.STALE, generation=handler.generation)
        )

    def terminate(self) -> None:
        """Handle SIGTERM (from the signal handler): leave the group and end."""
        self._terminated = True
        if self._waiting:
            self._waiting = False
            raise Terminated

    def _invoke_run(self, role: str = "default") -> RunResult:
        while True:
            try:
                self._interruptible(lambda: self._initialize_workers(self._worker_group))
                event = self._interruptible(self._next_event)
            except Terminated:
                event = _Event(End.TERMINATED)
            result = self._conclude(event)
            if result is not None:
                return result

    def _interruptible(self, wait: Any) -> Any:
        """Call `wait`, during which a SIGTERM raises Terminated; one that came before raises at once."""
        self._waiting = True
        try:
            if self._terminated:
                raise Terminated
            return wait()
        finally:
            self._waiting = False

    def _next_event(self) -> _Event:
        """Wait for what ends this generation here: a failed rank, all ranks done, or word of a new generation."""
        while True:
            try:
                event = self._events.get(timeout=SPARE_DELAY_S)
            except queue.Empty:
                self._starter.warm(self._worker_group.spec.local_world_size)
                continue
            if event.kind is End.STALE and event.generation == self._handler.generation:
                return event
            if event.rank is not None and event.rank in self._group.ranks:
                if event.rank.code != 0:
                    return event
                if all(rank.code == 0 for rank in self._group.ranks):
                    return _Event(End.SUCCEEDED)

    def _conclude(self, event: _Event) -> RunResult | None:
        """Act on the end of a generation; None: go on with the next."""
        if event.kind is End.SUCCEEDED:
            self._inbox.flush()
            self._finish()
            return RunResult(State.SUCCEEDED, return_values={rank.rank: None for rank in self._group.ranks})
        if event.kind is End.FAILED and event.rank is not None:
            return self._conclude_failure(event.rank)
        if event.kind is End.TERMINATED:
            self._leave("SIGTERM")
            self._stop_workers(self._worker_group)
            self.outcome = failure.Failure.of_signal("preempted", self._handler.identity.name, self._handler.generation)
            return RunResult(State.FAILED)
        log.info("generation %d is over (%s): stopping its ranks", self._handler.generation, self._handler.stale_reason)
        self._stop_workers(self._worker_group)
        return None

    def _conclude_failure(self, rank: Rank) -> RunResult | None:
        found = failure.Failure.of_rank(self._handler.identity.name, self._handler.generation, rank)
        log.warning("rank %d ended: %s", rank.rank, found.describe())
        self._inbox.flush()
        verdict = "exit" if found.verdict == failure.KILLED else self._verdict(found)
        self._stop_workers(self._worker_group)
        if verdict == "rejoin":
            log.info("a peer of generation %d was lost: joining the next", self._handler.generation)
            return None
        self._leave(found.describe())
        self.outcome = found
        detail = ProcessFailure(rank.local_rank, rank.process.pid, rank.code or 1, "")
        return RunResult(State.FAILED, failures={rank.rank: detail})

    def _verdict(self, found: failure.Failure) -> str:
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

    def _leave(self, reason: str) -> None:
        body = {"uid": self._handler.identity.uid, "reason": reason[:200]}
        try:
            self._handler.client.call("leave", body, LEAVE_TIMEOUT_S)
        except ServiceError as error:
            log.warning("could not take leave: %s", error)

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
        environments = [(w.global_rank, self._environment(worker_group, w)) for w in worker_group.workers]
        self._group.start(environments)
        return {entry.local_rank: entry.process.pid for entry in self._group.ranks}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._group.stop(self._stop_grace_s)
        self._inbox.flush()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Not used by this agent's loop, which is told of every exit; kept true for torch's callers."""
        codes = [entry.code for entry in self._group.ranks]
        if any(codes):
            return RunResult(State.FAILED)
        return RunResult(State.SUCCEEDED if codes and None not in codes else State.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._group.stop(self._stop_grace_s)
        self._starter.close()
        self._handler.shutdown()

    def _environment(self, group: WorkerGroup, worker: Worker) -> Mapping[str, str]:
        """torchrun's variables, and ours (docs/architecture.md)."""
        handler = self._handler
        generation = str(handler.generation)
        return {
            **self._starter.environment,
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": group.spec.role,
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": generation,
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": self._inbox.error_file(worker.global_rank),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "ELASTICCTL_GENERATION": generation,
            "ELASTICCTL_AGENT_SOCKET": self._inbox.path,
        }
