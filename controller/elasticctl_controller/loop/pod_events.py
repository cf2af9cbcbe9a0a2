"""What only events say of pods: why one does not start, and that a kubelet has killed a worker for its own probe.

An API server finds the events about one pod by reading all events of its namespace, so the controller asks for few of
them. Of a job whose workers wait, it asks about one pod: less often the longer the answer stays the same, and the more
jobs wait. Of workers that have ended, it asks about a few whose end is otherwise unexplained, and only if their
template has a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from elasticctl.api.codec import Manifest
from elasticctl.api.objects import as_text, at
from elasticctl.api.observed.pod_events import failed_probe, wait_by_events
from elasticctl.api.observed.workers import PROBE_FAILED, Pod, PodWait
from elasticctl.api.podtemplate import worker_container
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.causes import is_unannounced_kill
from elasticctl_controller.loop.workqueue import fair_pause_s

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 120.0
ASKED_PER_S = 2.0
"""Over all jobs."""
MOST_ENDS = 4
"""How many ends of workers are asked about in one pass: one that counts is enough to slow down the next attempt."""

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
        """Return the pods; those whose worker was killed because its own probe failed say so, in place of its report.

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
