"""The collective that a rank is in, read from torch's flight recorder, which numbers those of each process group.

torch records them anyway (`TORCH_FR_BUFFER_SIZE`, 2,000 entries by default). A thread that `bootstrap.py` starts in the
rank reads them on request, because a rank that waits in a collective lets other threads run. Ranks that were started
without a spare, and recorders with another format, report nothing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticctl_launcher.hangs.rank_location import Kind, StackPlace

ANSWER_S = 1.0
"""The timeout for a few kilobytes from a process on this machine. A process that holds the interpreter's lock does not
answer.
"""
MAX_BYTES = 1 << 22
MAX_NAME = 60
DEFAULT_GROUP, NOT_DESCRIBED = "default_pg", "undefined"


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective number `number` of its process group; `group` is empty for the default group."""

    name: str
    number: int
    group: str = ""

    def at(self, place: StackPlace) -> StackPlace:
        """Return `place`, the place of a rank that waits, extended by this collective."""
        number = f"no. {self.number}" + (f" of group {self.group}" if self.group else "")
        if place.kind is Kind.COLLECTIVE:
            return replace(place, where=f"{place.where} {number}")
        return replace(place, where=f"{place.where}, in {self.name} {number}") if place.kind is Kind.DEVICE else place


def read_collective(path: Path) -> Collective | None:
    """Ask the rank that listens at `path`; return None if it is in no collective, or does not answer."""
    answer = b""
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(ANSWER_S)
        asked.connect(str(path))
        while len(answer) < MAX_BYTES and (data := asked.recv(1 << 16)):
            answer += data
        return parse(answer.splitlines())
    return None


def parse(dumps: Iterable[bytes]) -> Collective | None:
    """Return the first collective in these dumps that has not ended. Raises ValueError for invalid JSON."""
    for dump in dumps:
        recorded = json.loads(dump)
        entries = recorded.get("entries") if isinstance(recorded, Mapping) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, Mapping) and (found := _read(entry)):
                return found
    return None


def _read(entry: Mapping[str, Any]) -> Collective | None:
    name, number, group = (entry.get(key) for key in ("profiling_name", "collective_seq_id", "process_group"))
    if entry.get("retired") or entry.get("is_p2p") or not isinstance(name, str) or not isinstance(number, int):
        return None
    called = [str(each)[:MAX_NAME] for each in group] if isinstance(group, list) else []  # name, description
    described = next((each for each in reversed(called) if each != NOT_DESCRIBED), "")
    return Collective(name.rpartition(":")[2][:MAX_NAME], number, "" if described == DEFAULT_GROUP else described)
