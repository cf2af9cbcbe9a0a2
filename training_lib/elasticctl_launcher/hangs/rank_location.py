"""The place where a rank is, as words and as a kind, from the stack of its main thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from elasticctl_launcher.hangs.stacks import StackFrame, Stacks, main_thread
from elasticctl_launcher.torch_names import C10D, COLLECTIVE_FILES, DEVICE_CALLS, DEVICE_LINE, NEXT_BATCH
from elasticctl_protocol.reports import RankPlace, ranks_text

SLEEP_LINE = re.compile(r"\bsleep\(")
LANDMARKS = (
    NEXT_BATCH,
    ("/elasticctl_train/inplace/elastic_ddp.py", "hand_in", "backward"),
)
"""Well-known calls that name the place, however deep the stack below them is."""
STANDARD_LIBRARY = re.compile(r"^<frozen |/lib(64)?/python3\.\d+/(?!site-packages/|dist-packages/)")


class Kind(Enum):
    """What a rank that stands still may be doing."""

    COLLECTIVE = "waits for other ranks"
    DEVICE = "waits for the GPU, and so perhaps for other ranks"
    SLEEP = "sleeps, and will wake up by itself"
    CODE = "is in its own code"
    UNKNOWN = "cannot be read"

    @property
    def waits(self) -> bool:
        """True if other ranks may have to move first, rather than this one."""
        return self in (Kind.COLLECTIVE, Kind.DEVICE)


@dataclass(frozen=True, slots=True)
class StackPlace:
    """`where` is a name for people: `all_reduce`, `DataLoader._next_data`, `load (data.py:40)`."""

    kind: Kind
    where: str


NOWHERE = StackPlace(Kind.UNKNOWN, "an unknown place: its Python stack cannot be read")


def place_of(stacks: Stacks | None, source_line: Callable[[str, int], str]) -> StackPlace:
    """Return the place of a rank. `source_line(file, line)` returns the text of a line, or an empty string."""
    main = main_thread(stacks) if stacks else None
    if main is None:
        return NOWHERE
    frames = main.frames
    inner = frames[0]
    if inner.file.endswith(COLLECTIVE_FILES):
        return StackPlace(Kind.COLLECTIVE, _collective(frames))
    where = _where(frames)
    text = source_line(inner.file, inner.line)
    if SLEEP_LINE.search(text):
        return StackPlace(Kind.SLEEP, where)
    calls_device = any(inner.file.endswith(file) and _last(inner) == name for file, name in DEVICE_CALLS)
    return StackPlace(Kind.DEVICE if calls_device or DEVICE_LINE.search(text) else Kind.CODE, where)


def _collective(frames: Sequence[StackFrame]) -> str:
    """The function of torch.distributed that the script called."""
    name = _last(frames[0])
    for frame in frames:
        if not frame.file.endswith(COLLECTIVE_FILES):
            break
        if frame.file.endswith(C10D) and not _last(frame).startswith("_"):
            name = _last(frame)
    return name


def _where(frames: Sequence[StackFrame]) -> str:
    for file, function, name in LANDMARKS:
        if any(frame.file.endswith(file) and _last(frame) == function for frame in frames):
            return name
    own = next((frame for frame in frames if not STANDARD_LIBRARY.search(frame.file)), frames[0])
    line = f"{own.file.rpartition('/')[2]}:{own.line}"
    return line if own.function == "<module>" else f"{own.function} ({line})"


def _last(frame: StackFrame) -> str:
    return frame.function.rpartition(".")[2]


def describe(places: Sequence[RankPlace]) -> str:
    """Return one line about all ranks: `rank 3 has been in X for 4m00s; ranks 0-2, 4-7 wait for it in all_reduce`."""
    standing = [place for place in places if not place.waits]
    waiting = [place for place in places if place.waits]
    if not standing:
        since = _span(min((place.for_s or 0.0 for place in waiting), default=0.0))
        parts = [f"{ranks_text(ranks)} in {where}" for where, ranks in _by_place(waiting)]
        other = " for each other" if len(parts) > 1 else ""
        return f"waiting{other} for {since}: {', '.join(parts)}"
    parts = []
    for where, ranks in _by_place(standing):
        for_s = min(place.for_s or 0.0 for place in standing if place.where == where)
        parts.append(f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} been in {where} for {_span(for_s)}")
    them = "it" if len(standing) == 1 else "them"
    for where, ranks in _by_place(waiting):
        parts.append(f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {them} in {where}")
    return "; ".join(parts)


def _by_place(places: Iterable[RankPlace]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for place in sorted(places, key=lambda place: place.rank or 0):
        found.setdefault(place.where, []).append(place.rank or 0)
    return list(found.items())


def _span(seconds: float) -> str:
    """A duration such as 12s, 3m40s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02}m"
