"""Run the ranks of one worker, and restart them whenever the group of workers changes.

`Agent` is a torch.distributed.elastic agent with its own loop, which goes through the states in `launcher_states`.
torch's loop polls for changes, counts the loss of peers against its restart budget, and stops ranks with a fixed grace
period of 30 s. This loop waits for events, and the rendezvous service decides what a failure means for the group.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousError

from elasticctl_launcher.agent_events import (
    Notification,
    RankDeclined,
    RankDrained,
    RankExited,
    RankLostPeers,
    RanksHung,
    RanksStandStill,
    ServiceAnnounced,
    ServiceAnswered,
    SigtermReceived,
    TrainingDone,
)
from elasticctl_launcher.failure import TERMINATED, WorkerFailure
from elasticctl_launcher.hangs.watch_ranks import Hang
from elasticctl_launcher.launcher_states import FINAL_STATES, LauncherEvent, LauncherState, transition
from elasticctl_launcher.leaving import BY_SIGNAL, Termination, TimeLimits
from elasticctl_launcher.rank_processes import Rank
from elasticctl_launcher.ranks.local_ranks import LocalRanks
from elasticctl_launcher.ranks.torch_agent import TorchAgent
from elasticctl_launcher.ranks.warm_spares import WARM_S, RankStarter
from elasticctl_launcher.rendezvous import Connect, GroupChange, GroupFinished, RanksWanted, Readiness, WorkerRemoved
from elasticctl_launcher.service.questions import REPORT_TIMEOUT_S, Inquiries, Question, Verdicts
from elasticctl_launcher.spot_notice import SpotNotice
from elasticctl_launcher.worker_output import WorkerOutput
from elasticctl_protocol.failures import EXIT_FAILED, FailureVerdict
from elasticctl_protocol.reports import StepShares, UsageReport
from elasticctl_protocol.requests import Doing

SPARE_DELAY_S = 2.0
"""Spares are started after a generation has run for this long, because its ranks need the CPU while they start."""
DOING: Mapping[LauncherState, Doing] = {
    LauncherState.PREPARING: Doing.PREPARING,
    LauncherState.RUNNING: Doing.RUNNING,
    LauncherState.NOTICED: Doing.RUNNING,
    LauncherState.DRAINING: Doing.DRAINING,
    LauncherState.DRAINING_TO_LEAVE: Doing.DRAINING,
    LauncherState.JUDGING: Doing.STOPPING,
    LauncherState.RESTARTING: Doing.STOPPING,
    LauncherState.FINISHING: Doing.FINISHING,
    LauncherState.FINISHING_TO_LEAVE: Doing.FINISHING,
    LauncherState.LEAVING: Doing.STOPPING,
    LauncherState.FAILING: Doing.STOPPING,
}
"""What the launcher reports to the service in each state. The rendezvous reports waiting and starting."""
ANNOUNCED: Mapping[GroupChange, LauncherEvent] = {
    GroupChange.OVER: LauncherEvent.GENERATION_STALE,
    GroupChange.DRAIN: LauncherEvent.DRAIN_REQUESTED,
    GroupChange.LEAVE: LauncherEvent.LEAVE_DUE,
}

log = logging.getLogger(__name__)


class Terminated(Exception):
    """SIGTERM arrived while the agent was joining a group or starting ranks."""


class Agent(TorchAgent):
    """Runs `ranks_per_worker` ranks with `starter`, generation after generation.

    `connect` creates the rendezvous handler. The ranks' output goes to `output`. After `run` has returned, `state` is a
    final state; if it is not SUCCEEDED, `failure` says why.
    """

    def __init__(
        self, connect: Connect, starter: RankStarter, ranks_per_worker: int, output: WorkerOutput, limits: TimeLimits
    ) -> None:
        self._notifications: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        notify = self._notifications.put
        handler = connect(self._readiness, self._announce)
        ranks = LocalRanks(handler.client, starter, output, limits, notify, handler.identity.host)
        super().__init__(ranks_per_worker, handler, starter, ranks)
        self._limits = limits
        self._service = Inquiries(
            handler.client, handler.poll, handler.identity.uid, lambda question: notify(ServiceAnswered(question))
        )
        self._got_sigterm = False
        self._sigterm_raises = False
        self._verdicts = Verdicts(self._service)
        self._wanted, self._is_prepared = RanksWanted(0), False
        self._termination = Termination(self._service, limits.grace_s)
        self.state = LauncherState.JOINING
        self.failure: WorkerFailure | None = None

    def terminate(self) -> None:
        """Handle SIGTERM, from the signal handler: leave the group in order, and end."""
        is_first, self._got_sigterm = not self._got_sigterm, True
        self._termination.record_signal()
        self._notifications.put(SigtermReceived())
        if is_first and self._sigterm_raises:
            raise Terminated

    def give_notice(self, notice: SpotNotice) -> None:
        """Make this worker leave as after SIGTERM, and report `notice` as the reason.

        This may be called from any thread, in a process that handles SIGTERM. It sends the signal, because nothing else
        interrupts the main thread while it waits for a group.
        """
        self._termination.expect(notice)
        os.kill(os.getpid(), signal.SIGTERM)

    def _readiness(self) -> Readiness:
        return Readiness(self._is_prepared, self._ranks.can_stay(), failed=self._verdicts.counted_failures())

    def _announce(self, generation: int, change: GroupChange) -> None:
        if change is GroupChange.LEAVE:
            self._termination.record_reason(self._handler.stale_reason)
        self._notifications.put(ServiceAnnounced(generation, ANNOUNCED[change]))

    def own_pids(self) -> set[int]:
        """Return the ids of the processes that this agent has started and waits for."""
        return self._ranks.own_pids()

    def step_times(self) -> StepShares:
        """Return the shares of the ranks' time since the last call, as in `StepTimes.shares`; call from one thread
        only.
        """
        return self._ranks.step_times.shares()

    def report_usage(self, used: UsageReport) -> None:
        """Send this worker's use of its machine with the next report; may be called from any thread."""
        self._ranks.reports.send_usage(replace(used, uid=self._handler.identity.uid))

    def unexpected_failure(self, why: str) -> WorkerFailure:
        """Return a failure of this worker that is none of its ranks'."""
        return WorkerFailure(FailureVerdict.APPLICATION, *self._place(), EXIT_FAILED, error=why)

    def close(self) -> None:
        """Send the ranks' last reports, stop listening, and remove this launcher's folders."""
        self._ranks.close()

    # The state machine

    def _invoke_run(self, role: str = "default") -> RunResult:
        enter: Mapping[LauncherState, Callable[[], LauncherEvent | None]] = {
            LauncherState.JOINING: self._join_group,
            LauncherState.PREPARING: self._prepare_ranks,
            LauncherState.STARTING: self._start_ranks,
            LauncherState.RUNNING: self._begin_running,
            LauncherState.NOTICED: self._ask_to_stay,
            LauncherState.DRAINING: self._drain,
            LauncherState.DRAINING_TO_LEAVE: self._drain_to_leave,
            LauncherState.JUDGING: self._judge_failure,
            LauncherState.RESTARTING: self._stop_to_restart,
            LauncherState.FINISHING: self._wait_for_peers_to_finish,
            LauncherState.FINISHING_TO_LEAVE: self._wait_for_peers_to_finish,
            LauncherState.LEAVING: self._leave,
            LauncherState.FAILING: self._fail,
        }
        while self.state not in FINAL_STATES:
            entered = self.state
            self._say(DOING.get(entered))
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
                self.failure = self.unexpected_failure(str(error))
                self._apply(LauncherEvent.ERROR)
        if self.state is not LauncherState.SUCCEEDED:
            return RunResult(WorkerState.FAILED)
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _apply(self, event: LauncherEvent) -> None:
        """Change to the state that `event` leads to. A SIGTERM that arrived meanwhile is applied first, while ranks
        run.
        """
        state = self.state
        if self._got_sigterm and state in (LauncherState.RUNNING, LauncherState.DRAINING):
            state = transition(state, LauncherEvent.SIGTERM)
        self.state = transition(state, event)

    # What each state does on entry. Returns the event that ends the state, or None to wait for one.

    def _join_group(self) -> LauncherEvent:
        self._sigterm_raises = True
        if self._got_sigterm:
            return LauncherEvent.SIGTERM
        if self._handler.generation == 0:
            # The others would have to wait for the imports of a newcomer that is not ready, instead of training.
            self._starter.wait_until_warm(WARM_S)
        event = LauncherEvent.GROUP_FORMED
        try:
            self._rendezvous(self._worker_group)
        except RanksWanted as wanted:
            self._wanted = wanted
            event = LauncherEvent.RANKS_WANTED
        except GroupFinished:
            event = LauncherEvent.GROUP_FINISHED
        except WorkerRemoved as error:
            log.warning("%s", error)
            self.failure = WorkerFailure.of_sigterm(*self._place(), str(error))
            event = LauncherEvent.REMOVED
        self._sigterm_raises = False
        return event

    def _prepare_ranks(self) -> LauncherEvent:
        """Start the ranks before there is a group for them.

        If they fail here, they start again in the group, which then waits for them, and a failure can be judged.
        """
        self._sigterm_raises = True
        if self._got_sigterm:
            return LauncherEvent.SIGTERM
        spec = self._worker_group.spec
        self._ranks.prepare(
            self._wanted.others, spec.local_world_size, self._handler.get_run_id(), self._wanted.examples
        )
        self._is_prepared = True
        self._sigterm_raises = False
        return LauncherEvent.RANKS_PREPARED

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
        self.failure, self._is_prepared = None, False

    def _ask_to_stay(self) -> LauncherEvent | None:
        """Keep training while the service allows it; return LEAVE_DUE if it does not."""
        if not self._termination.ask_to_stay():
            return LauncherEvent.LEAVE_DUE
        log.warning("this worker has to leave (%s): it keeps training until it is replaced", self._termination.why)
        return None

    def _drain(self) -> LauncherEvent | None:
        return None if self._ranks.drain.request() else self._end_generation(LauncherEvent.CANNOT_DRAIN)

    def _drain_to_leave(self) -> LauncherEvent | None:
        if not self._ranks.drain.request(to_leave=True):
            return LauncherEvent.CANNOT_DRAIN
        self._limit_drain()
        self._service.report_notice(self._termination.why)  # the service makes the others drain too
        return None

    def _limit_drain(self) -> None:
        """Limit the drain, if it is known when this worker is killed, so that the ranks are stopped before that."""
        left_s = self._termination.left_s()
        if left_s is not None:
            self._ranks.drain.limit(self._limits.drain_s(left_s))

    def _judge_failure(self) -> LauncherEvent:
        """Report the failure, wait for the service's verdict on the whole group, and stop the ranks.

        If a peer seems to be lost, the other ranks here run on until the verdict: the rank that broke the connections
        may be one of them, and may still be printing its traceback.
        """
        failure = self.failure
        if failure is None:
            raise RuntimeError("nothing to judge: no failure was noted")
        self._ranks.reports.flush()
        if failure.verdict is FailureVerdict.STUCK:
            log.warning("generation %d: %s", failure.generation, failure.describe())
            return LauncherEvent.EXIT_ORDERED
        question = self._verdicts.report_failure(failure)
        if failure.verdict is not FailureVerdict.COLLATERAL:
            self._ranks.stop()
        event = self._wait_for_answer(question)
        if event is not LauncherEvent.REJOIN_ORDERED or not self._ranks.keep_for_next():
            self._ranks.stop(peers_ended=self._verdicts.is_excused)
        if event is LauncherEvent.EXIT_ORDERED:
            self.failure = self._verdicts.blamed(self.failure or failure)
        return event

    def _stop_to_restart(self) -> LauncherEvent:
        if self.failure is None:
            why = self._handler.stale_reason or "the ranks of others have not ended with exit code 0"
            log.info("generation %d is over (%s)", self._handler.generation, why)
        if not self._got_sigterm and self._ranks.keep_for_next():
            return LauncherEvent.RANKS_STOPPED
        stopped = self._ranks.stop(peers_ended=True, more_s=self._more_grace_s)
        failure = WorkerFailure.of_stopped(*self._place(), stopped)
        if failure is None or self._got_sigterm:
            return LauncherEvent.RANKS_STOPPED
        self.failure = failure
        return LauncherEvent.RANK_FAILED

    def _wait_for_peers_to_finish(self) -> LauncherEvent:
        """Wait until the ranks of all members have succeeded: until then, they need each other's stores."""
        self._ranks.reports.flush()
        terminated = any(rank.terminated for rank in self._ranks.running)
        return self._wait_for_answer(self._service.wait_for_peers(self._handler.generation, terminated=terminated))

    def _leave(self) -> LauncherEvent:
        if self.failure is not None and not self._verdicts.has_reported(self.failure):
            self._verdicts.report_failure(self.failure)  # the verdict no longer matters
        self._service.report_leaving(self._termination.why)
        self._ranks.stop(grace_s=self._limits.last_grace_s(self._termination.left_s()), more_s=self._more_grace_s)
        why = self._termination.why
        self.failure = WorkerFailure.of_sigterm(*self._place(), "" if why == BY_SIGNAL else why)
        return LauncherEvent.RANKS_STOPPED

    def _more_grace_s(self) -> float:
        """How much longer ranks may take to stop: nothing waits for those of a worker that has got SIGTERM meanwhile.

        The service says that a group is over before a deleted pod is sent SIGTERM.
        """
        return self._limits.last_grace_s(self._termination.left_s()) if self._got_sigterm else 0.0

    def _fail(self) -> LauncherEvent:
        self._ranks.stop()
        self._service.report_leaving(self.failure.describe() if self.failure else "")
        return LauncherEvent.RANKS_STOPPED

    # Waiting for events

    def _wait_for_event(self) -> LauncherEvent:
        """Wait for the event that ends the current state; start spares meanwhile."""
        while True:
            timeout_s = self._wait_s()
            try:
                event = self._interpret(self._notifications.get(timeout=timeout_s))
            except queue.Empty:
                if self.state is LauncherState.NOTICED:
                    event = self._ask_to_stay()
                elif self.state is not LauncherState.RUNNING:
                    # Only a worker that has to leave has a time limit. The others resume from the last checkpoint.
                    return self._end_generation(LauncherEvent.DRAIN_TIMED_OUT)
                else:
                    self._starter.warm(self._worker_group.spec.local_world_size)
                    event = None
            if event is not None:
                return event

    def _wait_s(self) -> float | None:
        """The seconds to wait for an event before something else is due; None: no limit."""
        if self.state is LauncherState.RUNNING:
            return SPARE_DELAY_S
        if self.state is not LauncherState.NOTICED:
            return self._ranks.drain.left_s()
        return self._termination.stay_s()

    def _interpret(self, notification: Notification) -> LauncherEvent | None:
        """The event that a notification causes; None if it changes nothing or belongs to an earlier generation."""
        match notification:
            case SigtermReceived():
                return self._interpret_sigterm()
            case RankExited(rank) if rank in self._ranks.running:
                return self._interpret_exit(rank)
            case RankDrained(generation, global_rank):
                self._ranks.drain.record_drained(generation, global_rank)
                return self._end_generation(LauncherEvent.RANKS_DRAINED) if self._ranks.have_drained() else None
            case TrainingDone(self._handler.generation, is_over):
                self._say(Doing.EXPORTING if is_over else DOING.get(self.state))
            case RanksStandStill(self._handler.generation, still):
                moving = Doing.EXPORTING if self._ranks.drain.is_exporting else DOING.get(self.state)
                self._say(Doing.HUNG if still else moving)
            case RanksHung(hang) if hang.generation == self._handler.generation:
                return self._end_hung_generation(hang)
            case RankLostPeers() | RankDeclined() if notification.generation == self._handler.generation:
                return self._interpret_link(notification)
            case ServiceAnnounced(self._handler.generation, LauncherEvent.GENERATION_STALE as event):
                return self._end_generation(event)
            case ServiceAnnounced(self._handler.generation, event) if not self._ranks.drain.is_exporting:
                return event
        return None

    def _interpret_sigterm(self) -> LauncherEvent | None:
        """A signal that follows another one carries the time at which this worker has to leave."""
        if self.state is LauncherState.NOTICED:
            return self._ask_to_stay()
        if self.state is LauncherState.DRAINING_TO_LEAVE:
            self._limit_drain()
        return LauncherEvent.SIGTERM

    def _interpret_exit(self, rank: Rank) -> LauncherEvent | None:
        if rank.code != 0:
            self.failure = self._failure_of(rank)
            return LauncherEvent.RANK_FAILED
        if rank.terminated:
            log.warning("generation %d: rank %d: %s", self._handler.generation, rank.rank, TERMINATED)
        return LauncherEvent.ALL_RANKS_SUCCEEDED if all(rank.code == 0 for rank in self._ranks.running) else None

    def _interpret_link(self, end: RankLostPeers | RankDeclined) -> LauncherEvent:
        """A rank that may stay in its process cannot continue in this generation."""
        if isinstance(end, RankDeclined):
            log.warning("generation %d: the ranks start again: %s", end.generation, end.why)
            return LauncherEvent.RANKS_DECLINED
        self.failure = self._explained(WorkerFailure.of_lost_peers(*self._place(), end.why))
        return LauncherEvent.RANK_FAILED

    def _end_hung_generation(self, hang: Hang) -> LauncherEvent:
        event = self._end_generation(LauncherEvent.RANKS_HUNG)
        if event is LauncherEvent.RANKS_HUNG:
            self.failure = WorkerFailure.of_hang(*self._place(), hang)
        return event

    def _wait_for_answer(self, question: Question) -> LauncherEvent:
        """Wait for the answer without a limit.

        SIGTERM ends the wait. If it arrived before, the wait is limited to `REPORT_TIMEOUT_S`.
        """
        timeout_s = REPORT_TIMEOUT_S if self._got_sigterm else None
        self._verdicts.reset_answer()
        while True:
            try:
                notification = self._notifications.get(timeout=timeout_s)
            except queue.Empty:
                notification = SigtermReceived()
                timeout_s = None
            match notification:
                case SigtermReceived() if timeout_s is None:
                    question.withdraw()
                    return LauncherEvent.SIGTERM
                case ServiceAnswered(answered) if answered is question:
                    return self._verdicts.store_answer(question)
                case RankExited(rank) if self.failure is not None and rank in self._ranks.running and rank.code != 0:
                    failure = self._failure_of(rank)
                    if failure.explains_more_than(self.failure):
                        question.withdraw()
                        self.failure = failure
                        question = self._verdicts.report_failure(failure)

    def _end_generation(self, event: LauncherEvent) -> LauncherEvent:
        """`event`, which ends the generation here, or RANK_SUSPENDED if a rank of this worker held up the group."""
        suspended = self._ranks.suspended()
        if suspended:
            self.failure = WorkerFailure.of_suspended(*self._place(), suspended[0])
            return LauncherEvent.RANK_SUSPENDED
        return event

    def _place(self) -> tuple[str, int]:
        return self._handler.identity.name, self._handler.generation

    def _say(self, doing: Doing | None) -> None:
        if doing is not None and self._handler.heartbeat is not None:
            self._handler.heartbeat.say(doing, self._handler.generation)

    def _failure_of(self, rank: Rank) -> WorkerFailure:
        error_file = self._ranks.reports.error_file(self._handler.generation, rank.rank)
        return self._explained(WorkerFailure.of_rank(*self._place(), rank, error_file))

    def _explained(self, failure: WorkerFailure) -> WorkerFailure:
        """`failure`, or the failure of a rank on this worker that explains it, because it got SIGTERM from outside."""
        terminated = next((rank for rank in self._ranks.running if rank.terminated), None)
        if terminated is None or failure.verdict is not FailureVerdict.COLLATERAL:
            return failure
        return WorkerFailure.of_terminated(*self._place(), terminated)
