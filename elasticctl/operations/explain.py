"""Reads what is known about a job, for `elasticctl.diagnosis` to explain why it waits, restarts or failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from elasticctl.api.errors import ClusterError, ForbiddenError, NotFoundError
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.cluster.base import Manifest
from elasticctl.diagnosis import Case, Observations
from elasticctl.operations.target import Target


def read_case(target: Target, manifest: Manifest) -> Case:
    """Query everything about a job: itself, its pods, events about waiting ones, and the jobs that hold their GPUs."""
    job = ElasticJob.from_manifest(manifest)
    pods = tuple(target.cluster.pods_of([job])[job.uid])
    seen = replace(observe_pods(target, job, pods), budgets=tuple(target.cluster.list_budgets(job.namespace)))
    case = Case(job, pods, time.time(), seen=seen)
    if case.hardware.gpus_per_worker and any(case.pod_waits()):
        return replace(case, holders=_holders(target, job))
    return case


def observe_pods(target: Target, job: ElasticJob, pods: Sequence[Manifest]) -> Observations:
    """The cluster's observations of pods that have not started, and of notifications; queried only if needed."""
    if not job.notify and not any(at(pod, "status", "phase") in (None, "Pending") for pod in pods):
        return Observations()
    try:
        events = tuple(target.cluster.list_events(job.namespace, job.name))
    except (NotFoundError, ForbiddenError):
        return Observations()
    asked = any("nodeclaim/" in str(at(event, "message")) for event in events)
    claims = target.cluster.list_node_claims() if asked else None
    return Observations(events, None if claims is None else tuple(claims))


def _holders(target: Target, waiting: ElasticJob) -> dict[str, int]:
    """Other jobs -> GPUs that their workers hold; only of this namespace if the others may not be read."""
    try:
        manifests = target.cluster.list_jobs(None)
    except ClusterError:
        manifests = target.cluster.list_jobs(target.namespace)
    held: dict[str, int] = {}
    for job in map(ElasticJob.from_manifest, manifests):
        running = sum(worker.cause is None and worker.phase == PodPhase.RUNNING for worker in job.status.workers)
        if job.uid != waiting.uid and running * hardware(job).gpus_per_worker:
            held[job.name if job.namespace == waiting.namespace else job.key] = running * hardware(job).gpus_per_worker
    return held
