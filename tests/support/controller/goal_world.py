"""A job with a goal in virtual time: the controller's core over machines that come and go, and a group that trains.

From event to event: a change of how many spot machines there are, a pod that starts or has gone, the pass that the
controller asked for. What is paid is counted here, apart from what the controller believes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import ON_DEMAND, Goal, Prices
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob, PodPhase, Sharing, worker_name
from elasticctl.api.status import CheckpointStatus, GroupGeneration, ProgressStatus
from elasticctl_controller.core.actions import CreateWorker, DeleteWorker
from elasticctl_controller.core.observation import ClusterView, GroupView, Observed
from elasticctl_controller.core.reconcile import reconcile
from tests.support.controller.samples import JOB_UID, NOW, stored

TICK_S = 300.0
PRICES = Prices(on_demand=1.0, spot=0.3, source="a test")
GRACE = {"spec": {"terminationGracePeriodSeconds": 10, "containers": [{"name": "elasticjob-worker"}]}}


def a_goal_job(goal: Goal, *, most: int = 4) -> ElasticJob:
    """A job of 1 to `most` workers with this goal, at known prices."""
    return ElasticJob(
        name="digits",
        uid=JOB_UID,
        generation=1,
        created_at=Timestamp(NOW),
        desired=most,
        min=1,
        max=most,
        bounded=True,
        sharing=Sharing(automatic=True),
        goal=replace(goal, prices=PRICES),
        template=GRACE,
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take: until a pod has a machine, and then runs, and then joins; until a group's first step.

    `report_s`: a pass at least so often, as workers report.
    """

    tick_s: float = TICK_S
    boot_s: float = 60.0
    pull_s: float = 0.0
    launch_s: float = 0.0
    join_s: float = 5.0
    leave_s: float = 4.0
    save_s: float = 120.0
    report_s: float = math.inf


@dataclass(slots=True)
class _Machine:
    pod: Pod
    boots_at: float
    runs_at: float = math.inf
    joins_at: float = math.inf
    gone_at: float = math.inf


