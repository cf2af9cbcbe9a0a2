"""Snapshots in the node's shared memory: what is stored, trusted and deleted."""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.memory import buffers, local_tier
from elasticctl_train.checkpoint.memory.buffers import Buffer, Buffers, anonymous
from elasticctl_train.checkpoint.memory.local_tier import LocalObject, Tier
from tests.support.train.states import same
from tests.support.waiting import wait_until


class Counted(LocalStorage):
    """A folder that counts reads of tensor files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read = 0

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self.read += 1
        super().read_into(key, start, into)


class Full(LocalStorage):
    """A folder that refuses data."""

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        if key.startswith("data/"):
            raise OSError("no room")
        return super().put(key, parts, if_absent=if_absent)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tier"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("ELASTICCTL_LOCAL_TIER", str(folder))
    return folder


def opened(base: Path, rank: int = 0, generation: int = 1) -> Tier:
    found = Tier.open("file:///a", rank, generation, {"ELASTICCTL_LOCAL_TIER": str(base)})
    assert found is not None
    return found


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((5000,), float(step)), "n": torch.tensor(step)}}


def saved(root: Path, *steps: int) -> Checkpointer:
    checkpoints = Checkpointer(LocalStorage(root))
    for step in steps:
        checkpoints.save(state_of(step), Label(step), local={"own": torch.tensor(step)})
        assert checkpoints.settle()
    return checkpoints


def restored(root: Path) -> tuple[int, int]:
    """Restore; return the step, and how many tensor files were read from storage."""
    storage = Counted(root)
    found = Checkpointer(storage).restore()
    assert found is not None
    step = found.commit.step
    assert same(found.state, state_of(step))
    assert same(found.local, {"own": torch.tensor(step)})
    return step, storage.read


def files(base: Path, kind: str) -> list[Path]:
    return sorted(base.glob(f"*/*.{kind}"))


def test_restored_tensors_are_independent_of_later_saves(tmp_path: Path, base: Path) -> None:
    saved(tmp_path / "state", 1)
    young = Checkpointer(LocalStorage(tmp_path / "state"))
    found = young.restore()
    for step in (2, 3, 4):
        young.save(state_of(step), Label(step))
    young.settle()
    assert found is not None
    assert same(found.state, state_of(1))


@pytest.mark.parametrize("change", ["torn", "flipped", "gone", "unlabelled", "stale", "garbage"])
def test_only_objects_of_the_commit_are_used(tmp_path: Path, base: Path, change: str) -> None:
    saved(tmp_path / "state", 1, 2)
    data, labels = files(base, "data"), files(base, "json")
    assert len(data) == len(labels) == 2
    for file, label in zip(data, labels, strict=True):
        match change:
            case "torn":
                os.truncate(file, 10000)
            case "flipped":
                content = file.read_bytes()
                file.write_bytes(content[:9000] + bytes([content[9000] ^ 1]) + content[9001:])
            case "gone":
                file.unlink()
            case "unlabelled":
                label.unlink()
            case "stale":
                label.write_text(label.read_text().replace("crc32:", "crc32:0"))
            case "garbage":
                label.write_text('{"key": [1]}')
    assert restored(tmp_path / "state") == (2, 1)


def test_snapshots_of_different_urls_are_separate(tmp_path: Path, base: Path) -> None:
    saved(tmp_path / "one", 1)
    saved(tmp_path / "two", 1)
    assert len(list(base.iterdir())) == 2
    assert restored(tmp_path / "two") == (1, 0)
    assert restored(tmp_path / "one") == (1, 0)


def test_the_snapshot_of_a_failed_save_is_not_used(tmp_path: Path, base: Path) -> None:
    checkpoints = Checkpointer(Full(tmp_path / "state"))
    checkpoints.save(state_of(1), Label(1))
    assert not checkpoints.settle()
    assert files(base, "json") == []


def test_the_last_snapshot_stays_until_there_is_a_newer_one(tmp_path: Path, base: Path) -> None:
    saved(tmp_path / "state", 1, 2)
    young = Checkpointer(LocalStorage(tmp_path / "state"))
    young.restore()
    young.prepare(state_of(3), local={"own": torch.tensor(3)})
    assert [file.name for file in files(base, "json")] == ["g000001-r00000-1.json"]
    assert restored(tmp_path / "state") == (2, 0)  # killed before its first save
    young = saved(tmp_path / "state", 3, 4)
    assert {file.name[:7] for file in files(base, "data")} == {"g000004"}
    assert restored(tmp_path / "state") == (4, 0)


def test_a_tier_that_others_can_write_to_is_not_used(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base.chmod(0o777)
    saved(tmp_path / "state", 1)
    assert list(base.iterdir()) == []
    assert "is not private to this user" in caplog.text


def test_a_missing_tier_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Tier.open("file:///a", 0, 1, {"ELASTICCTL_LOCAL_TIER": str(tmp_path / "no")}) is None
    assert "cannot be used: No such file" in caplog.text
    assert Tier.open("file:///a", 0, 1, {}) is None


def test_without_room_buffers_are_private_memory(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_tier, "MARGIN_BYTES", 1 << 60)
    with caplog.at_level(logging.INFO, logger="elasticctl_train"):
        buffers = Buffers(5000, tier=opened(base), pin=None, one_at_first=False)
        first = buffers.next()
        buffers.turn()
        second = buffers.next()
    assert not first.in_tier
    assert not second.in_tier
    assert first.data.data_ptr() != second.data.data_ptr()
    assert "no local tier on this node" in caplog.text
    assert files(base, "data") == []


def test_buffers_alternate_and_keep_their_memory(base: Path) -> None:
    buffers = Buffers(5000, tier=opened(base), pin=None, one_at_first=True)
    first = buffers.next()
    assert buffers.next() is first
    assert [file.name for file in files(base, "data")] == ["g000001-r00000-0.data"]
    first.data.fill_(7)
    assert set(files(base, "data")[0].read_bytes()) == {7}
    assert buffers.fit(5000)
    assert buffers.fit(4000)
    assert not buffers.fit(50 << 20)
    buffers.turn()
    assert buffers.next().index == 1
    buffers.turn()
    assert buffers.next() is first


def test_without_a_tier_there_is_one_buffer() -> None:
    alone = Buffers(5000, tier=None, pin=None, one_at_first=False)
    first = alone.next()
    alone.turn()
    assert alone.next() is first
    assert first.index == 0


def test_closing_buffers_does_not_affect_their_successors(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, saved_too = threading.Event(), threading.Event()

    def touch_slowly(data: torch.Tensor) -> None:
        if data.nbytes > 8 << 20:
            begun.set()
            saved_too.wait(0.5)

    monkeypatch.setattr(buffers, "touch", touch_slowly)
    checkpoints = Checkpointer(LocalStorage(tmp_path / "state"))
    checkpoints.prepare({"model": torch.zeros(4 << 20)})
    begun.wait()
    checkpoints.save(state_of(1), Label(1), local={"own": torch.tensor(1)})
    assert checkpoints.settle()
    saved_too.set()
    wait_until(lambda: all(thread.name != "elasticctl-buffers" for thread in threading.enumerate()))
    assert all(file.stat().st_size < 8 << 20 for file in files(base, "data"))
    assert restored(tmp_path / "state") == (1, 0)


@pytest.mark.parametrize("buffer", [0, 1])
def test_a_save_without_memory_fails_and_the_next_one_tries_again(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, buffer: int
) -> None:
    def made(self: Buffers, index: int) -> Buffer:
        if index == buffer and lacking:
            anonymous(1 << 48)
        return make_one(self, index)

    make_one, lacking = Buffers.make_one, True
    monkeypatch.setattr(Buffers, "make_one", made)
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    outcomes = []
    for step in (1, 2):
        checkpoints.save(state_of(step), Label(step))
        outcomes.append(checkpoints.settle())
    assert outcomes == ([False, False] if buffer == 0 else [True, False])
    assert "the checkpoint of step 2 was not saved: no 268435456 MB of memory for a checkpoint" in caplog.text
    assert "268435456 MB" in str(checkpoints.failure())
    lacking = False
    checkpoints.save(state_of(3), Label(3))
    assert checkpoints.settle()


def test_a_restore_works_in_full_shared_memory(tmp_path: Path, base: Path) -> None:
    saved(tmp_path / "state", 1)
    for word in base.glob("*/node"):
        word.unlink()
    checkpoints = Checkpointer(LocalStorage(tmp_path / "state"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # as if /dev/shm were full
    try:
        found = checkpoints.restore()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found is not None
    assert same(found.state, state_of(1))
    assert list(base.glob("*/node*")) == []


def test_only_older_generations_are_deleted(base: Path) -> None:
    refs = [ObjectRef(f"data/save-{number}/share.safetensors", 3, "crc32:00000000") for number in range(4)]
    for generation in (1, 2, 3):
        made = opened(base, 0, generation)
        assert made.create(0, 3) is not None
        made.label(0, {refs[generation]: 0})
    assert opened(base, 0, 3).clear(but_for="data/save-2/")
    assert opened(base, 1, 3).offers().keys() == {refs[2], refs[3]}
    assert not opened(base, 0, 3).clear(but_for="data/save-1/")
    assert opened(base, 1, 3).offers() == {refs[3]: LocalObject(files(base, "data")[0])}


def test_another_process_can_map_the_memory() -> None:
    reserved = local_tier.reserve(5000)
    assert reserved is not None
    data, file = reserved
    data[:] = torch.arange(5000) % 251
    with file:
        spot = local_tier.address_of(file)
        assert spot is not None
        found = local_tier.map_address(spot)
    assert found is not None
    assert torch.equal(found, data)
    found[0] = 9
    assert data[0] == 0
    assert local_tier.map_address(spot) is None  # closed


def test_files_of_other_nodes_and_other_files_are_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    with path.open("rb") as file:
        spot = local_tier.address_of(file)
        assert spot is not None
        assert local_tier.map_address(spot) is not None
        assert local_tier.map_address(replace(spot, inode=spot.inode + 1)) is None
        assert local_tier.map_address(replace(spot, boot="another")) is None
        monkeypatch.setattr(local_tier, "BOOT_ID_FILE", tmp_path / "none")  # not Linux
        assert local_tier.map_address(spot) is None
        assert local_tier.address_of(file) is None


def test_other_kinds_of_files_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with (tmp_path / "file").open("w+b") as file:
        spot = local_tier.address_of(file)
    assert spot is not None
    assert local_tier.map_address(replace(spot, path=str(path))) is None


def test_unavailable_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_tier.reserve(0) is None
    assert local_tier.reserve(1 << 48) is None
    monkeypatch.delattr(os, "memfd_create")
    assert local_tier.reserve(5000) is None
