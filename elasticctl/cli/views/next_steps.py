"""What stands beside the tables of jobs: why some wait, and what to type next."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from elasticctl.cli.framework.output import on_terminal
from elasticctl.cli.framework.target import Target

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest

_WAITING = (None, "Pending", "Restarting")
_LOOKED_AT = 5
"""Of how many waiting jobs the pods are asked for."""


def bar_encoding() -> str | None:
    """The encoding in which stdout takes a bar; None where no person looks."""
    return sys.stdout.encoding if on_terminal() else None


def reasons(target: Target, jobs: list[Manifest], now: float) -> dict[str, str]:
    """UID -> why a job waits, of the first few that do: for that their pods are looked at."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING][:_LOOKED_AT]
    if not waiting:
        return {}
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.job import reason

    found = [ElasticJob.from_manifest(manifest) for manifest in waiting]
    pods = target.cluster.pods_of(found)
    return {job.uid: reason(job, pods[job.uid], now) for job in found}


def none_line(target: Target, namespace: str | None) -> str:
    """What to say where there are no jobs."""
    place = "in any namespace" if namespace is None else f"in namespace {namespace}"
    return f"no jobs {place} of context {target.context.name}; start one: elasticctl submit train.py"


def next_of_list(jobs: list[Manifest]) -> str:
    """What to type next: about a job that waits, if there is one, else about the newest."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING]
    if waiting:
        return f"why one waits: elasticctl explain {waiting[-1]['metadata']['name']}"
    return f"more about one: elasticctl status {jobs[-1]['metadata']['name']}"


def next_line(manifest: Manifest, *, live: bool = False) -> str:
    """What to type next about a job; `live`: it is being watched already."""
    from elasticctl.api.spec import ElasticJob
    from elasticctl.api.status import Phase

    job = ElasticJob.from_manifest(manifest)
    if job.status.phase in (Phase.PENDING, Phase.RESTARTING, Phase.FAILED):
        return f"what to do about it: elasticctl explain {job.name}; its output: elasticctl logs {job.name}"
    if job.status.phase.terminal:
        return f"what it cost: elasticctl history {job.name}; its output: elasticctl logs {job.name}"
    more = "" if live else f"; live: elasticctl status -w {job.name}"
    return f"its output: elasticctl logs -f {job.name}{more}"
