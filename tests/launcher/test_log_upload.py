"""The log in the storage: the lines that a real launcher prints, however it ends; and the uploader alone."""

from __future__ import annotations

import gzip
import logging
import signal
import sys
import threading
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from elasticctl_launcher import worker_output
from elasticctl_launcher.worker_output import LogUploader, UploadLimits
from elasticctl_store import stored_logs, stored_metrics
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.stored_logs import Incarnation, StoredLine
from tests.support.clouds import Cloud
from tests.support.gate import Fault
from tests.support.launcher_lab import Lab
from tests.support.waiting import wait_until

TALKS = """
import os, sys, time
print("héllo €", "x" * 40_000 + "é" * 10_000, flush=True)
sys.stderr.write("to the other stream, 50 %\\r100 %\\n")
number = 0
while not os.path.exists(os.environ["LAB"] + "/done"):
    print("line", number, flush=True)
    number += 1
    time.sleep(0.02)
"""


def talk(lab: Lab, *options: str, nproc: int = 1) -> LocalStorage:
    folder = lab.folder / "storage"
    lab.add("a-0")
    lab.start(
        "a-0",
        sys.executable,
        "-c",
        TALKS,
        options=("--nproc-per-node", str(nproc), "--preload", "none", *options),
        LAB=str(lab.folder),
        ELASTICCTL_STORAGE=folder.as_uri(),
        ELASTICCTL_JOB_UID="job-uid",
    )
    return LocalStorage(folder)


def stored(storage: Storage | Flaky) -> list[StoredLine]:
    return [line for log in stored_logs.find(storage, "job-uid") for line in log.lines()]  # type: ignore[arg-type]


def texts(found: list[StoredLine]) -> list[str]:
    return [line.text for line in found]


def printed(lab: Lab) -> list[str]:
    return (lab.folder / "a-0.log").read_bytes().decode().split("\n")[:-1]


