"""A worker like those of a job that failed, to look around in: a job of its own, which runs nothing by itself."""

from __future__ import annotations

from contextlib import suppress

from elasticctl.api.errors import ClusterError, NotFoundError
from elasticctl.api.observed.workers import runs
from elasticctl.api.podtemplate import hardware, worker_container
from elasticctl.api.spec import ANNOTATION_NOTIFY, ANNOTATION_RERUN_OF, ElasticJob
from elasticctl.cluster.base import Manifest
from elasticctl.operations.job_names import next_name, taken_names
from elasticctl.operations.rerun import Rerun, rerun_manifest
from elasticctl.operations.target import PATIENCE_S, Poller, Target
from elasticctl.operations.workers import WhichWorker, choose_running

_POLL_EVERY_S = 0.5
_NOT_FOR_ONE_WORKER = ("minReplicas", "maxReplicas", "sharing", "goal", "pools", "policy", "rdzvEndpoint")
KEPT_AFTER_DEBUG_S = 60


def create_debug_job(target: Target, old: Manifest, limit_s: int) -> Manifest:
    """Create a job with one worker like those of another job; it ends after `limit_s` at the latest."""
    name, taken = f"{old['metadata']['name'][:45].rstrip('-')}-debug", taken_names(target)
    made = debug_manifest(old, next_name(name, taken) if name in taken else name, limit_s)
    return target.cluster.create_job(made)


def await_worker(target: Target, made: Manifest) -> Manifest:
    """Wait until the worker has set up its folder, and report why it waits; returns its pod.

    Raises ClusterError if the job ends before.
    """
    reported = ""
    for manifest in Poller(
        lambda: target.reread(made), _POLL_EVERY_S, patience_s=PATIENCE_S, observer=target.observer
    ).each():
        job = ElasticJob.from_manifest(manifest)
        if job.status.phase.terminal:
            raise ClusterError(f"{job.name} has ended: {job.status.message}")
        running = [pod for pod in target.cluster.pods_of([job])[job.uid] if runs(pod)]
        if running and (job.status.generations or not hardware(job).launched):
            return choose_running(job, running, WhichWorker())
        if job.status.message != reported:
            reported = job.status.message
            target.observer.report(f"{job.name}: {reported}")
    raise AssertionError("unreachable")


def end_debug_job(target: Target, made: Manifest) -> None:
    """Delete the job, if it is still there."""
    with suppress(NotFoundError):
        target.cluster.delete_job(target.namespace, made["metadata"]["name"])


def debug_manifest(manifest: Manifest, name: str, limit_s: int) -> Manifest:
    """A job with one worker like those of another job, which runs nothing, keeps no state, and ends after `limit_s`."""
    made = rerun_manifest(manifest, Rerun(name))
    for ours in (ANNOTATION_NOTIFY, ANNOTATION_RERUN_OF):
        made["metadata"]["annotations"].pop(ours, None)
    spec = {key: value for key, value in made["spec"].items() if key not in _NOT_FOR_ONE_WORKER}
    worker = spec["replicaSpecs"]["Worker"]
    worker |= {"replicas": 1, "restartPolicy": "Never"}
    found = hardware(ElasticJob.from_manifest(manifest))
    launch = found.command[: found.command.index("--") + 1] if found.launched and "--" in found.command else ()
    worker_container(worker["template"]).update(command=[*launch, "sleep", str(limit_s)], args=[])
    ends = {"activeDeadlineSeconds": limit_s, "ttlSecondsAfterFinished": KEPT_AFTER_DEBUG_S, "cleanPodPolicy": "All"}
    return {**made, "spec": {**spec, **ends, "policy": {"hangTimeoutSeconds": 0}}}
