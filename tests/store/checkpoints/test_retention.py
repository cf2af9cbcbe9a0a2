"""What a run deletes: commits that it no longer keeps, and leftovers of killed runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import entries, verify
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.checkpoints.retention import Keeper
from elasticctl_store.errors import FencedError, StorageError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from tests.support.journals import Owner, commit, flip, share_key, steps, write_share


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path)


def test_a_fenced_run_can_neither_commit_nor_delete(storage: Storage) -> None:
    old = Owner(storage)
    for step in (1, 2, 3):
        commit(storage, old, step)
    young = Owner(storage)
    before = list(all_keys(storage, ""))
    with pytest.raises(
        FencedError, match=r"a newer run, generation 2 on .*, has taken over; this one \(generation 1\)"
    ):
        commit(storage, old, 4)
    with pytest.raises(FencedError):
        old.retire(Retention(1))
    assert set(before) <= set(all_keys(storage, ""))
    assert steps(storage) == [3, 2, 1]
    commit(storage, young, 4)
    assert steps(storage) == [4, 3, 2, 1]


def test_leftovers_of_killed_runs_are_swept_after_a_newer_commit(storage: Storage) -> None:
    storage.put("data/g000001-n000009-step000000009-dead/share-00000-of-00002.safetensors", [b"half"])
    storage.put("data/g000001-n000009-step000000009-dead/share-00001-of-00002.json.12ab.partial", [b"ha"])
    writer = Owner(storage)
    assert len(list(all_keys(storage, entries.DATA))) == 2
    newest = commit(storage, writer, 1)
    writer.retire(Retention(3))
    assert {entries.folder_of(key) for key in all_keys(storage, entries.DATA)} == {newest.folder}


def test_partial_entries_of_killed_runs_are_swept(storage: Storage) -> None:
    def partial(position: int) -> str:
        key = f"{entries.key_of(position)}.12ab34cd.partial"
        storage.put(key, [b'{"at":'])
        return key

    commit(storage, Owner(storage), 1)
    dead = [partial(position) for position in (1, 2, 3)]
    writer = Owner(storage)
    alive = partial(writer.generation.position + 2)
    commit(storage, writer, 2)
    assert set(dead) <= set(all_keys(storage, entries.JOURNAL))
    writer.retire(Retention(3))
    assert [key for key in all_keys(storage, entries.JOURNAL) if key.endswith(".partial")] == [alive]
    assert steps(storage) == [2, 1]


def test_foreign_objects_are_never_deleted(storage: Storage) -> None:
    theirs = ["data/mnist/train.bin", "data/labels.csv", "data/g1-n1-step1-x/y", "data/gallery/step1/image.png"]
    for key in theirs:
        storage.put(key, [b"somebody's data set"])
    writer = Owner(storage)
    for step in (1, 2, 3):
        commit(storage, writer, step)
        writer.sweep_again()
        writer.retire(Retention(1))
    assert [key for key in all_keys(storage, entries.DATA) if not key.startswith("data/g000001-")] == sorted(theirs)


def test_a_save_in_flight_is_not_swept(storage: Storage) -> None:
    writer = Owner(storage)
    commit(storage, writer, 1)
    ahead = share_key(writer, 2)
    storage.put(ahead, [b"rank 1 was faster"])
    writer.retire(Retention(3))
    assert ahead in list(all_keys(storage, entries.DATA))
    commit(storage, writer, 3)
    writer.sweep_again()
    writer.retire(Retention(3))
    assert ahead not in list(all_keys(storage, entries.DATA))


def test_a_delayed_sweep_deletes_nothing_of_a_newer_run(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    class HeldUp(LocalStorage):
        """The run is fenced while it lists the data for its sweep."""

        sweeps = False

        def list(self, prefix: str, *, after: str = "") -> list[str]:
            if prefix == entries.DATA and HeldUp.sweeps:
                HeldUp.sweeps = False
                commit(storage, Owner(storage), 7)
            return super().list(prefix, after=after)

    old = Owner(HeldUp(tmp_path))
    commit(storage, old, 1)
    HeldUp.sweeps = True
    with pytest.raises(FencedError):
        old.retire(Retention(1))
    kept = {entry.folder for entry in read_commits(storage)}
    assert steps(storage)[-1] == 1
    assert {entries.folder_of(key) for key in all_keys(storage, entries.DATA)} == kept


def test_a_delayed_retention_stops_once_fenced(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    class HeldUp(LocalStorage):
        """The run is fenced while it deletes its first entry."""

        overtaken = False

        def delete(self, keys: Sequence[str]) -> None:
            if not HeldUp.overtaken:
                HeldUp.overtaken = True
                Owner(storage)
            super().delete(keys)

    storage.put("data/g000001-n000009-step000000009-dead/share-00000-of-00001.json", [b"left over"])
    old = Owner(HeldUp(tmp_path))
    for step in range(1, 6):
        commit(storage, old, step)
    with pytest.raises(FencedError):
        old.retire(Retention(1))
    assert steps(storage) == [5, 4, 3, 2]
    assert len({entries.folder_of(key) for key in all_keys(storage, entries.DATA)}) == 5


def test_a_slow_takeover_wins_over_a_run_that_continues_meanwhile(storage: Storage, tmp_path: Path) -> None:
    old = Owner(storage)
    commit(storage, old, 1)

    class Slow(LocalStorage):
        """The first create takes so long that its position is used, and freed again."""

        waited = False

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
            if not Slow.waited:
                Slow.waited = True
                for step in (2, 3):
                    commit(storage, old, step)
                    old.retire(Retention(last=1))
            return super().put(key, parts, if_absent=if_absent)

    young = Owner(Slow(tmp_path))
    with pytest.raises(FencedError):
        commit(storage, old, 4)
    commit(storage, young, 5)
    assert steps(storage) == [5, 3]


def test_an_entry_deleted_while_it_is_read_still_counts(storage: Storage, tmp_path: Path) -> None:
    old = Owner(storage)
    commit(storage, old, 1)

    class Slow(LocalStorage):
        """The newest entry is deleted between the listing and its read."""

        waited = False

        def get(self, key: str) -> bytes:
            if not Slow.waited:
                Slow.waited = True
                commit(storage, old, 2)
                old.retire(Retention(last=1))
            return super().get(key)

    young = Owner(Slow(tmp_path))
    with pytest.raises(FencedError):
        commit(storage, old, 3)
    commit(storage, young, 4)
    assert steps(storage) == [4, 2]


def test_a_commit_whose_response_was_lost_is_recognized(storage: Storage, tmp_path: Path) -> None:
    class Silent(LocalStorage):
        """Writes the entry of step 2, and fails."""

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
            crc = super().put(key, parts, if_absent=if_absent)
            if b'"step":2}' in b"".join(parts):
                raise StorageError("no answer")
            return crc

    writer = Owner(Silent(tmp_path))
    commit(storage, writer, 1)
    writer.retire(Retention(last=3))
    with pytest.raises(StorageError, match="no answer"):
        commit(storage, writer, 2)
    third = commit(storage, writer, 3)
    assert (third.number, steps(storage)) == (3, [3, 2, 1])
    writer.retire(Retention(last=1))
    assert steps(storage) == [3]
    assert {entries.folder_of(key) for key in all_keys(storage, entries.DATA)} == {third.folder}


def test_nothing_is_deleted_while_no_newer_commit_is_intact(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Owner(storage)
    found = [commit(storage, run, step) for step in (1, 2, 3)]
    for damaged in found:
        flip(tmp_path, damaged)
    stray = "data/g000001-n000000-step000000000-dead/share-00000-of-00001.json"
    storage.put(stray, [b"left over"])
    run.retire(Retention(1))
    assert steps(storage) == [3, 2, 1]
    assert stray in list(all_keys(storage, entries.DATA))
    assert "the checkpoint of step 3 is damaged" in caplog.text
    assert "no checkpoint there is intact: nothing is deleted" in caplog.text
    commit(storage, run, 4)
    run.retire(Retention(1))
    assert steps(storage) == [4]
    assert stray not in list(all_keys(storage, entries.DATA))


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_damaged_commit_does_not_count_as_kept(storage: Storage, tmp_path: Path, last: int) -> None:
    run = Owner(storage)
    found = [commit(storage, run, step) for step in range(1, 7)]
    for damaged in found[-2:]:
        flip(tmp_path, damaged)
    run.retire(Retention(last))
    assert [step for step in steps(storage) if step < 5] == [4, 3, 2][:last]
    commit(storage, run, 7)
    run.retire(Retention(last))
    assert 7 in steps(storage)
    assert len([step for step in steps(storage) if step not in (5, 6)]) == last


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["save", "save", "lie", "rot"]), max_size=14),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_the_newest_intact_commit_always_stays(
    tmp_path_factory: pytest.TempPathFactory, doings: list[str], last: int, rng: random.Random
) -> None:
    """The storage damages objects when they are written ("lie"), or those that it holds ("rot")."""
    root = tmp_path_factory.mktemp("journal")
    storage = LocalStorage(root)
    run, whole = Owner(storage), dict[int, Commit]()
    for step, doing in enumerate(doings, start=1):
        if doing == "rot":
            left = [found for found in whole.values() if found.step in steps(storage)]
            if len(left) > 1:
                rotten = rng.choice(left[:-1])
                flip(root, whole.pop(rotten.step))
            continue
        found = commit(storage, run, step)
        if doing == "lie":
            flip(root, found)
        else:
            whole[step] = found
        run.retire(Retention(last))
        if whole:
            assert max(whole) in steps(storage)
            verify.verify(storage, whole[max(whole)], lambda count: None)


def test_each_kept_commit_is_verified_once(storage: Storage, tmp_path: Path) -> None:
    read: list[int] = []

    class Counting(LocalStorage):
        def read_into(self, key: str, start: int, into: memoryview) -> None:
            if not start:
                read.append(step_of(key))
            super().read_into(key, start, into)

    def step_of(key: str) -> int:
        return int(key.split("step")[1][:9])

    run = Owner(Counting(tmp_path))
    for step in range(1, 10):
        commit(storage, run, step)
        run.retire(Retention(3))
    assert read == [4, 7]


def test_an_interrupted_verification_deletes_nothing(storage: Storage) -> None:
    def give_up(count: int) -> None:
        raise StorageError("no time")

    writer = CommitWriter.take_over(storage)
    for step in (1, 2):
        commit(storage, writer, step)
    with pytest.raises(StorageError, match="no time"):
        Keeper(storage, writer, give_up).retire(Retention(1))
    assert steps(storage) == [2, 1]


class Lagging(LocalStorage):
    """Lists the journal without its newest entry, `times` times."""

    times = 0

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        found = super().list(prefix, after=after)
        if prefix == entries.JOURNAL and found and not after and self.times:
            self.times -= 1
            return found[1:]
        return found


def test_a_stale_listing_loses_neither_the_newest_checkpoint_nor_the_run(tmp_path: Path) -> None:
    storage = Lagging(tmp_path)
    commit(storage, Owner(storage), 1)
    run = Owner(storage)
    found = commit(storage, run, 2)
    storage.times = 1  # when existing commits are read for the first time
    run.retire(Retention(3))
    assert steps(storage) == [2, 1]
    verify.verify(storage, found, lambda count: None)
    storage.times = 1
    run.check_fence()


def test_a_run_ends_if_its_journal_was_deleted_and_another_run_has_started(storage: Storage) -> None:
    run = Owner(storage)
    for step in (1, 2, 3):
        commit(storage, run, step)
    storage.delete(list(all_keys(storage, entries.JOURNAL)))
    commit(storage, Owner(storage), 4)
    with pytest.raises(FencedError):
        run.check_fence()


def test_a_run_continues_if_the_storage_loses_its_newest_entry(storage: Storage) -> None:
    run = Owner(storage)
    commit(storage, run, 1)
    lost = commit(storage, run, 2)
    storage.delete([entries.key_of(lost.position)])
    run.check_fence()
    commit(storage, run, 3)
    assert steps(storage) == [3, 1]


def test_a_run_with_damaged_entries_continues_until_it_is_fenced(storage: Storage) -> None:
    CommitWriter.take_over(storage)
    run = Owner(storage)
    lost = commit(storage, run, 1)
    for position in (run.generation.position, lost.position):
        storage.put(entries.key_of(position), [b"torn"])
    run.check_fence()
    assert commit(storage, run, 2).position == lost.position + 1
    CommitWriter.take_over(storage)
    with pytest.raises(FencedError):
        run.check_fence()


def test_a_newer_run_at_the_position_of_a_lost_entry_is_noticed(storage: Storage) -> None:
    old = Owner(storage)
    lost = commit(storage, old, 1)
    storage.delete([entries.key_of(lost.position)])
    young = Owner(storage)
    with pytest.raises(FencedError):
        old.check_fence()
    commit(storage, young, 2)


def test_a_complete_save_stays_until_a_newer_one_is_verified(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    commit(storage, Owner(storage), 1)
    killed = Owner(storage)
    key = share_key(killed, 2)
    write_share(storage, key)
    run = Owner(storage)
    flip(tmp_path, commit(storage, run, 3))
    run.retire(Retention(3))
    assert key in all_keys(storage, entries.DATA)
    commit(storage, run, 4)
    run.retire(Retention(3))
    assert key not in all_keys(storage, entries.DATA)


@pytest.mark.parametrize("stored", [b"torn", None])
def test_nothing_is_deleted_for_a_commit_whose_entry_is_lost(storage: LocalStorage, stored: bytes | None) -> None:
    """The run knows it, and its data is intact, but no other run would find it."""
    run = Owner(storage)
    commit(storage, run, 1)
    key = entries.key_of(commit(storage, run, 2).position)
    storage.delete([key])
    if stored is not None:
        storage.put(key, [stored])
    run.retire(Retention(1))
    assert steps(storage) == [1]
    commit(storage, run, 3)
    run.retire(Retention(1))
    assert steps(storage) == [3]