def test_every_line_is_stored_as_it_was_printed(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on")
    lab.until(lambda: "line 50" in printed(lab))
    (lab.folder / "done").touch()
    assert lab.wait("a-0") == 0
    found = stored(storage)
    assert [line.text for line in found] == printed(lab)
    assert [line.number for line in found] == list(range(1, len(found) + 1))
    assert {line.rank for line in found if not line.text.startswith("[launcher]")} == {0}
    assert {line.rank for line in found if line.text.startswith("[launcher]")} <= {None}
    assert max(len(line.text.encode()) for line in found) <= 16_000, "container runtimes do not split them further"
    assert "".join(line.text for line in found if set(line.text[-1:]) & set("xé")).endswith("é" * 10_000)
    assert "\ufffd" not in "".join(line.text for line in found), "no character is broken"


def test_with_several_ranks_each_line_names_its_rank(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on", nproc=2)
    lab.until(lambda: {"[rank0] line 20", "[rank1] line 20"} <= set(printed(lab)))
    (lab.folder / "done").touch()
    assert lab.wait("a-0") == 0
    found = stored(storage)
    assert [line.text for line in found] == printed(lab)
    assert all(line.text.startswith(f"[rank{line.rank}] ") for line in found if line.rank is not None)


def test_sigterm_loses_nothing(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on")
    lab.until(lambda: "line 5" in printed(lab))
    lab.workers["a-0"].send_signal(signal.SIGTERM)
    assert lab.wait("a-0") == 143
    assert [line.text for line in stored(storage)] == printed(lab)


def test_sigkill_loses_only_the_last_seconds(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on")
    lab.until(lambda: len(stored(storage)) > 50)
    lab.kill("a-0")
    found, said = stored(storage), printed(lab)
    assert [line.text for line in found] == said[: len(found)]


def test_an_unavailable_storage_does_not_stop_training(lab: Lab) -> None:
    (lab.folder / "storage").write_text("in the way")
    talk(lab, "--log-upload", "on")
    lab.until(lambda: "cannot store the log for now" in lab.output("a-0"))
    (lab.folder / "done").touch()
    assert lab.wait("a-0") == 0


# The uploader alone

LIFE = Incarnation("job-uid", "job-worker-0", 1_770_000_000.25, "pod-uid")
QUICK = UploadLimits(flush_s=0.02, warm_up_s=0.0, first_pause_s=0.02)


class Flaky:
    """A folder that is unavailable while `away` is set; counts requests."""

    def __init__(self, root: Path) -> None:
        self.inner = LocalStorage(root)
        self.away = False
        self.puts = 0
        self.block = threading.Event()
        self.block.set()
        self.failing_deletes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        self.puts += 1
        self.block.wait()
        if self.away:
            raise StorageError("cannot write: the storage is away")
        return self.inner.put(key, parts, if_absent=if_absent)

    def delete(self, keys: Sequence[str]) -> None:
        if self.failing_deletes:
            self.failing_deletes -= 1
            raise StorageError("cannot delete: the storage is away")
        self.inner.delete(keys)


@pytest.fixture
def flaky(tmp_path: Path) -> Flaky:
    return Flaky(tmp_path / "storage")


def upload_to(storage: object, limits: UploadLimits = QUICK) -> LogUploader:
    return LogUploader(lambda: storage, LIFE, limits)  # type: ignore[arg-type,return-value]


def test_lines_are_stored_while_the_worker_runs(flaky: Flaky) -> None:
    uploader = upload_to(flaky)
    for n in range(5):
        uploader.add(1.0 + n, n % 2, f"line {n}")
        wait_until(lambda n=n: len(stored(flaky)) == n + 1)
    uploader.add(9.0, None, "[launcher] over \u2028 \r 50 %\rdone")
    uploader.close()
    found = stored(flaky)
    assert [line.number for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line.rank for line in found] == [0, 1, 0, 1, 0, None]
    assert found[-1].text == "[launcher] over \u2028 \r 50 %\rdone"
    assert len(list(all_keys(flaky, "logs/"))) == 1, "one object grows"  # type: ignore[arg-type]


def test_without_output_there_are_no_requests(flaky: Flaky) -> None:
    uploader = upload_to(flaky)
    uploader.add(1.0, 0, "x")
    wait_until(lambda: stored(flaky))
    puts = flaky.puts
    threading.Event().wait(0.5)
    assert flaky.puts == puts
    uploader.close()
    assert flaky.puts == puts, "nothing is written twice"


def test_much_output_is_split_into_objects_of_bounded_size(flaky: Flaky) -> None:
    uploader = upload_to(flaky, UploadLimits(pending_bytes=64 << 20, flush_s=0.02, warm_up_s=0.0))
    for n in range(10_000):
        uploader.add(float(n), 0, f"{n:060d}")
    uploader.close(30.0)
    assert texts(stored(flaky)) == [f"{n:060d}" for n in range(10_000)]
    sizes = [len(gzip.decompress(flaky.inner.get(key))) for key in all_keys(flaky, "logs/")]  # type: ignore[arg-type]
    assert len(sizes) > 1
    assert max(sizes) <= 2 * stored_logs.SEGMENT_BYTES


def test_a_short_outage_loses_nothing(flaky: Flaky, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    flaky.away = True
    uploader = upload_to(flaky)
    for n in range(100):
        uploader.add(float(n), 0, str(n))
    wait_until(lambda: flaky.puts > 3)
    flaky.away = False
    wait_until(lambda: texts(stored(flaky)) == [str(n) for n in range(100)])
    uploader.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "cannot store the log for now: cannot write: the storage is away",
        "the log is stored again",
    ]


def test_a_long_outage_drops_the_oldest_lines_with_a_note(flaky: Flaky) -> None:
    flaky.away = True
    uploader = upload_to(flaky, UploadLimits(pending_bytes=100_000, flush_s=0.02, warm_up_s=0.0, first_pause_s=0.02))
    size = 2000
    for n in range(1000):
        uploader.add(float(n), 0, f"{n:0{size}d}")
    wait_until(lambda: flaky.puts > 2)
    for n in range(1000, 2000):
        uploader.add(float(n), 0, f"{n:0{size}d}")
    assert uploader._pending_bytes <= 100_000
    flaky.away = False
    wait_until(lambda: texts(stored(flaky))[-1:] == [f"{1999:0{size}d}"])
    uploader.close()
    found = stored(flaky)
    gaps = [line for line in found if line.text.startswith("[elasticctl]")]
    kept = [int(line.text) for line in found if line not in gaps]
    assert kept == sorted(set(kept))
    missing = sum(int(line.text.split()[1]) for line in gaps)
    assert missing == 2000 - len(kept) > 0


def test_printing_never_waits_for_the_storage(flaky: Flaky) -> None:
    flaky.block.clear()  # it neither accepts nor refuses
    uploader = upload_to(flaky)
    uploader.add(0.0, 0, "first")
    wait_until(lambda: flaky.puts == 1)
    for n in range(10_000):
        uploader.add(float(n), 0, "x")
    uploader.close(0.1)
    flaky.block.set()


def test_many_pending_lines_are_sent_early(flaky: Flaky) -> None:
    uploader = upload_to(flaky, UploadLimits(pending_bytes=1 << 18, flush_s=60.0, warm_up_s=60.0))
    for n in range(8_000):
        uploader.add(float(n), 0, f"{n:060d}")
        if n % 250 == 0:
            wait_until(lambda: uploader._pending_bytes < 1 << 17)
    uploader.close()
    assert texts(stored(flaky)) == [f"{n:060d}" for n in range(8_000)]


def test_after_notice_lines_are_sent_sooner(flaky: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_output, "HURRIED_FLUSH_S", 0.02)
    uploader = upload_to(flaky, UploadLimits(flush_s=60.0, warm_up_s=60.0))
    uploader.add(1.0, 0, "before")
    uploader.hurry()
    wait_until(lambda: texts(stored(flaky)) == ["before"])
    uploader.add(2.0, 0, "after")
    wait_until(lambda: texts(stored(flaky)) == ["before", "after"])
    uploader.close()


def test_close_sends_the_remaining_lines(flaky: Flaky) -> None:
    uploader = upload_to(flaky, UploadLimits(flush_s=36_000.0, warm_up_s=36_000.0))
    uploader.add(1.0, 0, "last words")
    uploader.close()
    assert texts(stored(flaky)) == ["last words"]


@pytest.mark.parametrize("failing_deletes", [0, 3])
def test_the_oldest_objects_of_an_incarnation_are_deleted(
    flaky: Flaky, monkeypatch: pytest.MonkeyPatch, failing_deletes: int
) -> None:
    monkeypatch.setattr(stored_logs, "SEGMENT_BYTES", 2_000)
    flaky.failing_deletes = failing_deletes
    uploader = upload_to(flaky, UploadLimits(stored_bytes=2_000, flush_s=0.01, warm_up_s=0.0))
    for n in range(2_000):
        uploader.add(float(n), 0, f"{n} {zlib.crc32(str(n).encode()):x}" * 8)
    uploader.close(30.0)
    found = stored(flaky)
    assert found[0].text == f"[elasticctl] {found[1].number - 1} lines are missing here: the storage did not take them"
    assert [line.number for line in found[1:]] == list(range(found[1].number, 2_001))
    assert sum(len(flaky.inner.get(key)) for key in all_keys(flaky, "logs/")) < 6_000  # type: ignore[arg-type]


def test_faults_of_a_cloud_neither_lose_nor_duplicate_lines(cloud: Cloud) -> None:
    faults = {1: Fault(status=503), 3: Fault(lose="after"), 4: Fault(lose="before")}
    cloud.gate.faults = lambda seen: faults.get(seen.number)
    uploader = LogUploader(cloud.open, LIFE, QUICK)
    for n in range(50):
        uploader.add(float(n), 0, f"line {n}")
        if n % 10 == 0:
            wait_until(lambda n=n: f"line {n}" in texts(stored(cloud.open())))
    uploader.close(30.0)
    assert texts(stored(cloud.open())) == [f"line {n}" for n in range(50)]


# Which workers upload

WORKER = {
    "ELASTICCTL_STORAGE": "s3://bucket/job",
    "ELASTICCTL_JOB_UID": "job-uid",
    "ELASTICCTL_WORKER": "job-worker-0",
    "ELASTICCTL_POD_UID": "pod-uid",
    "ELASTICCTL_RDZV_ENDPOINT": "http://rendezvous:7777",
}
ON_THIS_MACHINE = {"ELASTICCTL_RDZV_ENDPOINT": "unix:///run/rendezvous.sock"}


@pytest.mark.parametrize(
    ("choice", "environ", "sends_log", "sends_metrics"),
    [
        ("auto", {}, True, True),
        ("off", {}, False, False),
        ("auto", {"ELASTICCTL_STORAGE": "file:///mnt/job"}, True, True),
        ("auto", {"ELASTICCTL_STORAGE": "file:///mnt/job", **ON_THIS_MACHINE}, False, True),
        ("on", {"ELASTICCTL_STORAGE": "file:///mnt/job", **ON_THIS_MACHINE}, True, True),
        ("auto", ON_THIS_MACHINE, True, True),
        ("auto", {"ELASTICCTL_STORAGE": ""}, False, False),
        ("on", {"ELASTICCTL_STORAGE": ""}, False, False),
        ("auto", {"ELASTICCTL_JOB_UID": ""}, False, False),
        ("auto", {"ELASTICCTL_WORKER": "../up"}, False, False),
    ],
)
def test_the_choice_decides_what_is_stored(
    choice: str, environ: dict[str, str], sends_log: bool, sends_metrics: bool
) -> None:
    with closing(worker_output.start_uploads(choice, {**WORKER, **environ})) as uploads:
        assert (uploads.log is not None, uploads.metrics is not None) == (sends_log, sends_metrics)


def test_a_worker_uploads_to_its_jobs_bucket(cloud: Cloud) -> None:
    output = worker_output.WorkerOutput()
    uploads = worker_output.start_uploads("auto", {**WORKER, "ELASTICCTL_STORAGE": cloud.url})
    output.store_in(uploads)
    output.print_rank_line(3, "hello")
    output.store_metrics(['{"step": 1, "at": 2.5, "loss": "NaN"}'])
    uploads.close(30.0)
    assert [(line.rank, line.text) for line in stored(cloud.open())] == [(3, "hello")]
    ((_, key),) = stored_metrics.keys_of(cloud.open(), WORKER["ELASTICCTL_JOB_UID"])
    assert stored_metrics.decode(cloud.open().get(key)) == [{"step": 1, "at": 2.5, "loss": "NaN"}]
