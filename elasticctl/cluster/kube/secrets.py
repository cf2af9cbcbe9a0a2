"""Secrets of a Kubernetes cluster for jobs: set without being read, listed by a label.

Values go to the API server in the body of a request. They are never shown.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress

from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import NotFoundError
from elasticctl.api.spec import GROUP
from elasticctl.cluster.base import SecretInfo, check_secret_name
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path

LABEL_SECRET = f"{GROUP}/secret"
"""On Secrets that `elasticctl secret` has set; others, such as tokens, are not listed."""
_OF_JOBS = "of-jobs"


class KubeSecrets:
    """`elasticctl.cluster.base.SecretStore` over an API server."""

    def __init__(self, api: Connection) -> None:
        self._api = api

    def merge(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """See SecretStore.merge; needs the right to patch and to create, but not to read."""
        check_secret_name(name)
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        patch = {"metadata": {"labels": {LABEL_SECRET: _OF_JOBS}}, "data": data}
        with suppress(NotFoundError):
            self._api.request("PATCH", _path(namespace, name), patch, content_type=MERGE_PATCH)
            return
        metadata = {"name": name, "namespace": namespace, "labels": {LABEL_SECRET: _OF_JOBS}}
        made = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
        self._api.request("POST", _path(namespace), made)

    def delete(self, namespace: str, name: str) -> None:
        """See SecretStore.delete."""
        check_secret_name(name)
        self._api.request("DELETE", _path(namespace, name))

    def list(self, namespace: str) -> list[SecretInfo]:
        """See SecretStore.list."""
        params = {"labelSelector": f"{LABEL_SECRET}={_OF_JOBS}"}
        items = self._api.request("GET", _path(namespace), None, params)["items"]
        found = [
            SecretInfo(
                item["metadata"]["name"],
                tuple(sorted(item.get("data") or {})),
                from_rfc3339(item["metadata"].get("creationTimestamp")),
            )
            for item in items
        ]
        return sorted(found, key=lambda info: info.name)


def _path(namespace: str, name: str = "") -> str:
    return resource_path("v1", namespace, "secrets", name)
