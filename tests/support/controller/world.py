"""A cluster in memory with everything that goes wrong between a controller and an API server.

The truth is kept as a log of snapshots, and the controller reads through caches that stand anywhere in it and only move
forward, each on its own. `facts` is what really happened to each pod, against which the controller's status is checked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from elasticctl.api.codec import Timestamp, from_json, from_rfc3339, to_json, to_rfc3339
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob, PodPhase, worker_name
from elasticctl.api.status import Cause, JobStatus, ShareStatus, WorkerStatus
from elasticctl_controller.core.actions import Action, CreateWorker, Decision, DeleteJob, DeleteWorker
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.core.observation import Allotment, ClusterView, GroupView, Observed
from elasticctl_controller.core.reconcile import apply_share, reconcile
from elasticctl_controller.core.workers import own_pods

START = 1_000_000.0
FACT_OF_CAUSE = {
    Cause.SCALED_IN: {"removed by us"},
    Cause.PREEMPTED: {"disrupted", "preempted"},
    Cause.NODE_LOST: {"node lost"},
    Cause.DELETED: {"deleted"},
    Cause.OOM_KILLED: {"oom"},
    Cause.KILLED: {"killed"},
    Cause.COLLATERAL: {"application", "collateral", "stuck"},
    Cause.STUCK: {"stuck"},
    Cause.UNRESPONSIVE: {"silent"},
    Cause.APPLICATION: {"application"},
    Cause.COMPLETED: {"success"},
}


@dataclass
class Log:
    """All versions of one kind of object, and how far the controller's cache of it has come."""

    versions: list[Any]
    seen: int = 0

    @property
    def latest(self) -> Any:
        return self.versions[-1]

    @property
    def cached(self) -> Any:
        return self.versions[self.seen]

    def add(self, version: Any) -> None:
        self.versions.append(version)

    def catch_up(self, versions: int | None = None) -> None:
        last = len(self.versions) - 1
        self.seen = last if versions is None else min(last, self.seen + versions)


@dataclass(frozen=True)
class Faults:
    """What goes wrong in one pass: the answer to the status write, the fate of each action, where we crash."""

    lose_write_answer: bool = False
    action_fates: tuple[str, ...] = ()  # "ok", "lost answer" or "refused", in turn
    crash_after: int | None = None


