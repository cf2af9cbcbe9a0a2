"""The stacks of a job's ranks, for the page."""

from __future__ import annotations

from typing import Any

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.api.observed.workers import runs
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster
from elasticctl.cluster.inside import Inside
from elasticctl.cluster.stacks import read_stacks

MAX_LINES = 20_000


def stacks_data(inside: Inside, cluster: Cluster, job: ElasticJob) -> dict[str, Any]:
    """The stacks of all ranks as lines, with the reasons for those that could not be read. Blocks.

    Raises UsageError or ConflictError if no rank can be examined, and ClusterError.
    """
    made = hardware(job)
    if not made.launched:
        raise UsageError(f"{job.name} does not run under elasticctl-launch, which knows its ranks")
    workers = [pod for pod in cluster.pods_of([job])[job.uid] if runs(pod)]
    if not workers:
        raise ConflictError(f"no worker of {job.name} is running")
    seen = read_stacks(inside, workers, made.command[0])
    lines = [line for one in seen for line in one.lines()]
    troubles = [f"{one.worker}: {one.trouble}" for one in seen if one.trouble]
    return {"lines": lines[:MAX_LINES], "more": max(0, len(lines) - MAX_LINES), "troubles": troubles}
