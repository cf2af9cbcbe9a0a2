"""The Python stacks of the ranks of workers, as their launchers see them; nothing is stopped."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError, UsageError
from elasticctl.api.objects import as_list, as_mapping
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import shorten, visible
from elasticctl.cluster.worker_access import BLOCK_BYTES, Streams, WorkerAccess

AT_ONCE = 16
"""Workers that are asked at the same time."""
MAX_BYTES = 4 << 20
"""The most that is read from one launcher, some hundred times what eight ranks have: a worker may send anything."""


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


def read_stacks(access: WorkerAccess, job: ElasticJob, workers: Sequence[Manifest]) -> list[Stacks]:
    """Read the stacks of a job's ranks on these workers, in parallel. Blocks. UsageError for another launcher."""
    made = hardware(job)
    if not made.launched:
        raise UsageError(f"{job.name} does not run under elasticctl-launch, which knows its ranks")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda worker: _read_worker(access, worker, made.command[0]), workers))


def _read_worker(access: WorkerAccess, worker: Manifest, launcher: str) -> Stacks:
    name = str(worker["metadata"]["name"])
    code = 1
    with _Pipe() as out, _Pipe() as err:
        try:
            code = access.run(worker, [launcher, "--stacks"], Streams(None, out.give, err.give))
        except ElasticctlError as e:
            return Stacks(name, trouble=str(e))
        except BrokenPipeError:
            pass  # one of the pipes is full
    if max(len(out.said), len(err.said)) > MAX_BYTES:
        return Stacks(name, trouble=f"its launcher sent more than {MAX_BYTES >> 20} MiB")
    try:
        seen = as_mapping(json.loads(out.said))
    except (ValueError, RecursionError):
        said = shorten(err.said[:4096].decode("utf-8", "replace"))
        return Stacks(name, trouble=f"its launcher cannot read stacks (exit code {code}: {said})")
    ranks = tuple(as_mapping(one) for one in as_list(seen.get("ranks")))
    return Stacks(name, ranks, str(seen.get("trouble") or ""))


class _Pipe:
    """A pipe, read by a thread into `said` up to MAX_BYTES and then closed; complete once the block has ended."""

    def __init__(self) -> None:
        receive, self.give = os.pipe()
        self.said = bytearray()
        self._thread = threading.Thread(target=self._read, args=(receive,), name="stacks", daemon=True)

    def _read(self, receive: int) -> None:
        with open(receive, "rb", buffering=0) as stream:
            while len(self.said) <= MAX_BYTES and (block := stream.read(BLOCK_BYTES)):
                self.said += block

    def __enter__(self) -> _Pipe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.give)
        self._thread.join()


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
