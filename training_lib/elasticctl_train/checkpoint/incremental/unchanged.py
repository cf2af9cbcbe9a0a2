"""What does not change of a rank's share from save to save: written once, to a base file, and referred to from then on.

Of tables, that is most of their rows (see `tables`). The rest of this module is about tensors that do not change at
all. They are detected: at two commits in a row, less and less often, the pieces of a committed share are compared by
their CRCs. What has stayed the same is laid out after the rest, in a file of its own. Whether a save has to write that
file again depends only on a digest of its bytes, which every save computes. So frozen parameters, adapters (LoRA) and
parts that are frozen for a while need no declaration, and any write to a tensor is noticed, however it is made.

A save refers only to a base file that a commit of the same run has introduced, or to that of the commit the run resumed
from, and that every commit since has needed. Retention relies on this: the newest commit is never deleted, so neither
is what a save in flight refers to.

Share documents contain the digests of their base files, for a run that resumes from them:

    "bases_sha256": {KEY: 64 hex digits}
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.checkpoints.tensor_boxes import Box
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint.incremental.tables import StoredBase, Tables
from elasticctl_train.checkpoint.plans import Apart, FilledPlan, Name, PlannedFile

LEAST_BYTES = 1 << 20
"""Less than this is not worth a file of its own."""
LEAST_SHARE = 0.25
"""Nor is less than this fraction of a share. Writing a larger base file again must gain as much."""
MOST_BREAKS = 2
"""A base file that has changed this often is given up until the next comparison."""


@dataclass(frozen=True, slots=True)
class _StoredPieces:
    """A base file, and the digest of its bytes."""

    file: ObjectRef
    digest: bytes


class Unchanged:
    """What one rank knows about its own shares. Used by one thread at a time.

    `pieces` are those that belong in a base file from now on.
    """

    def __init__(self) -> None:
        self.pieces: frozenset[Name] = frozenset()
        self._tables = Tables()
        self._committed: _StoredPieces | None = None
        self._pending: _StoredPieces | None = None
        self._is_distrusted = threading.Event()
        self._digest, self._breaks, self._is_broken = b"", 0, False
        self._crcs: dict[Name, int] = {}
        self._commits, self._look_at, self._is_second_look = 0, 1, False

    def recall(self, document: Any) -> None:
        """Start with what this rank's share in the commit that training resumes from has apart: the names of tables,
        and the base file of what does not change."""
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # from an older version, or nothing is apart
            bases, fixed = document["bases"], document.get("bases_sha256", {})
            for base in bases:
                if base["file"]["key"] not in fixed:
                    self._tables.recall(base["pieces"])
            ((key, said),) = fixed.items()
            (base,) = (base for base in bases if base["file"]["key"] == key)
            file, digest = entries.parse_ref(base["file"]), bytes.fromhex(said)
            pieces = frozenset((str(name), Box(tuple(at), tuple(shape))) for name, _, at, shape, _ in base["pieces"])
            if file is not None and entries.is_base_file(file.key) and len(digest) == hashlib.sha256().digest_size:
                self.pieces, self._committed, self._digest = pieces, _StoredPieces(file, digest), digest

    @property
    def apart(self) -> Apart:
        """What belongs in files of its own from now on."""
        return Apart(self.pieces, self._tables.pieces)

    @property
    def said(self) -> dict[str, Any]:
        """The fields for a later run in the document of the share that was stored last."""
        stored = self._pending or self._committed
        return {"bases_sha256": {stored.file.key: stored.digest.hex()}} if stored is not None else {}

    def store(self, share: FilledPlan, storage: Storage, key: str) -> list[StoredBase]:
        """Return the base files of a share whose document has this key, in the order of its plan, writing what is
        necessary.

        Raises StorageError.
        """
        self._pending, self._is_broken = None, False
        if self._is_distrusted.is_set():
            self._is_distrusted.clear()
            self._committed = None
            self._tables.forget_stored()
        found = []
        if share.plan.base is not None:
            file = self._store_fixed(share, share.plan.base, storage, key)
            found.append(StoredBase(file, file))
        else:
            self._committed = None
        if share.plan.tables is not None:
            found.append(self._tables.store(share, share.plan.tables, storage, key))
        else:
            self._tables.forget_stored()
        return found

    def _store_fixed(self, share: FilledPlan, planned: PlannedFile, storage: Storage, key: str) -> ObjectRef:
        data = share.bytes_of(planned)
        digest = hashlib.sha256(data).digest()
        self._is_broken, self._digest = self._digest not in (b"", digest), digest
        if self._committed is not None and self._committed.digest == digest:
            return self._committed.file
        self._committed = None
        base = entries.base_key(key)
        crc = storage.put(base, [data])
        self._pending = _StoredPieces(ObjectRef(base, len(data), entries.as_checksum(crc)), digest)
        return self._pending.file

    def to_write_bytes(self, share: FilledPlan) -> int:
        """Return about how many bytes a save of the share writes."""
        base, tables, stored_bytes = share.plan.base, share.plan.tables, 0
        if not self._is_distrusted.is_set():
            stored_bytes += base.size_bytes if base is not None and self._committed is not None else 0
            stored_bytes += tables.size_bytes if tables is not None and self._tables.is_stored else 0
        return share.plan.size_bytes - stored_bytes

    def committed(self, share: FilledPlan) -> None:
        """Record that the share that was stored last is part of a commit."""
        if self._pending is not None:
            self._committed, self._pending = self._pending, None
        self._tables.committed()
        self._commits += 1
        if self._is_broken:
            self._leave_out_changed(share)
        elif self._commits == self._look_at:
            self._find_fixed(share)

    def forget_stored(self) -> None:
        """Have the next save refer to nothing that is stored, because a save failed or a commit is damaged.
        Thread-safe."""
        self._is_distrusted.set()

    def _find_fixed(self, share: FilledPlan) -> None:
        """Record the CRCs of all pieces, and samples of their rows, and compare them at the next commit."""
        before, self._crcs = self._crcs, _crcs(share, share.plan.shared_pieces)
        if not self._is_second_look:
            self._is_second_look = True
            self._tables.sample(share)
            self._look_at = self._commits + 1
            return
        self._is_second_look = False
        self._look_at = 2 * self._commits
        same = frozenset(name for name, crc in self._crcs.items() if before.get(name) == crc) - self._tables.pieces
        if _is_worth_a_file(share, same - self.pieces):
            self._use(same)
            self._breaks = 0
        tables = self._tables.find(share, but_for=same)
        if _is_worth_a_file(share, tables):
            self._tables.pieces |= tables

    def _leave_out_changed(self, share: FilledPlan) -> None:
        """Remove from the next base file what has changed in this one."""
        self._breaks += 1
        now = _crcs(share, self.pieces)
        same = frozenset(name for name, crc in now.items() if self._crcs.get(name) == crc)
        few = not _is_worth_a_file(share, same)
        self._use(frozenset() if few or self._breaks > MOST_BREAKS else same)
        self._is_second_look = False
        self._look_at = max(self._look_at, 2 * self._commits)

    def _use(self, pieces: frozenset[Name]) -> None:
        if pieces != self.pieces:
            self.pieces, self._digest = pieces, b""


def _crcs(share: FilledPlan, names: frozenset[Name]) -> dict[Name, int]:
    return {name: zlib.crc32(data) for name, data in share.pieces() if name in names}


def _is_worth_a_file(share: FilledPlan, names: frozenset[Name]) -> bool:
    size_bytes = sum(len(data) for name, data in share.pieces() if name in names)
    return size_bytes >= max(LEAST_BYTES, LEAST_SHARE * share.plan.size_bytes)
