"""What every storage must do; each implementation's test module subclasses this and supplies `storage`."""

from __future__ import annotations

import threading
import zlib

import pytest

from elasticctl_store.errors import DamagedError, ExistsError, MissingError, StorageError
from elasticctl_store.storage import Storage, all_keys, gcs, local, s3


class StorageContract:
    """Subclasses define a fixture `storage` that returns an empty storage."""

    def test_an_object_is_its_parts_in_order(self, storage: Storage) -> None:
        crc = storage.put("a/b", [b"one", memoryview(b"two"), b"", memoryview(b"")])
        assert crc == zlib.crc32(b"onetwo")
        assert storage.get("a/b") == b"onetwo"

    def test_an_object_may_be_empty(self, storage: Storage) -> None:
        storage.put("empty", [])
        assert storage.get("empty") == b""

    def test_a_put_replaces(self, storage: Storage) -> None:
        storage.put("k", [b"first, longer"])
        storage.put("k", [b"second"])
        assert storage.get("k") == b"second"

    def test_half_an_object_is_never_visible(self, storage: Storage) -> None:
        bodies = [bytes([letter]) * (1 << 18) for letter in b"ab"]
        storage.put("k", [bodies[0]])
        done = threading.Event()

        def replace() -> None:
            for turn in range(8):
                storage.put("k", [bodies[turn % 2]])
            done.set()

        thread = threading.Thread(target=replace)
        thread.start()
        while not done.is_set():
            assert storage.get("k") in bodies
        thread.join()

    def test_if_absent_refuses_a_taken_key_and_changes_nothing(self, storage: Storage) -> None:
        storage.put("k", [b"first"], if_absent=True)
        with pytest.raises(ExistsError):
            storage.put("k", [b"second"], if_absent=True)
        assert storage.get("k") == b"first"
        assert list(all_keys(storage, "")) == ["k"]

    def test_of_several_creators_one_wins(self, storage: Storage) -> None:
        barrier = threading.Barrier(8)
        winners: list[int] = []

        def create(number: int) -> None:
            barrier.wait()
            try:
                storage.put("journal/1", [str(number).encode()], if_absent=True)
            except ExistsError:
                return
            winners.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [storage.get("journal/1")] == [str(number).encode() for number in winners]

    def test_what_is_not_there_is_missing(self, storage: Storage) -> None:
        with pytest.raises(MissingError):
            storage.get("no/such")
        with pytest.raises(MissingError):
            storage.read_into("no/such", 0, memoryview(bytearray(1)))

    def test_a_range_is_read_in_place(self, storage: Storage) -> None:
        storage.put("k", [bytes(range(100))])
        into = bytearray(10)
        storage.read_into("k", 42, memoryview(into))
        assert bytes(into) == bytes(range(42, 52))

    def test_a_range_past_the_end_is_damage(self, storage: Storage) -> None:
        storage.put("k", [b"12345"])
        with pytest.raises(DamagedError):
            storage.read_into("k", 3, memoryview(bytearray(3)))

    def test_a_listing_is_sorted_and_by_prefix(self, storage: Storage) -> None:
        for key in ("b/2", "a/1", "b/10", "b0", "ab/1", "b/1/x"):
            storage.put(key, [b""])
        assert list(all_keys(storage, "")) == sorted(("b/2", "a/1", "b/10", "b0", "ab/1", "b/1/x"))
        assert storage.list("b/") == ["b/1/x", "b/10", "b/2"]
        assert storage.list("b/1") == ["b/1/x", "b/10"]
        assert storage.list("a") == ["a/1", "ab/1"]
        assert storage.list("b/", after="b/10") == ["b/2"]
        assert storage.list("none/") == []

    def test_a_long_listing_comes_in_pages(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (local, s3, gcs):
            monkeypatch.setattr(module, "PAGE_KEYS", 10)
        keys = [f"many/{number:05d}" for number in range(17)]
        for key in reversed(keys):
            storage.put(key, [b""])
        assert storage.list("many/") == keys[:10]
        assert storage.list("many/", after=keys[9]) == keys[10:]
        assert list(all_keys(storage, "many/")) == keys

    def test_delete_ignores_missing_keys(self, storage: Storage) -> None:
        storage.put("d/1", [b""])
        storage.put("d/2", [b""])
        storage.delete(["d/1", "d/never"])
        assert list(all_keys(storage, "")) == ["d/2"]
        storage.put("d/1", [b"again"])
        assert storage.get("d/1") == b"again"

    @pytest.mark.parametrize("key", ["", "/etc/passwd", "../out", "a/../../out", "a//b", "a/", ".", "a\0b"])
    def test_a_key_that_leads_elsewhere_is_refused(self, storage: Storage, key: str) -> None:
        with pytest.raises(StorageError, match="is not a key"):
            storage.put(key, [b""])
        with pytest.raises(StorageError, match="is not a key"):
            storage.get(key)
