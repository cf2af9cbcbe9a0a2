"""How many requests it takes to find the newest of 10,000 commits.

python -m benchmarks.checkpoints.listing ENDPOINT COMMITS
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elasticctl_store import storage
from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit, ObjectRef

_THREADS = 4


def main() -> int:
    """Write the journal, find the newest commit, and print which requests the sink received."""
    endpoint, count = sys.argv[1], int(sys.argv[2])
    kept = storage.open(f"s3://benchmark/listing?endpoint={endpoint}&region=us-east-1")
    share = (ObjectRef("data/save/share-00000-of-00001.json", 1, "crc32:00000000"),)

    def write(position: int) -> None:
        commit = Commit(position, 1, position, step=position, epoch=0, shares=share, size_bytes=1)
        kept.put(entries.key_of(position), [entries.encode(commit)])

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(write, range(1, count + 1)))
    _ask(endpoint, "reset")
    began_s = time.perf_counter()
    newest = next(read_commits(kept))
    took_s = time.perf_counter() - began_s
    asked = _ask(endpoint, "stats")["requests"]
    print(json.dumps({"commits": count, "newest": newest.step, "requests": asked, "seconds": took_s}))
    return int(newest.step != count)


def _ask(endpoint: str, verb: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{endpoint}/-/{verb}") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


if __name__ == "__main__":
    sys.exit(main())
