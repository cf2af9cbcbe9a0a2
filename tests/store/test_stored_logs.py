"""The logs of workers in storage: the format, and reading it from either end."""

from __future__ import annotations

import gzip
import itertools
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store import stored_logs
from elasticctl_store.errors import DamagedError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.stored_logs import Incarnation, StoredLine

LIFE = Incarnation("job-uid", "job-worker-0", 1_770_000_000.25, "pod-uid")

text = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)))
times = st.integers(0, 4_000_000_000_000_000).map(lambda micros: micros / 1e6)
lines = st.lists(st.builds(StoredLine, st.integers(1, 10**11), times, st.none() | st.integers(0, 9999), text))


def texts(found: list[StoredLine]) -> list[str]:
    return [line.text for line in found]


# The format


@settings(max_examples=30)
@given(st.lists(lines, max_size=4))
def test_lines_survive_their_encoding(batches: list[list[StoredLine]]) -> None:
    data = b"".join(stored_logs.compress(stored_logs.encode(batch)) for batch in batches if batch)
    wanted = [line for batch in batches for line in batch]
    found = stored_logs.decode(data)
    assert [(line.number, line.rank, line.text) for line in found] == [
        (line.number, line.rank, line.text) for line in wanted
    ]
    assert all(abs(a.at - b.at) < 2e-6 for a, b in zip(found, wanted, strict=True))


def test_zcat_reads_an_object(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(
        b"".join(stored_logs.compress(stored_logs.encode([StoredLine(n, 1.5, 0, f"step {n}")])) for n in (1, 2))
    )
    said = subprocess.run(["zcat", path], capture_output=True, text=True, check=True).stdout
    assert said == "1 1970-01-01T00:00:01.500000Z 0 step 1\n2 1970-01-01T00:00:01.500000Z 0 step 2\n"


@pytest.mark.parametrize(
    "data",
    [
        b"no gzip",
        gzip.compress(b"no number\n", mtime=0),
        gzip.compress(b"1 yesterday 0 text\n", mtime=0),
        gzip.compress(b"1 2026-01-01T00:00:00Z zero text\n", mtime=0),
        gzip.compress(b"1 2026-01-01T00:00:00Z 0 text\n", mtime=0)[:-9],
        zlib.compress(b"1 2026-01-01T00:00:00Z 0 text\n"),
        gzip.compress(b"\n" * (stored_logs.MAX_SEGMENT_BYTES + 1), mtime=0),
    ],
)
def test_invalid_objects_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedError):
        stored_logs.decode(data)


@settings(max_examples=30)
@given(times, st.integers(1, 10**12 - 1))
def test_a_key_identifies_the_incarnation(started_at: float, first: int) -> None:
    life = Incarnation("0a-uid", "job-worker-12", started_at, "b1-uid")
    found = stored_logs.parse_key(life.key(first))
    assert found is not None
    assert (found[0].job_uid, found[0].worker, found[0].uid, found[1]) == ("0a-uid", "job-worker-12", "b1-uid", first)
    assert 0 <= started_at - found[0].started_at < 0.0011
    assert found[0].key(first) == life.key(first), "what was parsed names the same object"


@pytest.mark.parametrize(
    "key",
    [
        LIFE.key(1) + ".a1b2c3d4.partial",
        LIFE.key(1).replace("logs/", "data/"),
        LIFE.key(1).replace("pod-uid", "pod uid"),
        LIFE.key(1).replace("2026", "20x6"),
        LIFE.key(1).replace("20260202", "20261399"),
        "logs/a/b",
        "",
    ],
)
def test_other_objects_are_ignored(key: str) -> None:
    assert stored_logs.parse_key(key) is None


def test_incarnations_are_in_order_of_time() -> None:
    starts = [1.0, 999_999_999.9, 1_000_000_000.0, 1_000_000_000.001]
    folders = [Incarnation("j", "w", at, "u").folder for at in starts]
    assert folders == sorted(folders)


# Reading

ALL_LINES = [StoredLine(n, 999.0 + n, 0, f"line {n}") for n in range(1, 101)]


@pytest.fixture
def many(tmp_path: Path) -> LocalStorage:
    """`ALL_LINES`, five in each object."""
    storage = LocalStorage(tmp_path)
    for start in range(0, 100, 5):
        batch = ALL_LINES[start : start + 5]
        storage.put(LIFE.key(start + 1), [stored_logs.compress(stored_logs.encode(batch))])
    return storage


def test_tail_and_since_select_lines(many: LocalStorage) -> None:
    log = stored_logs.find(many, "job-uid")[0]
    for since, tail in itertools.product((None, 990.0, 1000.0, 1004.5, 1050.0, 1110.0), (None, 0, 1, 5, 7, 100, 120)):
        wanted = ALL_LINES if tail is None else ALL_LINES[100 - min(tail, 100) :]
        assert list(log.lines(since=since, tail=tail)) == [line for line in wanted if since is None or line.at >= since]


def test_tail_reads_few_objects(many: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    get = LocalStorage.get
    monkeypatch.setattr(LocalStorage, "get", lambda self, key: (asked.append(key), get(self, key))[1])
    log = stored_logs.find(many, "job-uid")[0]
    assert texts(list(log.lines(tail=3))) == ["line 98", "line 99", "line 100"]
    assert len(asked) == 1
    assert texts(list(log.lines(since=1098.0)))[0] == "line 99"
    assert len(asked) <= 7


def test_an_object_deleted_meanwhile_is_a_gap(many: LocalStorage) -> None:
    log = stored_logs.find(many, "job-uid")[0]
    many.delete([LIFE.key(6)])
    assert texts(list(log.lines()))[4:7] == [
        "line 5",
        "[elasticctl] 5 lines are missing here: the storage did not take them",
        "line 11",
    ]


def test_a_damaged_object_is_named(many: LocalStorage) -> None:
    many.put(LIFE.key(6), [b"torn"])
    log = stored_logs.find(many, "job-uid")[0]
    with pytest.raises(DamagedError, match="000000000006"):
        list(log.lines())


def test_jobs_and_workers_are_distinguished(many: LocalStorage) -> None:
    line = [stored_logs.compress(stored_logs.encode([StoredLine(1, 1.0, 0, "other")]))]
    many.put(Incarnation("job-uid-2", "job-worker-0", 1.0, "u").key(1), line)
    many.put(Incarnation("job-uid", "job-worker-1", 1.0, "u").key(1), line)
    assert len(stored_logs.find(many, "job-uid")) == 2
    assert [log.incarnation.worker for log in stored_logs.find(many, "job-uid", "job-worker-1")] == ["job-worker-1"]
    assert stored_logs.find(many, "no-such-job") == []
    assert stored_logs.delete(many, "job-uid") == 21
    assert stored_logs.find(many, "job-uid") == []
    assert len(stored_logs.find(many, "job-uid-2")) == 1
