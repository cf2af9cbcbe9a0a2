"""Run the ranks of one worker, and restart them whenever the group of workers changes.

`Agent` is a torch.distributed.elastic agent with a loop of its own, which goes through the states of `states.py`.
torch's loop polls for changes, spends its restart budget on the loss of peers and stops ranks with a fixed grace period
of 30 s. This one waits for events and asks the rendezvous service who is to blame for a failure.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousError

from elasticctl_launcher.failure import APPLICATION, COLLATERAL, KILLED, STUCK, WorkerFailure
from elasticctl_launcher.rank_processes import Rank, RankGroup, RankStarter
from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.rendezvous import (
    POLL_TIMEOUT_S,
    ServiceAway,
    ServiceError,
    ServiceRefused,
    ServiceRendezvous,
)
from elasticctl_launcher.states import FINAL_STATES, LauncherEvent, LauncherState, transition
from elasticctl_launcher.worker_output import WorkerOutput
from elasticctl_launcher.workspace import PrivateFolder, create_shared_memory_folder

FAIL_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 300.0
LEAVE_TIMEOUT_S = 2.0
WARM_TIMEOUT_S = 60.0
DRAIN_S = 10.0
"""How long the ranks have to agree on a step and commit it once they are asked to."""
SPARE_DELAY_S = 2.0
"""Spares are started once a generation has run this long, because its own start needs the processor first."""

log = logging.getLogger(__name__)


class Terminated(Exception):
    """SIGTERM arrived while the agent was joining a group or starting ranks."""


@dataclass(frozen=True, slots=True)
class SigtermReceived:
    """This process got SIGTERM."""


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank ended, with any exit code."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class RankDrained:
    """A rank has committed the step that the ranks agreed on."""

    generation: int
    global_rank: int


@dataclass(frozen=True, slots=True)
class ServiceAnnounced:
    """The rendezvous service says that the group has changed (GENERATION_STALE) or will (DRAIN_REQUESTED)."""

    generation: int
    event: LauncherEvent


Notification = SigtermReceived | RankExited | RankDrained | ServiceAnnounced


@dataclass(frozen=True, slots=True)
class Limits:
    """`stop_grace_s`: the time from SIGTERM to SIGKILL for ranks. `hang_timeout_s`: how long ranks that have reported
    may stay silent before the group re-forms; 0: forever.
    """

    stop_grace_s: float = 5.0
    hang_timeout_s: float = 0.0


class Agent(SimpleElasticAgent):
    """Runs what `starter` starts once per local rank, generation after generation.

    What ranks print goes to `output`. When `run` has returned, `state` is a final state, and `failure` says why it is
    not SUCCEEDED.
    """

    def __init__(
        self, spec: WorkerSpec, handler: ServiceRendezvous, starter: RankStarter, output: WorkerOutput, limits: Limits
    ) -> None:
        super().__init__(spec)
        self._handler, self._starter, self._limits = handler, starter, limits
        self._folder = PrivateFolder(Path(tempfile.gettempdir()))
        self._local_tier = create_shared_memory_folder()
        self._notifications: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        notify = self._notifications.put
        self._reports = RankReports(
            handler.client, self._folder.path, lambda generation, rank: notify(RankDrained(generation, rank))
        )
        self._group = RankGroup(starter, output.print_rank_line, lambda rank: notify(RankExited(rank)))
        handler.on_stale = lambda generation: notify(ServiceAnnounced(generation, LauncherEvent.GENERATION_STALE))
        handler.on_drain = lambda generation: notify(ServiceAnnounced(generation, LauncherEvent.DRAIN_REQUESTED))
        self._got_sigterm = False
        self._sigterm_raises = False
        self._spot_notice = ""
        self._drained: set[int] = set()
        self._drain_deadline: float | None = None
        self.state = LauncherState.JOINING
        self.failure: WorkerFailure | None = None

    def terminate(self) -> None:
        """Handle SIGTERM (from the signal handler): leave the group in order, and end."""
        if self._got_sigterm:
            return
        self._got_sigterm = True
        self._notifications.put(SigtermReceived())
        if self._sigterm_raises:
            raise Terminated

    def give_notice(self, reason: str) -> None:
        """Have this worker leave as SIGTERM would, and say why; from any thread, to a process that handles SIGTERM.

        It goes through the signal, because nothing else interrupts the main thread while it waits for a group.
        """
        self._spot_notice = reason
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Send the ranks' last reports, stop listening for more, and remove the folders of this launcher."""
        self._reports.close()
        self._folder.close()
        if self._local_tier is not None:
            self._local_tier.close()

    # The state machine

    def _invoke_run(self, role: str = "default") -> RunResult:
        enter: Mapping[LauncherState, Callable[[], LauncherEvent | None]] = {
            LauncherState.JOINING: self._join_group,
            LauncherState.STARTING: self._start_ranks,
            LauncherState.RUNNING: self._begin_running,
            LauncherState.DRAINING: self._drain,
            LauncherState.DRAINING_TO_LEAVE: self._drain_to_leave,
            LauncherState.JUDGING: self._judge_failure,
            LauncherState.RESTARTING: self._stop_to_restart,
            LauncherState.FINISHING: self._wait_for_peers_to_finish,
            LauncherState.LEAVING: self._leave,
            LauncherState.FAILING: self._fail,
        }
        while self.state not in FINAL_STATES:
            entered = self.state
            try:
                event = enter[entered]()
                while self.state is entered:
                    self._apply(event or self._wait_for_event())
                    event = None
            except Terminated:
                self._apply(LauncherEvent.SIGTERM)
            except (RendezvousError, OSError) as error:
                self._sigterm_raises = False
                log.error("%s", error)
                self.failure = WorkerFailure(APPLICATION, *self._place(), 1, error=str(error))
                self._apply(LauncherEvent.ERROR)
        if self.state is not LauncherState.SUCCEEDED:
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.SUCCEEDED, return_values={rank.rank: None for rank in self._group.ranks})

    def _apply(self, event: LauncherEvent) -> None:
        """Go to the state that `event` leads to. A SIGTERM that arrived meanwhile counts first."""
        state = self.state
        if self._got_sigterm and state not in (LauncherState.JOINING, LauncherState.STARTING):  # it interrupts those
            state = transition(state, LauncherEvent.SIGTERM)
        self.state = transition(state, event)

    # What each state does when it is entered: it returns the event that ends the state, or None to wait for one.

    def _join_group(self) -> LauncherEvent:
        self._sigterm_raises = True
        if self._got_sigterm:
            return LauncherEvent.SIGTERM
        if self._handler.generation == 0:
            # A newcomer that is not ready would have the others wait for its imports instead of training.
            self._starter.wait_until_warm(WARM_TIMEOUT_S)
        self._rendezvous(self._worker_group)
        self._sigterm_raises = False
        return LauncherEvent.GROUP_FORMED

    def _start_ranks(self) -> LauncherEvent:
        self._sigterm_raises = True
        if self._got_sigterm:
            return LauncherEvent.SIGTERM
        for local_rank, pid in self._start_workers(self._worker_group).items():
            self._worker_group.workers[local_rank].id = pid
        self._worker_group.state = WorkerState.HEALTHY
        self._sigterm_raises = False
        return LauncherEvent.RANKS_STARTED

    def _begin_running(self) -> None:
        self._drained.clear()
        self._drain_deadline = None
        self.failure = None

    def _drain(self) -> LauncherEvent | None:
        return None if self._ask_ranks_to_drain() else self._end_generation(LauncherEvent.CANNOT_DRAIN)

    def _drain_to_leave(self) -> LauncherEvent | None:
        if not self._ask_ranks_to_drain():
            return LauncherEvent.CANNOT_DRAIN
        self._send("notice", self._spot_notice or "SIGTERM")  # the service has the others drain too
        return None

    def _judge_failure(self) -> LauncherEvent:
        failure = self.failure
        if failure is None:
            raise RuntimeError("nothing to judge: no failure was noted")
        log.warning("generation %d: %s", failure.generation, failure.describe())
        self._reports.flush()
        if failure.verdict in (KILLED, STUCK):
            return LauncherEvent.WORKER_BLAMED
        if self._ask_who_is_to_blame(failure) == "rejoin":
            return LauncherEvent.PEER_BLAMED
        self.failure = replace(failure, verdict=APPLICATION)  # the service blames it, whatever it looked like from here
        return LauncherEvent.WORKER_BLAMED

    def _stop_to_restart(self) -> LauncherEvent:
        if self.failure is None:
            log.info("generation %d is over (%s)", self._handler.generation, self._handler.stale_reason)
        self._stop_workers(self._worker_group)
        return LauncherEvent.RANKS_STOPPED

    def _wait_for_peers_to_finish(self) -> LauncherEvent:
        """Wait until the ranks of every member have succeeded: they need each other's stores until then."""
        self._reports.flush()
        body = {"uid": self._handler.identity.uid, "generation": self._handler.generation}
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if self._handler.client.call("finish", body, POLL_TIMEOUT_S).get("state") == "done":
                    break
            except ServiceAway:
                time.sleep(1.0)
            except ServiceRefused:
                break  # the job is over
        return LauncherEvent.GROUP_FINISHED

    def _leave(self) -> LauncherEvent:
        self._send("leave", self._spot_notice or "SIGTERM")
        self._stop_workers(self._worker_group)
        self.failure = WorkerFailure.of_sigterm(*self._place(), self._spot_notice)
        return LauncherEvent.RANKS_STOPPED

    def _fail(self) -> LauncherEvent:
        self._stop_workers(self._worker_group)
        self._send("leave", self.failure.describe() if self.failure else "")
        return LauncherEvent.RANKS_STOPPED

    # What ends a state that waits

    def _wait_for_event(self) -> LauncherEvent:
        """Wait until this generation ends or is about to; start spares and look for hung ranks meanwhile."""
        while True:
            timeout_s = SPARE_DELAY_S if self._drain_deadline is None else self._drain_deadline - time.monotonic()
            try:
                event = self._interpret(self._notifications.get(timeout=max(0.0, timeout_s)))
            except queue.Empty:
                if self._drain_deadline is not None:
                    return self._end_generation(LauncherEvent.DRAIN_TIMED_OUT)  # resumes from the last checkpoint
                self._starter.warm(self._worker_group.spec.local_world_size)
                event = self._end_generation(LauncherEvent.RANKS_HUNG) if self._is_hung() else None
            if event is not None:
                return event

    def _interpret(self, notification: Notification) -> LauncherEvent | None:
        """The event that a notification amounts to; None if it changes nothing or is about an earlier generation."""
        ranks = self._group.ranks
        match notification:
            case SigtermReceived():
                return LauncherEvent.SIGTERM
            case RankExited(rank) if rank in ranks:
                if rank.code != 0:
                    error_file = self._reports.error_file(self._handler.generation, rank.rank)
                    self.failure = WorkerFailure.of_rank(*self._place(), rank, error_file)
                    return LauncherEvent.RANK_FAILED
                return LauncherEvent.ALL_RANKS_SUCCEEDED if all(rank.code == 0 for rank in ranks) else None
            case RankDrained(self._handler.generation, global_rank):
                self._drained.add(global_rank)
                return self._end_generation(LauncherEvent.RANKS_DRAINED) if self._all_drained() else None
            case ServiceAnnounced(self._handler.generation, LauncherEvent.GENERATION_STALE as event):
                return self._end_generation(event)
            case ServiceAnnounced(self._handler.generation, event):
                return event
        return None

    def _end_generation(self, event: LauncherEvent) -> LauncherEvent:
        """`event`, which ends the generation here, or RANK_SUSPENDED if a rank of this worker was holding it up."""
        suspended = self._group.suspended()
        if suspended:
            self.failure = WorkerFailure.of_suspended(*self._place(), suspended[0])
            return LauncherEvent.RANK_SUSPENDED
        if event is LauncherEvent.RANKS_HUNG:
            self.failure = WorkerFailure.of_hang(*self._place(), self._limits.hang_timeout_s)
        return event

    def _is_hung(self) -> bool:
        reported = self._reports.newest_generation >= self._handler.generation
        return reported and 0 < self._limits.hang_timeout_s < self._reports.silence_s()

    def _all_drained(self) -> bool:
        return self._drained >= {rank.rank for rank in self._group.ranks}

    def _ask_ranks_to_drain(self) -> bool:
        """Have the ranks agree on a step, commit it and stop; False if the script does not use the training library."""
        generation = self._handler.generation
        if self._reports.newest_generation < generation:
            return False
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + DRAIN_S
            Path(self._reports.notice_file(generation)).touch()
        return True

    # Talking to the rendezvous service

    def _place(self) -> tuple[str, int]:
        return self._handler.identity.name, self._handler.generation

    def _ask_who_is_to_blame(self, failure: WorkerFailure) -> str:
        """The service's verdict, "rejoin" or "exit"; "exit" if it gives none."""
        body = {
            "uid": self._handler.identity.uid,
            "generation": self._handler.generation,
            "of_peers": failure.verdict == COLLATERAL,
        }
        deadline = time.monotonic() + FAIL_TIMEOUT_S
        try:
            while True:
                answer = self._handler.client.call_until("fail", body, deadline, POLL_TIMEOUT_S)
                if answer.get("verdict") != "pending":
                    return str(answer.get("verdict", "exit"))
        except ServiceError as error:
            log.warning("the rendezvous service gave no verdict: %s", error)
            return "exit"

    def _send(self, verb: str, reason: str) -> None:
        """Send `notice` or `leave`; if that fails, the service finds out by itself."""
        try:
            body = {"uid": self._handler.identity.uid, "reason": reason[:200]}
            self._handler.client.call(verb, body, LEAVE_TIMEOUT_S)
        except ServiceError as error:
            log.warning("%s: %s", verb, error)

    # What torch's agent asks of an implementation

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks from the members alone: no exchange over the store is needed."""
        slots = [member["slots"] for member in self._handler.members]
        base, total = sum(slots[:group_rank]), sum(slots)
        return [
            Worker(local, global_rank=base + local, role_rank=base + local, world_size=total, role_world_size=total)
            for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        reports, generation = self._reports, self._handler.generation
        common = {
            **self._starter.environment,
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "LOCAL_WORLD_SIZE": str(worker_group.spec.local_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "ROLE_NAME": worker_group.spec.role,
            "TORCHELASTIC_MAX_RESTARTS": "0",  # torch makes none
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "TORCHELASTIC_RUN_ID": self._handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ELASTICCTL_GENERATION": str(generation),
            "ELASTICCTL_AGENT_SOCKET": reports.path,
            "ELASTICCTL_NOTICE_FILE": reports.notice_file(generation),
        }
        if self._local_tier is not None:
            common["ELASTICCTL_LOCAL_TIER"] = str(self._local_tier.path)
        environments = [
            (
                worker.global_rank,
                {
                    **common,
                    "RANK": str(worker.global_rank),
                    "LOCAL_RANK": str(worker.local_rank),
                    "ROLE_RANK": str(worker.role_rank),
                    "WORLD_SIZE": str(worker.world_size),
                    "ROLE_WORLD_SIZE": str(worker.role_world_size),
                    "TORCHELASTIC_ERROR_FILE": reports.error_file(generation, worker.global_rank),
                },
            )
            for worker in worker_group.workers
        ]
        self._group.start(environments)
        return {rank.local_rank: rank.process.pid for rank in self._group.ranks}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        has_drained = bool(self._drained) and self._all_drained()
        self._group.stop(0.0 if has_drained else self._limits.stop_grace_s)
        self._reports.flush()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Not used by this agent's loop, which is notified of every exit; kept correct for torch's callers."""
        codes = [rank.code for rank in self._group.ranks]
        if any(codes):
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.SUCCEEDED if codes and None not in codes else WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._group.stop(self._limits.stop_grace_s)
        self._starter.close()
        self._handler.shutdown()