@dataclass(slots=True)
class GoalWorld:
    """`spot`: how many spot machines each pool has, tick by tick, and for ever after as at the last one.

    `steps` are to be made, at `rates[n]` a second on n workers.
    """

    job: ElasticJob
    spot: Mapping[str, Sequence[int]]
    steps: int
    rates: Sequence[float]
    timing: Timing = Timing()
    now: float = NOW
    usd: float = 0.0
    finished_at: float | None = None
    done: float = 0.0
    committed: float = 0.0
    saved_at: float = NOW
    most_at_once: int = 0
    machines: dict[str, _Machine] = field(default_factory=dict)
    groups: list[GroupGeneration] = field(default_factory=list)
    members: tuple[str, ...] = ()
    trains_from: float = math.inf
    broken_at: float = NOW
    trained_at: float = NOW
    made: int = 0
    pass_at: float = NOW

    def run(self, until: float) -> None:
        """Until the work is done, or until this moment."""
        while self.now < until and self.finished_at is None:
            self._lose()
            self._boot()
            self._reform()
            self._reconcile()
            self._advance(min(self._next_at(), until))

    def on(self, pool: str) -> int:
        """How many machines of a pool the job has."""
        return sum(self._has(one) and one.pod.pool == pool for one in self.machines.values())

    def _there(self, pool: str) -> int:
        counts = self.spot[pool]
        return counts[min(int((self.now - NOW) // self.timing.tick_s), len(counts) - 1)]

    def _has(self, one: _Machine) -> bool:
        return bool(one.pod.node)

    def _next_at(self) -> float:
        tick = NOW + ((self.now - NOW) // self.timing.tick_s + 1) * self.timing.tick_s
        times = [at for one in self.machines.values() for at in (one.gone_at, one.boots_at, one.runs_at, one.joins_at)]
        times += [tick, self.pass_at, self.trains_from, self.now + self.timing.report_s]
        return min((at for at in times if at > self.now + 1e-6), default=tick)

    def _lose(self) -> None:
        """Machines that had to go have gone; of spot machines the newest go first."""
        lost = [uid for uid, one in self.machines.items() if one.gone_at <= self.now + 1e-6]
        for pool in self.spot:
            left = [uid for uid, one in self.machines.items() if self._has(one) and one.pod.pool == pool]
            left = sorted(set(left) - set(lost), key=lambda uid: -self.machines[uid].boots_at)
            lost += left[: max(0, len(left) - self._there(pool))]
        released = {uid for uid in lost if self.machines[uid].gone_at < math.inf}
        train = {uid for uid in self.members if uid in self.machines}
        for uid in lost:
            del self.machines[uid]
        if train and train <= set(lost):  # no worker with the state is left: that of the last commit counts
            if released & train == train:
                self.committed = self.done
            self.done = self.committed

    def _boot(self) -> None:
        """Pods that wait get machines, where there are any, and start on them."""
        free = {pool: self._there(pool) - self.on(pool) for pool in self.spot}
        for one in sorted(self.machines.values(), key=lambda one: one.boots_at):
            if self._has(one):
                if one.pod.phase is PodPhase.PENDING and one.runs_at <= self.now + 1e-6:
                    one.pod = replace(one.pod, phase=PodPhase.RUNNING, started_at=Timestamp(self.now))
                continue
            if one.pod.deleting or one.boots_at > self.now + 1e-6 or free.get(one.pod.pool, 1) <= 0:
                continue
            if one.pod.pool in free:
                free[one.pod.pool] -= 1
            one.runs_at = self.now + self.timing.pull_s
            one.joins_at = one.runs_at + self.timing.launch_s
            one.pod = replace(one.pod, node=f"node-{one.pod.uid}")
            if not self.timing.pull_s:
                one.pod = replace(one.pod, phase=PodPhase.RUNNING, started_at=Timestamp(self.now))

    def _reform(self) -> None:
        """The group is all that run and do not have to go; it stands still when that changes."""
        here = [uid for uid, one in self.machines.items() if one.joins_at <= self.now + 1e-6 and not one.pod.deleting]
        ready = tuple(sorted(here))
        if ready == self.members:
            return
        if self.trains_from < math.inf or not self.groups:
            self.broken_at = self.now
        self.members, self.trains_from = (
            ready,
            self.now + self.timing.join_s if len(ready) >= self.job.min else math.inf,
        )
        at = Timestamp(self.now)
        names = tuple(self.machines[uid].pod.name for uid in ready)
        if len(ready) >= self.job.min:
            opened_at = Timestamp(self.broken_at)
            group = GroupGeneration(len(self.groups) + 1, names, "", opened_at, at, resumed_step=int(self.done))
            self.groups.append(group)

    def _reconcile(self) -> None:
        progress = ProgressStatus(Timestamp(self.trained_at), int(self.done), self.steps)
        commits = CheckpointStatus(int(self.committed), Timestamp(self.saved_at), committed=max(1, self.made))
        trained = any(group.first_step_at for group in self.groups)
        group = GroupView(
            progress if trained else None, commits if trained else None, generations=tuple(self.groups[-20:])
        )
        for _ in range(3):  # what is stored first, and done in the pass after it
            observed = Observed(ClusterView(tuple(one.pod for one in self.machines.values())), group)
            before, decision = self.job, reconcile(self.job, observed, self.now)
            if decision.status != before.status:
                self.job = stored(before, decision.status)
            if self.job == before and not decision.actions:
                break
            self._act(decision.actions)
        self.pass_at = self.now + (math.inf if decision.requeue_s is None else max(1.0, decision.requeue_s))

    def _act(self, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, CreateWorker):
                uid = f"uid-{len(self.groups)}-{self.made}"
                self.made += 1
                pod = Pod(
                    name=worker_name("digits", action.index),
                    uid=uid,
                    index=action.index,
                    owner_uid=JOB_UID,
                    phase=PodPhase.PENDING,
                    created_at=Timestamp(self.now),
                    pool=action.pool,
                )
                self.machines[uid] = _Machine(pod, self.now + self.timing.boot_s)
            elif isinstance(action, DeleteWorker) and action.uid in self.machines:
                one = self.machines[action.uid]
                one.gone_at = min(one.gone_at, self.now + (self.timing.leave_s if self._has(one) else 0.0))
                one.pod = replace(one.pod, deleting=True)
        self.most_at_once = max(self.most_at_once, sum(map(self._has, self.machines.values())))

    def _advance(self, to: float) -> None:
        rate = self.rates[min(len(self.members), len(self.rates) - 1)] if self.trains_from < math.inf else 0.0
        begin = max(self.now, self.trains_from)
        if rate and begin + (self.steps - self.done) / rate <= to:
            to = max(self.now, begin + (self.steps - self.done) / rate)
            self.finished_at = to
        for one in self.machines.values():
            if self._has(one):
                price = PRICES.on_demand if one.pod.pool == ON_DEMAND else PRICES.spot
                self.usd += price * (to - self.now) / 3600
        made = rate * max(0.0, to - begin) if rate else 0.0
        if made:
            self.done += made
            self.trained_at = to  # up to a step later than it was made, as reports are
            newest = self.groups[-1]
            first = newest.first_step_at or Timestamp(begin)
            self.groups[-1] = replace(newest, first_step_at=first, last_step=int(self.done))
            save_s = self.timing.save_s
            if to - self.saved_at >= save_s:
                self.saved_at, self.committed = to, max(self.committed, self.done - rate * save_s / 2)
        self.now = to
