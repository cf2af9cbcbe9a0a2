"""The checkpoint benchmark: its server is right, its reckoning too, and a small run measures what it says."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import checkpoint, processes
from benchmarks.checkpoints import base, results, trials
from benchmarks.checkpoints.base import Place
from benchmarks.checkpoints.contenders import Boto3
from benchmarks.checkpoints.objects import CHUNK_BYTES, SMALL_BYTES, Blob, FullError, Objects, Pool
from benchmarks.checkpoints.results import Measurement, aims, merge, summarise
from benchmarks.checkpoints.training_state import Trainee, Yardstick, shape_for
from benchmarks.checkpoints.trials import Failed, Plan, RankProcess, Sink
from benchmarks.results import Spread
from elasticctl_store import storage as storages
from elasticctl_store.errors import ExistsError, StorageError
from elasticctl_store.parallel import each
from elasticctl_store.storage import Patience, Storage, all_keys
from tests.support.processes import has_ended
from tests.support.waiting import wait_until

# The server.


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with Sink(64 << 20) as sink:
        yield sink


@pytest.fixture
def stored(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    yield storages.open(f"s3://bucket/place?endpoint={sink.endpoint}&region=us-east-1", Patience(tries=1))
    sink.ask("drop", prefix="bucket/")


def test_the_sink_gives_back_what_it_was_given(stored: Storage) -> None:
    data = os.urandom(20 << 20)  # in two parts
    for key, content in {"large": data, "small": b"abc", "empty": b""}.items():
        stored.put(key, [content])
        into = bytearray(len(content))
        stored.read_into(key, 0, memoryview(into))
        assert into == content
        assert stored.get(key) == content
    middle = bytearray(3 << 20)
    stored.read_into("large", 5_000_001, memoryview(middle))
    assert middle == data[5_000_001 : 5_000_001 + len(middle)]


def test_the_sink_keeps_to_preconditions(stored: Storage) -> None:
    for content in (b"first", b"first" * (4 << 20)):
        stored.put(f"once-{len(content)}", [content], if_absent=True)
        with pytest.raises(ExistsError):
            stored.put(f"once-{len(content)}", [b"other" + content], if_absent=True)
        assert stored.get(f"once-{len(content)}") == content
        stored.delete([f"once-{len(content)}"])
        stored.put(f"once-{len(content)}", [b"again"], if_absent=True)


def test_the_sink_lists_in_order_and_in_pages_and_counts_what_it_is_asked(sink: Sink, stored: Storage) -> None:
    keys = [f"k{number:04d}" for number in range(1203)]
    each(lambda key: stored.put(key, [b"x"]), reversed(keys), threads=4)
    sink.ask("reset")
    assert list(all_keys(stored, "k")) == keys
    assert stored.list("k", after="k1200") == ["k1201", "k1202"]
    assert sink.ask("stats")["requests"] == {"list": 4}


def test_what_was_deleted_makes_room_and_a_full_sink_says_so(stored: Storage) -> None:
    data = memoryview(bytes(20 << 20))
    for _ in range(5):
        stored.put("same", [data])
    for number in range(2):
        stored.put(f"more-{number}", [data])
    with pytest.raises(StorageError, match="no room"):
        stored.put("too-much", [data])
    stored.delete(["same"])
    stored.put("fits", [data])


def test_the_sink_understands_boto3_which_asks_before_it_sends(sink: Sink, stored: Storage) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=sink.endpoint, region_name="us-east-1")
    data = os.urandom(9 << 20)
    client.upload_fileobj(io.BytesIO(data), "bucket", "theirs/x")
    client.copy_object(Bucket="bucket", Key="theirs/y", CopySource={"Bucket": "bucket", "Key": "theirs/x"})
    assert [row["Key"] for row in client.list_objects_v2(Bucket="bucket")["Contents"]] == ["theirs/x", "theirs/y"]
    found = io.BytesIO()
    client.download_fileobj("bucket", "theirs/y", found)
    assert found.getvalue() == data
    client.close()


def test_the_sink_reads_bodies_in_signed_chunks(sink: Sink, stored: Storage) -> None:
    address = urlsplit(sink.endpoint)
    head = (
        "PUT /bucket/place/chunked HTTP/1.1\r\nHost: x\r\nContent-Encoding: aws-chunked\r\nContent-Length: 99\r\n"
        "X-Amz-Decoded-Content-Length: 11\r\n\r\n"
    )
    body = "6;chunk-signature=0\r\nhello \r\n5\r\nworld\r\n0\r\nx-amz-checksum-crc32:AAAA\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall((head + body).encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert stored.get("chunked") == b"hello world"


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_pieces_of_a_blob_are_slices(parts: list[bytes], start: int, stop: int) -> None:
    whole = b"".join(parts)
    blob = Blob.joined([Blob((memoryview(part),), len(part)) for part in parts])
    assert b"".join(blob.pieces(start, stop)) == whole[start:stop]
    assert blob.size_bytes == len(whole)


def test_parts_are_joined_in_order_and_what_is_replaced_or_given_up_is_freed() -> None:
    pool = Pool(4 * CHUNK_BYTES)
    objects = Objects(pool)
    upload = objects.begin("b/x")
    for number, content in ((2, b"two"), (1, b"lost"), (1, b"one")):
        blob = pool.take(CHUNK_BYTES)
        blob.views[0][: len(content)] = content
        assert objects.add_part(upload, number, blob)
    assert objects.complete(upload, if_absent=True)
    joined = objects.get("b/x")
    assert joined is not None
    assert [bytes(view[:3]) for view in joined.views] == [b"one", b"two"]
    assert objects.complete(upload, if_absent=False) is None
    given_up = objects.begin("b/y")
    objects.add_part(given_up, 1, pool.take(2 * CHUNK_BYTES))
    with pytest.raises(FullError):
        pool.take(SMALL_BYTES + 1)
    objects.drop_prefix("b/")
    assert pool.take(4 * CHUNK_BYTES).size_bytes == 4 * CHUNK_BYTES


# What is saved.


@pytest.mark.parametrize("size_bytes", [1_000_000, 64_000_000, 500_000_000, 2_000_000_000])
def test_the_state_is_as_large_as_was_asked(size_bytes: int) -> None:
    width, layers = shape_for(size_bytes)
    assert 12 * layers * width * (width + 1) == pytest.approx(size_bytes, rel=0.025)
    assert layers >= 20


def test_a_state_goes_from_one_trainee_to_another_and_the_digest_tells() -> None:
    ours, theirs = Trainee(300_000, seed=1), Trainee(300_000, seed=2)
    ours.train_once()
    ours.mark(7)
    assert ours.size_bytes() == pytest.approx(300_000, rel=0.05)
    theirs.load(ours.state())
    assert theirs.digest() == ours.digest()
    ours.mark(8)
    assert theirs.digest() != ours.digest()
    assert all(state["step"] == 8.0 for state in ours.optimizer.state.values())


def test_the_yardstick_copies_a_ranks_share() -> None:
    trainee = Trainee(300_000, seed=1)
    trainee.train_once()
    assert 0 < Yardstick(trainee, 2).copy_s() < 1.0
    assert torch.get_num_threads() >= 1


# What is said of it.


def save(kind: str, hold_s: float, commit_s: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "hold_s": hold_s, "commit_s": commit_s, "copy_s": 0.1, "cpu_s": 1.0, **more}


def busy(quiet: int, during: int) -> dict[str, Any]:
    stretches = {"quiet": {"steps": quiet, "seconds": 1.0}, "during": {"steps": during, "seconds": 2.0}}
    return save("busy", 0.1, 2.1, cpu_s=None, **stretches)


SAVES = [
    {"size_bytes": 2_000_000_000, "prepare_s": 0.1, "extra_bytes": 5, "digest": 3, "newest": 4,
     "saves": [save("first", 0.3, 9.0), save("idle", 0.1, 2.0), busy(10, 18), busy(30, 62)]},
    {"size_bytes": 2_000_000_000, "prepare_s": 0.2, "extra_bytes": 7, "digest": 3, "newest": 4,
     "saves": [save("first", 0.2, 1.0), save("idle", 0.2, 1.0), busy(1, 1), busy(1, 1)]},
]  # fmt: skip
RESTORES = [{"restore_s": 1.0, "first_step_s": 1.1, "digest": 3}, {"restore_s": 2.0, "first_step_s": 2.1, "digest": 3}]
PLAIN = Measurement(2_000_000_000, 2, "elasticctl", 0)


def test_the_slowest_rank_holds_training_up_and_all_of_them_cost() -> None:
    found = merge(PLAIN, SAVES, RESTORES)
    assert found.holds == pytest.approx((3.0, 2.0, 1.0, 1.0))
    assert found.commits_s == (9.0, 2.0)
    assert found.cpu_s_per_gb == (1.0, 1.0)
    assert found.step_rate == pytest.approx((80 / 4) / (40 / 2))
    assert (found.prepare_s, found.extra_bytes, found.first_step_s, found.exact) == (0.2, 7, 2.1, True)


def test_a_rank_that_restored_something_else_is_seen() -> None:
    assert merge(PLAIN, SAVES, [RESTORES[0], {**RESTORES[1], "digest": 4}]).exact is False


OURS = Measurement(
    64_000_000, 1, "elasticctl", 0, state_bytes=64 << 20, copy_s=0.01, holds=(1.9, 1.1, 1.0), commits_s=(1.0, 0.5),
    cpu_s_per_gb=(2.0, 0.5), step_rate=0.95, extra_bytes=192 << 20, first_step_s=0.1, restore_s=0.1, exact=True,
)  # fmt: skip
BOTO3 = replace(OURS, contender="boto3", holds=(30.0, 20.0), commits_s=(3.0, 2.0), first_step_s=0.4)


def test_first_saves_are_told_apart_and_count_for_the_standstill() -> None:
    (ours,) = summarise([OURS, replace(OURS, repeat=1, holds=(1.5, 1.2))])
    assert ours.hold.p50 == pytest.approx(1.2)
    assert ours.hold_p99 == pytest.approx(1.9 - 0.04 * 0.4)
    assert ours.first_hold.p50 == pytest.approx(1.7)
    assert (ours.commit_s.p50, ours.first_commit_s.p50, ours.cpu_s_per_gb.p50) == (0.5, 1.0, 0.5)
    assert ours.extra_shares.p50 == pytest.approx(2.0)


def test_aims_are_held_against_the_bounds_and_against_the_others() -> None:
    met = aims(summarise([OURS, BOTO3]))
    assert len(met) == 8
    assert all(aim.met for aim in met)
    slow = replace(
        OURS, holds=(2.5, 1.3), cpu_s_per_gb=(1.0, 1.1), step_rate=0.8, extra_bytes=200 << 20, commits_s=(1.0, 2.1),
        first_step_s=0.5,
    )  # fmt: skip
    assert not any(aim.met for aim in aims(summarise([slow, BOTO3])))
    assert len(aims(summarise([OURS]))) == 5
    assert aims(summarise([BOTO3])) == []


def test_what_was_not_measured_is_shown_and_does_not_count() -> None:
    nothing = Measurement(64_000_000, 1, "torchsnapshot", 0, note="[rank0]: not measured: pip install torchsnapshot")
    summaries = summarise([OURS, BOTO3, nothing])
    assert [summary.trials for summary in summaries] == [1, 1, 0]
    assert summaries[2].commit_s == Spread()
    console = Console(width=260, record=True, file=io.StringIO())
    console.print(results.table(summaries))
    console.print(results.aims_table(aims(summaries)))
    text = console.export_text()
    for shown in (
        "64 MB, 1 rank",
        "1.10 (1.82)",
        "not measured: pip install torchsnapshot",
        "CPU seconds per GB",
        "met",
    ):
        assert shown in text
    assert "MISSED" not in text
    assert "WRONG" not in text


def test_the_json_holds_every_measurement_and_aim() -> None:
    found = json.loads(json.dumps(results.as_json({"repeats": 1}, [OURS, BOTO3], 0.0)))
    assert [row["contender"] for row in found["measurements"]] == ["elasticctl", "boto3"]
    assert found["measurements"][0]["holds"] == [1.9, 1.1, 1.0]
    assert len(found["aims"]) == 8
    assert found["versions"]["boto3"]


def test_the_picture_shows_every_state_and_figure(tmp_path: Path) -> None:
    from benchmarks.checkpoints import plot  # matplotlib, else in each process that collects tests

    path = tmp_path / "checkpoint.svg"
    nothing = Measurement(500_000_000, 2, "boto3", 0, note="failed")
    plot.save_svg(summarise([OURS, BOTO3, nothing]), path)
    text = " ".join(ET.parse(path).getroot().itertext())
    for shown in ("64 MB, 1 rank", "500 MB, 2 ranks", "CPU seconds per GB", "not measured", "1.10"):
        assert shown in text


# A run.


@pytest.mark.parametrize(
    "wrong", [("--size", "64"), ("--size", "0MB"), ("--ranks", "0"), ("--contender", "tape"), ("--repeats", "x")]
)
def test_the_benchmark_refuses_what_makes_no_sense(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        checkpoint.main(list(wrong))
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_state_that_does_not_fit_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    size_gb = 2 * psutil.virtual_memory().total // 10**9
    checkpoint.main(["--size", f"{size_gb}GB", "--ranks", "2"])
    assert f"{size_gb} GB with 2 ranks is left out" in capsys.readouterr().err


def test_a_package_that_is_missing_is_a_finding(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "NEEDS", {"boto3": ("no_such_package",)})
    found = trials.run_trial(Plan("boto3", 10**6, 1, 0, 1, 0.1, 0.0), sink)
    assert found.note == "not measured: pip install no_such_package"
    assert found.holds == ()


def test_a_rank_that_fails_says_why(sink: Sink) -> None:
    task = {"phase": "save", "rank": 0, "nonsense": 1}
    with (
        RankProcess(task, trials.environment(sink.endpoint, "a-test")) as rank,
        pytest.raises(Failed, match=r"save, rank 0: TypeError: .*nonsense"),
    ):
        rank.line(until_s=time.monotonic() + 60.0)


def test_a_small_run_from_start_to_end(tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    path = tmp_path / "checkpoint.json"
    options = ["--size", "4MB", "--ranks", "2", "--repeats", "1", "--idle-saves", "1", "--busy-s", "0.01"]
    options += ["--settle-s", "0", "--no-listing", "--json", str(path)]
    checkpoint.main([*options, "--contender", "elasticctl-tier"])
    (row,) = json.loads(path.read_text())["measurements"]
    assert (row["contender"], row["note"], row["exact"]) == ("elasticctl-tier", "", True)
    assert row["state_bytes"] == pytest.approx(4e6, rel=0.03)
    assert len(row["holds"]) >= 3
    assert len(row["commits_s"]) == len(row["cpu_s_per_gb"]) == 2
    assert all(value > 0 for value in (*row["holds"], *row["commits_s"], *row["cpu_s_per_gb"]))
    assert row["step_rate"] > 0
    assert 0 < row["restore_s"] <= row["first_step_s"]
    assert row["sink_cpu_s_per_gb"] > 0
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if name.startswith("checkpoint-benchmark-")]
    assert processes.sweep(f"elasticctl-tier-4000000-2-0-{os.getpid()}") == 0


def test_a_run_that_is_interrupted_shows_what_it_has_found(tmp_path: Path) -> None:
    """As a terminal does it at Ctrl-C, and `timeout`: the signal goes to all processes of the group."""
    path, said = tmp_path / "checkpoint.json", tmp_path / "said"
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--size", "1MB", "--ranks", "1", "--repeats", "1000"]
    command += ["--idle-saves", "1", "--busy-s", "0.01", "--settle-s", "0", "--no-listing", "--json", str(path)]
    command += ["--contender", "elasticctl"]
    with said.open("w") as stderr:
        benchmark = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
    below: list[psutil.Process] = []
    try:
        wait_until(lambda: " elasticctl  #0 " in said.read_text())
        below = wait_until(lambda: saving(benchmark.pid))
        os.killpg(benchmark.pid, signal.SIGINT)
        shown, _ = benchmark.communicate(timeout=240)
        left = [process for process in below if not has_ended(process)]
    finally:
        processes.kill_trees([benchmark.pid, *(process.pid for process in below if process.is_running())])
        benchmark.wait()
    *trials_said, last = said.read_text().splitlines()
    assert last == "stopped; all processes have been ended"
    assert all(line.startswith("1 MB  x 1  elasticctl  #") for line in trials_said)
    assert benchmark.returncode == 130
    assert "CPU seconds per GB" in shown
    assert len(json.loads(path.read_text())["measurements"]) == len(trials_said) > 0
    assert left == []


def saving(benchmark: int) -> list[psutil.Process]:
    """The processes below a benchmark's, once a trial is under way: the sink, and a rank."""
    below = psutil.Process(benchmark).children(recursive=True)
    return below if len(below) == 2 else []


