"""The journal in a storage: who owns the URL, what is committed, what is deleted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from elasticctl_store.checkpoints import commits, entries
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits, read_entries
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.errors import ExistsError, FencedError, StorageError
from elasticctl_store.storage import Patience, Storage, all_keys, local
from elasticctl_store.storage.local import LocalStorage
from tests.support.journals import commit, steps


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path)


def test_generations_and_commits_are_numbered_and_read_newest_first(storage: Storage) -> None:
    first = CommitWriter.take_over(storage)
    assert [commit(storage, first, step).number for step in (10, 20)] == [1, 2]
    second = CommitWriter.take_over(storage)
    assert second.generation.generation == 2
    assert commit(storage, second, 15).number == 3
    assert steps(storage) == [15, 20, 10]
    assert [position for position, _ in read_entries(storage)] == [5, 4, 3, 2, 1]


def test_of_several_simultaneous_takeovers_the_last_one_owns_the_url(storage: Storage) -> None:
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


def test_entries_of_another_version_are_neither_skipped_nor_deleted(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(entries, "FORMAT", entries.FORMAT_WITH_PATCHES + 1)
        theirs = commit(storage, CommitWriter.take_over(storage), 1)
    before = list(all_keys(storage, ""))
    with pytest.raises(StorageError, match=r"entry 2: written by another version .*FIX: continue with that version"):
        CommitWriter.take_over(storage)
    assert list(all_keys(storage, "")) == before
    assert theirs.folder in {entries.folder_of(key) for key in before}


def test_the_newest_of_many_commits_is_on_the_first_page(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting:
        """Counts pages."""

        url, pages = storage.url, 0

        def list(self, prefix: str, *, after: str = "") -> list[str]:
            Counting.pages += 1
            return storage.list(prefix, after=after)

        def get(self, key: str) -> bytes:
            return storage.get(key)

    monkeypatch.setattr(local, "PAGE_KEYS", 10)
    (tmp_path / "journal").mkdir()
    for position in range(1, 26):
        entry = Commit(position, 1, position, position, 0, (ObjectRef("data/x/y", 0, "crc32:00000000"),), 0)
        (tmp_path / entries.key_of(position)).write_bytes(entries.encode(entry))
    assert next(read_commits(Counting())).step == 25  # type: ignore[arg-type]
    assert Counting.pages == 1


class Refusing(LocalStorage):
    """Refuses so many entries of that kind as existing; with `after`, each after writing it."""

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
def test_a_service_that_refuses_every_entry_is_an_error(tmp_path: Path) -> None:
    refusing = Refusing(tmp_path, 99, kind=b"generation")
    with pytest.raises(StorageError, match="refused the next entry of the journal 4 times"):
        CommitWriter.take_over(refusing)
    assert refusing.refused == 4
    writer = CommitWriter.take_over(Refusing(tmp_path, 99, kind=b"commit"))
    with pytest.raises(StorageError, match="refused the next entry of the journal 4 times") as refused:
        commit(refusing, writer, 1)
    assert not isinstance(refused.value, FencedError)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", [b"generation", b"commit", b"moved"])
def test_a_spurious_refusal_of_an_entry_is_not_a_fence(tmp_path: Path, kind: bytes) -> None:
    storage = Refusing(tmp_path, 2, kind=kind)
    writer = CommitWriter.take_over(storage)
    assert commit(storage, writer, 1).number == 1
    writer.close("s3://bucket/elsewhere")
    assert storage.refused == 2
    assert [position for position, _ in read_entries(storage)] == [3, 2, 1]


def test_a_commit_refused_although_it_was_written_counts_once(tmp_path: Path) -> None:
    storage = Refusing(tmp_path, 1, kind=b"commit", after=True)
    writer = CommitWriter.take_over(storage)
    assert [commit(storage, writer, step).number for step in (1, 2)] == [1, 2]
    assert steps(storage) == [2, 1]


@pytest.mark.parametrize("name", ["000000000000", "000000000001", "899999999998", "README"])
def test_a_foreign_file_in_the_journal_is_ignored(tmp_path: Path, name: str) -> None:
    storage = LocalStorage(tmp_path)
    storage.put(f"journal/{name}.json", [b"whatever"])
    for step in (1, 2):
        commit(storage, CommitWriter.take_over(storage), step)
    assert steps(storage) == [2, 1]


def test_an_entry_damaged_in_transit_is_read_again(storage: Storage, tmp_path: Path) -> None:
    class Noisy(LocalStorage):
        """Inverts a bit of every entry the first time that it is read; entries are read in parallel."""

        def get(self, key: str) -> bytes:
            data = super().get(key)
            if key in read:
                return data
            read.add(key)
            return bytes([data[0] ^ 1]) + data[1:]

    read: set[str] = set()

    writer = CommitWriter.take_over(storage)
    for step in (1, 2):
        commit(storage, writer, step)
    assert steps(Noisy(tmp_path)) == [2, 1]
