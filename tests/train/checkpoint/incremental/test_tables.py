"""Only changed rows of tables are written, and every commit is complete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elasticctl_protocol import variables
from elasticctl_store.checkpoints import bitmaps, entries, verify
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.checkpoints.reader import read_contents
from elasticctl_store.checkpoints.transfer import copy_checkpoint, find_newest
from elasticctl_store.errors import DamagedError, FullError, StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from elasticctl_train.checkpoint.incremental import rows, tables
from elasticctl_train.dcp import ElasticReader
from tests.support.train import incremental_saves, programs, ranks, sharded
from tests.support.train.checkpoints import read_alone
from tests.support.train.incremental_saves import Counting, RowsWorld, base_files, flip, run_events, save
from tests.support.train.programs import table_state
from tests.support.train.states import same


@pytest.fixture(autouse=True)
def _small_tables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in incremental_saves.SMALL:
        monkeypatch.setattr(module, name, value)


def run_of(storage: Storage, saves: int, keep: int = 2) -> Checkpointer:
    checkpoints = Checkpointer(storage, keep=Retention(keep))
    for step in range(1, saves + 1):
        assert save(checkpoints, table_state(step), step)
    return checkpoints


def patches(storage: Storage) -> list[str]:
    return [key for key in base_files(storage) if entries.is_patch(key)]


def check(storage: Storage, commit: Commit) -> None:
    verify.verify(storage, commit, lambda count: None)
    assert same(read_alone(storage, commit)[0], table_state(commit.step))


def test_with_one_percent_of_changed_rows_a_twentieth_of_the_table_is_written(tmp_path: Path) -> None:
    storage = Counting(tmp_path)
    checkpoints = Checkpointer(storage, keep=Retention(1))
    torch.manual_seed(0)
    weight, average = torch.randn(3000, 32), torch.zeros(3000, 32)
    table_bytes, written = 2 * 3000 * 32 * 4, []
    for step in range(1, 41):
        rows = torch.randint(3000, (30,))
        weight[rows] += 1
        average[rows] += 0.5
        storage.put_bytes.clear()
        assert save(checkpoints, {"model": {"w": weight}, "optimizer": {"state": {0: {"exp_avg": average}}}}, step)
        written.append(sum(storage.put_bytes.values()))
        if step % 10 == 0:
            (commit,) = read_commits(storage)
            assert len(commit.bases) <= 11
            stored = sum((tmp_path / key).stat().st_size for key in base_files(storage))
            assert stored < 1.6 * table_bytes
            found = read_alone(storage, commit)[0]
            assert same(found["model"]["w"], weight)
            assert same(found["optimizer"]["state"][0]["exp_avg"], average)
    assert sum(written[2:]) / len(written[2:]) < 0.08 * table_bytes
    assert sorted(written)[20] < 0.03 * table_bytes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_reader_can_read_every_commit(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run_of(storage, 9, 20)
    found = list(read_commits(storage))
    assert [commit.step for commit in found] == list(range(9, 0, -1))
    assert patches(storage)
    for commit in found:
        check(storage, commit)
        files = [*commit.shares, *read_contents(storage, commit).files]
        assert commit.size_bytes == sum(file.size_bytes for file in files)
    state = {"model": {name: torch.zeros_like(value) for name, value in table_state(9)["model"].items()}}
    dcp.load(state, storage_reader=ElasticReader(str(tmp_path)), no_dist=True)
    assert same(state, table_state(9))


def test_a_commit_has_the_oldest_format_that_can_hold_it(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run_of(storage, 6, 20)
    formats = {}
    for commit in read_commits(storage):
        text = storage.get(entries.key_of(commit.position))
        formats[commit.step] = next(number for number in (2, 3, 4) if b'"format":%d' % number in text)
    assert formats == {1: 2, 2: 2, 3: 3, 4: 4, 5: 4, 6: 4}


def test_dense_training_has_no_tables(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = Checkpointer(storage)
    weight = torch.zeros(500, 32)
    for step in range(1, 8):
        weight += 1
        assert save(checkpoints, {"model": {"w": weight}}, step)
    assert not base_files(storage)


def test_unchanged_tables_are_not_written(tmp_path: Path) -> None:
    storage = Counting(tmp_path)
    checkpoints = run_of(storage, 5)
    storage.put_bytes.clear()
    assert save(checkpoints, table_state(5), 6)
    assert not [key for key in storage.put_bytes if key.startswith(entries.BASE)]
    assert same(read_alone(storage, next(read_commits(storage)))[0], table_state(5))


@pytest.mark.parametrize("fills", ["/rows-", f"/{entries.DATA}"])
def test_after_making_room_only_the_patch_is_written_again(tmp_path: Path, fills: str) -> None:
    class Full(Counting):
        fills = ""

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
            if self.fills and self.fills in f"/{key}":
                self.fills = ""
                raise FullError("no space left")
            return super().put(key, parts, if_absent=if_absent)

    storage = Full(tmp_path)
    checkpoints = run_of(storage, 5)
    storage.put_bytes.clear()
    storage.fills = fills
    assert save(checkpoints, table_state(6), 6)
    assert not storage.fills
    assert [entries.is_patch(key) for key in storage.put_bytes if key.startswith(entries.BASE)] == [True]
    check(storage, next(read_commits(storage)))


def test_saves_refer_only_to_committed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Counting(tmp_path)
    checkpoints = run_of(storage, 5)
    with monkeypatch.context() as during:
        during.setattr(checkpoints._snapshots, "keep_snapshot", lambda: None)
        assert save(checkpoints, table_state(6), 6)
    storage.put_bytes.clear()
    assert save(checkpoints, table_state(7), 7)
    assert not any(entries.is_patch(key) for key in storage.put_bytes)
    check(storage, next(read_commits(storage)))


def test_bitmaps_that_are_too_large_are_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = run_of(storage, 6)
    monkeypatch.setattr(bitmaps, "MOST_BITS", 200)
    newest = next(read_commits(storage))
    with pytest.raises(DamagedError, match="more bits"):
        read_contents(storage, newest)
    for step in (7, 8):
        assert save(checkpoints, table_state(step), step)
        check(storage, next(read_commits(storage)))


@pytest.mark.parametrize("is_patch", [False, True])
def test_a_missing_base_file_or_patch_is_detected_before_the_commit(tmp_path: Path, is_patch: bool) -> None:
    storage = LocalStorage(tmp_path)
    checkpoints = run_of(storage, 5)
    storage.delete([key for key in base_files(storage) if entries.is_patch(key) == is_patch][-1:])
    assert not save(checkpoints, table_state(6), 6)
    assert save(checkpoints, table_state(7), 7)
    check(storage, next(read_commits(storage)))


@pytest.mark.parametrize("which", [0, -1])
def test_damage_of_a_table_or_patch_is_detected(tmp_path: Path, which: int) -> None:
    storage = LocalStorage(tmp_path)
    run_of(storage, 7)
    newest = next(read_commits(storage))
    tables_and_patches = [key for key in base_files(storage) if f"{entries.folder_of(key)}" in newest.bases]
    flip(tmp_path / tables_and_patches[which])
    with pytest.raises(DamagedError):
        verify.verify(storage, newest, lambda count: None)
    with pytest.raises(DamagedError):
        read_alone(storage, newest)


def overlook(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """From now on, digests miss changes of this row."""
    digest = rows.digest

    def overlooking(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        found = digest(data, keys)
        found[row : row + 1] = 0  # not of a sample
        return found

    monkeypatch.setattr(rows, "digest", overlooking)


def test_a_change_missed_by_digests_is_detected_by_the_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    overlook(monkeypatch, 7)
    checkpoints = run_of(storage, 4)
    state = table_state(4)
    for step in (5, 6, 7):
        state["model"]["wide"][7] = step
        assert save(checkpoints, state, step)
        assert same(read_alone(storage, next(read_commits(storage)))[0], state)


def test_nothing_older_is_deleted_for_patches_that_do_not_match_their_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    overlook(monkeypatch, 7)
    checkpoints = Checkpointer(storage, keep=Retention(1))
    for step in range(1, 9):
        state = table_state(step)
        state["model"]["wide"][7] = step
        assert save(checkpoints, state, step)
        assert any(is_whole(storage, commit) for commit in read_commits(storage)), f"after step {step}"


def is_whole(storage: Storage, commit: Commit) -> bool:
    try:
        verify.verify(storage, commit, lambda count: None)
    except DamagedError:
        return False
    return True


def test_the_base_file_is_verified_again_whenever_verifications_have_doubled(tmp_path: Path) -> None:
    read: list[str] = []

    class Reading(LocalStorage):
        def read_into(self, key: str, start: int, into: memoryview) -> None:
            if "-table-" in key and len(into) > 1:
                read.append(key)
            super().read_into(key, start, into)

    storage = Reading(tmp_path)
    checkpoints = Checkpointer(storage, keep=Retention(1))
    weight, counts = torch.zeros(1000, 8), []
    for step in range(1, 23):
        weight[step] += 1
        assert save(checkpoints, {"model": {"w": weight}}, step)
        counts.append(len(read))
    proofs = [at - 3 for at in range(1, 22) if counts[at] > counts[at - 1]]
    assert proofs == [-1, 0, 1, 3, 7, 15]


def test_a_lost_entry_of_a_commit_with_patches_is_restored(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run_of(storage, 6)
    before = next(read_commits(storage))
    flip(tmp_path / entries.key_of(before.position), 20)
    restored = Checkpointer(storage).restore()
    assert restored is not None
    assert (restored.commit.step, restored.commit.bases) == (6, before.bases)
    assert same(restored.state, table_state(6))


def test_a_checkpoint_with_patches_can_be_moved_and_pulled(tmp_path: Path) -> None:
    source, target = LocalStorage(tmp_path / "here"), LocalStorage(tmp_path / "there")
    run_of(source, 6)
    newest = find_newest(source)
    assert newest is not None
    assert newest.size_bytes == newest.commit.size_bytes
    copy_checkpoint(source, target, newest)
    assert copy_checkpoint(source, target, newest).sent == 0
    moved = next(read_commits(target))
    check(target, moved)
    assert patches(target)
    assert set(all_keys(target, entries.BASE)) <= set(all_keys(source, entries.BASE))


def test_rows_at_the_edges_of_reads_are_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    run_of(storage, 6)
    newest = next(read_commits(storage))
    for chunk_bytes in (64, 1000, 4096):
        monkeypatch.setattr(verify, "CHUNK_BYTES", chunk_bytes)
        verify.verify(storage, newest, lambda count: None)
        verify.pull(storage, newest, "model", tmp_path / "pulled", lambda count: None)
        pulled = incremental_saves.load(tmp_path / "pulled")
        for name, tensor in table_state(6)["model"].items():
            assert same(pulled[name], tensor.contiguous().view(-1).view(torch.uint8))


def test_patched_tables_are_restored_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tmp_path / "tier"
    tier.mkdir(mode=0o700)
    monkeypatch.setenv(variables.LOCAL_TIER, str(tier))
    run_of(LocalStorage(tmp_path / "state"), 6)

    class Refusing(LocalStorage):
        def read_into(self, key: str, start: int, into: memoryview) -> None:
            raise StorageError(f"{key} is read from storage")

    restored = Checkpointer(Refusing(tmp_path / "state")).restore()
    assert restored is not None
    assert any(entries.is_patch(f"{base}share-00000-of-00001.safetensors") for base in restored.commit.bases)
    assert same(restored.state, table_state(6))


def test_after_a_restart_frozen_parts_are_not_written_and_tables_once(tmp_path: Path) -> None:
    storage = Counting(tmp_path)
    checkpoints = Checkpointer(storage)

    def state(step: int) -> dict[str, Any]:
        found = table_state(step)
        found["model"]["frozen"] = torch.ones(60, 70)
        return found

    for step in range(1, 7):
        assert save(checkpoints, state(step), step)
    checkpoints = Checkpointer(storage)
    assert checkpoints.restore() is not None
    kinds = []
    for step in range(7, 12):
        storage.put_bytes.clear()
        assert save(checkpoints, state(step), step)
        kinds.append([entries.is_patch(key) for key in storage.put_bytes if key.startswith(entries.BASE)])
        assert same(read_alone(storage, next(read_commits(storage)))[0], state(step))
    assert kinds == [[False], *[[True]] * 4]


def test_ranks_that_keep_the_state_write_tables_once(tmp_path: Path) -> None:
    storage = Counting(tmp_path)
    run_of(storage, 6)
    checkpoints = Checkpointer(storage)
    checkpoints.recall()
    for step in (8, 9):
        storage.put_bytes.clear()
        assert save(checkpoints, table_state(step), step)
        check(storage, next(read_commits(storage)))
    assert [entries.is_patch(key) for key in storage.put_bytes if key.startswith(entries.BASE)] == [True]


def test_a_table_that_is_dense_after_a_restart_is_soon_no_table(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run_of(storage, 6)
    checkpoints = Checkpointer(storage)
    assert checkpoints.restore() is not None
    for step in range(7, 14):
        state = {"model": {name: torch.full_like(value, step) for name, value in table_state(6)["model"].items()}}
        assert save(checkpoints, state, step)
        assert same(read_alone(storage, next(read_commits(storage)))[0], state)
    assert not base_files(storage)


def test_a_table_may_start_at_any_position_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`b` starts at a multiple of four bytes only while `ab`, which is not a table, is before it."""
    monkeypatch.setattr(tables, "MOST_WORDS", 24)
    storage = Counting(tmp_path)
    checkpoints = Checkpointer(storage)
    found = {"a": torch.zeros(65, 21), "ab": torch.zeros(3, 1), "b": torch.zeros(65, 92)}
    state = {"model": {name: tensor.byte() for name, tensor in found.items()}}
    for step in range(1, 6):
        state["model"]["ab"] += 1
        state["model"]["a"][step] = state["model"]["b"][step] = step
        assert save(checkpoints, state, step)
        assert same(read_alone(storage, next(read_commits(storage)))[0], state)
    assert patches(storage)


