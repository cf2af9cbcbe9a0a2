"""One rank saves during training, and restores; test_ranks.py has several ranks."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import resource
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_store.checkpoints import repair
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import (
    BASE,
    DATA,
    JOURNAL,
    Commit,
    base_key,
    encode,
    folder_of,
    key_of,
    marker_key,
    save_folder,
    share_key,
    tensors_key,
)
from elasticctl_store.checkpoints.retention import take_over
from elasticctl_store.errors import FencedError, StateError, StorageError
from elasticctl_store.storage import all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint import saving
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.dist import World
from tests.support.train import ranks, sharded
from tests.support.train.checkpoints import make_share
from tests.support.train.states import same
from tests.support.waiting import wait_until


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(step))}, "scheduler": {"last": step}}


class Gated(LocalStorage):
    """A folder whose writes of data wait until `gate` is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        if key.startswith("data/"):
            assert self.gate.wait(60)
        return super().put(key, parts, if_absent=if_absent)


@pytest.mark.parametrize("enabled", [True, False])
def test_saves_do_not_change_the_garbage_collector(tmp_path: Path, enabled: bool) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    try:
        (gc.enable if enabled else gc.disable)()
        checkpoints.save({"step": 1}, Label(step=1))
        assert gc.isenabled() is enabled
        with pytest.raises(StateError):
            checkpoints.save({"step": object()}, Label(step=2))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    checkpoints.settle()


def test_a_saved_state_is_restored(tmp_path: Path) -> None:
    first = Checkpointer(LocalStorage(tmp_path))
    assert first.restore() is None
    first.save(state_of(5), Label(5, 1, {"loss": 0.5}), local={"rank": 0})
    assert first.settle()
    restored = Checkpointer(LocalStorage(tmp_path)).restore()
    assert restored is not None
    assert same(restored.state, state_of(5))
    assert same(restored.local, {"rank": 0})
    assert (restored.commit.step, restored.commit.epoch, restored.commit.metrics) == (5, 1, {"loss": 0.5})


def test_training_may_change_the_state_as_soon_as_save_returns(tmp_path: Path) -> None:
    storage = Gated(tmp_path)
    checkpoints = Checkpointer(storage)
    state = state_of(1)
    checkpoints.save(state, Label(1))
    assert checkpoints.busy
    state["model"]["w"].zero_()
    assert list(read_commits(storage)) == []
    storage.gate.set()
    checkpoints.settle()
    restored = checkpoints.restore()
    assert restored is not None
    assert same(restored.state, state_of(1))


def test_a_save_that_is_due_while_one_is_in_flight_is_skipped_and_counted(tmp_path: Path) -> None:
    storage = Gated(tmp_path)
    checkpoints = Checkpointer(storage)
    assert checkpoints.agree(True, 2) == (True, 2, False)
    checkpoints.save(state_of(1), Label(1))
    assert checkpoints.agree(True, 3) == (False, 3, False)
    assert checkpoints.agree(False, 4, notice=True) == (False, 4, True)
    assert checkpoints.skipped == 1
    storage.gate.set()
    checkpoints.settle()
    assert checkpoints.agree(True, 5) == (True, 5, False)


@dataclass(frozen=True, slots=True)
class RankOne(World):
    """The second of two ranks; the first one only says that a save is due."""

    def broadcast(self, message: Any) -> Any:
        return [1, "run"]

    def highest(self, *values: int) -> list[int]:
        return [1, *values[1:]]


def test_one_rank_logs_a_skipped_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = Gated(tmp_path)
    checkpoints = Checkpointer(storage, RankOne(1, 2))
    checkpoints.save(state_of(1), Label(1))
    with caplog.at_level("INFO", logger="elasticctl_train"):
        assert checkpoints.agree(True, 3)[0] is False
    assert checkpoints.skipped == 1
    assert caplog.messages == []
    storage.gate.set()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_save_without_room_fails_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage)
    checkpoints.save(state_of(1), Label(1))
    assert checkpoints.settle()
    checkpoints.save({"model": torch.zeros(1 << 20)}, Label(2))
    assert not checkpoints.settle()
    assert "the checkpoint of step 2 was not saved: cannot write" in caplog.text
    assert "ulimit -f" in str(checkpoints.failure())
    restored = checkpoints.restore()
    assert restored is not None
    assert same(restored.state, state_of(1))
    assert {folder_of(key) for key in all_keys(storage, DATA)} == {restored.commit.folder}
    checkpoints.save(state_of(3), Label(3))
    assert checkpoints.settle()


