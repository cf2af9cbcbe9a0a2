"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import os
import signal
from types import FrameType


def count(text: str) -> int:
    """An option's value that is a number of things: 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def installed_environment() -> dict[str, str]:
    """This process's environment, without what would have Python compile the command line at each start.

    Where it is installed it has been compiled before.
    """
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def end_as_by_ctrl_c() -> None:
    """Have SIGTERM end this process as Ctrl-C does: what was started is ended, and what was found is shown."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # `timeout` sends it twice, to its command and to the group; the second one must not hit what ends the processes.
    signal.signal(number, _stay)
    raise KeyboardInterrupt


def _stay(number: int, frame: FrameType | None) -> None:
    """It is ending already."""
