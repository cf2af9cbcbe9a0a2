"""What workers print, in storage: the format, sending it as it comes, reading it from either end."""

from __future__ import annotations

import gzip
import logging
import subprocess
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.stored_logs import StoredLogs
from elasticctl_launcher import worker_output
from elasticctl_launcher.worker_output import LogUploader, UploadLimits
from elasticctl_store import stored_logs
from elasticctl_store.errors import DamagedError, StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.stored_logs import Incarnation, Line
from tests.support.clouds import Cloud
from tests.support.gate import Fault
from tests.support.jobs import shell_job
from tests.support.stored import launched
from tests.support.waiting import wait_until

LIFE = Incarnation("job-uid", "job-worker-0", 1_770_000_000.25, "pod-uid")
QUICK = UploadLimits(flush_s=0.02, warm_up_s=0.0, first_pause_s=0.02)

text = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)))
times = st.integers(0, 4_000_000_000_000_000).map(lambda micros: micros / 1e6)
lines = st.lists(st.builds(Line, st.integers(1, 10**11), times, st.none() | st.integers(0, 9999), text))


class Flaky:
    """A folder that is away while `away`; counts what it is asked."""

    def __init__(self, root: Path) -> None:
        self.inner = LocalStorage(root)
        self.away = False
        self.puts = 0
        self.block = threading.Event()
        self.block.set()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        self.puts += 1
        self.block.wait(30)
        if self.away:
            raise StorageError("cannot write: the storage is away")
        return self.inner.put(key, parts, if_absent=if_absent)


@pytest.fixture
def flaky(tmp_path: Path) -> Flaky:
    return Flaky(tmp_path / "storage")


def shipper(storage: object, bounds: UploadLimits = QUICK) -> LogUploader:
    return LogUploader(lambda: storage, LIFE, bounds)  # type: ignore[arg-type,return-value]


def stored(storage: Storage | Flaky, job: str = "job-uid") -> list[Line]:
    found = stored_logs.find(storage, job)  # type: ignore[arg-type]
    return [line for log in found for line in log.lines()]


def texts(found: list[Line]) -> list[str]:
    return [line.text for line in found]


# The format


@given(st.lists(lines, max_size=4))
def test_lines_come_back_as_they_were(batches: list[list[Line]]) -> None:
    data = b"".join(stored_logs.compress(stored_logs.encode(batch)) for batch in batches if batch)
    wanted = [line for batch in batches for line in batch]
    found = stored_logs.decode(data)
    assert [(line.number, line.rank, line.text) for line in found] == [
        (line.number, line.rank, line.text) for line in wanted
    ]
    assert all(abs(a.at - b.at) < 2e-6 for a, b in zip(found, wanted, strict=True))


def test_zcat_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(b"".join(stored_logs.compress(stored_logs.encode([Line(n, 1.5, 0, f"step {n}")])) for n in (1, 2)))
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
def test_what_is_no_log_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedError):
        stored_logs.decode(data)


@given(times, st.integers(1, 10**12 - 1))
def test_a_key_tells_whose_lines_these_are(started_at: float, first: int) -> None:
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
def test_other_objects_are_left_alone(key: str) -> None:
    assert stored_logs.parse_key(key) is None


def test_incarnations_are_in_order_of_time() -> None:
    starts = [1.0, 999_999_999.9, 1_000_000_000.0, 1_000_000_000.001]
    folders = [Incarnation("j", "w", at, "u").folder for at in starts]
    assert folders == sorted(folders)


# Sending


def test_lines_are_stored_as_they_come(flaky: Flaky) -> None:
    ship = shipper(flaky)
    for n in range(5):
        ship.add(1.0 + n, n % 2, f"line {n}")
        wait_until(lambda n=n: len(stored(flaky)) == n + 1)
    ship.add(9.0, None, "[launcher] over \u2028 \r 50 %\rdone")
    ship.close()
    found = stored(flaky)
    assert [line.number for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line.rank for line in found] == [0, 1, 0, 1, 0, None]
    assert found[-1].text == "[launcher] over \u2028 \r 50 %\rdone"
    assert len(list(all_keys(flaky, "logs/"))) == 1, "one object grows"  # type: ignore[arg-type]