@dataclass
class World:
    """One job, its pods, its nodes, and the controller in front of it."""

    initial: ElasticJob
    now: float = START
    jobs: Log = field(init=False)
    pods: Log = field(default_factory=lambda: Log([{}]))
    nodes: Log = field(default_factory=lambda: Log([frozenset()]))
    facts: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    counted: set[str] = field(default_factory=set)
    highest_max: int = 0
    share: ShareStatus | None = None
    unwanted: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    noticed: frozenset[str] = frozenset()
    most_going: int = 0
    job_deleted: bool = False
    made: int = 0

    def __post_init__(self) -> None:
        self.jobs = Log([replace(self.initial, resource_version="0")])
        self.highest_max = self.initial.max

    # The controller

    def a_pass(self, faults: Faults | None = None) -> Decision:
        """Observe through the caches, decide, write, act; with faults."""
        faults = faults or Faults()
        job: ElasticJob = self.jobs.cached
        allotment = None if self.share is None else Allotment(self.share, self.unwanted)
        cluster = ClusterView(tuple(self.pods.cached.values()), self.nodes.cached, notices=self._notices())
        observed = Observed(cluster, GroupView(silent=self.silent), allotment)
        decision = reconcile(job, observed, self.now)
        check_decision(job, observed, decision)
        if self.job_deleted:
            return decision
        if decision.status != job.status and (not self._write(job, decision.status) or faults.lose_write_answer):
            return decision
        self.silent -= {worker.uid for worker in decision.status.workers if worker.cause}  # they are given up
        fates = faults.action_fates or ("ok",)
        for number, action in enumerate(decision.actions):
            if faults.crash_after is not None and number >= faults.crash_after:
                self.crash()
                break
            if fates[number % len(fates)] != "refused":
                self._carry_out(action)
        return decision

    def _notices(self) -> dict[str, LeaveNotice]:
        if self.share is not None:
            return {}
        return {pod.uid: LeaveNotice("it goes") for pod in self.pods.cached.values() if pod.node in self.noticed}

    def crash(self) -> None:
        """Restart the controller, which knows nothing and lists everything again."""
        self.silent = frozenset()
        for log in (self.jobs, self.pods, self.nodes):
            log.catch_up()

    def _write(self, read: ElasticJob, status: JobStatus) -> bool:
        latest: ElasticJob = self.jobs.latest
        if latest.resource_version != read.resource_version:
            return False  # conflict
        stored = from_json(JobStatus, to_json(status))
        self._check_write(latest.status, stored)
        self._put_job(replace(latest, status=stored))
        return True

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, CreateWorker):
            self._create(action.index)
        elif isinstance(action, DeleteWorker):
            self._delete(action)
        elif isinstance(action, DeleteJob):
            self.job_deleted = True

    def _create(self, index: int) -> None:
        name = worker_name(self.initial.name, index)
        if name in self.pods.latest:
            return  # the API server refuses a double
        self.made += 1
        uid = f"uid-{self.made}"
        self.put(Pod(name, uid, index, self.initial.uid, PodPhase.PENDING, created_at=self.stamp()))
        live, allowed = sum(not pod.ended for pod in self.ours()), self.highest_max + self.most_going
        assert live <= allowed, f"{live} live pods, never more than {allowed} were allowed"

    def _delete(self, action: DeleteWorker) -> None:
        pod = self.pods.latest.get(action.name)
        if pod is None or pod.uid != action.uid:
            return
        assert pod.owner_uid == self.initial.uid, "a pod of another owner was deleted"
        worker = next((w for w in self.jobs.latest.status.workers if w.uid == pod.uid), WorkerStatus())
        assert worker.removal or worker.cause, f"{pod.name} was deleted, and no stored status says why"
        if action.force or pod.ended:
            self.drop(pod)
        else:
            self.put(replace(pod, deleting=True))

    def _check_write(self, old: JobStatus, new: JobStatus) -> None:
        """Check that nothing is counted twice or not at all, and that every reported cause is what happened."""
        if old.phase.terminal:
            assert new.phase is old.phase, "a job that was over went on"
            assert (sum(new.restarts.values()), new.failures) == (sum(old.restarts.values()), old.failures)
        known, present = {w.uid: w for w in old.workers}, {w.uid: w for w in new.workers}
        for worker in old.workers:
            if worker.removal:
                self.facts[worker.uid].add("removed by us")
        ended = [w for w in new.workers if w.cause and not (w.uid in known and known[w.uid].cause)]
        vanished = [w for w in old.workers if not w.cause and w.uid not in present]
        fresh = {w.uid for w in (*ended, *vanished)}
        assert not fresh & self.counted, "an end was counted twice"
        self.counted |= fresh
        grown = {
            cause: new.restarts.get(cause, 0) - old.restarts.get(cause, 0) for cause in {**old.restarts, **new.restarts}
        }
        assert all(count >= 0 for cause, count in grown.items() if cause != Cause.UNRESPONSIVE)
        assert sum(grown.values()) <= len(fresh)
        assert 0 <= new.failures - old.failures <= sum(grown.get(cause.value, 0) for cause in Cause if cause.counted)
        for worker in ended:
            assert worker.cause is not None
            assert self.facts[worker.uid] & FACT_OF_CAUSE[worker.cause], (worker, self.facts[worker.uid])
        for worker in old.workers:
            cause = present[worker.uid].cause if worker.uid in present else worker.cause
            if worker.cause and cause is not worker.cause:
                assert (worker.cause, cause) == (Cause.UNRESPONSIVE, Cause.NODE_LOST)
                assert "node lost" in self.facts[worker.uid]
        assert len(new.interruptions) <= 50
        assert len(new.scalings) <= 20
        assert len(to_json(new)["conditions"]) <= 6

    # The cluster and the people around it

    def stamp(self) -> Timestamp | None:
        """The time as pods carry it: it has been through RFC 3339."""
        return from_rfc3339(to_rfc3339(self.now))

    def ours(self) -> list[Pod]:
        return [pod for pod in self.pods.latest.values() if pod.owner_uid == self.initial.uid]

    def put(self, pod: Pod) -> None:
        self.pods.add({**self.pods.latest, pod.name: pod})
        self._count_going()

    def give_notice(self, nodes: frozenset[str]) -> None:
        """Workers will have to leave these nodes, and may stay on all others."""
        self.noticed = nodes
        self._count_going()

    def _count_going(self) -> None:
        going = sum(pod.deleting or pod.node in self.noticed for pod in self.ours())
        self.most_going = max(self.most_going, going)

    def drop(self, pod: Pod) -> None:
        self.pods.add({name: other for name, other in self.pods.latest.items() if name != pod.name})

    def edit(self, **fields: Any) -> None:
        """A user changes the spec; bounds are clamped as `ElasticJob.from_manifest` does."""
        job = replace(self.jobs.latest, **fields)
        low = min(job.min, job.max)
        job = replace(job, min=low, desired=min(max(job.desired, low), job.max), generation=job.generation + 1)
        self.highest_max = max(self.highest_max, job.max)
        self._put_job(job)

    def _put_job(self, job: ElasticJob) -> None:
        self.jobs.add(replace(job, resource_version=str(len(self.jobs.versions))))

    def run_pod(self, pod: Pod, node: str) -> None:
        self.put(replace(pod, phase=PodPhase.RUNNING, started_at=self.stamp(), node=node))

    def end_pod(self, pod: Pod, fact: str, **fields: Any) -> None:
        """The process ends by itself, as `fact` says."""
        self.facts[pod.uid].add(fact)
        phase = PodPhase.SUCCEEDED if fields.get("exit_code") == 0 else PodPhase.FAILED
        self.put(replace(pod, phase=phase, **fields))

    def leave(self, pod: Pod) -> None:
        """A terminating pod's grace period is over."""
        self.drop(pod)

    def stop_answering(self, pod: Pod) -> None:
        """The worker does not join again when the group re-forms."""
        self.facts[pod.uid].add("silent")
        self.silent |= {pod.uid}

    def lose_node(self, node: str) -> None:
        """Pods that have gone from it count, while the controller's cache still shows them there."""
        self.nodes.add(self.nodes.latest | {node})
        for pod in (pod for pods in self.pods.versions[self.pods.seen :] for pod in pods.values()):
            if pod.node == node:
                self.facts[pod.uid].add("node lost")

    def find_node(self, node: str) -> None:
        self.nodes.add(self.nodes.latest - {node})


