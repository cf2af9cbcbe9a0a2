"""Log lines as they come, each under its worker's short name."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from elasticctl.api.codec import to_rfc3339
from elasticctl.cli.framework import output
from elasticctl.cluster.base import LogLine

# Readable on dark and light grounds alike: no white, black or plain blue.
_COLOURS = (36, 33, 32, 35, 96, 92, 95, 94)


def print_lines(lines: Iterable[LogLine], job: str, *, timestamps: bool = False) -> None:
    """Print log lines as they come, each under its worker's short name; colours on a terminal."""
    coloured = output.colour()
    prefixes: dict[str, str] = {}
    for line in lines:
        prefix = prefixes.get(line.worker)
        if prefix is None:
            prefix = prefixes[line.worker] = _prefix(line.worker, job, len(prefixes) if coloured else None)
        time_text = f"{to_rfc3339(line.at)} " if timestamps else ""
        output.emit(f"{prefix}{time_text}{line.text}")
        sys.stdout.flush()


def _prefix(worker: str, job: str, number: int | None) -> str:
    short = worker.removeprefix(f"{job}-")
    return f"{short} | " if number is None else f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{short} |\x1b[0m "
