"""The files of one worker's log, and where to begin to read them.

A log is written to one file after the other: `log`, `log.1`, `log.2`, and so on. Nothing is added to a file that has a
later one. Of a long log, the first file and the last ones are kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from elasticctl.api.codec import from_rfc3339

BLOCK_BYTES = 1 << 16

Place = tuple[int, int]
"""The number of a file, and an offset in it."""


def file_of(log: Path, number: int) -> Path:
    """Return the path of a file of the log whose first file is `log`."""
    return log.with_name(f"{log.name}.{number}") if number else log


def numbers_of(log: Path) -> list[int]:
    """Return the numbers of the files that are there, in order. Raises FileNotFoundError if their folder is not."""
    found = [name.removeprefix(log.name) for name in os.listdir(log.parent) if name.startswith(log.name)]
    return sorted(int(rest[1:] or 0) for rest in found if rest == "" or (rest[0] == "." and rest[1:].isdecimal()))


def start_of(log: Path, tail: int | None, since: float | None) -> Place:
    """Return where the last `tail` lines begin, and those of the time `since`. Raises FileNotFoundError for no log."""
    numbers = numbers_of(log)
    if not numbers:
        raise FileNotFoundError(log)
    by_tail = (numbers[0], 0) if tail is None else _tail_place(log, numbers, tail)
    return by_tail if since is None else max(by_tail, _time_place(log, numbers, since))


def first_time(log: Path, number: int) -> float | None:
    """Return the time of the first line of a file; None if there is none."""
    with file_of(log, number).open("rb") as file:
        return from_rfc3339(file.readline().partition(b" ")[0].decode("ascii", "replace"))


def _tail_place(log: Path, numbers: list[int], lines: int) -> Place:
    for number in reversed(numbers):
        with file_of(log, number).open("rb") as file:
            offset = tail_offset(file, lines)
            if offset or not lines:
                return number, offset
            file.seek(0)
            lines -= sum(1 for _ in file)
        if not lines:
            return number, 0
    return numbers[0], 0


def _time_place(log: Path, numbers: list[int], since: float) -> Place:
    older = [number for number in numbers if (first_time(log, number) or since) < since]
    number = older[-1] if older else numbers[0]
    with file_of(log, number).open("rb") as file:
        return number, time_offset(file, since)


def tail_offset(file: BinaryIO, lines: int) -> int:
    """Return the offset of the last `lines` lines of a file, which is read from its end."""
    size = file.seek(0, 2)
    if lines == 0:
        return size
    wanted, end = lines + 1, size  # the file ends with a newline of its own
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start)
        count = block.count(b"\n")
        if count >= wanted:
            position = len(block)
            for _ in range(wanted):
                position = block.rfind(b"\n", 0, position)
            return start + position + 1
        wanted, end = wanted - count, start
    return 0


def time_offset(file: BinaryIO, since: float) -> int:
    """Return the offset of a line that is older than `since`, by less than a block or by one line, or 0."""
    low, high = 0, file.seek(0, 2)
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        start, stamp = file.tell(), file.readline().partition(b" ")[0]
        at = from_rfc3339(stamp.decode("ascii", "replace"))
        if at is None or at >= since or start >= high:
            high = middle
        else:
            low = start
    return low
