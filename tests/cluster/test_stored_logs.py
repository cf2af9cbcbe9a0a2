"""Which incarnations only the storage has, and what is said when it cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.errors import JobStorageError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase, Scaling, WorkerStatus
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.cluster.stored_logs import ReadLines, StoredIncarnation, StoredLogs, chosen, someone_is_gone
from elasticctl_store.stored_logs import Incarnation
from tests.support.jobs import shell_job
from tests.support.stored import launched, store

LIVES = [
    StoredIncarnation("w0", 1.0, "a"),
    StoredIncarnation("w0", 2.0, "b"),
    StoredIncarnation("w0", 3.0, "c"),
    StoredIncarnation("w1", 1.5, "d"),
    StoredIncarnation("w2", 4.0, "e"),
]


@pytest.mark.parametrize(
    ("live", "query", "expected"),
    [
        ({}, {}, "cde"),
        ({"w0": "c", "w1": "d", "w2": "e"}, {}, ""),
        ({"w0": "new", "w1": "d"}, {}, "e"),
        ({"w0": "c"}, {"previous": True}, "ab"),
        ({"w0": "new"}, {"previous": True}, "abc"),
        ({}, {"previous": True}, "ab"),
        ({"w0": "c"}, {"everything": True}, "abde"),
        ({"w0": "c"}, {"everything": True, "workers": ("w0",)}, "ab"),
        ({}, {"workers": ("w1", "w9")}, "d"),
    ],
)
def test_logs_that_only_the_storage_has(live: dict[str, str], query: dict[str, object], expected: str) -> None:
    found = chosen(reversed(LIVES), live, LogQuery(**query))  # type: ignore[arg-type]
    assert "".join(past.uid for past in found) == expected


@given(st.sets(st.sampled_from("abcde")), st.booleans())
def test_nothing_is_read_twice_or_left_out(alive: set[str], new: bool) -> None:
    """The newest and the earlier ones are all, and who lives is read where it lives."""
    live = {past.worker: past.uid for past in LIVES if past.uid in alive}
    if new:
        live["w0"] = "new"
    newest, previous, everything = (
        chosen(LIVES, live, query) for query in (LogQuery(), LogQuery(previous=True), LogQuery(everything=True))
    )
    assert sorted(newest + previous, key=LIVES.index) == everything
    assert {past.uid for past in everything} | set(live.values()) >= {past.uid for past in LIVES}
    assert not {past.uid for past in everything} & set(live.values())


@pytest.mark.parametrize(
    ("status", "live", "workers", "gone"),
    [
        (JobStatus(), [], (), False),
        (JobStatus(), ["j-worker-0"], (), False),
        (JobStatus(workers=(WorkerStatus("j-worker-0"),)), [], (), False),
        (JobStatus(workers=(WorkerStatus("j-worker-0", started_at=Timestamp(1)),)), [], (), True),
        (JobStatus(restarts={"NodeLost": 1}), ["j-worker-0"], (), True),
        (JobStatus(restarts={"NodeLost": 1}), ["j-worker-0", "j-worker-1"], (), False),
        (JobStatus(restarts={"NodeLost": 1}), ["j-worker-0"], ("j-worker-0",), False),
        (JobStatus(restarts={"NodeLost": 1}), ["j-worker-0"], ("j-worker-1",), True),
        (JobStatus(phase=Phase.SUCCEEDED), [], (), True),
        (JobStatus(scalings=(Scaling(from_workers=3, to_workers=2),)), ["j-worker-0", "j-worker-1"], (), True),
    ],
)
def test_the_storage_is_read_only_when_a_worker_is_gone(
    status: JobStatus, live: list[str], workers: tuple[str, ...], gone: bool
) -> None:
    job = ElasticJob(name="j", desired=2, status=status)
    assert someone_is_gone(job, live, LogQuery(workers=workers)) is gone


def job_at(url: str) -> ElasticJob:
    manifest = shell_job("j", "true", container=launched(url))
    manifest["metadata"]["uid"] = "job-uid"
    return ElasticJob.from_manifest(manifest)


def test_lines_are_merged_by_time_and_deleted_in_the_end(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    for worker in range(3):
        life = Incarnation("job-uid", f"j-worker-{worker}", 10.0 * worker, f"uid-{worker}")
        store(url, life, *((100.0 + 3 * n + worker, f"{n}") for n in range(5)))
    logs = StoredLogs(job_at(url), pytest.fail)
    found = [(line.worker[-1], line.text) for line in logs.past({"j-worker-1": "uid-1"}, LogQuery())]
    assert found == [(worker, str(n)) for n in range(5) for worker in "02"]
    last = [line.text for line in logs.past({}, LogQuery(tail=1, since=112.5))]
    assert last == ["4", "4"]
    read = ReadLines(whole=True)
    for n in range(3):
        read.note_line(100.0 + 3 * n + 0.01, str(n))
    assert [line.text for line in logs.rest("j-worker-0", "uid-0", read, LogQuery())] == ["3", "4"]
    assert logs.delete() == 6
    assert list(logs.past({}, LogQuery())) == []


@pytest.mark.parametrize(
    "manifest",
    [
        shell_job("j", "true"),
        shell_job("j", "true", container={"env": launched("file:///nowhere")["env"]}),
        shell_job("j", "true", container={"command": launched("")["command"]}),
    ],
)
def test_a_job_without_a_storage_or_our_launcher_keeps_none(manifest: dict[str, object]) -> None:
    logs = StoredLogs(ElasticJob.from_manifest(manifest), pytest.fail)
    assert not logs.kept
    assert list(logs.past({}, LogQuery())) == []
    assert logs.delete() == 0


def test_a_storage_that_cannot_be_read_is_reported_once(tmp_path: Path) -> None:
    said: list[str] = []
    logs = StoredLogs(job_at((tmp_path / "of-the-workers").as_uri()), said.append)
    for _ in range(2):
        assert list(logs.past({}, LogQuery())) == []
        assert list(logs.of("j-worker-0", "uid", LogQuery())) == []
    assert len(said) == 1
    assert "of-the-workers is not a folder on this machine" in said[0]
    with pytest.raises(JobStorageError, match="no output of the job could be read"):
        list(logs.failing_if_none(logs.past({}, LogQuery())))
    line = LogLine("j-worker-0", 1.0, "of a worker that is there")
    assert list(logs.failing_if_none([line])) == [line]
    assert logs.delete() == 0


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    said: list[str] = []
    logs = StoredLogs(job_at("s3://bucket/job?endpoint=http://127.0.0.1:9"), said.append)
    assert list(logs.past({}, LogQuery())) == []
    assert len(said) == 1
    assert "credentials" in said[0]


def test_a_damaged_object_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
    said: list[str] = []
    url = tmp_path.as_uri()
    for worker in range(2):
        life = Incarnation("job-uid", f"j-worker-{worker}", 10.0, f"uid-{worker}")
        store(url, life, *((100.0 + n, f"{n}") for n in range(6)))
        if worker:
            (tmp_path / life.key(4)).write_bytes(b"torn")
    found = [(line.worker[-1], line.text) for line in StoredLogs(job_at(url), said.append).past({}, LogQuery())]
    assert [text for worker, text in found if worker == "0"] == list("012345")
    assert [text for worker, text in found if worker == "1"] == list("012")
    assert len(said) == 1
    assert "000000000004.gz" in said[0]
