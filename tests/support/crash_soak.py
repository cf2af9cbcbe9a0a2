"""Kill saving processes, look at what they leave: a test bed for every storage, and a soak of any length.

python -m tests.support.crash_soak --kills 1000        # against a folder, S3 and GCS, that many each
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import BASE, DATA, folder_of
from elasticctl_store.storage import Storage, all_keys
from elasticctl_train.checkpoint import restore
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from tests.support import servers
from tests.support.gate import Gate
from tests.support.train import programs, ranks
from tests.support.train.states import same
from tests.support.waiting import wait_until

BACKENDS = ("file", "s3", "gs")
KILLS_A_JOB = 100
"""Then the next job begins, at a URL of its own: a journal grows with each kill, and so does a look at all of it."""
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
        return cls(url, folder / f"acknowledged-{secrets.token_hex(4)}", storages.open(url))

    def noted(self) -> list[int]:
        return [int(step) for step in self.acknowledged.read_text().split()] if self.acknowledged.exists() else []

    def check(self) -> int:
        """Look at all commits, then resume as a new run would: whole, to the bit, not too old; returns the step."""
        noted = self.noted()
        for commit in read_commits(self.storage):
            assert same(restore.read_alone(self.storage, commit)[0], programs.state_of(commit.step))
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


@contextmanager
def jobs(backends: list[str], count: int) -> Iterator[dict[str, list[Bed]]]:
    """So many beds on each of the backends."""
    os.environ |= servers.KEYS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crash-soak-")))
        urls = {"file": [f"{folder}/state-{job}" for job in range(count)]}
        if set(backends) - {"file"}:
            ports = stack.enter_context(servers.running())
            for scheme in ("s3", "gs"):
                gate = Gate(scheme, getattr(ports, scheme))
                stack.callback(gate.close)
                urls[scheme] = [gate.url(f"soak-{job}") for job in range(count)]
        yield {backend: [Bed.at(url, folder) for url in urls[backend]] for backend in backends}


def main() -> None:
    """Soak, and say what came of it; an AssertionError shows a loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="how many on each backend")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--seed", type=int, default=0, help="of the times at which is killed")
    options = parser.parse_args()
    portions = [min(KILLS_A_JOB, options.kills - done) for done in range(0, options.kills, KILLS_A_JOB)]
    with jobs(options.backends, len(portions)) as found:
        for backend, beds in found.items():
            started_s, kills, commits = time.monotonic(), 0, 0
            for job, (bed, portion) in enumerate(zip(beds, portions, strict=True)):
                steps = list(soak(bed, portion, options.seed + job))
                assert steps == sorted(set(steps))
                bed.check_swept()
                kills, commits = kills + portion, commits + len(bed.noted())
                took_s = time.monotonic() - started_s
                print(
                    f"{backend}: {kills} of {options.kills} kills in {took_s:.0f} s, {commits} commits acknowledged, "
                    "none lost",
                    flush=True,
                )


if __name__ == "__main__":
    main()
