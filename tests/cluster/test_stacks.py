"""What is read from the launchers of workers, which may send anything."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.stacks import MAX_BYTES, Stacks, read_stacks
from elasticctl.cluster.worker_access import Streams, write_all
from tests.support.jobs import made


class Worker:
    """Workers whose launchers print such things."""

    def __init__(self, out: bytes, err: bytes = b"") -> None:
        self.out, self.err = out, err

    def run(self, worker: Manifest, argv: Sequence[str], streams: Streams) -> int:
        write_all(streams.stderr, self.err)
        write_all(streams.stdout, self.out)
        return 3

    async def forward(
        self, worker: Manifest, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        raise AssertionError


def look(worker: Worker) -> list[Stacks]:
    return read_stacks(worker, made(), [{"metadata": {"name": "w"}}])


@pytest.mark.parametrize("endless", [{"out": b"[" * (MAX_BYTES * 2)}, {"out": b"{}", "err": b"x" * (MAX_BYTES * 2)}])
def test_no_more_is_kept_of_a_launcher_than_its_stacks_could_be(endless: dict[str, bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert look(Worker(**endless)) == [Stacks("w", trouble="its launcher sent more than 4 MiB")]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_launcher_that_sends_something_else_is_named_with_its_output() -> None:
    assert look(Worker(b"[" * 100_000, b"no\n"))[0].trouble == "its launcher cannot read stacks (exit code 3: no)"
    assert look(Worker(b'{"ranks": [{"rank": 1}]}')) == [Stacks("w", ({"rank": 1},))]


def test_the_ranks_of_another_launcher_are_not_asked_for() -> None:
    with pytest.raises(UsageError, match="does not run under elasticctl-launch"):
        read_stacks(Worker(b"{}"), ElasticJob.from_manifest({"metadata": {"name": "j"}}), [])
