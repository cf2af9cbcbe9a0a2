"""Kill saving processes, look at what they leave: a test bed for every storage."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import BASE, DATA, folder_of
from elasticctl_store.storage import Storage, all_keys
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from tests.support import servers
from tests.support.train import programs, ranks
from tests.support.train.checkpoints import read_alone
from tests.support.train.states import same
from tests.support.waiting import wait_until

_NUMBERS = itertools.count()
SHORT_S, LONG_S, LONG_EVERY = 0.06, 2.0, 10
"""After a commit a process lives on for up to `SHORT_S`; one of so many longer, or nobody would ever clean up."""


@dataclass(frozen=True, slots=True)
class Bed:
    """A URL to save to, the file in which acknowledged steps are noted, and a client to look at what is there."""

    url: str
    acknowledged: Path
    storage: Storage

    @classmethod
    def at(cls, url: str, folder: Path) -> Bed:
        return cls(url, folder / f"acknowledged-{next(_NUMBERS)}", storages.open(url))

    def noted(self) -> list[int]:
        return [int(step) for step in self.acknowledged.read_text().split()] if self.acknowledged.exists() else []

    def check(self) -> int:
        """Look at all commits, then resume as a new run would: whole, to the bit, not too old; returns the step."""
        noted = self.noted()
        for commit in read_commits(self.storage):
            assert same(read_alone(self.storage, commit)[0], programs.state_of(commit.step))
        restored = Checkpointer(self.storage).restore()
        step = restored.commit.step if restored else 0
        assert step >= max(noted, default=0)
        assert restored is None or same(restored.state, programs.state_of(step))
        return step

    def check_swept(self) -> None:
        """One more save leaves nothing but its own data."""
        step = self.check()
        process = ranks.alone(programs.save_to, self.url, str(self.acknowledged), 1, servers.KEYS)
        process.join()
        assert process.exitcode == 0
        assert self.check() == step + 1
        (kept,) = read_commits(self.storage)
        assert {folder_of(key) for key in all_keys(self.storage, DATA)} == {kept.folder}
        assert {folder_of(key) for key in all_keys(self.storage, BASE)} == set(kept.bases)


def soak(bed: Bed, kills: int, seed: int) -> Iterator[int]:
    """Kill a process that saves for ever, so many times, soon after a commit; yields the step found after each."""
    chance = random.Random(seed)
    for _ in range(kills):
        before = len(bed.noted())
        process = ranks.alone(programs.save_to, bed.url, str(bed.acknowledged), 1_000_000, servers.KEYS)
        try:
            wait_until(lambda: not process.is_alive() or len(bed.noted()) > before, 60, every_s=0.001)  # noqa: B023
            time.sleep(chance.random() * (SHORT_S if chance.randrange(LONG_EVERY) else LONG_S))
            assert process.is_alive()
        finally:
            process.kill()
            process.join()
        yield bed.check()
