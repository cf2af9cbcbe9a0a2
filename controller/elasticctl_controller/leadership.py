"""The label by which the rendezvous Service finds the leader's pod.

Readiness would not do: a Deployment whose standby is never ready looks broken, and a rollout would wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from elasticctl.cluster.kube.connection import MERGE_PATCH, resource_path
from elasticctl.cluster.kube.limiter import LimitedApi
from elasticctl.errors import ElasticctlError, NotFoundError

LABEL = "elasticctl.dev/leader"
RETRY_S = 1.0

log = logging.getLogger(__name__)


class LeaderLabel:
    """Moves the label to the pod `pod` of `namespace`."""

    def __init__(self, api: LimitedApi, namespace: str, pod: str) -> None:
        self._api, self._namespace, self._pod = api, namespace, pod

    async def keep(self, holds: Callable[[], bool]) -> None:
        """Put it on, and take it off every other pod: the last leader may have had no time to; until that is done."""
        while holds():
            try:
                await asyncio.to_thread(self._move)
            except ElasticctlError as e:
                log.warning("the rendezvous Service does not find this pod yet: %s", e)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def remove(self) -> None:
        """Take it off this pod; that it cannot be done is logged, for the next leader does it too."""
        try:
            self._set(self._pod, None)
        except ElasticctlError as e:
            log.warning("the leader's label stays: %s", e)

    def _move(self) -> None:
        self._set(self._pod, "true")
        pods = self._api.request(
            "GET", resource_path("v1", self._namespace, "pods"), None, {"labelSelector": f"{LABEL}=true"}
        )
        for pod in pods.get("items") or []:
            name = pod["metadata"]["name"]
            if name != self._pod:
                try:
                    self._set(name, None)
                except NotFoundError:
                    continue

    def _set(self, pod: str, value: str | None) -> None:
        path = resource_path("v1", self._namespace, "pods", pod)
        self._api.request("PATCH", path, {"metadata": {"labels": {LABEL: value}}}, content_type=MERGE_PATCH)
