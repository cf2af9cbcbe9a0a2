"""Jobs, pods and failures for the tests of the controller's core."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob, PodPhase, worker_name
from elasticctl.api.status import GroupGeneration, JobStatus
from elasticctl_controller.core.actions import CreateWorker, Decision, DeleteWorker
from elasticctl_controller.core.observation import Allotment, ClusterView, GroupView, Observed
from elasticctl_controller.core.reconcile import reconcile

NOW = 1_000_000.0
JOB_UID = "job-uid-1"


@dataclass
class Clock:
    """Stands still until a test moves it."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now


def a_job(**fields: Any) -> ElasticJob:
    """A job of three workers, at least one and at most four."""
    job = ElasticJob(name="digits", uid=JOB_UID, generation=1, desired=3, min=1, max=4)
    return replace(job, **fields)


def a_pod(index: int, phase: PodPhase = PodPhase.RUNNING, **fields: Any) -> Pod:
    """A pod of that job, started a minute ago."""
    start = Timestamp(NOW - 60)
    pod = Pod(
        name=worker_name("digits", index),
        uid=f"uid-{index}",
        index=index,
        owner_uid=JOB_UID,
        phase=phase,
        created_at=start,
        started_at=start,
        node=f"node-{index}",
    )
    return replace(pod, **fields)


def an_end(index: int, exit_code: int | None, **fields: Any) -> Pod:
    """The same pod, ended just now with this exit code."""
    phase = PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED
    return a_pod(index, **({"phase": phase, "exit_code": exit_code, "finished_at": Timestamp(NOW)} | fields))


def termination_message(verdict: str, **fields: Any) -> str:
    """A termination message as the launcher writes it."""
    return json.dumps(
        {"verdict": verdict, "rank": 2, "exitCode": 1, "error": "ValueError: no", "lastLines": ["a", "b"]} | fields
    )


def stored(job: ElasticJob, status: JobStatus) -> ElasticJob:
    """The job as it is read back after its status was written."""
    return replace(job, status=from_json(JobStatus, to_json(status)))


SOURCES = {"cluster": ClusterView, "group": GroupView, "allotment": Allotment}


def observe(**fields: Any) -> Observed:
    """What is observed of a job, with each of these fields at its source; a job that is not shared has no `share`."""
    sources = {name: cls for name, cls in SOURCES.items() if name != "allotment" or "share" in fields}
    parts = {
        name: cls(**{each.name: fields.pop(each.name) for each in dataclasses.fields(cls) if each.name in fields})  # type: ignore[arg-type]
        for name, cls in sources.items()
    }
    assert not fields, f"no source has {fields}"
    return Observed(**parts)


def a_step(job: ElasticJob, pods: list[Pod], now: float = NOW, **observed: Any) -> tuple[ElasticJob, Decision]:
    """One pass: the job as stored after it, and what was decided."""
    decision = reconcile(job, observe(pods=tuple(pods), **observed), now)
    return stored(job, decision.status), decision


def a_running_job(**fields: Any) -> ElasticJob:
    """The job with its three workers seen and running."""
    return a_step(a_job(**fields), [a_pod(0), a_pod(1), a_pod(2)])[0]


def created(decision: Decision) -> list[int]:
    """Indices that the decision creates."""
    return [action.index for action in decision.actions if isinstance(action, CreateWorker)]


def deleted(decision: Decision) -> list[str]:
    """Names that the decision deletes."""
    return [action.name for action in decision.actions if isinstance(action, DeleteWorker)]


def a_generation(number: int, workers: int, **fields: Any) -> GroupGeneration:
    """An incarnation of the group with the first `workers` workers."""
    return GroupGeneration(generation=number, workers=tuple(worker_name("digits", i) for i in range(workers)), **fields)