def test_the_older_of_two_runs_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, young = Checkpointer(LocalStorage(tmp_path)), Checkpointer(LocalStorage(tmp_path))
    old.save(state_of(1), Label(1))
    with pytest.raises(FencedError, match="a newer run, generation 2"):
        old.settle()
    with pytest.raises(FencedError):
        old.agree(False, 2)
    young.save(state_of(2), Label(2))
    assert young.settle()
    assert young.restore() is not None


def test_a_run_that_saves_nothing_notices_a_newer_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FENCE_EVERY_S", 0.01)
    old = Checkpointer(LocalStorage(tmp_path))
    old.save(state_of(1), Label(1))
    assert old.settle()
    for step in range(2, 30):  # its own commits are not those of a newer run
        old.save(state_of(step), Label(step))
        assert old.agree(False, step)[1] == step
    Checkpointer(LocalStorage(tmp_path))
    wait_until(lambda: old._fenced is not None)
    with pytest.raises(FencedError, match="a newer run, generation 2"):
        old.agree(False, 30)


def test_the_fence_thread_ends_with_its_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FENCE_EVERY_S", 0.01)
    before = set(threading.enumerate())
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    (looking,) = (one for one in set(threading.enumerate()) - before if one.name == "elasticctl-fence")
    del checkpoints
    gc.collect()
    wait_until(lambda: not looking.is_alive())


def test_an_unsupported_state_is_refused_immediately(tmp_path: Path) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    with pytest.raises(StateError, match="ema/hook"):
        checkpoints.save({"ema": {"hook": print}}, Label(1))
    assert not checkpoints.busy
    assert list(all_keys(LocalStorage(tmp_path), "data/")) == []


def test_a_commit_is_reported_with_its_number_and_size(tmp_path: Path) -> None:
    reported: list[tuple[Commit, float]] = []
    checkpoints = Checkpointer(
        LocalStorage(tmp_path), on_commit=lambda commit, took_s: reported.append((commit, took_s))
    )
    for step in (1, 2):
        checkpoints.save(state_of(step), Label(step))
        checkpoints.settle()
    assert [(commit.number, commit.step) for commit, _ in reported] == [(1, 1), (2, 2)]
    assert all(commit.size_bytes > 200 and took_s > 0 for commit, took_s in reported)


class Unsteady(LocalStorage):
    """A folder with bad reads: each object is damaged so many times or, with `gone`, no tensor file is readable."""

    def __init__(self, root: Path, times: int = 1, *, gone: bool = False) -> None:
        super().__init__(root)
        self._times, self._gone = times, gone
        self.reads = Counter[str]()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.reads[key] += 1
        return data if self.reads[key] > self._times else b"<html>Welcome</html>"

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        if self._gone:
            raise StorageError("the service is out of reach")
        super().read_into(key, start, into)
        self.reads[key] += 1
        if self.reads[key] <= self._times:
            into[-1] ^= self.reads[key]


def damage_newest(storage: LocalStorage, kind: str) -> None:
    folder = next(read_commits(storage)).folder
    key = next(key for key in all_keys(storage, folder) if key.endswith(kind))
    data = storage.get(key)
    storage.put(key, [data[:-1] + bytes([data[-1] ^ 1])])


def test_a_damaged_checkpoint_is_reported_and_an_older_one_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Unsteady(tmp_path, 0)
    checkpoints = Checkpointer(storage)
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), Label(step))
        checkpoints.settle()
    damage_newest(storage, ".safetensors")
    key = tensors_key(next(read_commits(storage)).shares[0].key)
    storage.reads.clear()
    with caplog.at_level(logging.WARNING):
        restored = Checkpointer(storage).restore()
    assert restored is not None
    assert same(restored.state, state_of(2))
    assert storage.reads[key] == 3, "it is read again before it counts as damaged"
    assert "the checkpoint of step 3 is damaged" in caplog.text
    younger = Checkpointer(storage)
    younger.restore()
    younger.save(state_of(4), Label(4))
    assert younger.settle()


