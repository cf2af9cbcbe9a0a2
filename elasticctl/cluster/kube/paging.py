"""Listing everything of a kind, page by page."""

from __future__ import annotations

from collections.abc import Mapping

from elasticctl.cluster.kube.connection import Connection
from elasticctl.codec import Manifest

PAGE_OBJECTS = 500


def all_items(connection: Connection, path: str, params: Mapping[str, str] | None = None) -> list[Manifest]:
    """The objects of a collection, as many requests as it takes; raises what `Connection.request` raises."""
    items: list[Manifest] = []
    token = ""
    while True:
        more = {"continue": token} if token else {}
        page = connection.request("GET", path, None, {"limit": str(PAGE_OBJECTS), **(params or {}), **more})
        items += page.get("items") or []
        token = page.get("metadata", {}).get("continue") or ""
        if not token:
            return items
