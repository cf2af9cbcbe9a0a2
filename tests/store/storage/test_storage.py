"""The folder storage, and the choice of a storage by URL."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl_store import storage as storages
from elasticctl_store.errors import DamagedError, ExistsError, StorageError
from elasticctl_store.storage import Patience, Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from tests.support.storage_contract import StorageContract
from tests.support.storage_soak import places
from tests.support.train.ranks import CONTEXT, alone


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return storages.open((tmp_path / "not made yet" / "state").as_uri())


def test_a_url_a_path_and_a_home_name_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    urls = [f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a%20b", f"{tmp_path}/a b", "a b", "~/a b"]
    assert {storages.open(url).url for url in urls} == {f"file://{tmp_path}/a%20b"}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "is empty"),
        ("ftp://host/x", "ftp:// is not a supported storage"),
        ("file://host/x", "three slashes"),
        ("file://", "three"),
        ("s3:/bucket/x", r"is not a URL. FIX: write s3://bucket/x"),
        ("gs:bucket/x", r"is not a URL. FIX: write gs://bucket/x"),
        ("file:/x", r"is not a URL. FIX: write file:///x"),
        ("~nobody-of-this-name/x", "there is no such user"),
        ("a\0b", "null character"),
        ("file:///a%00b", "null character"),
    ],
)
def test_an_invalid_url_is_named(url: str, why: str) -> None:
    with pytest.raises(StorageError, match=why):
        storages.open(url)


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    store = storages.open(str(tmp_path / "state"))
    assert store.list("journal/") == []
    store.delete(["journal/1"])
    assert not (tmp_path / "state").exists()


CALLS = ["fsync", "link", "replace", "scandir", "unlink"]
"""Functions of the module `os` that fail while a file server is away."""


class FileServer:
    """Makes calls of `os` fail, `times` times each: before they are carried out, or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, times: int, *, after: bool = False) -> None:
        for name in CALLS:
            monkeypatch.setattr(os, name, self.failing(getattr(os, name), number, times, after))

    def failing(self, plain: Any, number: int, times: int, after: bool) -> Any:
        left = iter(range(times))

        def call(*args: Any, **kwargs: Any) -> Any:
            fails = next(left, None) is not None
            if fails and not after:
                raise OSError(number, os.strerror(number))
            found = plain(*args, **kwargs)
            if fails:
                if hasattr(found, "close"):
                    found.close()
                raise OSError(number, os.strerror(number))
            return found

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_requests_wait_for_an_unavailable_file_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    store = storages.open(str(tmp_path / "state"), Patience(first_pause_s=0.001, longest_pause_s=0.001))
    for number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN):
        FileServer(monkeypatch, number, times=3, after=after)
    store.put("journal/1", [b"mine"], if_absent=True)
    store.put("data/1", [b"x"])
    with pytest.raises(ExistsError):
        store.put("journal/1", [b"other"], if_absent=True)
    assert store.get("journal/1") == b"mine"
    whole = [
        key for key in all_keys(store, "") if not key.endswith(".partial")
    ]  # partial files are swept like all leftovers
    assert whole == ["data/1", "journal/1"]
    store.delete(["data/1"])
    assert "data/1" not in store.list("data/")


def test_a_full_disk_is_an_immediate_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileServer(monkeypatch, errno.ENOSPC, times=1)
    with pytest.raises(StorageError, match="the disk is full: free some space"):
        storages.open(str(tmp_path)).put("data/1", [b"x"])


def test_requests_wait_for_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel does this after errors of the disk. A folder that has never been written to is refused."""
    store = storages.open(str(tmp_path), Patience(first_pause_s=0.001, longest_pause_s=0.001))
    with monkeypatch.context() as patched:
        FileServer(patched, errno.EROFS, times=1)
        with pytest.raises(StorageError, match="read-only: choose another storage URL"):
            store.put("data/1", [b"x"])
    store.put("data/1", [b"x"])
    FileServer(monkeypatch, errno.EROFS, times=12)
    store.put("data/2", [b"y"])
    assert store.get("data/2") == b"y"


def test_the_wait_for_a_file_server_can_be_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileServer(monkeypatch, errno.EIO, times=10)
    with pytest.raises(StorageError, match=r"cannot write .*data/1: input/output error; tried 3 times"):
        storages.open(str(tmp_path), Patience(tries=3, longest_pause_s=0.001)).put("data/1", [b"x"])


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write .*state"):
        storages.open(str(tmp_path / "state")).put("journal/1", [b"x"], if_absent=True)


def test_emptied_folders_are_deleted_except_the_root(tmp_path: Path) -> None:
    store = storages.open(str(tmp_path))
    store.put("data/one/x", [b""])
    store.delete(["data/one/x"])
    assert tmp_path.is_dir()
    assert not (tmp_path / "data" / "one").exists()


def test_a_failed_write_leaves_nothing_and_has_a_fix(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    store.put("k", [b"old"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*/k: File too large. FIX: .*ulimit -f"):
            store.put("k", [b"x" * 5000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.get("k") == b"old"
    assert list(all_keys(store, "")) == ["k"]


def test_a_read_beyond_the_end_reports_the_size(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("k", [b"12345"])
    with pytest.raises(DamagedError, match="ends at byte 5, 10 were expected"):
        storage.read_into("k", 9, memoryview(bytearray(1)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with places.small_disk(tmp_path / "disk", 1 << 20) as place:
        yield place


def test_free_space_is_that_of_the_objects_disk(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "data").symlink_to(small_disk)
    storage = LocalStorage(tmp_path / "state")
    assert (storage.free_bytes("data/") or 0) <= 1 << 20 < (storage.free_bytes("journal/") or 0)


def test_a_full_disk_is_reported(small_disk: Path) -> None:
    store = LocalStorage(small_disk)
    store.put("k", [b"old"])
    with pytest.raises(StorageError, match="the disk is full: free some space"):
        store.put("k", [bytes(2 << 20)])
    assert store.get("k") == b"old"
    assert list(all_keys(store, "")) == ["k"]


def _write_as_nobody(root: str, result: multiprocessing.SimpleQueue[str]) -> None:
    os.setuid(65534)
    try:
        LocalStorage(Path(root)).put("k", [b"x"])
    except StorageError as e:
        result.put(str(e))


@pytest.mark.needs("root")  # to become another user
def test_a_folder_without_write_permission_is_reported() -> None:
    root = Path(tempfile.mkdtemp())  # other users cannot enter pytest's own folders
    root.chmod(0o755)
    try:
        result = CONTEXT.SimpleQueue()
        child = alone(_write_as_nobody, str(root), result)
        child.join()
        assert "no permission: check the folder's owner and mode" in result.get()
    finally:
        root.rmdir()
