"""The collective that a rank is in, from torch's flight recorder, which counts those of each process group.

torch keeps it anyhow (`TORCH_FR_BUFFER_SIZE`, 2,000 entries unless somebody turns it off). A thread that `bootstrap.py`
has left in the rank reads it when it is asked: a rank that waits in a collective lets other threads run. Ranks that
were started without a spare, and recorders whose format is another, tell nothing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticctl_launcher.hangs.places import Kind, Place

ANSWER_S = 1.0
"""For a few kilobytes from a process of this machine; one that holds the interpreter's lock does not answer."""
MAX_BYTES = 1 << 22
MAX_NAME = 60
DEFAULT_GROUP, NOT_DESCRIBED = "default_pg", "undefined"


@dataclass(frozen=True, slots=True)
class Collective:
    """The `number`th of its process group; `group` is empty for the default one."""

    name: str
    number: int
    group: str = ""

    def at(self, place: Place) -> Place:
        """The place of a rank that waits, with what it is in."""
        number = f"no. {self.number}" + (f" of group {self.group}" if self.group else "")
        if place.kind is Kind.COLLECTIVE:
            return replace(place, where=f"{place.where} {number}")
        return replace(place, where=f"{place.where}, in {self.name} {number}") if place.kind is Kind.DEVICE else place


def read_collective(path: Path) -> Collective | None:
    """Ask the rank that listens at `path`; None if it is in none, or does not tell."""
    answer = b""
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(ANSWER_S)
        asked.connect(str(path))
        while len(answer) < MAX_BYTES and (data := asked.recv(1 << 16)):
            answer += data
        return parse(answer.splitlines())
    return None


def parse(dumps: Iterable[bytes]) -> Collective | None:
    """The first collective that has not ended, in `dumps` of flight recorders. Raises ValueError if one is no JSON."""
    for dump in dumps:
        told = json.loads(dump)
        entries = told.get("entries") if isinstance(told, Mapping) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, Mapping) and (found := _read(entry)):
                return found
    return None


def _read(entry: Mapping[str, Any]) -> Collective | None:
    name, number, group = (entry.get(key) for key in ("profiling_name", "collective_seq_id", "process_group"))
    if entry.get("retired") or entry.get("is_p2p") or not isinstance(name, str) or not isinstance(number, int):
        return None
    called = [str(each)[:MAX_NAME] for each in group] if isinstance(group, list) else []  # its name and its description
    told = next((each for each in reversed(called) if each != NOT_DESCRIBED), "")
    return Collective(name.rpartition(":")[2][:MAX_NAME], number, "" if told == DEFAULT_GROUP else told)