def test_the_sink_ends_with_a_benchmark_that_is_killed() -> None:
    script = "import time; from benchmarks.checkpoints.trials import Sink; print(Sink(1).endpoint); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-uc", script], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout
        address = urlsplit(benchmark.stdout.readline().strip())
        benchmark.kill()

    def refused() -> bool:
        with socket.socket() as client:
            return client.connect_ex((address.hostname, address.port)) == errno.ECONNREFUSED

    wait_until(refused)


def test_boto3_saves_on_rank_0_and_restores_on_all(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in trials.environment(sink.endpoint, "").items():
        monkeypatch.setenv(name, value)
    sink.ask("reset")
    place = Place(sink.endpoint, "a-trial")
    ours, theirs = Trainee(300_000, seed=1), Trainee(300_000, seed=2)
    ours.train_once()
    base.client.cache_clear()
    for rank in (1, 0):
        contender = Boto3(place, rank)
        contender.save(ours, 1)
        contender.wait()
        assert contender.committed_at_s() is not None
        assert sink.ask("stats")["requests"].get("put", 0) == (rank == 0)
    Boto3(place, 1).restore(theirs, 1)
    assert theirs.digest() == ours.digest()
    with pytest.raises(Exception, match="404"):
        contender.restore(theirs, 2)
    base.client().close()
    base.client.cache_clear()
