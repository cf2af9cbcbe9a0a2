"""The launcher of one worker in virtual time: the real states and events, and what the launcher does in each of them.

`elasticctl_launcher.launcher_states.transition` is the real one. What `restart_ranks`, `rendezvous` and the heartbeats
do with threads, sockets and processes is done here with timers, messages and `script.Training`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elasticctl_launcher.launcher_states import FINAL_STATES, LauncherEvent, LauncherState, transition
from elasticctl_launcher.service.questions import REPORT_TIMEOUT_S
from tests.support.virtual.clock import VirtualLoop
from tests.support.virtual.cluster import Cluster, Pod
from tests.support.virtual.network import Answer, Call, Network
from tests.support.virtual.script import Script, Training
from tests.support.virtual.staying import Exit, Ranks

BEAT_S = 3.0
RETRY_MIN_S, RETRY_MAX_S = 0.05, 2.0
UNKNOWN_JOB_S = 30.0
SETTLE_S = 0.05

_S, _E = LauncherState, LauncherEvent
DOING = {
    _S.PREPARING: "preparing",
    _S.STARTING: "starting",
    _S.RUNNING: "running",
    _S.NOTICED: "running",
    _S.DRAINING: "draining",
    _S.DRAINING_TO_LEAVE: "draining",
    _S.JUDGING: "stopping",
    _S.RESTARTING: "stopping",
    _S.FINISHING: "finishing",
    _S.FINISHING_TO_LEAVE: "finishing",
    _S.LEAVING: "stopping",
    _S.FAILING: "stopping",
}


TRAINING = (_S.RUNNING, _S.NOTICED, _S.DRAINING, _S.DRAINING_TO_LEAVE)
"""Ranks run in these."""


class Surroundings(Protocol):
    """The world, as a launcher sees it."""

    loop: VirtualLoop
    dice: random.Random
    network: Network
    cluster: Cluster
    script: Script
    launchers: dict[str, Launcher]

    def training(self, generation: int, members: tuple[str, ...]) -> Training:
        """The generation of these members."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a launcher, in seconds. `leave_s`: how long ranks may take to drain when it must leave."""

    prepare_s: float = 5.0
    spawn_s: float = 0.2
    stop_grace_s: float = 5.0
    leave_s: float = 20.0


