"""Tell many stories of storages, and look for one that must not be: `make soak`, or this module with `--help`.

With `--seed` one story is told, and printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support import servers
from tests.support.storage_soak.places import KINDS, Places
from tests.support.storage_soak.story import Told, tell
from tests.support.train import ranks

LEFT_TO_THE_ENVIRONMENT = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST")
OF_NOBODY = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}


def tell_at(places: Places, kind: str, seed: int) -> Told:
    """The story of this seed at a new place of that kind."""
    with places.place(kind) as place, tempfile.TemporaryDirectory(prefix="ec-story-") as folder:
        return tell(place, seed, Path(folder))


def search(places: Places, kind: str, first: int, seeds: int, seconds: float) -> list[int]:
    """Tell stories until there are enough of them, or the time is over; returns the seeds of those that failed."""
    counts, failed, began_s, cpu_s, told = Counter[str](), list[int](), time.monotonic(), time.process_time(), 0
    for seed in range(first, first + seeds):
        found = tell_at(places, kind, seed)
        told, counts = told + 1, counts + found.counts
        if found.failure:
            failed.append(seed)
            print(f"{kind}, seed {seed}:", *found.lines, found.failure, sep="\n    ", flush=True)
        if time.monotonic() - began_s > seconds:
            break
    took = f"{time.monotonic() - began_s:.0f} s, {time.process_time() - cpu_s:.0f} of CPU"
    summary = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{kind}: {told} stories in {took}: {summary}; failed: {failed or 'none'}", flush=True)
    return failed


def main() -> None:
    """Search, or tell one story."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many at most, of each kind of place")
    parser.add_argument("--seconds", type=float, default=450.0, help="for each kind of place, at most")
    parser.add_argument("--places", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, help="tell the story of this one")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    for name in LEFT_TO_THE_ENVIRONMENT:
        os.environ.pop(name, None)
    os.environ |= servers.KEYS | OF_NOBODY
    ranks.start_server()
    failed = 0
    with Places() as places:
        os.environ["ELASTICCTL_HOME"] = str(places.folder / "home")
        for kind in flags.places:
            with suppress(pytest.skip.Exception):
                if flags.seed is None:
                    failed += len(search(places, kind, flags.first, flags.seeds, flags.seconds))
                else:
                    told = tell_at(places, kind, flags.seed)
                    print(f"{kind}:", *told.lines, told.failure or "as it should be", sep="\n    ")
                    failed += bool(told.failure)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
