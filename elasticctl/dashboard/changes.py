"""What the page may change: scale, suspend, resume, cancel. Each is done to the very job that was looked at, or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.api.spec import MAX_WORKERS, ElasticJob
from elasticctl.api.text import listed, shown
from elasticctl.cluster.base import Cluster, Manifest

Scaled = Callable[[Manifest, int], Mapping[str, Any]]
"""From a job and a number of workers to the merge patch that `elasticctl scale` makes."""

VERBS: Mapping[str, Mapping[str, Any]] = {
    "suspend": {"suspend": True},
    "resume": {"suspend": False},
    "cancel": {"cancel": True},
}
"""What each sets in the spec; `scale` is the one besides."""

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody asked for, of the job with this uid; `workers` for `scale` only."""

    verb: str
    uid: str
    workers: int = 0

    @classmethod
    def parse(cls, verb: str, body: object) -> Wish:
        """From the last word of a path and a JSON body; UsageError when it makes no sense."""
        if verb != "scale" and verb not in VERBS:
            raise UsageError(f"{shown(verb)} cannot be done here; {listed(['scale', *VERBS])} can")
        found = body if isinstance(body, dict) else {}
        uid, workers = found.get("uid"), found.get("workers", 0)
        if not isinstance(uid, str) or not uid:
            raise UsageError("uid: which job is meant?")
        if not isinstance(workers, int) or isinstance(workers, bool) or not 0 <= workers <= MAX_WORKERS:
            raise UsageError(f"workers: {shown(workers)} is not a number from 0 to {MAX_WORKERS}")
        if (verb == "scale") != (workers > 0):
            raise UsageError("workers: a number for scale, and for nothing else")
        return cls(verb, uid, workers)


def carry_out(cluster: Cluster, namespace: str, name: str, wish: Wish, scaled: Scaled) -> None:
    """Patch the job, again where somebody else has changed it meanwhile.

    Raises ConflictError when it has ended or is another job by now, UsageError for a number out of bounds, and what
    the cluster raises.
    """
    for attempt in range(_ATTEMPTS):
        patch = _patch(cluster.get_job(namespace, name), wish, scaled)
        try:
            cluster.patch_job(namespace, name, patch)
        except ConflictError:
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        return


def _patch(manifest: Manifest, wish: Wish, scaled: Scaled) -> Mapping[str, Any]:
    job = ElasticJob.from_manifest(manifest)
    if job.uid != wish.uid:
        raise ConflictError(f"{job.name} is not the job that the page shows: it has been made again since")
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}); {wish.verb} comes too late")
    if wish.verb == "scale":
        return scaled(manifest, wish.workers)
    return {"metadata": {"resourceVersion": job.resource_version}, "spec": dict(VERBS[wish.verb])}
