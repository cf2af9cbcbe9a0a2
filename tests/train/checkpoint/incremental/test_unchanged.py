"""Unchanged parts are written once, and kept while any commit needs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from elasticctl_store.checkpoints import entries, tensor_boxes, verify
from elasticctl_store.checkpoints.commits import delete_commit, read_commits
from elasticctl_store.checkpoints.entries import Retention
from elasticctl_store.errors import DamagedError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from elasticctl_train.checkpoint.incremental import unchanged
from tests.support.train import programs, ranks
from tests.support.train.checkpoints import FOLDER, gather_shares, make_share, read_alone
from tests.support.train.incremental_saves import Counting, base_files, flip, run_events, save
from tests.support.train.programs import frozen_state
from tests.support.train.states import same

BASE_KEY = "base/g000001-n000001-step000000001-ab/share-00000-of-00001.safetensors"


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "LEAST_BYTES", 0)


def test_frozen_parts_are_written_three_times_at_most(tmp_path: Path) -> None:
    storage = Counting(tmp_path)
    checkpoints = Checkpointer(storage)
    written = []
    for step in range(1, 13):
        storage.put_bytes.clear()
        assert save(checkpoints, frozen_state(step), step)
        written.append(sum(storage.put_bytes.values()))
    whole = written[0]
    assert max(written[3:]) < 0.1 * whole
    assert sum(written) < 3.9 * whole
    assert len(base_files(storage)) == 1
    for commit in read_commits(storage):
        verify.verify(storage, commit, lambda count: None)
        assert commit.size_bytes > 0.9 * whole
        assert same(read_alone(storage, commit)[0], frozen_state(commit.step))
    restored = Checkpointer(storage).restore()
    assert restored is not None
    assert same(restored.state, frozen_state(12))


def test_after_a_restart_stored_parts_are_not_written_again(tmp_path: Path) -> None:
    storage = Counting(tmp_path)
    checkpoints = Checkpointer(storage)
    assert save(checkpoints, frozen_state(1), 1)
    whole = sum(storage.put_bytes.values())
    for step in range(2, 6):
        assert save(checkpoints, frozen_state(step), step)
    (base,) = base_files(storage)
    for step in range(6, 10):
        checkpoints = Checkpointer(storage, keep=Retention(1))
        if step % 2:
            restored = checkpoints.restore()
            assert restored is not None
            assert same(restored.state, frozen_state(step - 1))
        else:
            checkpoints.recall()  # as if the state were still in memory
        storage.put_bytes.clear()
        assert save(checkpoints, frozen_state(step), step)
        assert sum(storage.put_bytes.values()) < 0.1 * whole
        assert base_files(storage) == [base]
    (commit,) = read_commits(storage)
    verify.verify(storage, commit, lambda count: None)
    assert same(read_alone(storage, commit)[0], frozen_state(9))


@pytest.mark.parametrize(
    "document",
    [
        *[None, [], {}, {"bases": []}, {"bases": [{}]}, {"bases": 7, "bases_sha256": {}}],
        *[
            {"bases": [{"file": file, "pieces": pieces}], "bases_sha256": {BASE_KEY: digest}}
            for file, pieces, digest in (
                ({"key": BASE_KEY, "size_bytes": 9, "checksum": "crc32:00000000"}, [], "ab" * 31),
                ({"key": BASE_KEY, "size_bytes": 9, "checksum": "crc32:00000000"}, [[[]] * 4], "ab" * 32),
                ({"key": BASE_KEY, "size_bytes": -9, "checksum": "crc32:00000000"}, [], "ab" * 32),
                ({"key": "data/x", "size_bytes": 9, "checksum": "crc32:00000000"}, [], "ab" * 32),
                ({"key": BASE_KEY, "size_bytes": 9, "checksum": "crc32:00000000"}, [], 7),
                ({"key": BASE_KEY, "size_bytes": 9, "checksum": "crc32:00000000"}, 7, "ab" * 32),
            )
        ],
    ],
)
def test_documents_without_base_files_are_ignored(document: object) -> None:
    known = unchanged.Unchanged()
    known.recall(document)
    assert not known.pieces
    assert not known.said


def test_a_damaged_base_file_is_written_again_and_nothing_older_deleted(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage, keep=Retention(1))
    for step in (1, 2):
        assert save(checkpoints, frozen_state(step), step)
    flipped = False

    class Flipping(LocalStorage):
        def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
            nonlocal flipped
            crc = super().put(key, parts, if_absent=if_absent)
            if key.startswith(entries.BASE) and not flipped:
                flipped = True
                flip(tmp_path / key)
            return crc

    checkpoints = Checkpointer(Flipping(tmp_path), keep=Retention(1))
    for step in range(3, 8):
        assert save(checkpoints, frozen_state(step), step)
        whole = []
        for commit in read_commits(storage):
            try:
                verify.verify(storage, commit, lambda count: None)
            except DamagedError:
                continue
            whole.append(commit.step)
        assert whole
        assert whole[0] == (4 if step == 5 else step)
    assert flipped
    assert [commit.step for commit in read_commits(storage)] == [7]
    assert len(base_files(storage)) == 1


def test_base_files_are_kept_while_an_entry_is_unreadable(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage, keep=Retention(9))
    for step in range(1, 7):
        assert save(checkpoints, frozen_state(step), step)
    (base,) = base_files(storage)
    found = list(read_commits(storage))
    for commit in found[1:]:
        delete_commit(storage, commit)
    flip(tmp_path / entries.key_of(found[0].position), 20)
    flip(tmp_path / found[0].shares[0].key, 20)  # so that the entry is not restored
    checkpoints = Checkpointer(storage, keep=Retention(1))
    for step in (7, 8):
        assert save(checkpoints, frozen_state(step), step)
    assert base_files(storage) == [base]


def test_a_copy_in_memory_is_one_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    fixed = frozenset((f"model/layer.{index}", tensor_boxes.whole((50, 40))) for index in range(10))
    share = make_share(frozen_state(1), {"own": torch.ones(3)}, 0, 1, apart=unchanged.Apart(fixed))
    assert share.plan.base is not None
    (file,) = share.write(storage, entries.share_key(FOLDER, 0, 1))
    commit = gather_shares(storage, 1)
    assert not commit.bases
    verify.verify(storage, commit, lambda count: None)
    state, own = read_alone(storage, commit)
    assert same(state, frozen_state(1))
    assert same(own, {"own": torch.ones(3)})
    assert safetensors.torch.load_file(tmp_path / file.key).keys() > {"model/adapter", "model/layer.3"}


def test_each_of_two_ranks_writes_its_changes(tmp_path: Path) -> None:
    assert ranks.run(programs.save_with_frozen_part, 2, str(tmp_path), 6) == [0, 0]
    storage = LocalStorage(tmp_path)
    assert len(base_files(storage)) == 2
    found = list(read_commits(storage))
    assert [commit.step for commit in found] == [6, 5, 4]
    for commit in found:
        verify.verify(storage, commit, lambda count: None)
        for rank in range(2):
            state, own = read_alone(storage, commit, rank)
            assert same(state, frozen_state(commit.step))
            assert own == {"rank": rank}
    written = base_files(storage)
    assert ranks.run(programs.save_with_frozen_part, 2, str(tmp_path), 2, 7) == [0, 0]
    assert base_files(storage) == written
    restored = Checkpointer(storage).restore()
    assert restored is not None
    assert same(restored.state, frozen_state(8))


@pytest.mark.seeds(2)
def test_after_any_history_commits_are_intact_and_no_files_are_left(tmp_path: Path, seed: int) -> None:
    run_events(tmp_path, seed, events=15)
