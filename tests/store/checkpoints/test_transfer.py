"""Checkpoints copied between storages: intact, continued where a copy stopped, and the source is closed."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints import entries, transfer, verify
from elasticctl_store.checkpoints.commits import CommitWriter, moved_to, read_commits, read_entries
from elasticctl_store.checkpoints.entries import Commit, Moved, ObjectRef
from elasticctl_store.checkpoints.transfer import CheckpointObjects, CopyResult, copy_checkpoint, find_newest
from elasticctl_store.errors import DamagedError, FencedError, MovedError, StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support.clouds import QUICK, Cloud
from tests.support.gate import Fault, Seen, first
from tests.support.train.checkpoints import damage, model_state, saved
from tests.support.train.states import same
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from elasticctl_store import storage
from elasticctl_store.checkpoints import transfer
source, target = map(storage.open, sys.argv[1:])
transfer.AT_ONCE = 1
transfer.copy_checkpoint(source, target, transfer.find_newest(source))
"""


def load_of(storage: Storage) -> CheckpointObjects:
    load = find_newest(storage)
    assert load is not None
    return load


def restored_at(storage: Storage) -> tuple[int, object]:
    """Start a job there: return what it resumes from; it saves immediately."""
    checkpoints = Checkpointer(storage)
    found = checkpoints.restore()
    assert found is not None
    checkpoints.save({"model": model_state()}, Label(found.commit.step + 1))
    assert checkpoints.settle()
    return found.commit.step, found.state["model"]


def test_every_byte_arrives_between_all_kinds_of_storage(tmp_path: Path, s3: Cloud, gs: Cloud) -> None:
    begin, _ = saved(tmp_path / "a", steps=2)
    places: list[Storage] = [begin, s3.open(), gs.open(), LocalStorage(tmp_path / "b")]
    for source, target in itertools.pairwise(places):
        load = load_of(source)
        seen: list[int] = []
        carried = copy_checkpoint(source, target, load, seen.append)
        assert carried == CopyResult(len(load.objects), 0)
        assert sum(seen) == load.size_bytes
        assert [commit.step for commit in read_commits(target)] == [2]
        verify.verify(target, load.commit, lambda count: None)
    step, state = restored_at(places[-1])
    assert step == 2
    assert same(state, model_state())
    assert [entry.step for _, entry in read_entries(places[-1]) if isinstance(entry, Commit)] == [3, 2]


def test_within_one_service_the_service_copies(tmp_path: Path, cloud: Cloud) -> None:
    folder, _ = saved(tmp_path / "a")
    copy_checkpoint(folder, cloud.open(), load_of(folder))
    source, target = cloud.open(), storages.open(cloud.gate.url(f"moved/{tmp_path.name}"), QUICK)
    load, before = load_of(source), len(cloud.gate.seen)
    copy_checkpoint(source, target, load)
    asked = cloud.gate.seen[before:]
    copies = [seen for seen in asked if "x-amz-copy-source" in seen.headers or "/rewriteTo/" in seen.target]
    assert len(copies) == len(load.objects)
    sent_bytes = sum(len(seen.body) for seen in asked)
    assert sent_bytes < 4096  # the commit, and no object
    verify.verify(target, load.commit, lambda count: None)


def test_if_the_service_does_not_copy_the_bytes_are_transferred(tmp_path: Path, cloud: Cloud) -> None:
    folder, _ = saved(tmp_path / "a")
    copy_checkpoint(folder, cloud.open(), load_of(folder))
    target = storages.open(cloud.gate.url(f"refused/{tmp_path.name}"), QUICK)

    def refuse(seen: Seen) -> Fault | None:
        copies = "x-amz-copy-source" in seen.headers or "/rewriteTo/" in seen.target
        return Fault(status=403, code="AccessDenied") if copies else None

    cloud.gate.faults = refuse
    load = load_of(cloud.open())
    assert copy_checkpoint(cloud.open(), target, load) == CopyResult(len(load.objects), 0)
    verify.verify(target, load.commit, lambda count: None)


def test_a_storage_without_a_checkpoint_has_nothing_to_copy(tmp_path: Path) -> None:
    assert find_newest(LocalStorage(tmp_path)) is None
    storage, found = saved(tmp_path / "a", steps=2)
    damage(tmp_path / "a", found[0], ".json", 5)
    assert load_of(storage).commit.step == 1


def test_a_failed_copy_commits_nothing_and_the_next_try_continues(tmp_path: Path, cloud: Cloud) -> None:
    source, _ = saved(tmp_path / "a")
    load, target = load_of(source), cloud.open()
    part = "share" if cloud.gate.scheme == "s3" else "upload"
    cloud.gate.faults = first(Fault(status=403, code="AccessDenied"), part=part, skip=1, times=100)
    with pytest.raises(StorageError):
        copy_checkpoint(source, target, load)
    cloud.gate.faults = lambda seen: None
    assert list(read_commits(target)) == []
    assert len(list(all_keys(target, ""))) == 1
    assert copy_checkpoint(source, target, load) == CopyResult(len(load.objects) - 1, 1)
    assert copy_checkpoint(source, target, load) == CopyResult(0, len(load.objects))
    assert restored_at(target)[0] == 1