def test_silence_costs_nothing(flaky: Flaky) -> None:
    ship = shipper(flaky)
    ship.add(1.0, 0, "x")
    wait_until(lambda: stored(flaky))
    puts, before = flaky.puts, time.process_time()
    threading.Event().wait(0.5)
    assert flaky.puts == puts
    assert time.process_time() - before < 0.05
    ship.close()
    assert flaky.puts == puts, "nothing is written twice"


def test_much_goes_into_several_objects_of_bounded_size(flaky: Flaky) -> None:
    ship = shipper(flaky, UploadLimits(pending_bytes=64 << 20, flush_s=0.02, warm_up_s=0.0))
    for n in range(30_000):
        ship.add(float(n), 0, f"{n:060d}")
    ship.close(30.0)
    assert texts(stored(flaky)) == [f"{n:060d}" for n in range(30_000)]
    sizes = [len(gzip.decompress(flaky.inner.get(key))) for key in all_keys(flaky, "logs/")]  # type: ignore[arg-type]
    assert len(sizes) > 3
    assert max(sizes) <= 2 * stored_logs.SEGMENT_BYTES


def test_a_storage_that_is_away_for_a_while_loses_nothing(flaky: Flaky, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    flaky.away = True
    ship = shipper(flaky)
    for n in range(100):
        ship.add(float(n), 0, str(n))
    wait_until(lambda: flaky.puts > 3)
    flaky.away = False
    wait_until(lambda: texts(stored(flaky)) == [str(n) for n in range(100)])
    ship.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "cannot store the log for now: cannot write: the storage is away",
        "the log is stored again",
    ]


def test_away_for_long_the_oldest_lines_go_and_that_is_said(flaky: Flaky) -> None:
    flaky.away = True
    ship = shipper(flaky, UploadLimits(pending_bytes=100_000, flush_s=0.02, warm_up_s=0.0, first_pause_s=0.02))
    size = 2000
    for n in range(1000):
        ship.add(float(n), 0, f"{n:0{size}d}")
    wait_until(lambda: flaky.puts > 2)
    for n in range(1000, 2000):
        ship.add(float(n), 0, f"{n:0{size}d}")
    assert ship._pending_bytes <= 100_000
    flaky.away = False
    wait_until(lambda: texts(stored(flaky))[-1:] == [f"{1999:0{size}d}"])
    ship.close()
    found = stored(flaky)
    gaps = [line for line in found if line.text.startswith("[elasticctl]")]
    kept = [int(line.text) for line in found if line not in gaps]
    assert kept == sorted(set(kept))
    missing = sum(int(line.text.split()[1]) for line in gaps)
    assert missing == 2000 - len(kept) > 0


def test_printing_never_waits_for_the_storage(flaky: Flaky) -> None:
    flaky.block.clear()  # it neither takes nor refuses
    ship = shipper(flaky)
    ship.add(0.0, 0, "first")
    wait_until(lambda: flaky.puts == 1)
    before = time.monotonic()
    for n in range(10_000):
        ship.add(float(n), 0, "x")
    ship.close(0.1)
    assert time.monotonic() - before < 2.0
    flaky.block.set()


def test_closing_sends_what_is_left_at_once(flaky: Flaky) -> None:
    ship = shipper(flaky, UploadLimits(flush_s=60.0, warm_up_s=60.0))
    ship.add(1.0, 0, "last words")
    assert flaky.puts == 0
    ship.close()
    assert texts(stored(flaky)) == ["last words"]


