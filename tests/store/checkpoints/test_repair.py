"""Lost or damaged journal entries are restored from the labels of shares."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from elasticctl_store.checkpoints import entries, repair, verify
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.storage import all_keys
from elasticctl_store.storage.local import LocalStorage
from tests.support import journals
from tests.support.journals import Owner, share_key, steps, write_share
from tests.support.train.damage import seal_document


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def commit(storage: LocalStorage, run: Owner, step: int) -> Commit:
    """A commit that is marked as one."""
    found = journals.commit(storage, run, step)
    run.retire(Retention(99))
    return found


def damage(storage: LocalStorage, found: Commit) -> None:
    key = entries.key_of(found.position)
    storage.put(key, [storage.get(key)[:-4]])


def essence(found: Commit) -> Commit:
    """The fields of a commit that must be restored."""
    return replace(found, position=0, generation=0, number=0)


@pytest.mark.parametrize("lost", [(3,), (1, 2, 3)])
def test_lost_newest_entries_are_restored_at_the_next_start(storage: LocalStorage, lost: tuple[int, ...]) -> None:
    run = Owner(storage)
    found = {step: commit(storage, run, step) for step in (1, 2, 3)}
    storage.delete([entries.key_of(found[step].position) for step in lost])
    writer = CommitWriter.take_over(storage)
    assert [one.step for one in repair.rebuild(storage, writer).commits] == list(lost)
    again = list(read_commits(storage))
    assert [essence(one) for one in again] == [essence(found[step]) for step in (3, 2, 1)]
    assert [one.number for one in again] == [3, 2, 1]
    assert journals.commit(storage, writer, 4).number == 4
    assert all(not finding.damage for finding in verify.findings(storage))
    assert repair.rebuild(storage, CommitWriter.take_over(storage)).commits == ()


@pytest.mark.seeds(3)
def test_damaged_entries_are_skipped_and_replaced_in_place(
    storage: LocalStorage, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng, found = random.Random(seed), list[Commit]()
    for _ in range(3):
        run = Owner(storage)
        found += [commit(storage, run, len(found) + 1 + n) for n in range(rng.randrange(3))]
    damaged = rng.sample(found, rng.randrange(len(found) + 1))
    for one in damaged:
        damage(storage, one)
    assert list(read_commits(storage)) == [one for one in found[::-1] if one not in damaged]
    assert all(f"journal entry {one.position}" in caplog.text for one in damaged)
    repair.rebuild(storage, CommitWriter.take_over(storage), everything=True)
    assert list(read_commits(storage)) == found[::-1]


def test_the_entire_journal_is_restored(storage: LocalStorage) -> None:
    run = Owner(storage)
    found = [journals.commit(storage, run, step) for step in (1, 2, 3)]
    storage.delete(list(all_keys(storage, entries.JOURNAL)))
    repair.rebuild(storage, CommitWriter.take_over(storage))
    assert [essence(one) for one in read_commits(storage)] == [essence(one) for one in reversed(found)]


def test_an_uncommitted_save_is_not_restored(storage: LocalStorage) -> None:
    """The run was killed, or fenced, right before its commit."""
    run = Owner(storage)
    commit(storage, run, 1)
    write_share(storage, share_key(run, 2))
    writer = CommitWriter.take_over(storage)
    assert repair.rebuild(storage, writer, everything=True) == repair.Rebuilt((), ())
    commit(storage, Owner(storage), 3)
    assert {entries.folder_of(key) for key in all_keys(storage, entries.DATA)} == {
        one.folder for one in read_commits(storage)
    }


def test_a_start_lists_the_data_twice(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run's own entry, for its generation, and after it, for lost entries: each costs a page per 1,000."""
    commit(storage, Owner(storage), 1)
    listed, plain = list[str](), LocalStorage.list

    def list_and_note(self: LocalStorage, prefix: str, *, after: str = "") -> list[str]:
        if not after:
            listed.append(prefix)
        return plain(self, prefix, after=after)

    monkeypatch.setattr(LocalStorage, "list", list_and_note)
    repair.rebuild(storage, CommitWriter.take_over(storage))
    assert [prefix for prefix in listed if prefix != entries.JOURNAL] == [entries.DATA] * 2


def test_deleted_commits_stay_deleted(storage: LocalStorage) -> None:
    run = Owner(storage)
    for step in range(1, 5):
        commit(storage, run, step)
    interrupted = next(one for one in read_commits(storage) if one.step == 2)
    storage.delete([entries.key_of(interrupted.position)])
    assert repair.rebuild(storage, CommitWriter.take_over(storage), everything=True).commits == ()
    assert steps(storage) == [4, 3, 1]


def test_interrupted_and_damaged_saves_are_not_restored(storage: LocalStorage) -> None:
    run = Owner(storage)
    commit(storage, run, 1)
    storage.put(entries.tensors_key(share_key(run, 2)), [b"its document is missing"])
    cut, changed = share_key(run, 3), share_key(run, 4)
    for key in (cut, changed):
        write_share(storage, key)
    storage.put(cut, [storage.get(cut)[:-1]])
    storage.put(changed, [storage.get(changed).replace(b'"epoch": 0', b'"epoch": 7')])
    rebuilt = repair.rebuild(storage, CommitWriter.take_over(storage), everything=True)
    assert rebuilt.commits == ()
    assert [line.partition(":")[0] for line in rebuilt.rejected] == ["step 3", "step 4"]
    assert steps(storage) == [1]


