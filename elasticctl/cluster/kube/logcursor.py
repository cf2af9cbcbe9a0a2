"""How far a container's log has been read, so that a stream that broke is taken up without gaps or doubles; pure.

The API server can be asked for lines since a whole second only, and a container's two outputs are stamped by two
writers, so that stamps may go back a little. So a second that has not been read whole is asked for again, with the one
before it, and as many of their lines are passed over as have been read.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

OVERLAP_S = 1
_MICROS = 1_000_000


class Cursor:
    """A place in one container's log; times are microseconds since the epoch."""

    def __init__(self) -> None:
        self._newest = -1
        self._read: Counter[int] = Counter()  # second -> lines read of it; the newest seconds only
        self._to_pass = 0

    def resume(self) -> float | None:
        """The time to ask for lines from, in whole seconds since the epoch; None: from the beginning."""
        if self._newest < 0:
            return None
        self._to_pass = self._read.total()
        return float(self._newest // _MICROS - OVERLAP_S)

    def is_new(self, at: int) -> bool:
        """Count the next line of the stream; False when it has been read before."""
        if self._to_pass and at <= self._newest:
            self._to_pass -= 1
            return False
        self._to_pass = 0  # past all that was read; fewer lines than expected: the file has been rotated since
        self._newest = max(self._newest, at)
        oldest = self._newest // _MICROS - OVERLAP_S
        if at // _MICROS >= oldest:
            self._read[at // _MICROS] += 1
        for second in [second for second in self._read if second < oldest]:
            del self._read[second]
        return True


def split_stamp(line: bytes) -> tuple[int, str] | None:
    """`<RFC 3339 time> <text>` as microseconds since the epoch and text; None for what the kubelet says itself."""
    stamp, _, text = line.removesuffix(b"\n").decode("utf-8", "replace").partition(" ")
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86_400 + since_epoch.seconds) * _MICROS + since_epoch.microseconds, text
