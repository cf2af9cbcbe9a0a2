"""Metrics in a job's storage, as launchers write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from elasticctl.cluster.base import Manifest
from elasticctl_store import storage, stored_logs, stored_metrics
from elasticctl_store.stored_logs import Incarnation, StoredLine


def store_metrics(folder: Path, life: Incarnation, first: int, rows: Iterable[Mapping[str, object]]) -> None:
    """An object whose first row has this number."""
    lines = [StoredLine(number, 0.0, 0, json.dumps(row)) for number, row in enumerate(rows, first)]
    text = stored_logs.compress(stored_metrics.encode(lines))
    storage.open(f"file://{folder}").put(stored_metrics.key(life, first), [text])


def keeps_in(manifest: Manifest, folder: Path, *arguments: str) -> Manifest:
    """The job with a storage, started by our launcher with these arguments of its script."""
    container = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["command"] = ["elasticctl-launch", "--", "python", "train.py", *arguments]
    container["env"] = [{"name": "ELASTICCTL_STORAGE", "value": f"file://{folder}"}]
    return manifest
