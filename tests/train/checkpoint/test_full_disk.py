"""A full disk: room is made before a save, and leftovers of a killed save do not block the next run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_store.checkpoints.commits import read_commits, read_entries
from elasticctl_store.checkpoints.entries import Generation, Retention, save_folder, share_key, tensors_key
from elasticctl_store.errors import FullError, StorageError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint import saving
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support.clouds import Cloud
from tests.support.gate import Fault, Seen
from tests.support.train.states import same

STATE_BYTES = 1_000_000


class Disk(LocalStorage):
    """A folder with limited room for data, which reports the free space or, as under a quota, does not."""

    def __init__(self, root: Path, capacity_bytes: int, *, reports_room: bool = True) -> None:
        super().__init__(root)
        self.root, self.capacity_bytes, self.reports_room = root, capacity_bytes, reports_room

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.root / "data").rglob("*") if path.is_file())

    def free_bytes(self, below: str) -> int | None:
        return self.capacity_bytes - self.used_bytes() if self.reports_room else None

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        if self.used_bytes() + sum(map(len, parts)) > self.capacity_bytes:
            raise FullError(f"cannot write {key}: the disk is full")
        return super().put(key, parts, if_absent=if_absent)


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((STATE_BYTES // 4,), float(step))}}


def save(checkpoints: Checkpointer, step: int) -> bool:
    checkpoints.save(state_of(step), Label(step))
    return checkpoints.settle()


def steps(disk: LocalStorage) -> list[int]:
    return [commit.step for commit in read_commits(disk)]


def leave_half_a_save(disk: Disk, size_bytes: int) -> None:
    """The leftovers of a first run that is killed while it writes."""
    run_id = next(entry.run_id for _, entry in read_entries(disk) if isinstance(entry, Generation))
    key = tensors_key(share_key(save_folder(1, 77, 77, run_id), 0, 1))
    path = disk.root / f"{key}.12ab34cd.partial"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size_bytes))


@pytest.mark.parametrize("reports_room", [True, False])
def test_the_oldest_commit_is_deleted_to_make_room_for_a_save(
    tmp_path: Path, reports_room: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path, 3_500_000, reports_room=reports_room)
    checkpoints = Checkpointer(disk, keep=Retention(3))
    with caplog.at_level(logging.WARNING):
        assert all(save(checkpoints, step) for step in range(1, 7))
    assert steps(disk) == [6, 5, 4]
    free = ", 0.5 MB are free" if reports_room else ""
    assert f"MB{free}: deleting the oldest of 3 checkpoints (step 1), keeping 2 until there is room" in caplog.text


@pytest.mark.parametrize("reports_room", [True, False])
@pytest.mark.parametrize("committed", [0, 2])
def test_leftovers_of_a_killed_save_are_deleted_to_make_room(
    tmp_path: Path, reports_room: bool, committed: int
) -> None:
    disk = Disk(tmp_path, (committed + 1) * 1_100_000, reports_room=reports_room)
    first = Checkpointer(disk)
    assert all(save(first, step) for step in range(1, committed + 1))
    leave_half_a_save(disk, 900_000)
    second = Checkpointer(disk)
    second.restore()
    assert save(second, 9)
    assert steps(disk) == [9, 2, 1][: committed + 1]


def test_a_disk_without_room_for_an_entry_can_be_taken_over(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 2_200_000)
    assert save(Checkpointer(disk), 1)
    leave_half_a_save(disk, disk.capacity_bytes - disk.used_bytes())
    second = Checkpointer(disk)
    restored = second.restore()
    assert restored is not None
    assert same(restored.state, state_of(1))
    assert save(second, 2)


def test_a_disk_full_of_checkpoints_can_be_taken_over(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 3_500_000)
    first = Checkpointer(disk, keep=Retention(3))
    assert all(save(first, step) for step in (1, 2, 3))
    disk.capacity_bytes = disk.used_bytes()
    second = Checkpointer(disk, keep=Retention(3))
    assert steps(disk) == [3, 2]
    restored = second.restore()
    assert restored is not None
    assert same(restored.state, state_of(3))


@pytest.mark.parametrize("reports_room", [True, False])
def test_a_start_stops_deleting_if_that_makes_no_room(tmp_path: Path, reports_room: bool) -> None:
    """Others fill the disk as quickly, or a quota is updated late."""
    disk = Disk(tmp_path, 5_500_000)
    first = Checkpointer(disk, keep=Retention(5))
    assert all(save(first, step) for step in range(1, 6))

    class Shared(Disk):
        def delete(self, keys: Sequence[str]) -> None:
            super().delete(keys)
            self.capacity_bytes = self.used_bytes()

    with pytest.raises(FullError):
        Checkpointer(Shared(tmp_path, disk.used_bytes(), reports_room=reports_room), keep=Retention(5))
    assert steps(disk) == [5, 4, 3, 2]


def test_a_disk_full_of_one_checkpoint_is_reported_as_full(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 3_500_000)
    first = Checkpointer(disk, keep=Retention(3))
    assert all(save(first, step) for step in (1, 2))
    path = next(tmp_path.glob("data/*step000000002*/*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    disk.capacity_bytes = disk.used_bytes()
    with pytest.raises(FullError):
        Checkpointer(disk)
    assert steps(disk) == [2, 1]


def test_the_newest_intact_commit_is_never_deleted_to_make_room(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 1_500_000)
    checkpoints = Checkpointer(disk)
    assert save(checkpoints, 1)
    assert not save(checkpoints, 2)
    assert "the disk is full" in str(checkpoints.failure())
    assert steps(disk) == [1]
    restored = Checkpointer(disk).restore()
    assert restored is not None
    assert same(restored.state, state_of(1))


def test_with_a_damaged_newest_commit_the_previous_one_stays(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 3_500_000)
    checkpoints = Checkpointer(disk)
    for step in (1, 2, 3):
        assert save(checkpoints, step)
    for step in (2, 3):
        path = next(tmp_path.glob(f"data/*step00000000{step}*/*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert not save(checkpoints, 4)
    assert steps(disk) == [3, 2, 1]


def test_room_is_made_on_a_cloud_service_too(s3: Cloud) -> None:
    """As for a folder on a full disk: the oldest commit is deleted before the write is repeated."""
    there: dict[str, int] = {}

    def refuse(seen: Seen) -> Fault | None:
        if seen.method == "DELETE":
            there.pop(seen.target, None)
        elif seen.method == "PUT" and sum(there.values()) + len(seen.body) > 2_500_000:
            return Fault(status=507, code="InsufficientStorage")
        elif seen.method == "PUT":
            there[seen.target] = len(seen.body)
        return None

    s3.gate.faults = refuse
    checkpoints = Checkpointer(s3.open(), keep=Retention(3))
    for step in range(1, 5):
        checkpoints.save(state_of(step), Label(step))
        assert checkpoints.settle()
    assert [commit.step for commit in read_commits(s3.open())] == [4, 3]


class Quota(Disk):
    """Deleted data keeps counting until so many more writes have been refused."""

    def __init__(self, root: Path, capacity_bytes: int, late: int) -> None:
        super().__init__(root, capacity_bytes, reports_room=False)
        self.late, self.refused, self.counted_bytes = late, 0, 0

    def delete(self, keys: Sequence[str]) -> None:
        self.counted_bytes = max(self.counted_bytes, self.used_bytes())
        super().delete(keys)

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        if self.counted_bytes + sum(map(len, parts)) > self.capacity_bytes:
            self.refused += 1
            if self.refused <= self.late:
                raise FullError(f"cannot write {key}: the quota is used up")
        self.counted_bytes = 0
        return super().put(key, parts, if_absent=if_absent)


@pytest.mark.parametrize(("late", "saved", "left"), [(1, True, [6, 5, 4, 3, 2]), (99, False, [5, 4, 3])])
def test_with_a_delayed_quota_no_more_than_needed_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, saved: bool, left: list[int]
) -> None:
    """At most two commits: slightly more is reserved for a save than the previous one needed."""
    monkeypatch.setattr(saving, "ROOM_PAUSES_S", (0.0,) * 6)
    disk = Quota(tmp_path, 5_100_000, late)
    checkpoints = Checkpointer(disk, keep=Retention(9))
    assert all(save(checkpoints, step) for step in range(1, 6))
    assert save(checkpoints, 6) is saved
    assert steps(disk) == left


def test_with_a_disk_that_frees_late_no_more_than_needed_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a disk with snapshots, which may never free it."""

    class Late(Disk):
        def used_bytes(self) -> int:
            self.most_bytes = max(getattr(self, "most_bytes", 0), super().used_bytes())
            return self.most_bytes

    monkeypatch.setattr(saving, "ROOM_PAUSES_S", (0.0,) * 6)
    disk = Late(tmp_path, 5_100_000)
    checkpoints = Checkpointer(disk, keep=Retention(9))
    assert all(save(checkpoints, step) for step in range(1, 6))
    assert not save(checkpoints, 6)
    assert steps(disk) == [5, 4, 3, 2]


def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path) -> None:
    assert issubclass(FullError, StorageError)
    assert (LocalStorage(tmp_path / "not" / "yet").free_bytes("data/") or 0) > 0
