"""A job that was created to see whether its workers come, and can be taken back without a trace."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import TYPE_CHECKING

from elasticctl.api.errors import ClusterError, NotFoundError
from elasticctl.api.text import counted, span
from elasticctl.cli.framework.target import Target
from elasticctl.cluster.base import Cluster, Manifest

if TYPE_CHECKING:
    from elasticctl.cli.submit.manifest import Draft

GONE_WITHIN_S = 120.0
_POLL_EVERY_S = 0.25
_UNCONTROLLED_S = 15.0
"""A job that nobody looks after has no phase; one without workers is taken to be such after so long."""
_LATE_S = 2.0
"""A create that was sent is carried out within this, answered or not."""
_LIVE = ("Pending", "Running", "Unknown")


class Attempt:
    """One try in one place; the job bears a mark, so that no other is taken for it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._mark = secrets.token_hex(8)
        self._made: list[tuple[str, str]] = []
        self._sure = False

    def marked(self, draft: Draft) -> Draft:
        """The draft with the mark on what it makes."""
        from elasticctl.api.spec import ANNOTATION_ATTEMPT

        def make(name: str) -> Manifest:
            manifest = draft.make(name)
            metadata = manifest["metadata"]
            self._made.append((metadata["namespace"], metadata["name"]))
            annotations = {**(metadata.get("annotations") or {}), ANNOTATION_ATTEMPT: self._mark}
            return {**manifest, "metadata": {**metadata, "annotations": annotations}}

        return dataclasses.replace(draft, make=make)

    def wait(self, manifest: Manifest, timeout_s: float) -> str:
        """Wait for the minimum of workers, or the end: "", or what there was instead. NotFoundError: it was deleted."""
        from elasticctl.api.spec import ElasticJob

        self._sure = True
        metadata, deadline = manifest["metadata"], time.monotonic() + timeout_s
        active, wanted, trouble = 0, 1, ""
        while True:
            try:
                job = ElasticJob.from_manifest(self._cluster.get_job(metadata["namespace"], metadata["name"]))
            except NotFoundError:
                raise
            except ClusterError as e:
                trouble = f" ({e})"
            else:
                active, wanted, trouble = job.status.active, max(1, job.min), ""
                if active >= wanted or job.status.phase.terminal:
                    return ""
            if time.monotonic() >= deadline:
                return f"{active} of {counted(wanted, 'worker')} within {span(timeout_s)}{trouble}"
            time.sleep(_POLL_EVERY_S)

    def withdraw(self) -> None:
        """Cancel the job, see its workers gone, delete it. Raises ClusterError where it cannot be seen to be gone.

        Ctrl-C meanwhile deletes it at once.
        """
        for namespace, name in dict.fromkeys(self._made):
            try:
                try:
                    self._end(namespace, name)
                finally:
                    self._delete(namespace, name)
            except NotFoundError:
                continue
            except ClusterError as e:
                where = self._target.context.name
                raise ClusterError(
                    f"{name} may still be in context {where}, so no other was tried: {e}; see to it with"
                    f" `elasticctl delete {name} --context {where}`"
                ) from e

    @property
    def _cluster(self) -> Cluster:
        return self._target.cluster

    def _is_mine(self, namespace: str, name: str) -> bool:
        from elasticctl.api.objects import at
        from elasticctl.api.spec import ANNOTATION_ATTEMPT

        manifest = self._cluster.get_job(namespace, name)
        return bool(at(manifest, "metadata", "annotations", ANNOTATION_ATTEMPT) == self._mark)

    def _turned_up(self, namespace: str, name: str) -> bool:
        """Is there a job of ours? One whose creation was never answered may come a moment later."""
        deadline = time.monotonic() + (0.0 if self._sure else _LATE_S)
        while True:
            try:
                return self._is_mine(namespace, name)
            except NotFoundError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_EVERY_S)

    def _end(self, namespace: str, name: str) -> None:
        """Cancel, and wait until no worker is left; NotFoundError when there is no such job."""
        from elasticctl.api.objects import at
        from elasticctl.api.status import Phase

        if not self._turned_up(namespace, name):
            return
        self._cluster.patch_job(namespace, name, {"spec": {"cancel": True, "cleanPodPolicy": "All"}})
        ended = tuple(phase.value for phase in Phase if phase.terminal)
        began = time.monotonic()
        while True:
            phase = at(self._cluster.get_job(namespace, name), "status", "phase")
            live = [pod for pod in self._cluster.list_pods(namespace, name) if at(pod, "status", "phase") in _LIVE]
            waited_s = time.monotonic() - began
            if not live and (phase in ended or waited_s > _UNCONTROLLED_S):
                return
            if waited_s > GONE_WITHIN_S:
                raise ClusterError(f"its workers have not ended within {span(GONE_WITHIN_S)}")
            time.sleep(_POLL_EVERY_S)

    def _delete(self, namespace: str, name: str) -> None:
        """Delete the job, if it is there and ours, and wait until it is gone."""
        try:
            if not self._is_mine(namespace, name):
                return
            self._cluster.delete_job(namespace, name)
            deadline = time.monotonic() + GONE_WITHIN_S
            while self._is_mine(namespace, name):
                if time.monotonic() > deadline:
                    raise ClusterError(f"it has not been deleted within {span(GONE_WITHIN_S)}")
                time.sleep(_POLL_EVERY_S)
        except NotFoundError:
            return
