"""Logs and metrics in a job's storage, as launchers write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elasticctl.cluster.base import Manifest
from elasticctl_store import storage, stored_logs, stored_metrics
from elasticctl_store.stored_logs import Incarnation, StoredLine


def launched(url: str) -> dict[str, Any]:
    """The container of a job that our launcher would run, with a storage."""
    return {
        "command": ["elasticctl-launch", "--", "python", "train.py"],
        "env": [{"name": "ELASTICCTL_STORAGE", "value": url}],
    }


def store(url: str, life: Incarnation, *said: tuple[float, str], first: int = 1, each: int = 3) -> None:
    """Store lines of one incarnation, `each` an object, the first of which has the number `first`."""
    opened = storage.open(url)
    lines = [StoredLine(number, at, 0, text) for number, (at, text) in enumerate(said, first)]
    for start in range(0, len(lines), each):
        batch = lines[start : start + each]
        opened.put(life.key(batch[0].number), [stored_logs.compress(stored_logs.encode(batch))])


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
