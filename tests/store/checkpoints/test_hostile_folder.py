"""A folder that contains links or other objects in place of files: they are refused, and nothing else is affected."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticctl_store.checkpoints import entries, repair, verify
from elasticctl_store.checkpoints.commits import CommitWriter, delete_commit, read_commits
from elasticctl_store.checkpoints.entries import Commit, Retention
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import all_keys
from elasticctl_store.storage.local import LocalStorage
from tests.support.journals import Owner, commit, steps


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(6 << 30)


BAD: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "folder with files": lambda path: (path / "x").mkdir(parents=True),
    "sparse": sparse,
    "brackets": lambda path: path.write_bytes(b"[" * 1_000_000),
    "nested": lambda path: path.write_bytes(b"[" * 1_000_000 + b"]" * 1_000_000),
}


@pytest.fixture
def found(tmp_path: Path) -> list[Commit]:
    """Three commits, newest first."""
    run = Owner(LocalStorage(tmp_path))
    return [commit(LocalStorage(tmp_path), run, step) for step in (1, 2, 3)][::-1]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["entry", "document", "tensors"])
def test_a_bad_commit_hides_no_other(tmp_path: Path, found: list[Commit], bad: str, kind: str) -> None:
    storage, (victim, *others) = LocalStorage(tmp_path), found
    document = victim.shares[0].key
    keys = {"entry": entries.key_of(victim.position), "document": document, "tensors": entries.tensors_key(document)}
    path = tmp_path / keys[kind]
    path.unlink()
    BAD[bad](path)
    tracemalloc.start()
    findings = list(verify.findings(storage))
    checked = [verify.check(storage, finding, lambda count: None) for finding in findings]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100e6
    assert [(one.position, bool(one.damage)) for one in checked if one is not None] == [
        (victim.position, True),
        *((other.position, False) for other in others),
    ]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_entry_neither_stops_a_run_nor_costs_its_checkpoint(
    tmp_path: Path, found: list[Commit], bad: str
) -> None:
    storage = LocalStorage(tmp_path)
    Owner(storage).retire(Retention(9))
    path = tmp_path / entries.key_of(found[0].position)
    path.unlink()
    BAD[bad](path)
    writer = CommitWriter.take_over(storage)
    repair.rebuild(storage, writer)
    assert commit(storage, writer, 4).step == 4
    assert steps(storage)[0] == 4
    assert found[1:] == [one for one in read_commits(storage) if one.step < 3]


def test_nothing_is_deleted_through_a_link(tmp_path: Path, found: list[Commit]) -> None:
    storage, outside = LocalStorage(tmp_path), tmp_path / "outside"
    folder = tmp_path / found[-1].folder
    folder.rename(outside)
    folder.symlink_to(outside)
    before = sorted(outside.iterdir())
    delete_commit(storage, found[-1])
    assert sorted(outside.iterdir()) == before
    run = Owner(storage)
    commit(storage, run, 4)
    run.retire(Retention(9))
    assert sorted(outside.iterdir()) == before
    assert not folder.is_symlink()


def link_to_elsewhere(tmp_path: Path, name: str) -> Path:
    """Replace a folder of the storage by a link; return its target."""
    outside = tmp_path.with_name(f"{tmp_path.name}-{name}")
    (tmp_path / name).rename(outside)
    (tmp_path / name).symlink_to(outside)
    return outside


@pytest.mark.parametrize("names", [("data",), ("journal",), ("data", "journal")])
def test_a_link_of_the_user_is_followed(tmp_path: Path, found: list[Commit], names: tuple[str, ...]) -> None:
    storage, before = LocalStorage(tmp_path), sorted(all_keys(LocalStorage(tmp_path), ""))
    for name in names:
        link_to_elsewhere(tmp_path, name)
    assert list(all_keys(storage, "")) == before
    run = Owner(storage)
    commit(storage, run, 4)
    run.retire(Retention(1))
    assert steps(storage) == [4]
    assert len({entries.folder_of(key) for key in all_keys(storage, entries.DATA)}) == 1
    repair.start_over(storage, CommitWriter.take_over(storage))
    assert not repair.holds_saves(storage)
    assert steps(storage) == []


@pytest.mark.needs("root")  # to change the owner of a link
@pytest.mark.parametrize("name", ["data", "journal"])
def test_nothing_is_deleted_through_a_link_of_another_user(tmp_path: Path, found: list[Commit], name: str) -> None:
    """Nor is it claimed to be."""
    storage, outside = LocalStorage(tmp_path), link_to_elsewhere(tmp_path, name)
    os.chown(tmp_path / name, 65534, 65534, follow_symlinks=False)
    (outside / "g000009-n000009-step000000009-dead").mkdir()
    before = sorted(outside.rglob("*"))
    with pytest.raises(StorageError, match="of another owner"):
        delete_commit(storage, found[-1])
    assert sorted(outside.rglob("*")) == before
    assert {commit.step for commit in found} == set(steps(storage))
    verify.verify(storage, found[-1], lambda count: None)
    CommitWriter.take_over(storage)
    assert (outside / "g000009-n000009-step000000009-dead").exists()
    with pytest.raises(StorageError, match="of another owner"):
        repair.start_over(storage, CommitWriter.take_over(storage))


def test_a_link_to_itself_is_not_a_folder(tmp_path: Path, found: list[Commit]) -> None:
    (tmp_path / "rollbacks").symlink_to("rollbacks")
    (tmp_path / "more").symlink_to("data")
    (tmp_path / "data" / "again").symlink_to(tmp_path)
    keys = list(all_keys(LocalStorage(tmp_path), ""))
    assert "rollbacks" in keys
    assert "more/again" in keys


def test_empty_folders_are_deleted(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    folders = [tmp_path / "data" / name for name in ("g000001-n000004-step000000004-dead", "mnist")]
    for folder in folders:
        folder.mkdir(parents=True)
    CommitWriter.take_over(storage)
    assert [folder.exists() for folder in folders] == [False, True]


def test_an_inaccessible_checkpoint_stops_neither_the_run_nor_retention(
    tmp_path: Path, found: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, scandir, unlink = tmp_path / found[-1].folder, os.scandir, Path.unlink

    def refuse(path: str | Path) -> None:
        if closed in (Path(path), Path(path).parent):
            raise PermissionError(errno.EACCES, "Permission denied")

    def scan(path: str | Path) -> Any:
        refuse(path)
        return scandir(path)

    def remove(self: Path, *, missing_ok: bool = False) -> None:
        refuse(self)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(Path, "unlink", remove)
    repair.rebuild(LocalStorage(tmp_path), CommitWriter.take_over(LocalStorage(tmp_path)))
    run = Owner(LocalStorage(tmp_path))
    commit(LocalStorage(tmp_path), run, 4)
    with pytest.raises(StorageError, match=r"cannot delete .*: Permission denied"):
        run.retire(Retention(1))
    assert steps(LocalStorage(tmp_path)) == [4, 1]
    assert closed.is_dir()
