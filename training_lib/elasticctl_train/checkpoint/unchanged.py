"""What of a rank's share does not change from save to save: written once, to a base file, and referred to since then.

Which pieces that are is found out by looking: twice in a row, ever more rarely, a committed share's pieces are compared
by their CRCs. What has stayed the same is laid out behind the rest, as a file of its own; that a save need not write it
again is decided by a digest of its bytes alone, in each save. So frozen parameters, adapters (LoRA) and parts that are
frozen for a while need no declaration, and whoever writes to a tensor in whatever way is noticed.

A save refers only to a base file that a commit of the same run has brought in, or the one that the run went on from,
and that every commit since has needed. Retention relies on it: the newest commit is never deleted, so neither is what a
save in flight refers to.

Share documents have the digests of their base files beside what the reader needs, for the run that goes on from there:

    "bases_sha256": {KEY: 64 hex digits}
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.boxes import Box
from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.storage import Storage

if TYPE_CHECKING:
    from elasticctl_train.checkpoint.shares import Share

LEAST_BYTES = 1 << 20
"""Less is not worth a file of its own."""
LEAST_SHARE = 0.25
"""Nor is less of a share than this; to write a larger base file anew has to gain as much."""
MOST_BREAKS = 2
"""A base file that has changed so often is given up, until the next look."""

Name = tuple[str, Box]
"""A box of a tensor: what a piece is known by, wherever it lies."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A base file, and the digest of its bytes."""

    file: ObjectRef
    digest: bytes


class Unchanged:
    """What one rank knows of its own shares; used by one thread at a time.

    `pieces` are those that belong in a base file from now on.
    """

    def __init__(self) -> None:
        self.pieces: frozenset[Name] = frozenset()
        self._committed: _Stored | None = None
        self._pending: _Stored | None = None
        self._is_distrusted = threading.Event()
        self._digest, self._breaks, self._is_broken = b"", 0, False
        self._crcs: dict[Name, int] = {}
        self._commits, self._look_at, self._is_second_look = 0, 1, False

    def recall(self, document: Any) -> None:
        """Begin with the base file of this rank's share in the commit that training goes on from, if that has one."""
        try:
            (base,) = document["bases"]
            file = entries.parse_ref(base["file"])
            digest = bytes.fromhex(document["bases_sha256"][base["file"]["key"]])
            pieces = frozenset((str(name), Box(tuple(at), tuple(shape))) for name, _, at, shape, _ in base["pieces"])
        except (KeyError, TypeError, ValueError):  # of an older version, or without a base file
            return
        if file is not None and entries.is_base_file(file.key) and len(digest) == hashlib.sha256().digest_size:
            self.pieces, self._committed, self._digest = pieces, _Stored(file, digest), digest

    @property
    def said(self) -> dict[str, Any]:
        """What the document of the share that was stored last says for a later run."""
        stored = self._pending or self._committed
        return {"bases_sha256": {stored.file.key: stored.digest.hex()}} if stored is not None else {}

    def store(self, share: Share, storage: Storage, key: str) -> ObjectRef | None:
        """The base file of a share whose document gets this key, written if it has to be; None: it has none.

        Raises StorageError.
        """
        self._pending, self._is_broken = None, False
        if self._is_distrusted.is_set():
            self._is_distrusted.clear()
            self._committed = None
        if share.plan.base is None:
            self._committed = None
            return None
        data = share.bytes_of(share.plan.base)
        digest = hashlib.sha256(data).digest()
        self._is_broken, self._digest = self._digest not in (b"", digest), digest
        if self._committed is not None and self._committed.digest == digest:
            return self._committed.file
        self._committed = None
        base = entries.base_key(key)
        crc = storage.put(base, [data])
        self._pending = _Stored(ObjectRef(base, len(data), entries.as_checksum(crc)), digest)
        return self._pending.file

    def to_write_bytes(self, share: Share) -> int:
        """About how much a save of the share writes."""
        base = share.plan.base
        is_stored = base is not None and self._committed is not None and not self._is_distrusted.is_set()
        return share.plan.size_bytes - (base.size_bytes if base is not None and is_stored else 0)

    def committed(self, share: Share) -> None:
        """The share that was stored last is part of a commit."""
        if self._pending is not None:
            self._committed, self._pending = self._pending, None
        self._commits += 1
        if self._is_broken:
            self._leave_out_changed(share)
        elif self._commits == self._look_at:
            self._look(share)

    def forget(self) -> None:
        """Let the next save refer to nothing that is stored: one has failed, or a commit was found damaged.

        Any thread may say so.
        """
        self._is_distrusted.set()

    def _look(self, share: Share) -> None:
        """Take note of all pieces, and at the commit after that see which of them are the same."""
        before, self._crcs = self._crcs, _crcs(share, share.plan.shared_pieces)
        if not self._is_second_look:
            self._is_second_look = True
            self._look_at = self._commits + 1
            return
        self._is_second_look = False
        self._look_at = 2 * self._commits
        same = frozenset(name for name, crc in self._crcs.items() if before.get(name) == crc)
        gained = same - self.pieces
        if _size_bytes(share, gained) >= max(LEAST_BYTES, LEAST_SHARE * share.plan.size_bytes):
            self._use(same)
            self._breaks = 0

    def _leave_out_changed(self, share: Share) -> None:
        """Something in the base file has changed: it is not to be in the next one."""
        self._breaks += 1
        now = _crcs(share, self.pieces)
        same = frozenset(name for name, crc in now.items() if self._crcs.get(name) == crc)
        few = _size_bytes(share, same) < max(LEAST_BYTES, LEAST_SHARE * share.plan.size_bytes)
        self._use(frozenset() if few or self._breaks > MOST_BREAKS else same)
        self._is_second_look = False
        self._look_at = max(self._look_at, 2 * self._commits)

    def _use(self, pieces: frozenset[Name]) -> None:
        if pieces != self.pieces:
            self.pieces, self._digest = pieces, b""


def _crcs(share: Share, names: frozenset[Name]) -> dict[Name, int]:
    return {name: zlib.crc32(data) for name, data in share.pieces() if name in names}


def _size_bytes(share: Share, names: frozenset[Name]) -> int:
    return sum(len(data) for name, data in share.pieces() if name in names)
