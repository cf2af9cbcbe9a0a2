"""Kubernetes' own gang scheduling, where the API server serves it: whether new pods of a job name its PodGroup."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.gangs import GANG_API, is_gang
from elasticctl_controller.kube.limited_api import LimitedApi

RECHECK_S = 600.0
"""After this time a cluster without PodGroups is asked again."""

log = logging.getLogger(__name__)


class Gangs:
    """Puts pods into their job's gang; thread-safe. `clock` is monotonic seconds."""

    def __init__(self, api: LimitedApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._lock = threading.Lock()
        self._served, self._ask_at = False, 0.0

    def takes(self, job: ElasticJob, pods: Iterable[Mapping[str, Any]]) -> bool:
        """True if new pods of the job, which has these `pods`, join its gang."""
        return self._is_served() and is_gang(job, pods)

    def _is_served(self) -> bool:
        with self._lock:
            if not self._served and self._clock() >= self._ask_at:
                self._ask_at = self._clock() + RECHECK_S
                self._served = self._ask_server()
            return self._served

    def _ask_server(self) -> bool:
        try:
            found = self._api.request("GET", f"/apis/{GANG_API}").get("resources", ())
        except NotFoundError:
            return False
        except ElasticctlError as e:
            log.warning("whether the cluster has PodGroups is not known: %s", e)
            return False
        served = any(resource.get("name") == "podgroups" for resource in found)
        if served:
            log.info("the cluster schedules gangs: the minimum of a job is placed together")
        return served
