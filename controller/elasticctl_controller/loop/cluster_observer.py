"""What the cluster shows of a job: its pods, what keeps them from starting, and which of its workers have to leave.

Some things are known from events only: why a pod does not start, and that a kubelet has killed a worker because its own
probe failed. An API server finds the events about one pod by reading all events of its namespace, so the controller
asks for few of them. Of a job whose workers wait, it asks about one pod: less often the longer the answer stays the
same, and the more jobs wait. Of workers that have ended, it asks about a few whose end is otherwise unexplained, and
only if their template has a probe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.objects import as_text, at
from elasticctl.api.observed.pod_events import failed_probe, wait_by_events
from elasticctl.api.observed.workers import PROBE_FAILED, Pod, PodWait
from elasticctl.api.podtemplate import worker_container
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.causes import is_unannounced_kill
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.core.observation import ClusterView
from elasticctl_controller.loop.apply_actions import Workload, log_fields
from elasticctl_controller.loop.workqueue import fair_pause_s

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 120.0
ASKED_PER_S = 2.0
"""Over all jobs."""
MOST_ENDS = 4
"""How many ends of workers are asked about in one pass: one that counts is enough to slow down the next attempt."""

AVOID_S = 300.0
"""How long new workers avoid a node after its notice; by then it is mostly gone. Nodes that accept no pods anyway are
not named in new workers' pods, because Karpenter adds no machine for a pod that names nodes."""

log = logging.getLogger(__name__)

ListEvents = Callable[[ElasticJob, str], list[Manifest]]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What events said of the pod `uid`, when that was asked, and how long to wait until it is asked again."""

    uid: str
    wait: PodWait | None
    at: float
    pause_s: float


class PodEvents:
    """Thread-safe, as long as one job is worked on by one thread at a time."""

    def __init__(self, list_events: ListEvents) -> None:
        self._list_events = list_events
        self._answers: dict[str, _Answer] = {}  # by key of the job

    def of(self, key: str) -> Mapping[str, PodWait | None]:
        """What events have said of the job's waiting pod, by its uid."""
        answer = self._answers.get(key)
        return {} if answer is None else {answer.uid: answer.wait}

    def drop_answer(self, key: str) -> None:
        """Drop the answer about a job none of whose pods waits for a reason that only events give."""
        self._answers.pop(key, None)

    def ask(self, job: ElasticJob, pod: Pod, now: float) -> tuple[bool, float]:
        """Ask about this waiting pod if it is time: returns whether the answer is new, and seconds until the next time.

        Raises ElasticctlError where the API server does.
        """
        answer = self._answers.get(job.key)
        if answer is not None and answer.uid != pod.uid:
            answer = None
        least_s = fair_pause_s(list(self._answers), job.key, ASKED_PER_S)
        if answer is not None and now < answer.at + max(answer.pause_s, least_s):
            return False, answer.at + max(answer.pause_s, least_s) - now
        wait = wait_by_events(self._list_events(job, pod.uid), placed=bool(pod.node), now=now)
        is_new = answer is None or answer.wait != wait
        pause_s = FIRST_PAUSE_S if answer is None or is_new else min(answer.pause_s * 2, LONGEST_PAUSE_S)
        self._answers[job.key] = _Answer(pod.uid, wait, now, pause_s)
        return is_new, max(pause_s, least_s)

    def explain_ends(
        self, job: ElasticJob, pods: tuple[Pod, ...], lost_nodes: Collection[str], now: float
    ) -> tuple[Pod, ...]:
        """Return the pods; for a worker that was killed because its own probe failed, the pod says so in place of the
        worker's report.

        Raises ElasticctlError where the API server does.
        """
        container = worker_container(job.template)
        if not (at(container, "livenessProbe") or at(container, "startupProbe")):
            return pods
        counted = {worker.uid for worker in job.status.workers if worker.cause is not None or worker.removal}
        unclear = [
            pod.uid
            for pod in pods
            if pod.owner_uid == job.uid and pod.uid not in counted and is_unannounced_kill(pod, lost_nodes, now)
        ]
        why = {
            uid: failed_probe(self._list_events(job, uid), as_text(at(container, "name")))
            for uid in unclear[:MOST_ENDS]
        }
        return tuple(
            replace(pod, reason=PROBE_FAILED, message=why[pod.uid]) if why.get(pod.uid) else pod for pod in pods
        )


@dataclass(slots=True)
class _SeenPods:
    """What is remembered of one job: its parsed `pods`, by the id of their manifests, and the nodes that workers have
    `left`, with the time (seconds since the epoch) until which new workers avoid them."""

    job_uid: str
    pods: dict[int, tuple[Mapping[str, Any], Pod]] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)