def test_many_lines_go_before_their_time(flaky: Flaky) -> None:
    ship = shipper(flaky, UploadLimits(pending_bytes=1 << 20, flush_s=60.0, warm_up_s=60.0))
    for n in range(20_000):
        ship.add(float(n), 0, f"{n:060d}")
        if n % 1000 == 0:
            wait_until(lambda: ship._pending_bytes < 1 << 19)
    ship.close()
    assert texts(stored(flaky)) == [f"{n:060d}" for n in range(20_000)]


def test_on_notice_lines_go_sooner(flaky: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_output, "HURRIED_FLUSH_S", 0.02)
    ship = shipper(flaky, UploadLimits(flush_s=60.0, warm_up_s=60.0))
    ship.add(1.0, 0, "before")
    ship.hurry()
    wait_until(lambda: texts(stored(flaky)) == ["before"])
    ship.add(2.0, 0, "after")
    wait_until(lambda: texts(stored(flaky)) == ["before", "after"])
    ship.close()


def test_of_one_incarnation_the_newest_lines_are_kept(flaky: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_logs, "SEGMENT_BYTES", 2_000)
    ship = shipper(flaky, UploadLimits(stored_bytes=2_000, flush_s=0.01, warm_up_s=0.0))
    for n in range(2_000):
        ship.add(float(n), 0, f"{n} {zlib.crc32(str(n).encode()):x}" * 8)
    ship.close(30.0)
    found = stored(flaky)
    assert found[0].text == f"[elasticctl] {found[1].number - 1} lines are missing here: the storage did not take them"
    assert [line.number for line in found[1:]] == list(range(found[1].number, 2_001))
    assert sum(len(flaky.inner.get(key)) for key in all_keys(flaky, "logs/")) < 6_000  # type: ignore[arg-type]


def test_on_the_clouds_faults_neither_lose_nor_double(cloud: Cloud) -> None:
    faults = {1: Fault(status=503), 3: Fault(lose="after"), 4: Fault(lose="before")}
    cloud.gate.faults = lambda seen: faults.get(seen.number)
    ship = LogUploader(cloud.open, LIFE, QUICK)
    for n in range(50):
        ship.add(float(n), 0, f"line {n}")
        if n % 10 == 0:
            wait_until(lambda n=n: f"line {n}" in texts(stored(cloud.open())))
    ship.close(30.0)
    assert texts(stored(cloud.open())) == [f"line {n}" for n in range(50)]


def test_the_command_line_reads_them_from_a_bucket(cloud: Cloud) -> None:
    ship = LogUploader(cloud.open, LIFE, QUICK)
    for n in range(2_000):
        ship.add(1_770_000_000.0 + n, 0, f"line {n}")
    ship.close(30.0)
    manifest = shell_job("job", "true", container=launched(cloud.url))
    manifest["metadata"]["uid"] = LIFE.job_uid
    logs = StoredLogs(ElasticJob.from_manifest(manifest), pytest.fail)
    assert [line.text for line in logs.past({}, LogQuery())] == [f"line {n}" for n in range(2_000)]
    assert [line.text for line in logs.past({}, LogQuery(tail=1, since=1_770_000_001.0))] == ["line 1999"]
    assert logs.delete() > 0
    assert list(logs.past({}, LogQuery())) == []


# Who sends

WORKER = {
    "ELASTICCTL_STORAGE": "s3://bucket/job",
    "ELASTICCTL_JOB_UID": "job-uid",
    "ELASTICCTL_WORKER": "job-worker-0",
    "ELASTICCTL_POD_UID": "pod-uid",
    "ELASTICCTL_RDZV_ENDPOINT": "http://rendezvous:7777",
}
ON_THIS_MACHINE = {"ELASTICCTL_RDZV_ENDPOINT": "unix:///run/rendezvous.sock"}