@pytest.mark.parametrize("entry_too", [False, True])
def test_a_run_does_not_start_at_step_0_if_no_checkpoint_is_readable(tmp_path: Path, entry_too: bool) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage)
    checkpoints.save(state_of(1), Label(1))
    checkpoints.settle()
    damage_newest(storage, ".json")
    if entry_too:
        for entry in (tmp_path / "journal").iterdir():
            entry.write_bytes(b"torn")
    before = list(all_keys(storage, DATA))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"none of them can be read: step 1: .* --start-over"):
            Checkpointer(storage).restore()
    assert list(all_keys(storage, DATA)) == before


def lose_entry(storage: LocalStorage, commit: Commit) -> None:
    storage.delete([key_of(commit.position), marker_key(commit.folder)])


def damaged(folder: Path, commit: Commit, how: str) -> None:
    """Change what is left of a commit without entry and marker, so that no interrupted save could have left it."""
    storage, (ref,) = LocalStorage(folder), commit.shares
    document, tensors = folder / ref.key, folder / tensors_key(ref.key)
    match how:
        case "a byte of the document":
            document.write_bytes(document.read_bytes().replace(b'"rank"', b'"rand"'))
        case "a byte of the tensors":
            tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
        case "no tensors":
            tensors.unlink()
        case "another name":
            document.rename(f"{document}~")
        case "another folder":
            tensors.parent.rename(tensors.parent.with_name(f"old-{tensors.parent.name}"))
        case "no document, and a marker":
            document.unlink()
            storage.put(marker_key(commit.folder), [b"{}"])
        case "no document, and a later run":
            storage.put(key_of(commit.position), [encode(commit)])
            Checkpointer(storage)
            lose_entry(storage, commit)
            document.unlink()
        case "no document, and no run":
            document.unlink()
            storage.delete(list(all_keys(storage, JOURNAL)))
        case "a base file":
            storage.delete([tensors_key(ref.key), ref.key])
            storage.put(base_key(ref.key), [b"of a frozen model"])


@pytest.mark.parametrize(
    "how",
    [
        "a byte of the document",
        "a byte of the tensors",
        "no tensors",
        "another name",
        "another folder",
        "no document, and a marker",
        "no document, and a later run",
        "no document, and no run",
        "a base file",
    ],
)
def test_a_run_does_not_start_at_step_0_if_there_are_traces_of_a_commit(tmp_path: Path, how: str) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage)
    checkpoints.save(state_of(1), Label(1))
    checkpoints.settle()
    (commit,) = read_commits(storage)
    lose_entry(storage, commit)
    damaged(tmp_path, commit, how)
    before = {key: storage.get(key) for prefix in (DATA, BASE) for key in all_keys(storage, prefix)}
    for _ in range(2):
        with pytest.raises(StorageError, match=r"none of them can be read: .* --start-over"):
            Checkpointer(storage).restore()
    assert {key: storage.get(key) for prefix in (DATA, BASE) for key in all_keys(storage, prefix)} == before
    repair.start_over(storage, take_over(storage))
    if how == "another folder":
        shutil.rmtree(tmp_path / DATA)  # no sweep deletes it, because its name is not that of a save
    assert Checkpointer(storage).restore() is None


def test_a_complete_uncommitted_save_is_preferred_to_step_0(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage)
    checkpoints.save(state_of(1), Label(1, 4))
    checkpoints.settle()
    lose_entry(storage, next(read_commits(storage)))
    restored = Checkpointer(storage).restore()
    assert restored is not None
    assert same(restored.state, state_of(1))
    assert (restored.commit.step, restored.commit.epoch) == (1, 4)


