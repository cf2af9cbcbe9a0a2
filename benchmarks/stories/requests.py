"""Count who sent which requests to the lab's API server, by its audit log: the controller and Kueue.

Leases and watches are not counted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.replicas import SYSTEM
from elasticctl.kubeapi import installation

LOG = Path(os.environ.get("KUBELAB_HOME", "/tmp/kubelab")) / "log" / "audit.log"
CONTROLLER, KUEUE = "the controller", "Kueue"


def _size() -> int:
    return LOG.stat().st_size if LOG.exists() else 0


@dataclass(slots=True)
class Requests:
    """All requests since this object was created."""

    _at: int = field(default_factory=_size)

    def count(self) -> Counter[str]:
        """Return how many requests each has sent; empty if there is no audit log."""
        found: Counter[str] = Counter()
        if not LOG.exists():
            return found
        with LOG.open("rb") as log:
            log.seek(self._at)
            for line in log:
                if line.endswith(b"\n") and (who := _asker(json.loads(line))):
                    found[who] += 1
        return found


def _asker(event: dict[str, object]) -> str:
    about, user = event.get("objectRef") or {}, event.get("user") or {}
    assert isinstance(about, dict)
    assert isinstance(user, dict)
    if about.get("resource") == "leases" or event.get("verb") == "watch":
        return ""
    name = str(user.get("username", ""))
    if name == f"system:serviceaccount:{SYSTEM}:{installation.ACCOUNT}":
        return CONTROLLER
    return KUEUE if name.startswith("system:serviceaccount:kueue-system:") else ""