@pytest.mark.parametrize(
    ("choice", "environ", "sends"),
    [
        ("auto", {}, True),
        ("off", {}, False),
        ("auto", {"ELASTICCTL_STORAGE": "file:///mnt/job"}, True),
        ("auto", {"ELASTICCTL_STORAGE": "file:///mnt/job", **ON_THIS_MACHINE}, False),
        ("on", {"ELASTICCTL_STORAGE": "file:///mnt/job", **ON_THIS_MACHINE}, True),
        ("auto", ON_THIS_MACHINE, True),
        ("auto", {"ELASTICCTL_STORAGE": ""}, False),
        ("on", {"ELASTICCTL_STORAGE": ""}, False),
        ("auto", {"ELASTICCTL_JOB_UID": ""}, False),
        ("auto", {"ELASTICCTL_WORKER": "../up"}, False),
    ],
)
def test_who_sends(choice: str, environ: dict[str, str], sends: bool) -> None:
    made = worker_output.create_uploader(choice, {**WORKER, **environ})
    assert (made is not None) is sends
    if made is not None:
        made.close()


def test_a_worker_sends_to_its_jobs_bucket(cloud: Cloud) -> None:
    made = worker_output.create_uploader("auto", {**WORKER, "ELASTICCTL_STORAGE": cloud.url})
    assert made is not None
    made.add(time.time(), 3, "hello")
    made.close(30.0)
    assert [(line.rank, line.text) for line in stored(cloud.open())] == [(3, "hello")]


# Reading


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    """100 lines, one a second from 1000 on, five an object."""
    storage = LocalStorage(tmp_path)
    for first in range(1, 101, 5):
        batch = [Line(n, 999.0 + n, 0, f"line {n}") for n in range(first, first + 5)]
        storage.put(LIFE.key(first), [stored_logs.compress(stored_logs.encode(batch))])
    return storage


@settings(deadline=None, max_examples=50)
@given(st.none() | st.floats(990.0, 1110.0), st.none() | st.integers(0, 120))
def test_the_end_and_a_time_are_found(
    tmp_path_factory: pytest.TempPathFactory, since: float | None, tail: int | None
) -> None:
    storage = LocalStorage(tmp_path_factory.getbasetemp() / "many")
    all_lines = [Line(n, 999.0 + n, 0, f"line {n}") for n in range(1, 101)]
    if not storage.list("logs/"):
        for start in range(0, 100, 5):
            batch = all_lines[start : start + 5]
            storage.put(LIFE.key(start + 1), [stored_logs.compress(stored_logs.encode(batch))])
    log = stored_logs.find(storage, "job-uid")[0]
    wanted = all_lines if tail is None else all_lines[len(all_lines) - min(tail, 100) :]
    assert list(log.lines(since=since, tail=tail)) == [line for line in wanted if since is None or line.at >= since]


def test_little_is_read_for_the_last_lines(many: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    get = LocalStorage.get
    monkeypatch.setattr(LocalStorage, "get", lambda self, key: (asked.append(key), get(self, key))[1])
    log = stored_logs.find(many, "job-uid")[0]
    assert texts(list(log.lines(tail=3))) == ["line 98", "line 99", "line 100"]
    assert len(asked) == 1
    assert texts(list(log.lines(since=1098.0)))[0] == "line 99"
    assert len(asked) <= 7


def test_an_object_that_was_deleted_meanwhile_is_a_gap(many: LocalStorage) -> None:
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


def test_jobs_and_workers_are_told_apart(many: LocalStorage) -> None:
    line = [stored_logs.compress(stored_logs.encode([Line(1, 1.0, 0, "other")]))]
    many.put(Incarnation("job-uid-2", "job-worker-0", 1.0, "u").key(1), line)
    many.put(Incarnation("job-uid", "job-worker-1", 1.0, "u").key(1), line)
    assert len(stored_logs.find(many, "job-uid")) == 2
    assert [log.incarnation.worker for log in stored_logs.find(many, "job-uid", "job-worker-1")] == ["job-worker-1"]
    assert stored_logs.find(many, "nobody") == []
    assert stored_logs.delete(many, "job-uid") == 21
    assert stored_logs.find(many, "job-uid") == []
    assert len(stored_logs.find(many, "job-uid-2")) == 1