class ClusterObserver:
    """Reads what a `Workload` shows of jobs. Thread-safe, as long as one job is worked on by one thread at a time."""

    def __init__(self, workload: Workload, clock: Callable[[], float]) -> None:
        self._workload, self._clock = workload, clock
        self._events = PodEvents(workload.list_pod_events)
        self._known: dict[str, _SeenPods] = {}

    def observe(self, job: ElasticJob, refused: str | None, taken: Mapping[str, float]) -> ClusterView:
        """What the cluster shows now. `taken` are names of workers that other pods have, and when to try each again."""
        now = self._clock()
        return ClusterView(
            pods=self._explain_ends(job, self._pods(job)),
            lost_nodes=self._workload.lost_nodes(),
            refused=refused,
            taken={name: at <= now for name, at in taken.items()},
            events=self._events.of(job.key),
        )

    def add_notices(
        self, job: ElasticJob, cluster: ClusterView, reported: Mapping[str, LeaveNotice], *, is_shared: bool
    ) -> ClusterView:
        """The same with the workers that will have to leave, as far as they may be replaced. Launchers have `reported`
        some of them."""
        nodes = self._workload.node_notices()
        notices = {**notices_of(cluster.pods, nodes), **reported}
        avoid = self._nodes_to_avoid(job, cluster, notices, nodes)
        return replace(
            cluster,
            notices={} if is_shared else notices,  # there is no room for replacements
            avoid=avoid if self._workload.nodes_may_be_named() else (),
        )

    def ask_about(self, job: ElasticJob, pod: Pod | None) -> tuple[bool, float | None]:
        """Find out from events why this pod does not start, for the next pass; a failure is only logged.

        Returns whether the answer is new, and seconds until this should be asked again. None: no pod waits for a reason
        that only events give.
        """
        if pod is None:
            self._events.drop_answer(job.key)
            return False, None
        try:
            return self._events.ask(job, pod, self._clock())
        except ElasticctlError as e:
            log.warning("job %s: no events about %s: %s", job.key, pod.name, e, extra=log_fields(job, pod.name))
            return False, LONGEST_PAUSE_S

    def drop_job(self, key: str) -> None:
        """A job is gone."""
        self._known.pop(key, None)
        self._events.drop_answer(key)

    def _of(self, job: ElasticJob) -> _SeenPods:
        """What is remembered about this very job, not about an earlier one of its name."""
        known = self._known.get(job.key)
        if known is None or known.job_uid != job.uid:
            known = self._known[job.key] = _SeenPods(job.uid)
        return known

    def _pods(self, job: ElasticJob) -> tuple[Pod, ...]:
        """The job's pods; only pods that have changed since the last pass are parsed again."""
        known = self._of(job)
        found: dict[int, tuple[Mapping[str, Any], Pod]] = {}
        for manifest in self._workload.list_pods(job):
            before = known.pods.get(id(manifest))  # the entry keeps the manifest alive, so no other object gets its id
            found[id(manifest)] = before or (manifest, Pod.from_manifest(manifest))
        known.pods = found
        return tuple(pod for _, pod in found.values())

    def _explain_ends(self, job: ElasticJob, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods, with what is known from events only about their ends; a failure to read the events is only
        logged."""
        try:
            return self._events.explain_ends(job, pods, self._workload.lost_nodes(), self._clock())
        except ElasticctlError as e:
            log.warning("job %s: no events about workers that have ended: %s", job.key, e, extra=log_fields(job))
            return pods

    def _nodes_to_avoid(
        self,
        job: ElasticJob,
        cluster: ClusterView,
        notices: Mapping[str, LeaveNotice],
        nodes: Mapping[str, LeaveNotice],
    ) -> tuple[str, ...]:
        """The nodes that workers of the job have to leave, now or until a while ago, and that still accept pods."""
        now, known = self._clock(), self._of(job)
        closed = cluster.lost_nodes | {node for node, notice in nodes.items() if notice.closed}
        left = {node: until for node, until in known.left.items() if until > now}
        left |= {pod.node: now + AVOID_S for pod in cluster.pods if pod.node and pod.uid in notices}
        known.left = {node: until for node, until in left.items() if node not in closed}
        return tuple(sorted(known.left))


def notices_of(pods: Iterable[Pod], nodes: Mapping[str, LeaveNotice]) -> dict[str, LeaveNotice]:
    """The notices that pods get from their nodes, by the pods' uids."""
    return {pod.uid: nodes[pod.node] for pod in pods if pod.node in nodes}
