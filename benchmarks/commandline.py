"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import os
import signal
from types import FrameType


def count(text: str) -> int:
    """Parse an option's value that is a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def installed_environment() -> dict[str, str]:
    """Return this process's environment, without what would make Python compile the command line at each start.

    An installed command line is compiled already.
    """
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def end_as_by_ctrl_c() -> None:
    """Make SIGTERM end this process like Ctrl-C: what was started is ended, and the results so far are shown."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # `timeout` sends it twice, to its command and to the group; the second one must not interrupt the clean-up.
    signal.signal(number, _stay)
    raise KeyboardInterrupt


def _stay(number: int, frame: FrameType | None) -> None:
    """Ignore the signal: the process is ending already."""