@pytest.mark.parametrize("left", ["tensors", "half a file", "a share of two", "shares that differ"])
def test_an_interrupted_first_save_does_not_prevent_a_start(
    tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage(tmp_path)
    mine = Checkpointer(storage)._committer.writer.generation  # type: ignore[union-attr]
    folder = save_folder(mine.generation, 1, 1, mine.run_id)
    alone, first, second = share_key(folder, 0, 1), share_key(folder, 0, 2), share_key(folder, 1, 2)
    if left == "tensors":
        storage.put(tensors_key(alone), [b"before their document"])
    elif left == "half a file":
        storage.put(f"{tensors_key(alone)}.12ab34cd.partial", [b"half"])
    else:
        make_share({"model": torch.ones(3)}, {}, 1, 2).write(storage, second)
    if left == "shares that differ":  # which no run commits
        make_share({"model": torch.ones(4)}, {}, 0, 2).write(storage, first)
    checkpoints = Checkpointer(storage)
    assert checkpoints.restore() is None
    assert "only such as interrupted ones leave" in caplog.text
    (tmp_path / "journal/999999999998.json").write_bytes(b"torn")
    storage.delete(list(all_keys(storage, DATA)))
    assert Checkpointer(storage).restore() is None


@pytest.mark.parametrize("times", [1, 5])
def test_damage_in_transit_is_not_damage_of_the_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    for step in (1, 2):
        checkpoints.save(state_of(step), Label(step))
        checkpoints.settle()
    restored = Checkpointer(Unsteady(tmp_path, times)).restore()
    assert restored is not None
    assert same(restored.state, state_of(2))
    assert "its checksum does not match; reading it again" in caplog.text


def test_an_unavailable_storage_is_an_error_rather_than_damage(tmp_path: Path) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    checkpoints.save(state_of(1), Label(1))
    checkpoints.settle()
    with pytest.raises(StorageError, match="out of reach"):
        Checkpointer(Unsteady(tmp_path, gone=True)).restore()


def test_forked_workers_can_read_a_restored_state(tmp_path: Path) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    checkpoints.save(state_of(7), Label(7))
    checkpoints.settle()
    restored = checkpoints.restore()
    assert restored is not None
    weight = restored.state["model"]["w"].numpy()
    worker = multiprocessing.get_context("fork").Process(target=lambda: os._exit(int(weight.sum() / 50)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork with threads
        worker.start()
    worker.join()
    assert worker.exitcode == 7


def test_a_run_that_fails_does_not_wait_for_long(tmp_path: Path) -> None:
    storage = Gated(tmp_path)
    checkpoints = Checkpointer(storage)
    checkpoints.abandon(grace_s=0.0)
    checkpoints.save(state_of(1), Label(1))
    checkpoints.abandon(grace_s=0.0)
    assert checkpoints.busy
    storage.gate.set()
    checkpoints.settle()


def test_saves_reuse_the_prepared_buffers(tmp_path: Path) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    checkpoints.prepare(state_of(0), local={"own": torch.zeros(2)})
    prepared = checkpoints._snapshots._plan, checkpoints._snapshots._buffers
    for step in range(3):
        checkpoints.save(state_of(step), Label(step), local={"own": torch.ones(2)})
    assert checkpoints.settle()
    assert (checkpoints._snapshots._plan, checkpoints._snapshots._buffers) == prepared
    checkpoints.save({**state_of(4), "new": torch.ones(3)}, Label(4))
    assert checkpoints.settle()
    assert checkpoints._snapshots._plan is not prepared[0]
    assert checkpoints._snapshots._buffers is prepared[1]  # there is some room to spare
    restored = checkpoints.restore()
    assert restored is not None
    assert same(restored.state, {**state_of(4), "new": torch.ones(3)})


def test_a_state_that_grows_gets_new_buffers(tmp_path: Path) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    for size in (10, 5_000_000, 20):
        state = {"model": torch.full((size,), float(size))}
        checkpoints.save(state, Label(size))
        assert checkpoints.settle()
        restored = checkpoints.restore()
        assert restored is not None
        assert same(restored.state, state)


def test_a_run_whose_save_is_swept_is_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))

    def sweep(file: int) -> None:
        monkeypatch.undo()
        Checkpointer(LocalStorage(tmp_path))
        shutil.rmtree(tmp_path / "data")

    monkeypatch.setattr(os, "fsync", sweep)
    checkpoints.save(state_of(1), Label(1))
    with pytest.raises(FencedError, match="a newer run"):
        checkpoints.settle()


def test_ranks_whose_shares_are_swept_are_fenced_immediately(tmp_path: Path) -> None:
    url, outcome = str(tmp_path / "state"), str(tmp_path / "outcome")
    assert ranks.run(sharded.outlive, 2, url, outcome) == [0, 0]
    assert all("a newer run" in Path(f"{outcome}-{rank}").read_text() for rank in range(2))