def test_tables_are_restored_at_another_world_size(tmp_path: Path) -> None:
    assert ranks.run(programs.save_tables, 2, str(tmp_path), 6) == [0, 0]
    storage = LocalStorage(tmp_path)
    assert {key[-33:] for key in patches(storage)} == {f"/share-{rank:05d}-of-00002.safetensors" for rank in (0, 1)}
    for commit in read_commits(storage):
        check(storage, commit)
    checkpoints = Checkpointer(storage)
    restored = checkpoints.restore()
    assert restored is not None
    assert same(restored.state, table_state(6))
    for step in range(7, 12):
        assert save(checkpoints, table_state(step), step)
    assert ranks.run(programs.save_tables, 2, str(tmp_path), 3, 12) == [0, 0]  # restores what one rank has saved
    for commit in read_commits(storage):
        check(storage, commit)


def test_each_rank_writes_the_rows_of_its_shard(tmp_path: Path) -> None:
    assert ranks.run(sharded.save_tables, 2, str(tmp_path), 6) == [0, 0]
    storage = LocalStorage(tmp_path)
    assert {key[-33:] for key in patches(storage)} == {f"/share-{rank:05d}-of-00002.safetensors" for rank in (0, 1)}
    for commit in read_commits(storage):
        check(storage, commit)
    assert ranks.run(sharded.save_tables, 3, str(tmp_path), 1, 7) == [0, 0, 0]


@pytest.mark.seeds(2)
def test_after_any_history_commits_are_intact_and_no_files_are_left(tmp_path: Path, seed: int) -> None:
    run_events(tmp_path, seed, events=10, kind=RowsWorld)


def test_such_histories_have_patches(tmp_path: Path) -> None:
    assert run_events(tmp_path, seed=0, events=10, kind=RowsWorld).patches