@pytest.mark.parametrize("base", [b"", b', "bases": [{"file": {"size_bytes": -1e999}}]'])
def test_an_invalid_size_is_damage(storage: LocalStorage, base: bytes) -> None:
    """JSON has larger numbers than any float, whose sum is not finite, and a forged document may have a valid seal."""
    key = share_key(Owner(storage), 1)
    write_share(storage, key)
    forged = re.sub(rb'"size_bytes": \d+', b'"size_bytes": 1e999', storage.get(key))
    storage.put(key, [seal_document(forged.replace(b', "sha256"', base + b', "sha256"'))])
    assert len(repair.rebuild(storage, CommitWriter.take_over(storage)).rejected) == 1


def test_sweeps_keep_saves_that_an_unreadable_entry_may_stand_for(storage: LocalStorage) -> None:
    first = Owner(storage)
    found = [commit(storage, first, step) for step in (1, 2, 3)]
    damage(storage, found[1])
    commit(storage, Owner(storage), 4)
    assert found[1].folder in {entries.folder_of(key) for key in all_keys(storage, entries.DATA)}
    repair.rebuild(storage, CommitWriter.take_over(storage), everything=True)
    assert steps(storage) == [4, 3, 2, 1]


def test_sweeps_keep_links_to_saves_that_an_unreadable_entry_may_stand_for(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """For example a link to another disk: listings do not follow it."""
    found = commit(storage, Owner(storage), 1)
    folder = tmp_path / found.folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    intact = storage.get(entries.key_of(found.position))
    damage(storage, found)
    commit(storage, Owner(storage), 2)
    storage.put(entries.key_of(found.position), [intact])
    verify.verify(storage, found, lambda count: None)


def test_starting_over_deletes_all_saves_and_no_foreign_data(storage: LocalStorage) -> None:
    run = Owner(storage)
    for step in (1, 2):
        damage(storage, commit(storage, run, step))
    storage.put("data/mnist/train.bin", [b"somebody's data set"])
    repair.start_over(storage, CommitWriter.take_over(storage))
    assert list(all_keys(storage, entries.DATA)) == ["data/mnist/train.bin"]
    assert not repair.holds_saves(storage)
    writer = CommitWriter.take_over(storage)
    assert writer.generation.generation == 3
    assert repair.rebuild(storage, writer) == repair.Rebuilt((), ())


@pytest.mark.parametrize("tensors", [False, True])
def test_starting_over_deletes_folders_in_place_of_files(storage: LocalStorage, tmp_path: Path, tensors: bool) -> None:
    run = Owner(storage)
    key = commit(storage, run, 1).shares[0].key
    path = tmp_path / (entries.tensors_key(key) if tensors else key)
    path.unlink()
    (path / "a").mkdir(parents=True)
    (path / "a" / "b").write_bytes(b"")
    writer = CommitWriter.take_over(storage)
    repair.start_over(storage, writer)
    assert not repair.holds_saves(storage)
    assert repair.find_traces(storage, writer.generation.position) == []


def test_a_journal_restored_from_a_backup_continues_without_losing_checkpoints(storage: LocalStorage) -> None:
    """As from a backup: later commits are listed again, and stay older than those that follow."""
    runs = [Owner(storage) for _ in range(3)]
    commit(storage, runs[-1], 1)
    storage.delete([key for key in all_keys(storage, entries.JOURNAL) if key != entries.key_of(1)])
    for step in (2, 3):
        writer = CommitWriter.take_over(storage)
        assert len(repair.rebuild(storage, writer).commits) == (step == 2)
        assert journals.commit(storage, writer, step).generation > runs[-1].generation.generation
        assert steps(storage) == list(range(step, 0, -1))


def test_listed_commits_are_not_listed_twice(storage: LocalStorage) -> None:
    first = Owner(storage)
    found = commit(storage, first, 1)
    later = entries.save_folder(1, 0, 2, "ab12cd34")  # as from a version that started to count from 0 again
    ref, size_bytes = write_share(storage, entries.share_key(later, 0, 1))
    first.append(replace(found, step=2, shares=(ref,), size_bytes=size_bytes))
    assert repair.rebuild(storage, CommitWriter.take_over(storage)).commits == ()
    assert steps(storage) == [2, 1]


def test_a_temporarily_unreadable_entry_loses_no_data(storage: LocalStorage) -> None:
    """It was restored meanwhile, as the newest entry."""
    run = Owner(storage)
    found = commit(storage, run, 1)
    again = run.append(replace(found, step=1))
    assert again.folder == found.folder
    run.retire(Retention(1))
    assert [one.position for one in read_commits(storage)] == [again.position]
    verify.verify(storage, again, lambda count: None)