def check_decision(job: ElasticJob, observed: Observed, decision: Decision) -> None:
    """What holds of every single decision, however stale its view."""
    creates = [worker_name(job.name, a.index) for a in decision.actions if isinstance(a, CreateWorker)]
    deletes = [a.name for a in decision.actions if isinstance(a, DeleteWorker)]
    names = {pod.name for pod in observed.cluster.pods}
    ours = own_pods(job, observed.cluster.pods).values()
    wanted = {a.pool for a in decision.actions if isinstance(a, CreateWorker)}
    has_pools = job.goal is not None or job.pools is not None
    staying = [pod for pod in ours if not has_pools or not wanted or pod.pool in wanted]  # the others make room
    live = sum(not pod.ended and not pod.deleting and pod.uid not in observed.cluster.notices for pod in staying)
    assert len({*creates, *deletes}) == len(creates) + len(deletes), "one index twice in a pass"
    assert not names & {*creates}
    assert not creates or live + len(creates) <= job.max
    assert not creates or not (decision.status.phase.terminal or job.suspend or job.cancel)
    assert not creates or observed.share is None or observed.share.workers
    assert len(decision.events) <= 20
    assert decision.requeue_s is None or decision.requeue_s >= 0
    status = decision.status
    going = status.phase.terminal or job.suspend or status.reason == "Finishing" or job.deleting
    if not going and status.active < apply_share(job, observed.share).desired:
        assert creates or decision.requeue_s is not None, "workers are missing and no pass is requested"
