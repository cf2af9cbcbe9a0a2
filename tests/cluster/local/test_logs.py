"""Reading log files: whole, from the end, since a time, and as they grow."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import NotFoundError
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.logs import BLOCK_BYTES, LogFile, LogFiles, read_logs, tail_offset, time_offset
from tests.support.cluster_contract import phase, running, scale
from tests.support.jobs import shell_job
from tests.support.local_pods import write
from tests.support.waiting import wait_until


def texts(folder: Path, files: LogFiles, query: LogQuery) -> list[str]:
    return [f"{line.worker}:{line.text}" for line in read_logs(files, lambda: files, lambda uid: folder / uid, query)]


TWICE = LogFiles(True, (LogFile("w0", "u0", True), LogFile("w1", "u1", True), LogFile("w0", "u2", True)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "u0", (1.0, "old"))
    write(tmp_path, "u1", (2.0, "a"), (4.0, "c"))
    write(tmp_path, "u2", (3.0, "b"), (5.0, "d"))
    return tmp_path


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["w1:a", "w0:b", "w1:c", "w0:d"]),
        ({"previous": True}, ["w0:old"]),
        ({"workers": ("w1",)}, ["w1:a", "w1:c"]),
        ({"workers": ("w9",)}, []),
        ({"tail": 1}, ["w1:c", "w0:d"]),
        ({"tail": 0}, []),
        ({"since": 4.0}, ["w1:c", "w0:d"]),
    ],
)
def test_queries(folder: Path, query: dict[str, object], expected: list[str], follow: bool) -> None:
    assert texts(folder, TWICE, LogQuery(follow=follow, **query)) == expected  # type: ignore[arg-type]


def test_a_worker_that_has_not_started_has_no_lines(tmp_path: Path) -> None:
    assert texts(tmp_path, LogFiles(False, (LogFile("w0", "u0", False),)), LogQuery()) == []


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "u0").write_text("2026-01-01T00:00:00.000000Z whole\n2026-01-01T00:00:01.0000")
    assert texts(tmp_path, LogFiles(True, (LogFile("w0", "u0", True),)), LogQuery()) == ["w0:whole"]


def test_following_ends_when_the_job_is_deleted(tmp_path: Path) -> None:
    def deleted() -> LogFiles:
        raise NotFoundError("gone")

    assert list(read_logs(LogFiles(False, ()), deleted, lambda uid: tmp_path / uid, LogQuery(follow=True))) == []


def test_following_does_not_go_on_into_another_job_of_the_same_name(local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("live", "echo of the first; sleep 60"))
    wait_until(lambda: running(local_cluster, "live"))
    said = local_cluster.logs("default", "live", LogQuery(follow=True))
    assert next(said).text == "of the first"
    local_cluster.delete_job("default", "live")
    local_cluster.create_job(shell_job("live", "echo of the second"))
    assert list(said) == []


@pytest.mark.parametrize("follow", [False, True])
def test_more_workers_than_a_process_may_open_files(tmp_path: Path, follow: bool) -> None:
    files = LogFiles(True, tuple(LogFile("w0", f"u{number}", True) for number in range(64)))
    for number, file in enumerate(files.files):
        write(tmp_path, file.uid, (float(number), "early"), (100.0 + number, "late"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 24, limits[1]))
    try:
        found = texts(tmp_path, files, LogQuery(everything=True, follow=follow))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == ["w0:early"] * 64 + ["w0:late"] * 64


@settings(max_examples=60)
@given(st.lists(st.integers(0, BLOCK_BYTES), max_size=12), st.integers(0, 14))
def test_the_last_lines_are_found_from_the_end(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], n: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "tail"
    content = b"".join(b"x" * size + b"\n" for size in sizes)
    path.write_bytes(content)
    with path.open("rb") as file:
        found = content[tail_offset(file, n) :]
    assert found == b"".join(content.splitlines(keepends=True)[len(sizes) - min(n, len(sizes)) :])


@pytest.mark.parametrize("since", [-1.0, 0.0, 17.5, 2_500.0, 4_999.0, 9_999.0])
def test_a_moment_is_found_without_reading_all(tmp_path: Path, since: float) -> None:
    write(tmp_path, "u0", *((float(second), "x" * 50) for second in range(5_000)))
    with (tmp_path / "u0").open("rb") as file:
        offset = time_offset(file, since)
        assert offset <= max(0.0, since) * 80
        assert offset >= min(since, 5_000) * 70 - 2 * BLOCK_BYTES
    files = LogFiles(True, (LogFile("w0", "u0", True),))
    found = list(read_logs(files, lambda: files, lambda uid: tmp_path / uid, LogQuery(since=since)))
    assert [line.at for line in found] == [float(second) for second in range(5_000) if second >= since]


def test_following_sees_new_and_remade_workers_to_their_end(local_cluster: LocalCluster, home: Path) -> None:
    """From before the first worker until the job's end, through a crash and a scaling up."""
    script = (
        f"mkdir {home}/crashed 2>/dev/null && {{ echo crashes; exit 1; }};"
        f"echo runs; until [ -e {home}/stop ]; do sleep 0.05; done; echo last words"
    )
    local_cluster.create_job(shell_job("live", script, minReplicas=1, maxReplicas=2, suspend=True))
    heard: list[tuple[str, str]] = []

    def follow() -> None:
        heard.extend((line.worker, line.text) for line in local_cluster.logs("default", "live", LogQuery(follow=True)))

    listener = threading.Thread(target=follow)
    listener.start()
    local_cluster.patch_job("default", "live", {"spec": {"suspend": False}})
    wait_until(lambda: (home / "crashed").exists() and running(local_cluster, "live"))
    local_cluster.patch_job("default", "live", scale(2))
    wait_until(lambda: len(running(local_cluster, "live")) == 2)
    (home / "stop").touch()
    wait_until(lambda: phase(local_cluster, "live") == "Succeeded")
    listener.join()
    assert [text for worker, text in heard if worker == "live-worker-0"] == ["crashes", "runs", "last words"]
    assert [text for worker, text in heard if worker == "live-worker-1"] == ["runs", "last words"]
    before = local_cluster.logs("default", "live", LogQuery(previous=True))
    assert [(line.worker, line.text) for line in before] == [("live-worker-0", "crashes")]
