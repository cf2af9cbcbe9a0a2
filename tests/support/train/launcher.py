"""The launcher's end of the wire between it and a rank."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class Launcher:
    """The launcher's end of the wire: hears reports, gives notice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "agent"))
        self.socket.settimeout(240)

    def give_notice(self, rank: int) -> None:
        (self.folder / f"notice-{rank}").touch()

    def hear(self, kind: str, count: int) -> dict[int, int]:
        """Wait for `count` reports of a kind; returns rank -> step."""
        heard: dict[int, int] = {}
        while len(heard) < count:
            report = self.hear_report(kind)
            heard[report["rank"]] = report["step"]
        return heard

    def hear_report(self, kind: str, **fields: object) -> dict[str, Any]:
        """Wait for the next report of a kind that has these fields."""
        while True:
            report: dict[str, Any] = json.loads(self.socket.recv(65536))
            if {"kind": kind, **fields}.items() <= report.items():
                return report
