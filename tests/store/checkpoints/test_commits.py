"""The journal in a storage: who owns the URL, what is committed, what is deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from elasticctl_store.checkpoints import commits, entries
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits, read_entries
from elasticctl_store.checkpoints.entries import Commit, ObjectRef, Retention
from elasticctl_store.errors import ExistsError, FencedError, StorageError
from elasticctl_store.storage import Patience, Storage, all_keys
from elasticctl_store.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path)


def commit(storage: Storage, writer: CommitWriter, step: int) -> Commit:
    """A commit with one data object."""
    key = share(writer, step)
    storage.put(key, [b"data"])
    ref = ObjectRef(key, 4, entries.checksum([b"data"]))
    return writer.append(Commit(0, writer.generation.generation, 0, step, 0, (ref,), 4))


def share(writer: CommitWriter, step: int) -> str:
    """The key of what a run writes for a step; its saves are numbered as its steps."""
    mine = writer.generation
    return entries.share_key(entries.save_folder(mine.generation, step, step, mine.run_id), 0, 1)


def steps(storage: Storage) -> list[int]:
    return [entry.step for entry in read_commits(storage)]


def test_generations_and_commits_are_numbered_and_found_newest_first(storage: Storage) -> None:
    first = CommitWriter.take_over(storage)
    assert [commit(storage, first, step).number for step in (10, 20)] == [1, 2]
    second = CommitWriter.take_over(storage)
    assert second.generation.generation == 2
    assert commit(storage, second, 15).number == 3
    assert steps(storage) == [15, 20, 10]
    assert [position for position, _ in read_entries(storage)] == [5, 4, 3, 2, 1]


def test_an_older_run_can_neither_commit_nor_delete(storage: Storage) -> None:
    old = CommitWriter.take_over(storage)
    for step in (1, 2, 3):
        commit(storage, old, step)
    young = CommitWriter.take_over(storage)
    before = list(all_keys(storage, ""))
    with pytest.raises(
        FencedError, match=r"a younger run, generation 2 on .*, has taken over; this one \(generation 1\)"
    ):
        commit(storage, old, 4)
    with pytest.raises(FencedError):
        old.retire(Retention(1))
    assert set(before) <= set(all_keys(storage, ""))
    assert steps(storage) == [3, 2, 1]
    commit(storage, young, 4)
    assert steps(storage) == [4, 3, 2, 1]


def test_a_zombie_stays_fenced_however_much_was_committed_and_deleted_since(storage: Storage) -> None:
    zombie = CommitWriter.take_over(storage)
    commit(storage, zombie, 1)
    young = CommitWriter.take_over(storage)
    for step in range(2, 8):
        commit(storage, young, step)
        young.retire(Retention(1))
    with pytest.raises(FencedError):
        commit(storage, zombie, 100)
    assert steps(storage) == [7]


def test_of_several_that_take_over_at_once_the_last_one_owns_the_url(storage: Storage) -> None:
    barrier, writers = threading.Barrier(6), []

    def take_over() -> None:
        barrier.wait()
        writers.append(CommitWriter.take_over(storage))

    threads = [threading.Thread(target=take_over) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writers.sort(key=lambda writer: writer.generation.generation)
    assert [writer.generation.generation for writer in writers] == [1, 2, 3, 4, 5, 6]
    for fenced in writers[:-1]:
        with pytest.raises(FencedError):
            commit(storage, fenced, 1)
    commit(storage, writers[-1], 2)
    assert steps(storage) == [2]


def test_retiring_keeps_the_last_and_the_data_of_no_other(storage: Storage) -> None:
    writer = CommitWriter.take_over(storage)
    for step in range(1, 6):
        commit(storage, writer, step)
        writer.retire(Retention(2))
        assert steps(storage) == list(range(step, max(0, step - 2), -1))
    folders = {entries.folder_of(key) for key in all_keys(storage, entries.DATA)}
    assert folders == {entry.folder for entry in read_commits(storage)}


def test_a_younger_run_retires_what_older_ones_left(storage: Storage) -> None:
    old = CommitWriter.take_over(storage)
    for step in range(1, 5):
        commit(storage, old, step)
    young = CommitWriter.take_over(storage)
    commit(storage, young, 5)
    young.retire(Retention(3))
    assert steps(storage) == [5, 4, 3]


def test_leftovers_of_killed_runs_are_swept_once_something_newer_is_committed(storage: Storage) -> None:
    storage.put("data/g000001-n000009-step000000009-dead/share-00000-of-00002.safetensors", [b"half"])
    storage.put("data/g000001-n000009-step000000009-dead/share-00001-of-00002.json.12ab.partial", [b"ha"])
    writer = CommitWriter.take_over(storage)
    assert len(list(all_keys(storage, entries.DATA))) == 2
    newest = commit(storage, writer, 1)
    writer.retire(Retention(3))
    assert [entries.folder_of(key) for key in all_keys(storage, entries.DATA)] == [newest.folder]


def test_entries_that_killed_runs_were_at_are_swept_and_no_younger_ones(storage: Storage) -> None:
    def partial(position: int) -> str:
        key = f"{entries.key_of(position)}.12ab34cd.partial"
        storage.put(key, [b'{"at":'])
        return key

    commit(storage, CommitWriter.take_over(storage), 1)
    dead = [partial(position) for position in (1, 2, 3)]
    writer = CommitWriter.take_over(storage)
    alive = partial(writer.generation.position + 2)
    commit(storage, writer, 2)
    assert set(dead) <= set(all_keys(storage, entries.JOURNAL))
    writer.retire(Retention(3))
    assert [key for key in all_keys(storage, entries.JOURNAL) if key.endswith(".partial")] == [alive]
    assert steps(storage) == [2, 1]


def test_a_failed_save_of_this_run_is_swept_when_asked(storage: Storage) -> None:
    writer = CommitWriter.take_over(storage)
    commit(storage, writer, 1)
    writer.retire(Retention(3))
    failed = share(writer, 2)
    storage.put(failed, [b"half"])
    commit(storage, writer, 3)
    writer.retire(Retention(3))
    assert failed in list(all_keys(storage, entries.DATA))
    writer.sweep_again()
    writer.retire(Retention(3))
    assert failed not in list(all_keys(storage, entries.DATA))


def test_what_no_save_has_made_is_never_deleted(storage: Storage) -> None:
    theirs = ["data/mnist/train.bin", "data/labels.csv", "data/g1-n1-step1-x/y", "data/gallery/step1/image.png"]
    for key in theirs:
        storage.put(key, [b"somebody's data set"])
    writer = CommitWriter.take_over(storage)
    for step in (1, 2, 3):
        commit(storage, writer, step)
        writer.sweep_again()
        writer.retire(Retention(1))
    assert [key for key in all_keys(storage, entries.DATA) if not key.startswith("data/g000001-")] == sorted(theirs)


def test_a_save_that_other_ranks_are_at_already_is_not_swept(storage: Storage) -> None:
    writer = CommitWriter.take_over(storage)
    commit(storage, writer, 1)
    ahead = share(writer, 2)
    storage.put(ahead, [b"rank 1 was faster"])
    writer.retire(Retention(3))
    assert ahead in list(all_keys(storage, entries.DATA))
    commit(storage, writer, 3)
    writer.sweep_again()
    writer.retire(Retention(3))
    assert ahead not in list(all_keys(storage, entries.DATA))


def test_a_run_that_is_held_up_while_it_sweeps_deletes_nothing_of_a_younger_one(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    class HeldUp(LocalStorage):
        """Who first lists the data is overtaken before the answer comes."""

        overtaken = False

        def list(self, prefix: str, *, after: str = "") -> list[str]:
            if prefix == entries.DATA and not HeldUp.overtaken:
                HeldUp.overtaken = True
                commit(storage, CommitWriter.take_over(storage), 7)
            return super().list(prefix, after=after)

    old = CommitWriter.take_over(HeldUp(tmp_path))
    commit(storage, old, 1)
    with pytest.raises(FencedError):
        old.retire(Retention(1))
    kept = {entry.folder for entry in read_commits(storage)}
    assert steps(storage)[-1] == 1
    assert {entries.folder_of(key) for key in all_keys(storage, entries.DATA)} == kept


def test_a_run_that_is_held_up_while_it_retires_deletes_no_more_than_what_it_was_at(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    class HeldUp(LocalStorage):
        """Is overtaken while it deletes its first entry."""

        overtaken = False

        def delete(self, keys: Sequence[str]) -> None:
            if not HeldUp.overtaken:
                HeldUp.overtaken = True
                CommitWriter.take_over(storage)
            super().delete(keys)

    storage.put("data/g000001-n000009-step000000009-dead/share-00000-of-00001.json", [b"left over"])
    old = CommitWriter.take_over(HeldUp(tmp_path))
    for step in range(1, 6):
        commit(storage, old, step)
    with pytest.raises(FencedError):
        old.retire(Retention(1))
    assert steps(storage) == [5, 4, 3, 2]
    assert len({entries.folder_of(key) for key in all_keys(storage, entries.DATA)}) == 5


def test_what_another_version_has_written_is_neither_passed_over_nor_deleted(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(entries, "FORMAT", entries.FORMAT + 1)
        theirs = commit(storage, CommitWriter.take_over(storage), 1)
    before = list(all_keys(storage, ""))
    with pytest.raises(StorageError, match=r"entry 2: written by another version .*FIX: continue with that version"):
        CommitWriter.take_over(storage)
    assert list(all_keys(storage, "")) == before
    assert theirs.folder in {entries.folder_of(key) for key in before}


def test_a_damaged_entry_is_passed_over_and_reported(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    writer = CommitWriter.take_over(storage)
    commit(storage, writer, 1)
    newest = commit(storage, writer, 2)
    storage.put(entries.key_of(newest.position), [storage.get(entries.key_of(newest.position))[:-3]])
    with caplog.at_level(logging.WARNING):
        assert steps(storage) == [1]
    assert "journal entry 3" in caplog.text
    younger = CommitWriter.take_over(storage)
    assert (younger.generation.position, younger.generation.generation) == (4, 2)
    commit(storage, younger, 3)
    younger.retire(Retention(3))
    assert steps(storage) == [3, 1]


def test_a_strangers_file_in_the_journal_does_no_harm(storage: Storage) -> None:
    storage.put("journal/README", [b"hello"])
    storage.put("journal/000000000000.json.12ab.partial", [b"{"])
    writer = CommitWriter.take_over(storage)
    commit(storage, writer, 1)
    writer.retire(Retention(1))
    assert steps(storage) == [1]


def test_the_newest_of_many_commits_is_on_the_first_page(storage: Storage, tmp_path: Path) -> None:
    class Counting:
        """Counts pages."""

        url, pages = storage.url, 0

        def list(self, prefix: str, *, after: str = "") -> list[str]:
            Counting.pages += 1
            return storage.list(prefix, after=after)

        def get(self, key: str) -> bytes:
            return storage.get(key)

    (tmp_path / "journal").mkdir()
    for position in range(1, 2_501):
        entry = Commit(position, 1, position, position, 0, (ObjectRef("data/x/y", 0, "crc32:00000000"),), 0)
        (tmp_path / entries.key_of(position)).write_bytes(entries.encode(entry))
    assert next(read_commits(Counting())).step == 2_500  # type: ignore[arg-type]
    assert Counting.pages == 1


def test_a_run_that_is_slow_to_take_over_wins_over_one_that_goes_on_meanwhile(storage: Storage, tmp_path: Path) -> None:
    old = CommitWriter.take_over(storage)
    commit(storage, old, 1)

    class Slow(LocalStorage):
        """The first create takes so long that the position is taken, and freed again."""

        waited = False

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
            if not Slow.waited:
                Slow.waited = True
                for step in (2, 3):
                    commit(storage, old, step)
                    old.retire(Retention(last=1))
            return super().put(key, parts, if_absent=if_absent)

    young = CommitWriter.take_over(Slow(tmp_path))
    with pytest.raises(FencedError):
        commit(storage, old, 4)
    commit(storage, young, 5)
    assert steps(storage) == [5, 3]


def test_an_entry_that_is_retired_while_it_is_looked_at_still_counts(storage: Storage, tmp_path: Path) -> None:
    old = CommitWriter.take_over(storage)
    commit(storage, old, 1)

    class Slow(LocalStorage):
        """The newest entry goes away between the listing and its reading."""

        waited = False

        def get(self, key: str) -> bytes:
            if not Slow.waited:
                Slow.waited = True
                commit(storage, old, 2)
                old.retire(Retention(last=1))
            return super().get(key)

    young = CommitWriter.take_over(Slow(tmp_path))
    with pytest.raises(FencedError):
        commit(storage, old, 3)
    commit(storage, young, 4)
    assert steps(storage) == [4, 2]


def test_a_commit_that_was_written_and_never_confirmed_is_taken_in(storage: Storage, tmp_path: Path) -> None:
    class Silent(LocalStorage):
        """Writes the entry of step 2, and fails."""

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
            crc = super().put(key, parts, if_absent=if_absent)
            if b'"step":2}' in b"".join(parts):
                raise StorageError("no answer")
            return crc

    writer = CommitWriter.take_over(Silent(tmp_path))
    commit(storage, writer, 1)
    writer.retire(Retention(last=3))
    with pytest.raises(StorageError, match="no answer"):
        commit(storage, writer, 2)
    third = commit(storage, writer, 3)
    assert (third.number, steps(storage)) == (3, [3, 2, 1])
    writer.retire(Retention(last=1))
    assert steps(storage) == [3]
    assert {entries.folder_of(key) for key in all_keys(storage, entries.DATA)} == {third.folder}


class Refusing(LocalStorage):
    """Says so many times of an entry of that kind that it is there already; with `after`, once it has written it."""

    def __init__(self, root: Path, times: int, *, kind: bytes, after: bool = False) -> None:
        super().__init__(root)
        self.left, self.kind, self.after, self.refused = times, b'"kind":"%s"' % kind, after, 0

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        if self.kind not in b"".join(parts) or self.left == self.refused:
            return super().put(key, parts, if_absent=if_absent)
        self.refused += 1
        if self.after:
            super().put(key, parts, if_absent=if_absent)
        raise ExistsError(f"{key} is already there")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "PATIENCE", Patience(tries=4, first_pause_s=0.001))


@pytest.mark.usefixtures("hasty")
def test_a_service_that_refuses_every_entry_is_not_asked_for_ever(tmp_path: Path) -> None:
    refusing = Refusing(tmp_path, 99, kind=b"generation")
    with pytest.raises(StorageError, match="next entry of its journal was refused 4 times as being there already"):
        CommitWriter.take_over(refusing)
    assert refusing.refused == 4
    writer = CommitWriter.take_over(Refusing(tmp_path, 99, kind=b"commit"))
    with pytest.raises(StorageError, match="was refused 4 times") as refused:
        commit(refusing, writer, 1)
    assert not isinstance(refused.value, FencedError)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", [b"generation", b"commit", b"moved"])
def test_an_entry_that_is_refused_for_nothing_is_no_fence(tmp_path: Path, kind: bytes) -> None:
    storage = Refusing(tmp_path, 2, kind=kind)
    writer = CommitWriter.take_over(storage)
    assert commit(storage, writer, 1).number == 1
    writer.close("s3://bucket/elsewhere")
    assert storage.refused == 2
    assert [position for position, _ in read_entries(storage)] == [3, 2, 1]


def test_a_commit_that_is_refused_although_it_was_written_is_made_once(tmp_path: Path) -> None:
    storage = Refusing(tmp_path, 1, kind=b"commit", after=True)
    writer = CommitWriter.take_over(storage)
    assert [commit(storage, writer, step).number for step in (1, 2)] == [1, 2]
    assert steps(storage) == [2, 1]


def test_an_entry_that_is_damaged_on_its_way_only_is_read_again(storage: Storage, tmp_path: Path) -> None:
    class Noisy(LocalStorage):
        """Inverts a bit of every other entry that is read."""

        reads = 0

        def get(self, key: str) -> bytes:
            Noisy.reads += 1
            data = super().get(key)
            return bytes([data[0] ^ 1]) + data[1:] if Noisy.reads % 2 else data

    writer = CommitWriter.take_over(storage)
    for step in (1, 2):
        commit(storage, writer, step)
    assert steps(Noisy(tmp_path)) == [2, 1]