class Launcher:
    """What runs in a pod."""

    def __init__(self, world: Surroundings, pod: Pod, job: tuple[str, str], timing: Timing) -> None:
        self.world, self.pod, self.job, self.timing = world, pod, job, timing
        self.uid, self.name, self.node = pod.uid, pod.name, pod.node
        self.loop, self.network = world.loop, world.network
        self.state = LauncherState.JOINING
        self.doing, self.since = "preparing", self.loop.time()
        self.generation = 0
        self.runs = False
        self.frozen = False
        self.got_sigterm = False
        self.members: tuple[str, ...] = ()
        self.ranks: Ranks | None = None
        self.training: Training | None = None
        self.failure: Exit | None = None
        self.counted: list[tuple[int, int, Exit]] = []
        self._beats_from, self._beat_before = 0.0, -1.0
        self._pause_s = RETRY_MIN_S
        self._pending: list[LauncherEvent] = []
        self._call: Call | None = None
        self._watch: Call | None = None
        self._watches = False
        self._knows_drain = False
        self._left_s: float | None = None
        self._known, self._refused_since = False, None
        self._unsent: list[dict[str, object]] = []
        self._sending = False
        self._stale = False
        self._is_prepared = False
        self._visit = 0

    # What the kubelet and the node do to it

    def start(self) -> None:
        self.runs = True
        self._beats_from = self.loop.time()
        self._send("heartbeat", self._words(), lambda answer: None)
        self._after(self.timing.prepare_s * self.world.dice.uniform(0.8, 1.2), self._enter)

    def terminate(self) -> None:
        if not self.runs or self.got_sigterm:
            return
        self.got_sigterm = True
        if self.state is not _S.RESTARTING:
            self._happen(_E.SIGTERM)

    def die(self, *, silently: bool) -> None:
        if silently:
            self.network.lose_host(self.node, for_good=True)
        else:
            self.network.hang_up(self.node)
        self._vanish()
        self._kill_ranks(silently=silently)

    # What the service hears of it

    def heard_at(self, began: float) -> float | None:
        """Return its last sign of life for the service that began then, renewals and heartbeats included."""
        if not self.runs:
            return None
        calls = self.network.calls.get(self.node, ())
        polls = [self.network.renewed_at(call) for call in calls if call.task is not None]
        now = self.network.cut.get(self.node, self.loop.time())
        at = max(polls, default=self._beaten_at(now))
        return at if at >= began else None

    def _beaten_at(self, now: float) -> float:
        """When the last heartbeat was sent by then."""
        if now < self._beats_from:
            return self._beat_before
        return self._beats_from + BEAT_S * math.floor((now - self._beats_from) / BEAT_S)

    def reconnect(self) -> None:
        """The service has been restarted, or the node reaches it again."""
        if self.runs:
            self._beats_from = self.loop.time() + self.world.dice.uniform(0.0, BEAT_S)
            self.loop.at(self._beats_from, self._beat)

    # The state machine

    def _happen(self, event: LauncherEvent) -> None:
        """Handle an event: enter the state that follows from it."""
        if not self.runs or self.state in FINAL_STATES:
            return
        before = self.state
        state = self.state
        if self.got_sigterm and state in (_S.RUNNING, _S.DRAINING):
            state = transition(state, _E.SIGTERM)
        self.state = transition(state, event)
        if self.state is not before:
            self._visit += 1
            self._drop_calls()
            self._enter()

    def _enter(self) -> None:
        doing = DOING.get(self.state)
        if doing is not None:
            self._say(doing)
        {
            _S.JOINING: self._join,
            _S.PREPARING: self._prepare,
            _S.STARTING: self._start_ranks,
            _S.RUNNING: self._run,
            _S.NOTICED: self._ask_to_stay,
            _S.DRAINING: self._drain,
            _S.DRAINING_TO_LEAVE: self._drain_to_leave,
            _S.JUDGING: self._judge,
            _S.RESTARTING: self._restart,
            _S.FINISHING: self._finish,
            _S.FINISHING_TO_LEAVE: self._finish_to_leave,
            _S.LEAVING: self._leave,
            _S.FAILING: self._fail,
            _S.SUCCEEDED: lambda: self._exit(0, ""),
            _S.LEFT: lambda: self._exit(143, json.dumps({"verdict": "preempted", "exitCode": 143})),
            _S.FAILED: self._end_failed,
        }[self.state]()

    def _join(self) -> None:
        if self.got_sigterm:
            self._happen(_E.SIGTERM)
            return
        self._end_watch()
        self._say("waiting")
        host = self.node
        body = {"uid": self.uid, "name": self.name, "host": host, "port": 1234, "slots": 1}
        body["prepared"] = self._is_prepared or self._can_stay()
        body["stays"] = self._can_stay()
        body["failed"] = [self._report_of(*failed) for failed in self.counted]
        self._ask("join", lambda: {**body, "generation": self.generation, **self._words()}, self._joined)

    def _joined(self, answer: Answer) -> None:
        if answer is None:
            self._again(self._join)
            return
        status, reply = answer
        if status != 200:
            now = self.loop.time()
            self._refused_since = now if self._refused_since is None else self._refused_since
            refused_s = now - self._refused_since
            if refused_s > UNKNOWN_JOB_S and (self._known or status == 410):
                self.failure = None
                self._happen(_E.REMOVED)
            else:
                self._again(self._join)
            return
        self._known, self._refused_since, self._pause_s = True, None, RETRY_MIN_S
        if reply["state"] == "over":
            self._happen(_E.GROUP_FINISHED)
        elif reply["state"] == "formed":
            self.generation = reply["generation"]
            self.members = tuple(member["uid"] for member in reply["members"])
            self._say("starting")
            self._begin_watch()
            self._connect()
        elif reply["state"] == "prepare":
            self._happen(_E.RANKS_WANTED)
        else:
            self._join()

    def _prepare(self) -> None:
        """Start the ranks before a group waits for them."""
        self._is_prepared = True
        self.ranks, self.training, script = self._new_ranks(), None, self.world.script
        self.ranks.prepare(self.loop, script.import_s + script.load_s, self._are_prepared)

    def _are_prepared(self) -> None:
        if self.frozen:
            self.loop.after(1.0, self._are_prepared)
        elif self.state is _S.PREPARING:
            self._happen(_E.RANKS_PREPARED)

    def _new_ranks(self) -> Ranks:
        return Ranks(self.uid, self.node, self._ranks_ended, self._ranks_hung, self._ranks_lost_peers)

    def _can_stay(self) -> bool:
        return self.ranks is not None and self.ranks.can_stay

    def _connect(self) -> None:
        """Connect to the store of rank 0's launcher; while that fails, only a change of the group ends the wait."""
        if self._stale:
            self._join()
            return
        first = self.world.launchers.get(self.members[0])
        if first is not None and first.can_reach(self):
            self._after(0.01, self._happen, _E.GROUP_FORMED)
        else:
            self._after(0.5, self._connect)

    def can_reach(self, other: Launcher) -> bool:
        """Whether messages reach the other one."""
        isolated = self.world.cluster.nodes
        return self.runs and not self.frozen and not (isolated[self.node].cut or isolated[other.node].cut)

    def _start_ranks(self) -> None:
        self._after(self.timing.spawn_s, self._started)

    def _started(self) -> None:
        self.failure, self._is_prepared = None, False
        self.training = self.world.training(self.generation, self.members)
        if self.ranks is None or not self._can_stay():
            self.ranks = self._new_ranks()
        self.training.start(self.ranks)
        self._happen(_E.RANKS_STARTED)

    def _ask_to_stay(self) -> None:
        reclaimed_at = self.pod.reclaimed_at
        deadline = {} if reclaimed_at is None else {"in_s": max(0.0, reclaimed_at - self.loop.time())}
        self._ask("notice", lambda: {"uid": self.uid, "reason": "SIGTERM", "stays": True, **deadline}, self._may_stay)

    def _may_stay(self, answer: Answer) -> None:
        reply = answer[1] if answer is not None and answer[0] == 200 else {"stay_s": 0.0, "left_s": None}
        stay_s, self._left_s = reply["stay_s"], reply["left_s"]
        if stay_s is not None and stay_s <= 0:
            self._happen(_E.LEAVE_DUE)
        elif stay_s is not None:
            self._after(stay_s, self._ask_to_stay)

    def _run(self) -> None:
        while self._pending and self.state in (_S.RUNNING, _S.DRAINING):
            self._happen(self._pending.pop(0))

    def _ranks_ended(self, how: Exit) -> None:
        if self.state in (_S.JOINING, _S.STARTING):
            return  # they were kept for the next generation, in which they are restarted
        if how.code == 0:
            self._notify(_E.ALL_RANKS_SUCCEEDED)
        elif self.failure is None:
            self.failure = how
            self._notify(_E.RANK_FAILED)

    def _ranks_hung(self, how: Exit) -> None:
        if self.failure is None and self.state in TRAINING:
            self.failure = how
            self._notify(_E.RANKS_HUNG)

    def _ranks_lost_peers(self, how: Exit) -> None:
        if self.failure is None and self.state in (_S.RUNNING, _S.DRAINING, _S.DRAINING_TO_LEAVE):
            self.failure = how
            self._notify(_E.RANK_FAILED)

    def _notify(self, event: LauncherEvent) -> None:
        """Handle an event of the ranks or the group, which counts while the ranks run."""
        if self.frozen:
            self.loop.after(1.0, self._notify, event)
        elif self.state in TRAINING:
            self._happen(event)
        elif self.state in (_S.JOINING, _S.STARTING):
            self._pending.append(event)

    def _drain(self) -> None:
        training = self.training
        if training is None or not self._uses_library(training):
            self._happen(_E.CANNOT_DRAIN)
            return
        if training.draining:
            self._happen(_E.RANKS_DRAINED)
            return
        training.drain(self._all_drained, to_leave=self.state is _S.DRAINING_TO_LEAVE)

    def _all_drained(self) -> None:
        for uid in self.members:
            launcher = self.world.launchers.get(uid)
            if launcher is not None and launcher.generation == self.generation:
                launcher._notify(_E.RANKS_DRAINED)

    def _drain_to_leave(self) -> None:
        if self.training is not None and self._uses_library(self.training):
            self._send("notice", {"uid": self.uid, "reason": "SIGTERM"}, lambda answer: None)
            left_s = self.timing.leave_s if self._left_s is None else max(self._left_s / 2, self._left_s - 10.0)
            self._after(min(self.timing.leave_s, left_s), self._happen, _E.DRAIN_TIMED_OUT)
        self._drain()

    def _uses_library(self, training: Training) -> bool:
        begun = training.first_at is not None and self.loop.time() >= training.first_at - training.first_s
        return (self.world.script.reports and begun) or training.draining

    def _judge(self) -> None:
        self._ask("fail", self._report_of_failure, self._judged)

    def _judged(self, answer: Answer) -> None:
        if answer is None:
            self._again(self._judge)
            return
        status, reply = answer
        verdict = reply.get("verdict") if status == 200 else "exit"
        if verdict == "pending":
            self._judge()
        else:
            if verdict == "rejoin" and not reply.get("excused") and self.failure and self.failure.own:
                self.counted = [*self.counted, (self.generation, self.members.index(self.uid), self.failure)][-8:]
            self._happen(_E.REJOIN_ORDERED if verdict == "rejoin" else _E.EXIT_ORDERED)

    def _restart(self) -> None:
        is_own = self.failure is not None and self.failure.own
        if (
            self._can_stay()
            and self.ranks is not None
            and self.training is not None
            and not (is_own or self.got_sigterm)
        ):
            self.training.release(self.ranks)
            self._happen(_E.RANKS_STOPPED)
            return
        self._stop_ranks(lambda: self._happen(_E.RANKS_STOPPED))

    def _finish(self) -> None:
        body = {"uid": self.uid, "generation": self.generation}
        self._ask("finish", lambda: {**body, **self._words()}, self._finished)

    def _finish_to_leave(self) -> None:
        self._finish()
        self._after(REPORT_TIMEOUT_S, self._happen, _E.SIGTERM)

    def _finished(self, answer: Answer) -> None:
        if answer is None:
            self._again(self._finish)
        elif answer[0] != 200 or answer[1]["state"] == "done":
            self._happen(_E.GROUP_FINISHED)
        elif answer[1]["state"] == "rejoin":
            self._happen(_E.REJOIN_ORDERED)
        else:
            self._finish()

    def _leave(self) -> None:
        if self.failure is not None:
            self._send("fail", self._report_of_failure(), lambda answer: None)
        self._send("leave", {"uid": self.uid, "reason": "SIGTERM"}, lambda answer: None)
        self._stop_ranks(lambda: self._happen(_E.RANKS_STOPPED))

    def _fail(self) -> None:
        error = self.failure.error if self.failure is not None else ""
        self._send("leave", {"uid": self.uid, "reason": error or "failed"}, lambda answer: None)
        self._stop_ranks(lambda: self._happen(_E.RANKS_STOPPED))

    def _end_failed(self) -> None:
        how = self.failure
        code = how.code if how is not None else 1
        message = {"verdict": "application", "exitCode": code, "generation": self.generation, "worker": self.name}
        if how is not None:
            message |= {"error": how.error, "rank": 0}
            message |= {"permanent": True} if self._is_permanent(how) else {}
        self._exit(code, json.dumps(message))

    def _stop_ranks(self, then: Callable[[], None]) -> None:
        if self.ranks is None or self.training is None:
            self._kill_ranks(silently=False)
            self._after(0.0, then)
        else:
            self.training.stop(self.ranks, self.timing.stop_grace_s, then)

    def _kill_ranks(self, *, silently: bool) -> None:
        if self.ranks is not None and self.training is not None:
            self.training.kill(self.ranks, silently=silently)
        elif self.ranks is not None:
            self.ranks.end()

    def _exit(self, code: int, message: str) -> None:
        self._kill_ranks(silently=False)
        self.network.hang_up(self.node)
        self._vanish()
        self.world.cluster.exit(self.pod, code, message)

    def _vanish(self) -> None:
        self.runs = False
        self._end_watch()
        self._drop_calls()
        self.network.drop_all(self.node)

    # Messages

    def _report_of_failure(self) -> dict[str, Any]:
        assert self.failure is not None
        report = self._report_of(self.generation, self.members.index(self.uid), self.failure)
        return {**report, "failed": [self._report_of(*failed) for failed in self.counted], **self._words()}

    def _is_permanent(self, how: Exit) -> bool:
        bug = self.world.script.bug
        return how.own and bug is not None and bug.permanent

    def _report_of(self, generation: int, rank: int, how: Exit) -> dict[str, Any]:
        failure = {"rank": rank, "exit_code": how.code, "error": how.error}
        failure |= {"signal": "SIGKILL" if how.code == 137 else "", "last_lines": [how.error]}
        failure["verdict"] = "collateral" if how.of_peers else "killed" if how.code == 137 else "application"
        return {
            "uid": self.uid,
            "generation": generation,
            "of_peers": how.of_peers,
            "permanent": self._is_permanent(how),
            "ended_s_ago": self.loop.time() - how.at,
            "failure": failure,
        }

    def _begin_watch(self) -> None:
        self._stale = self._knows_drain = False
        self._pending.clear()
        self._watches = True
        self._ask_watch(with_members=False)

    def _ask_watch(self, *, with_members: bool) -> None:
        if not self._watches or not self.runs:
            return
        generation = self.generation
        body: dict[str, Any] = {"uid": self.uid, "generation": generation, "draining": self._knows_drain}
        if with_members:
            launchers = [self.world.launchers[uid] for uid in self.members]
            body["stays"] = self._can_stay()
            body["failed"] = [self._report_of(*failed) for failed in self.counted]
            body["members"] = [
                {"uid": one.uid, "name": one.name, "host": one.node, "port": 1234, "slots": 1} for one in launchers
            ]
        self._watch = self._send("watch", {**body, **self._words()}, lambda answer: self._watched(generation, answer))

    def _watched(self, generation: int, answer: Answer) -> None:
        if not self._watches or generation != self.generation or not self.runs:
            return
        if self.frozen:
            self.loop.after(1.0, self._watched, generation, answer)
            return
        if answer is None or answer[0] != 200:
            self.loop.after(self._next_pause_s(), lambda: self._ask_watch(with_members=False))
            return
        state = answer[1]["state"]
        if state == "stale":
            self._watches, self._stale = False, True
            self._notify(_E.GENERATION_STALE)
        elif state == "drain" and not self._knows_drain:
            self._knows_drain = True
            self._ask_watch(with_members=False)
            self._notify(_E.LEAVE_DUE if answer[1]["leave"] else _E.DRAIN_REQUESTED)
        else:
            self._ask_watch(with_members=state == "unknown")

    def _end_watch(self) -> None:
        self._watches = False
        if self._watch is not None:
            self.network.drop(self._watch)
            self._watch = None

    def report(self, message: dict[str, object]) -> None:
        """A rank reports something."""
        if message["kind"] == "finished":
            self._say("exporting")
            return
        if message["kind"] == "progress":
            self._unsent = [item for item in self._unsent if item["kind"] != "progress"]
        self._unsent.append(message)
        self._send_reports()

    def _send_reports(self) -> None:
        if self._sending or not self._unsent or not self.runs:
            return
        self._sending, sent = True, list(self._unsent)

        def answered(answer: Answer) -> None:
            self._sending = False
            if answer is None:
                self.loop.after(1.0, self._send_reports)
                return
            self._unsent = [item for item in self._unsent if item not in sent]
            self._send_reports()

        self._send("report", {"messages": sent}, answered)

    def _say(self, doing: str) -> None:
        if doing == self.doing:
            return
        self.doing, self.since = doing, self.loop.time()
        self._beat_before = self._beaten_at(self.network.cut.get(self.node, self.since))
        self._beats_from = self.since + SETTLE_S
        if doing not in ("waiting", "finishing"):  # the poll that begins now reports these
            self.loop.at(self._beats_from, self._beat)

    def _beat(self) -> None:
        if self.runs and not self.frozen:
            self._send("heartbeat", {"uid": self.uid, **self._words()}, lambda answer: None)

    def _words(self) -> dict[str, Any]:
        return {"uid": self.uid, "doing": self.doing, "since_s": self.loop.time() - self.since}

    def _ask(self, verb: str, body: Callable[[], Mapping[str, Any]], on_answer: Callable[[Answer], None]) -> None:
        """Send a request of the current state; the answer is dropped in another."""
        visit = self._visit

        def answered(answer: Answer) -> None:
            if self.frozen:
                self.loop.after(1.0, answered, answer)
            elif self.runs and self._visit == visit:
                self._call = None
                on_answer(answer)

        self._call = self._send(verb, body(), answered)

    def _send(self, verb: str, body: Mapping[str, Any], on_answer: Callable[[Answer], None]) -> Call:
        return self.network.call(self.node, self.job, verb, body, on_answer)

    def _again(self, call: Callable[[], None]) -> None:
        self._after(self._next_pause_s(), call)

    def _next_pause_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(RETRY_MAX_S, self._pause_s * 2)
        return pause_s * self.world.dice.uniform(0.5, 1.0)

    def _after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call it after a delay, unless the state has changed by then."""
        visit = self._visit

        def do() -> None:
            if self.frozen:
                self.loop.after(1.0, do)
            elif self.runs and self._visit == visit:
                call(*args)

        self.loop.after(delay_s, do)

    def _drop_calls(self) -> None:
        if self._call is not None:
            self.network.drop(self._call)
            self._call = None
