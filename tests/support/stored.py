"""Logs in a job's storage, as launchers would have left them there."""

from __future__ import annotations

from typing import Any

from elasticctl_store import storage, stored_logs
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
