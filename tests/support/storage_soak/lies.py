"""A proxy that answers in a storage's place: with errors, too little, something else, or what was once true."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.storage.outages import Patience
from tests.support.gate import Fault, Gate, Reply, Seen

FAULTS = {
    "500": Fault(status=500, code="InternalError"),
    "503": Fault(status=503, code="SlowDown"),
    "429": Fault(status=429, code="rateLimitExceeded"),
    "409": Fault(status=409, code="ConditionalRequestConflict"),
    "reset before": Fault(lose="before"),
    "reset after": Fault(lose="after"),
    "short": Fault(truncate=True),
    "flipped request": Fault(flip="request"),
    "flipped answer": Fault(flip="answer"),
    "slow": Fault(slow_s=0.003),
}
LIES = ("nothing", "a page", "an error with 200", "another answer", "an old listing", "an old listing again", "etag")
_PAGE = Reply(200, [("Content-Type", "text/html")], b"<html><body>Welcome</body></html>")
_ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code></Error>'


class LyingGate(Gate):
    """Is honest until `start_lying`, and from `stop_lying` on."""

    def __init__(self, scheme: str, port: int) -> None:
        super().__init__(scheme, port)
        self._dice, self._chance, self._kinds = random.Random(), 0.0, list[str]()
        self._listings: dict[str, Reply] = {}
        self._last: dict[str, Reply] = {}
        self._turn = threading.Lock()
        self.before: Callable[[Seen], Fault | None] = lambda seen: None
        """Is asked before anything is drawn."""
        self.faults = self._fault

    def start_lying(self, seed: int) -> str:
        """Lie, as drawn; returns how."""
        self._dice = random.Random(seed)
        self._kinds = self._dice.sample([*FAULTS, *LIES], self._dice.choice((1, 3, 6)))
        self._chance = self._dice.choice((0.03, 0.1, 0.2))
        return f"{self._chance:.0%} {', '.join(self._kinds)}"

    def stop_lying(self) -> None:
        """Lie no more."""
        self._chance = 0.0

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """While it lasts, be honest."""
        before, self._chance = self._chance, 0.0
        try:
            yield
        finally:
            self._chance = before

    def pass_on(self, seen: Seen, body: bytes) -> Reply:
        with self._turn:
            if seen.method in ("PUT", "POST") and "a page" in self._kinds and self._dice.random() < self._chance:
                return _PAGE  # and nothing is stored
        reply = super().pass_on(seen, body)
        with self._turn:
            if not self._chance or (seen.method != "GET" and reply.status >= 300):
                return self._note(seen, reply)  # that a create is refused is never turned round
            return self._lie(seen, reply)

    def _fault(self, seen: Seen) -> Fault | None:
        with self._turn:
            fault = self.before(seen)
            if fault is not None:
                return fault
            kinds = [kind for kind in self._kinds if kind in FAULTS]
            if not kinds or self._dice.random() >= self._chance:
                return None
            return FAULTS[self._dice.choice(kinds)]

    def _note(self, seen: Seen, reply: Reply) -> Reply:
        """Remember the answer to a read, to give it again."""
        if seen.method == "GET" and reply.status in (200, 206):
            if _is_listing(seen):
                self._listings[seen.target] = reply
            self._last[_kind_of(seen)] = reply
        return reply

    def _lie(self, seen: Seen, reply: Reply) -> Reply:
        kinds = [kind for kind in self._kinds if kind in LIES]
        old, other = self._listings.get(seen.target), self._last.get(_kind_of(seen))
        if self._dice.random() < 0.3:
            self._note(seen, reply)
        if not kinds or self._dice.random() >= self._chance:
            return reply
        false = None
        match self._dice.choice(kinds):
            case "nothing":
                false = replace(reply, body=b"")
            case "a page":
                false = _PAGE
            case "an error with 200":
                false = Reply(200, [("Content-Type", "application/xml")], _ERROR)
            case "another answer":
                false = other
            case "an old listing":
                false = old if _is_listing(seen) else None
            case "an old listing again" if _is_listing(seen) and old is not None:
                false, self._listings[seen.target] = old, old
            case "etag":
                kept = [(name, value) for name, value in reply.headers if name.lower() != "etag"]
                false = replace(reply, headers=[*kept, ("ETag", '"deadbeefdeadbeefdeadbeefdeadbeef"')])
        return false or reply


class LyingFolder(LocalStorage):
    """A folder that, from `start_lying` to `stop_lying`, may silently store something else than what it is given."""

    def __init__(self, root: Path, patience: Patience) -> None:
        super().__init__(root, patience)
        self._dice, self._chance = random.Random(), 0.0

    def start_lying(self, seed: int) -> str:
        """Lie; returns how."""
        self._dice, self._chance = random.Random(seed), random.Random(seed).choice((0.05, 0.2, 0.5))
        return f"{self._chance:.0%} of what is written is stored wrong"

    def stop_lying(self) -> None:
        """Lie no more."""
        self._chance = 0.0

    def trusted(self) -> AbstractContextManager[None]:
        """What is read is true anyway."""
        return nullcontext()

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        if self._dice.random() >= self._chance:
            return super().put(key, parts, if_absent=if_absent)
        data = bytearray(b"".join(parts))
        crc = zlib.crc32(data)
        match self._dice.choice(("flipped", "short", "nothing", "empty")):
            case "flipped" if data:
                data[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)
            case "short":
                data = data[: len(data) // 2]
            case "empty":
                data = bytearray()
            case "nothing":
                return crc
        super().put(key, [bytes(data)], if_absent=if_absent)
        return crc


def _is_listing(seen: Seen) -> bool:
    return "list-type" in seen.target or seen.target.partition("?")[0].endswith("/o")


def _kind_of(seen: Seen) -> str:
    """A listing, or which sort of object."""
    return "listing" if _is_listing(seen) else seen.target.partition("?")[0].rpartition(".")[2]
