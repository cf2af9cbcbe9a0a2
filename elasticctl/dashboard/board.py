"""The newest row of each job and what of it is news to whom. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
"""A job in a few fields, as JSON; `uid` tells it from all others."""

MAX_GONE = 1_000
"""So many deletions are remembered; a viewer that missed more is sent everything."""


@dataclass(frozen=True, slots=True)
class Update:
    """What is new up to `version`; `whole`: these are all rows there are, otherwise those that changed."""

    version: int
    whole: bool
    rows: tuple[Row, ...]
    gone: tuple[str, ...] = ()


class Board:
    """Rows by uid. `version` grows by one whenever something changes."""

    def __init__(self) -> None:
        self.version = 0
        self._rows: dict[str, Row] = {}
        self._changed: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._complete_since = 0

    def show(self, rows: Iterable[Row]) -> bool:
        """These are the rows now; True when that is news."""
        now = {row["uid"]: row for row in rows}
        changed = [uid for uid, row in now.items() if self._rows.get(uid) != row]
        gone = self._rows.keys() - now.keys()
        if not changed and not gone:
            return False
        self.version += 1
        for uid in gone:
            self._changed.pop(uid)
            self._gone[uid] = self.version
        for uid in changed:
            self._gone.pop(uid, None)
            self._changed[uid] = self.version
        for uid in list(self._gone)[: max(0, len(self._gone) - MAX_GONE)]:
            self._complete_since = max(self._complete_since, self._gone.pop(uid))
        self._rows = now
        return True

    def since(self, version: int | None) -> Update:
        """What a viewer that knows `version` has to hear; None: one that knows nothing."""
        if version is None or not self._complete_since <= version <= self.version:
            return Update(self.version, True, tuple(self._rows.values()))
        rows = tuple(self._rows[uid] for uid, at in self._changed.items() if at > version)
        return Update(self.version, False, rows, tuple(uid for uid, at in self._gone.items() if at > version))
