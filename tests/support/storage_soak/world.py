"""What must hold, whatever happens to a storage (docs/recovery.md).

1. No wrong tensor is ever given out, by a restore, a pull or a look.
2. `verify` and the restore agree on each commit.
3. The newest commit that is whole, listed or with its entry lost, stays until a newer one is proven whole.
4. A restore gives out the newest whole one; where there is none, it refuses in one clear line, and begins at step 0
   only where no more is left of a commit than an interrupted save leaves.
5. What was acknowledged is not lost, but by damage to what lies there.
6. When nothing is wrong any more, a run saves, and leaves nothing that no commit needs.
"""

from __future__ import annotations

import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticctl_store.checkpoints import entries, repair, verify
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.errors import DamagedError, MissingError, StorageError, TrainError
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Restored
from tests.support.storage_soak.damages import is_small
from tests.support.storage_soak.places import Place
from tests.support.storage_soak.states import is_right
from tests.support.train.checkpoints import read_alone

LONGEST_MESSAGE = 2500
SHARE = re.compile(r"(data/[^/]+/)share-\d+-of-(\d+)\.(?:json|safetensors)")
ENOUGH_BYTES = 60_000
"""More than a run takes to begin and to save, in blocks of a disk."""


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass
class World:
    """A place, what has happened there, and what is known to be there."""

    place: Place
    dice: random.Random
    folder: Path
    lines: list[str] = field(default_factory=list)
    acknowledged: int = 0
    runs: dict[str, int] = field(default_factory=dict)
    whole: dict[str, dict[str, int]] = field(default_factory=dict)
    zombie: tuple[Checkpointer, int] | None = None
    run_number: int = 0
    step: int = 0
    floor: tuple[int, int] = (0, 0)
    is_damaged: bool = False
    is_honest: bool = True
    owner: int = field(default_factory=os.geteuid)
    stores_what_it_says: bool = True

    @property
    def storage(self) -> Storage:
        """A client for checks."""
        return self.place.open()

    def log(self, line: str) -> None:
        """Add a line to the log of the scenario."""
        self.lines.append(line)

    def whole_commits(self) -> list[Commit]:
        """The listed commits that are whole, newest first: verified, restored and compared, one by one."""
        with self.trusted():
            return list(self._whole())

    def _whole(self) -> Iterator[Commit]:
        for commit in read_commits(self.storage):
            verdict = ""
            try:
                verify.verify(self.storage, commit, lambda count: None)
            except StorageError as e:
                verdict = str(e) or "refused"
            states: list[Any] = []
            for rank in range(len(commit.shares)):
                try:
                    states.append((*read_alone(self.storage, commit, rank), rank))
                except (DamagedError, MissingError) as e:
                    expect(bool(verdict), f"{commit.folder}: whole for verify, and rank {rank} reads: {e}")
            expect(not (verdict and states), f"{commit.folder}: restored, and verify says: {verdict}")
            for state, local, rank in states:
                self.check_state(commit, state, local, rank)
            if not verdict:
                self.whole.setdefault(commit.folder, self._bytes_of(commit))
                yield commit

    def check_state(self, commit: Commit, state: dict[str, Any], local: dict[str, Any] | None, rank: int) -> None:
        """Check that it is what was saved there."""
        expect(is_right(state, local, rank), f"{commit.folder}: a wrong tensor")
        save, made = entries.save_of(commit.folder), state["made"]
        expect(save is not None and save.step == commit.step == made["step"], f"{commit.folder}: of step {made}")
        run = self.runs.setdefault(entries.run_of(commit.folder), made["run"])
        expect(run == made["run"], f"{commit.folder}: of run {made}, not {run}")

    def acknowledge(self, commit: Commit, duration_s: float = 0.0) -> None:
        """A run says that it has committed."""
        self.acknowledged += 1
        if self.stores_what_it_says:
            self.floor = max(self.floor, order(commit))

    def check_kept(self, before: list[Commit], intact: list[str]) -> list[Commit]:
        """Something other than damage has happened; returns what is whole now."""
        after = self.whole_commits()
        newest = max(map(order, after), default=(0, 0))
        least = max([self.floor, *map(order, before)])
        expect(newest >= least, f"lost: {least} was whole, the newest is {newest} of {[one.folder for one in after]}")
        if intact and newest < order_of(intact[-1]):
            expect(intact[-1] in self.intact(), f"deleted: {intact[-1]}, whole, and the newest that is listed {newest}")
        self.floor = newest
        return after

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """While it lasts, everything can be read, and all answers are true."""
        mine = os.geteuid()
        if mine != self.owner:
            os.seteuid(self.owner)
        try:
            with self.place.trusted():
                yield
        finally:
            if mine != self.owner:
                os.seteuid(mine)

    def intact(self) -> list[str]:
        """The commits whose files are all as they were, listed or not, oldest first; known of folders only."""
        with self.trusted():
            return sorted(self._intact(), key=order_of)

    def _intact(self) -> Iterator[str]:
        root = self.place.root
        for folder, crcs in self.whole.items() if root is not None else ():
            try:
                if all(is_small(root / key) and zlib.crc32((root / key).read_bytes()) == crcs[key] for key in crcs):
                    yield folder
            except OSError:
                continue

    def check_refusal(self, error: TrainError, whole: list[Commit]) -> None:
        """A run, or a verb, would not go on: it says so in a line, and is right."""
        message = str(error)
        expect("\n" not in message and len(message) < LONGEST_MESSAGE, f"a long message: {message!r:.4000}")
        has_reason = not self.is_honest or self.place.is_filled()
        expect(not whole or has_reason, f"refused, though {whole[:1]} is whole: {message}")

    def check_restored(self, restored: Restored | None, whole: list[Commit]) -> None:
        """A run goes on from there: from the newest, and nothing is passed over in silence."""
        if restored is None:
            left = self.left_of_commits()
            expect(not left, f"step 0 in silence, where there are {left}")
            return
        self.check_state(restored.commit, restored.state, restored.local, 0)
        newest = max([order(commit) for commit in whole], default=(0, 0))
        found = order(restored.commit)
        is_newest = found >= newest or restored.commit.folder == whole[0].folder
        expect(is_newest or os.geteuid() != self.owner, f"restored {found}, whole is {newest}")

    def check_room(self, error: object) -> None:
        """What the disk had no room for would have none either if everything went but the newest that is whole."""
        is_full = "the disk is full" in str(error) or "no room" in str(error)
        if not is_full or self.is_damaged or self.place.files is None:
            return
        newest = self.whole_commits()[:1]
        kept = {folder for commit in newest for folder in (commit.folder, *commit.bases)}
        paths = [path for above in ("data", "base") for path in (self.place.files / above).rglob("*") if path.is_file()]
        others = [path for path in paths if f"{path.parent.relative_to(self.place.files)}/" not in kept]
        room = self.place.free_bytes() + sum(-(-path.stat().st_size // 4096) * 4096 for path in others)
        expect(room < ENOUGH_BYTES, f"there could be {room} bytes, and a run says: {error}")

    def left_of_commits(self) -> list[str]:
        """The keys of what has ever been part of a whole commit, and is still there, damaged or not.

        Not those of a folder that looks as if its save had been interrupted: some rank's document is missing.
        """
        with self.trusted():
            keys = [key for key in repair.save_keys(self.storage) if entries.folder_of(key) in self.whole]
        documents = Counter(entries.folder_of(key) for key in keys if key.endswith(".json"))
        shares = [(key, SHARE.fullmatch(key)) for key in keys]
        return [key for key, share in shares if share is None or documents[share[1]] == int(share[2])]

    def reset_after_damage(self) -> None:
        """After damage, start from what is whole now, which must stay."""
        self.is_damaged = True
        self.floor = max(map(order, self.whole_commits()), default=(0, 0))

    def _bytes_of(self, commit: Commit) -> dict[str, int]:
        root = self.place.root
        if root is None:
            return {}
        folders = (root / folder for folder in (commit.folder, *commit.bases))
        paths = [path for folder in folders for path in folder.iterdir() if path.name != "committed" and is_small(path)]
        return {str(path.relative_to(root)): zlib.crc32(path.read_bytes()) for path in paths}


def order(commit: Commit) -> tuple[int, int]:
    """Where it stands among the saves of its URL."""
    return order_of(commit.folder)


def order_of(folder: str) -> tuple[int, int]:
    """Where a save's folder stands among the saves of its URL."""
    save = entries.save_of(folder)
    return save.order if save else (0, 0)


def expect(holds: bool, otherwise: str) -> None:
    """Raise Broken unless it holds."""
    if not holds:
        raise Broken(otherwise)
