"""Suspend, resume, cancel and delete a job, and wait for it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from elasticctl.api.errors import ConflictError
from elasticctl.api.spec import ANNOTATION_MOVING_FROM, ANNOTATION_MOVING_TO, ElasticJob
from elasticctl.api.status import Phase
from elasticctl.cluster.base import Manifest
from elasticctl.operations.logs import delete_stored_logs
from elasticctl.operations.target import PATIENCE_S, Poller, Target

POLL_EVERY_S = 0.25
_RUNS = (Phase.PENDING, Phase.RUNNING, Phase.RESTARTING)


def suspend(target: Target, found: Manifest) -> ElasticJob:
    """Stop the job's workers after a last checkpoint. Raises ConflictError once it has ended."""
    return _change_spec(target, found, {"suspend": True}, "suspended")


def resume(target: Target, found: Manifest, *, here: bool = False) -> ElasticJob | None:
    """Continue from the last checkpoint; None if the job is not suspended, and nothing was changed.

    `here` abandons an unfinished move of the job first. Raises ConflictError once it has ended, has moved or is moving.
    """
    job = ElasticJob.from_manifest(target.reread(found))
    if not here:
        _check_here(job)
        if job.status.phase in _RUNS and not (job.suspend or job.cancel):
            return None
    ended_move = _end_move(target, job) if here else {}
    return _change_spec(target, found, {"suspend": False}, "resumed", ended_move)


def cancel(target: Target, found: Manifest) -> ElasticJob:
    """Stop the job permanently. Raises ConflictError once it has ended."""
    return _change_spec(target, found, {"cancel": True}, "cancelled")


def delete(target: Target, found: Manifest) -> None:
    """Delete the job, its workers and its logs, even while it runs; its checkpoints stay."""
    job = ElasticJob.from_manifest(target.reread(found))
    target.cluster.delete_job(target.namespace, job.name)
    delete_stored_logs(job, target.observer)
    if job.moving_to:
        from elasticctl.operations import move

        move.abandon_of_deleted_job(job, target.observer)


def wait(
    target: Target,
    found: Manifest,
    *,
    timeout_s: float | None = None,
    running: bool = False,
    every_s: float = POLL_EVERY_S,
) -> ElasticJob:
    """Wait until the job ends (`running`: or trains), or until the time is over; returns the job as it is then.

    Raises NotFoundError if the job is deleted meanwhile, even if another one has its name by now, and UnreachableError
    if the cluster does not answer for a long time.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    answers = Poller(lambda: target.reread(found), every_s, deadline, PATIENCE_S, target.observer)
    for manifest in answers.each():
        job = ElasticJob.from_manifest(manifest)
        phase = job.status.phase
        if phase.terminal or (running and phase is Phase.RUNNING) or time.monotonic() >= deadline:
            return job
    raise AssertionError("unreachable")


def _check_here(job: ElasticJob) -> None:
    """Raise ConflictError if the job continues elsewhere, or may do so: only there can it restore and commit."""
    context = job.moved_to.partition(" ")[0]
    if context:
        there = f"`elasticctl resume {job.name} --context {context}`"
        raise ConflictError(f"{job.name} runs in context {context} now. FIX: {there}")
    if job.is_moving:
        from elasticctl.operations import move

        raise ConflictError(move.describe_unfinished(job))


def _end_move(target: Target, job: ElasticJob) -> dict[str, Any]:
    """Abandon an unfinished move; returns the changes to the job's metadata."""
    if not job.is_moving or job.status.phase.terminal:
        _check_here(job)
        return {}
    from elasticctl.operations import move

    move.abandon(job, target.observer)
    return {"annotations": {ANNOTATION_MOVING_TO: None, ANNOTATION_MOVING_FROM: None}}


def _change_spec(
    target: Target, found: Manifest, spec: Mapping[str, Any], done: str, metadata: Mapping[str, Any] | None = None
) -> ElasticJob:
    """Change the spec and `metadata` of a job. Raises ConflictError once it has ended."""

    def patch_of(manifest: Manifest) -> dict[str, Any]:
        job = ElasticJob.from_manifest(manifest)
        if job.status.phase.terminal:
            raise ConflictError(f"{job.name} has ended ({job.status.phase.value}) and cannot be {done}")
        if job.cancel and "cancel" not in spec:
            raise ConflictError(
                f"{job.name} is being cancelled and cannot be {done}. FIX: `elasticctl rerun {job.name}`"
            )
        return {"metadata": dict(metadata or {}), "spec": dict(spec)}

    return ElasticJob.from_manifest(target.change(found, patch_of)[1])
