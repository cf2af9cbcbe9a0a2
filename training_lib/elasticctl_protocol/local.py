"""What a rank and its launcher say to each other on one machine, apart from reports.

The link is a Unix socket on which both send lines of JSON. A rank that has one can stay in its process when the group
changes. Copies of ranks' state are announced on another socket, with one line of JSON each way. A file that appears
asks the ranks of a generation to agree on a step, commit it and stop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl_protocol.requests import WIRE

PLACE_LATER = "later"
"""The place of a rank that was started before it has one in a group, and must wait for it."""
NOTICE_LEAVE = "leave"
"""The content of the file that asks ranks to drain if it is their own worker that has to leave; else it is empty."""
COPIES_FOLDER = "copies"
"""The folder of copies in the local tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage:
    """From a rank on its link. Each message has one of the first four fields: `why` goes with all but the first.

    `attach`: this local rank can be kept when its `generation` ends; it says so once. The others name a generation.
    `lost`: it can no longer reach its peers. `regroup`: the ranks have to meet in a new group. `decline`: it cannot
    continue in this process.
    """

    attach: int | None = None
    lost: int | None = None
    regroup: int | None = None
    decline: int | None = None
    generation: int | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherMessage:
    """To a rank on its link. `over`: this generation has ended. `place`: the environment for the next one."""

    over: int | None = None
    place: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRequest:
    """From a rank. `copied`: the files of a share, as (name, size in bytes, CRC-32), to be sent to the next launcher.
    `room`: asks whether so many more bytes fit into memory. `state`: asks about the last copy."""

    copied: tuple[Any, ...] | None = None
    room: int | None = None
    state: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAnswer:
    """`refused` is why the request is refused, or empty. `sending`: a copy is being sent. `lack` is why the last copy
    is only here, or empty."""

    refused: str | None = None
    sending: bool | None = None
    lack: str | None = None


def to_line(message: object) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(WIRE.encode(message)).encode() + b"\n"
