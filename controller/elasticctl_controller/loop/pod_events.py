"""What events say of pods that have not started: asked for few of them, and rarely.

An API server finds the events about one pod by reading all of its namespace. So one pod of a job is asked about, less
often the longer the answer stays the same, and of many jobs that wait each one less often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticctl.api.codec import Manifest
from elasticctl.api.observed.pod_events import told_by_events
from elasticctl.api.observed.workers import Pod, PodWait
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.loop.workqueue import fair_pause_s

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 120.0
ASKED_PER_S = 2.0
"""Of all jobs together."""

ListEvents = Callable[[ElasticJob, str], list[Manifest]]


@dataclass(frozen=True, slots=True)
class _Heard:
    """What was heard of the pod `uid`, when that was asked, and how long to wait until it is asked again."""

    uid: str
    wait: PodWait | None
    at: float
    pause_s: float


class Hearsay:
    """Thread-safe, as long as one job is worked on by one thread at a time."""

    def __init__(self, list_events: ListEvents) -> None:
        self._list_events = list_events
        self._heard: dict[str, _Heard] = {}  # by key of the job

    def of(self, key: str) -> Mapping[str, PodWait | None]:
        """What was heard of a job's pod, by its uid."""
        heard = self._heard.get(key)
        return {} if heard is None else {heard.uid: heard.wait}

    def forget(self, key: str) -> None:
        """Nothing of this job waits for a reason that has to be asked for."""
        self._heard.pop(key, None)

    def ask(self, job: ElasticJob, pod: Pod, now: float) -> tuple[bool, float]:
        """Ask about this pod if it is time: is there anything new, and in how many seconds is it time again?

        Raises ElasticctlError where the API server does.
        """
        heard = self._heard.get(job.key)
        if heard is not None and heard.uid != pod.uid:
            heard = None
        least_s = fair_pause_s(list(self._heard), job.key, ASKED_PER_S)
        if heard is not None and now < heard.at + max(heard.pause_s, least_s):
            return False, heard.at + max(heard.pause_s, least_s) - now
        wait = told_by_events(self._list_events(job, pod.uid), placed=bool(pod.node), now=now)
        is_new = heard is None or heard.wait != wait
        pause_s = FIRST_PAUSE_S if heard is None or is_new else min(heard.pause_s * 2, LONGEST_PAUSE_S)
        self._heard[job.key] = _Heard(pod.uid, wait, now, pause_s)
        return is_new, max(pause_s, least_s)
