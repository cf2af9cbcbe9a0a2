"""Folders of one launcher: private, gone with it, and swept by the next launcher where it was killed.

A file lock tells whether the owner lives, because the kernel drops it with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "elasticctl-launch-"
LOCK = "lock"
UNLOCKED_S = 60.0
"""How long a folder may be without a lock file before it counts as left behind: its owner is just making it."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not for temporary files: memory that outlives a rank


class PrivateFolder:
    """A new folder in `parent` (mode 0700), there until `close` or the end of this process. Raises OSError."""

    def __init__(self, parent: Path) -> None:
        delete_orphaned_folders(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        unnamed = self.path / f"{LOCK}.new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)  # whoever sees the name sees the lock held

    def close(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def create_shared_memory_folder() -> PrivateFolder | None:
    """A folder in the machine's memory; None where the system has no such place for us."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    with suppress(OSError):
        return PrivateFolder(SHARED_MEMORY)
    return None


def delete_orphaned_folders(parent: Path) -> None:
    """Remove this user's folders in `parent` whose launchers are no more."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or not ours to remove
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and _is_left_behind(folder):
                shutil.rmtree(folder)


def _is_left_behind(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - folder.lstat().st_mtime > UNLOCKED_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