def test_a_killed_copy_continues_where_it_stopped(tmp_path: Path, s3: Cloud, gs: Cloud) -> None:
    folder, _ = saved(tmp_path / "a")
    copy_checkpoint(folder, s3.open(), load_of(folder))
    hanging = threading.Event()

    def second_hangs(seen: Seen) -> Fault | None:
        if seen.method == "POST" and "/upload/" in seen.target:
            if begun:
                hanging.set()
                return Fault(hang=True)
            begun.append(seen.target)
        return None

    begun: list[str] = []
    gs.gate.faults = second_hangs
    argv = [sys.executable, "-c", PROGRAM, s3.url, gs.url]
    with subprocess.Popen(argv, cwd=ROOT, env=dict(os.environ)) as process:
        wait_until(hanging.is_set)
        process.kill()
    gs.gate.faults = lambda seen: None
    target = gs.open()
    assert list(read_commits(target)) == []
    load = load_of(s3.open())
    carried = copy_checkpoint(s3.open(), target, load)
    # The requests that hung had been carried out: two complete objects existed.
    assert carried == CopyResult(len(load.objects) - 2, 2)
    step, state = restored_at(target)
    assert (step, same(state, model_state())) == (1, True)


@pytest.mark.parametrize("how", ["flipped", "shortened", "lengthened"])
def test_damaged_objects_of_an_earlier_try_are_sent_again(tmp_path: Path, how: str) -> None:
    source, _ = saved(tmp_path / "a")
    load, target = load_of(source), LocalStorage(tmp_path / "b")
    ref = load.objects[-1]
    data = bytearray(source.get(ref.key))
    data[len(data) // 2] ^= how == "flipped"
    target.put(ref.key, [bytes(data[:-1] if how == "shortened" else data) + (b"x" if how == "lengthened" else b"")])
    assert copy_checkpoint(source, target, load).found == 0
    verify.verify(target, load.commit, lambda count: None)


def test_a_damaged_checkpoint_is_not_copied(tmp_path: Path) -> None:
    source, found = saved(tmp_path / "a")
    load = load_of(source)
    damage(tmp_path / "a", found[0], ".safetensors", 7)
    with pytest.raises(DamagedError, match="checksum"):
        copy_checkpoint(source, LocalStorage(tmp_path / "b"), load)
    assert not list((tmp_path / "b").rglob("journal/*"))


def test_a_bit_flipped_in_transit_is_detected(tmp_path: Path, s3: Cloud) -> None:
    """One response of the source is damaged, and the object is read again."""
    folder, _ = saved(tmp_path / "a")
    copy_checkpoint(folder, s3.open(), load_of(folder))
    load = load_of(s3.open())
    s3.gate.faults = first(Fault(flip="answer"), method="GET", part=".safetensors")
    target = LocalStorage(tmp_path / "b")
    copy_checkpoint(s3.open(), target, load)
    verify.verify(target, load.commit, lambda count: None)


def test_a_used_target_is_refused(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "a")
    target, _ = saved(tmp_path / "b")
    with pytest.raises(StorageError, match="a job has been running there"):
        copy_checkpoint(source, target, load_of(source))


def test_a_second_copy_adds_to_the_first(tmp_path: Path) -> None:
    """The first move failed after the copy; the job continued in its old place and is moved again."""
    source, _ = saved(tmp_path / "a")
    target = LocalStorage(tmp_path / "b")
    copy_checkpoint(source, target, load_of(source))
    restored_at(source)
    copy_checkpoint(source, target, load_of(source))
    assert [commit.step for commit in read_commits(target)] == [2, 1]


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SMALL_BYTES", 1 << 20)
    source = LocalStorage(tmp_path / "a")
    data = random.Random(1).randbytes(1 << 20) * 16
    refs = []
    for rank in range(4):
        key = f"data/g1-x/share-{rank:05d}-of-00004.json"
        source.put(key, [data])
        refs.append(ObjectRef(key, len(data), entries.checksum([data])))
    commit = CommitWriter.take_over(source).append(Commit(0, 1, 0, 1, 0, tuple(refs), 4 * len(data)))
    del data
    peaks_bytes = []
    for number in range(3):  # threads of other tests may allocate memory too
        tracemalloc.start()
        try:
            copy_checkpoint(source, LocalStorage(tmp_path / f"b{number}"), CheckpointObjects(commit, commit.shares))
            peaks_bytes.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks_bytes) < (transfer.AT_ONCE + 2) << 20


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = saved(tmp_path / "a")
    load = load_of(source)
    monkeypatch.setattr(transfer, "SMALL_BYTES", 1024)
    full = Path("/dev/full")
    monkeypatch.setattr(transfer.tempfile, "TemporaryFile", lambda: full.open("r+b", buffering=0))
    with pytest.raises(StorageError, match="free some space there, or set TMPDIR"):
        copy_checkpoint(source, LocalStorage(tmp_path / "b"), load)


# The end of a journal.


def test_after_a_move_no_run_can_commit_or_take_over(tmp_path: Path) -> None:
    storage, (commit,) = saved(tmp_path / "a")
    zombie = CommitWriter.take_over(storage)
    mover = CommitWriter.take_over(storage)
    mover.close("gs://b/x")
    assert moved_to(storage) == Moved(5, 3, "gs://b/x", moved_to(storage).at)  # type: ignore[union-attr]
    for writer in (zombie, mover):
        with pytest.raises(FencedError):
            writer.append(commit)
    with pytest.raises(MovedError, match="has been moved to gs://b/x, and continues only there"):
        CommitWriter.take_over(storage)
    with pytest.raises(FencedError):
        Checkpointer(storage)
    assert [found.step for found in read_commits(storage)] == [1]  # it can still be read


def test_a_fenced_run_cannot_close_the_journal(tmp_path: Path) -> None:
    storage, _ = saved(tmp_path / "a")
    mover = CommitWriter.take_over(storage)
    resumed = CommitWriter.take_over(storage)
    with pytest.raises(FencedError):
        mover.close("gs://b/x")
    assert moved_to(storage) is None
    assert resumed.generation.position == 4
