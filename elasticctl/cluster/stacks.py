"""The Python stacks of the ranks of workers, as their launchers see them; nothing is stopped."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError
from elasticctl.api.objects import as_list, as_mapping
from elasticctl.api.text import shorten, visible
from elasticctl.cluster.inside import Inside, Streams

AT_ONCE = 16
"""Workers that are asked at the same time."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The ranks of one worker, and what kept its launcher from examining them."""

    worker: str
    ranks: tuple[Mapping[str, Any], ...] = ()
    trouble: str = ""

    def lines(self, rank: int | None = None) -> Iterator[str]:
        """Each rank, or this one, and the stacks of its threads, the innermost call first, fit for a terminal."""
        for one in self.ranks:
            if rank is None or one.get("rank") == rank:
                yield from (visible(line) for line in _lines_of(self.worker, one))


def read_stacks(inside: Inside, workers: Sequence[Manifest], launcher: str) -> list[Stacks]:
    """Look at the ranks of all these workers at once; `launcher` is the program that each of them runs. Blocks."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda worker: _look(inside, worker, launcher), workers))


def _look(inside: Inside, worker: Manifest, launcher: str) -> Stacks:
    name = str(worker["metadata"]["name"])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            code = inside.run(worker, [launcher, "--stacks"], Streams(None, out.fileno(), err.fileno()))
        except ElasticctlError as e:
            return Stacks(name, trouble=str(e))
        out.seek(0)
        err.seek(0)
        try:
            seen = as_mapping(json.loads(out.read()))
        except (ValueError, RecursionError):
            said = shorten(err.read(4096).decode("utf-8", "replace"))
            return Stacks(name, trouble=f"its launcher cannot look at ranks (exit code {code}: {said})")
    ranks = tuple(as_mapping(one) for one in as_list(seen.get("ranks")))
    return Stacks(name, ranks, str(seen.get("trouble") or ""))


def _lines_of(worker: str, rank: Mapping[str, Any]) -> Iterator[str]:
    """A rank and its threads, the main one first; those of processes that it has started have a pid."""
    threads = [as_mapping(thread) for thread in as_list(rank.get("stacks"))]
    own = threads[0].get("pid") if threads else None
    yield f"rank {rank.get('rank')}, {worker}" + ("" if threads else ": no Python stack can be read")
    for thread in sorted(threads, key=lambda one: (one.get("pid") != own, one.get("thread") != "MainThread")):
        process = "" if thread.get("pid") == own else f" of process {thread.get('pid')}"
        yield f"  {thread.get('thread')}{process}:"
        for frame in map(as_mapping, as_list(thread.get("frames"))):
            yield f"    {frame.get('function')} ({frame.get('file')}:{frame.get('line')})"
