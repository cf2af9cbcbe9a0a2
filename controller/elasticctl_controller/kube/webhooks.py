"""From a reference to a webhook's URL on Kubernetes: read anew for each message, kept nowhere.

It is a key of one Secret, `elasticctl-notify`, in the job's own namespace: the only one that the controller may read,
and no job can use another namespace's. Apart from `urls`, which must do without the client for Kubernetes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, Protocol

from elasticctl.api import notifications
from elasticctl.api.errors import NotFoundError
from elasticctl.kubeapi.connection import resource_path
from elasticctl_controller.core.notifications import WebhookError
from elasticctl_controller.loop.notifier import Destination, value_of


class Api(Protocol):
    """What is asked of an API server; `elasticctl_controller.kube.limiter.LimitedApi`, or a plain connection."""

    def request(self, method: str, path: str) -> dict[str, Any]:
        """Send one request. Raises ClusterError."""


def of_cluster(api: Api) -> Callable[[Destination], str]:
    """URLs from the Secrets of a Kubernetes cluster."""

    def url_of(destination: Destination) -> str:
        reference = notifications.parse_reference(destination.reference)
        if reference.local_only:
            raise WebhookError(f"{reference.kind}: is for the local cluster; here it is secret:KEY")
        try:
            found = api.request("GET", resource_path("v1", destination.namespace, "secrets", notifications.SECRET))
        except NotFoundError:
            found = {}
        data = found.get("data") or {}
        try:
            values = {
                key: base64.b64decode(value, validate=True).decode()
                for key, value in data.items()
                if key == reference.name
            }
        except (binascii.Error, ValueError, TypeError):
            raise WebhookError(f"the key {reference.name} of the secret {notifications.SECRET} is no text") from None
        return value_of(values, destination, reference)

    return url_of
