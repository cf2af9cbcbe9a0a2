"""A launcher's own folders: private, locked while it lives, swept when it was killed."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl_launcher import workspace
from elasticctl_launcher.workspace import PrivateFolder, create_folder_for_sockets, delete_orphaned_folders

OWNER = """
import sys, time
from pathlib import Path
from elasticctl_launcher.workspace import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]))
(folder.path / "snapshot").write_bytes(b"state")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder it owns."""
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "x").touch()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_launcher_that_lives_is_left_alone(
    owner: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, folder = owner
    delete_orphaned_folders(tmp_path)
    assert (folder / "snapshot").exists()
    process.kill()
    process.wait()
    PrivateFolder(tmp_path).close()  # the next launcher
    assert list(tmp_path.iterdir()) == []


def test_what_is_just_being_made_is_left_alone_for_a_while(tmp_path: Path) -> None:
    young, old = tmp_path / f"{workspace.PREFIX}young", tmp_path / f"{workspace.PREFIX}old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (1.0, 1.0))
    delete_orphaned_folders(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


def test_strangers_and_links_are_not_touched(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    os.utime(kept, (1.0, 1.0))
    link = tmp_path / f"{workspace.PREFIX}link"
    link.symlink_to(kept)
    delete_orphaned_folders(tmp_path)
    assert kept.is_dir()
    assert link.is_symlink()


def test_without_shared_memory_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workspace, "SHARED_MEMORY", tmp_path / "none")
    assert workspace.create_shared_memory_folder() is None
    monkeypatch.setattr(workspace, "SHARED_MEMORY", tmp_path)
    folder = workspace.create_shared_memory_folder()
    assert folder is not None
    assert folder.path.parent == tmp_path
    folder.close()


@pytest.mark.parametrize("length", [40, 69, 70, 200])
def test_a_temporary_folder_may_have_a_path_of_any_length(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="e") as parent:
        long = Path(parent) / ("x" * (length - len(parent) - 1))
        long.mkdir()
        assert len(str(long)) == length
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        folder = create_folder_for_sockets()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
            wire.bind(str(folder.path / "agent.sock"))
        folder.close()


def test_a_machine_without_room_for_a_socket_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 100)
    monkeypatch.setattr(workspace, "SHORT_PARENTS", ("/no-such-folder",))
    with pytest.raises(OSError, match="FIX: set TMPDIR"):
        create_folder_for_sockets()
