"""What somebody has asked of the lab's API server, and what the answers were, by the server's own audit log."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from tests.on_cluster.commands import LAB_HOME
from tests.support.controller.rights import Right

LOG = LAB_HOME / "log" / "audit.log"
REFUSED = (401, 403)


def need_audit_log() -> None:
    """Skip the test where the API server writes no audit log."""
    if not LOG.exists():
        pytest.skip(f"there is no audit log {LOG}: the cluster is not the lab's")


@dataclass(slots=True)
class Audit:
    """All that `user` asks for from now on; `used` are the rights that were taken for it, `refused` what was denied."""

    user: str
    used: set[Right] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)
    _at: int = field(default_factory=lambda: LOG.stat().st_size)

    def read(self) -> set[Right]:
        """Take in what has been written since; returns `used`."""
        with LOG.open("rb") as log:
            log.seek(self._at)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                self._take(json.loads(line))
        return self.used

    def _take(self, event: dict[str, object]) -> None:
        user, about, answer = (event.get(part) or {} for part in ("user", "objectRef", "responseStatus"))
        assert isinstance(user, dict)
        assert isinstance(about, dict)
        assert isinstance(answer, dict)
        if user.get("username") != self.user:
            return
        if answer.get("code") in REFUSED:
            self.refused.append(f"{event['verb']} {event['requestURI']}: {answer.get('message', answer['code'])}")
        if about.get("resource"):
            part = about.get("subresource")
            resource = f"{about['resource']}/{part}" if part else about["resource"]
            self.used.add((about.get("apiGroup", ""), resource, str(event["verb"])))
            self.namespaces.add(about.get("namespace", ""))
