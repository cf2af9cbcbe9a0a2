"""The folders of one launcher: private folders, which are removed when it ends, and the job's unpacked workspace.

If a launcher is killed, the next one deletes its private folders. A file lock shows whether the owner is alive, because
the kernel releases the lock whenever the process ends.

The workspace is the folder that was submitted with the job. Some commands run the copy's code in their original working
folder: commands that name their script by a path in the submitted folder, and `python -m MODULE` if the working folder
is the submitted one. A job of the local cluster thus finds its data and leaves its results in their usual place, but
runs the code that it was submitted with. All other commands run in the copy.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticctl_launcher.ranks.warm_spares import PythonCommand
from elasticctl_protocol import variables
from elasticctl_store import storage as storages
from elasticctl_store.errors import StorageError, TrainError
from elasticctl_store.storage.base import without_secrets
from elasticctl_store.workspace.packing import Listing, is_digest
from elasticctl_store.workspace.transfer import describe_failure, unpack

PREFIX = "elasticctl-launch-"
LOCK = "lock"
UNLOCKED_S = 60.0
"""The age at which a folder without a lock file counts as abandoned; a newer one may still be under construction."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not for temporary files: memory that outlives a rank
MAX_PARENT_BYTES = 103 - len(f"/{PREFIX}12345678/agent.sock")
"""The path of a socket may have 107 bytes on Linux, 103 on macOS."""
SHORT_PARENTS = ("/tmp", "/var/tmp", str(SHARED_MEMORY))  # noqa: S108

LARGE_BYTES = 20_000_000

_CODE_LINE = re.compile(r'(?:\[rank\d+\]: ?)?(?:\s*File ")?(?P<path>/.*)(?:", line \d+|:\d+: \w*Warning\b)')
"""A line that names a place in code, in the form of Python's tracebacks, its faulthandler or its warnings."""

log = logging.getLogger(__name__)


class PrivateFolder:
    """A new folder in `parent` (mode 0700), which exists until `close` or until this process ends. Raises OSError.

    Its name is random unless `name` is given: then it is `PREFIX` + `name`. Programs in the launcher role look for
    their own folder on other workers under the same name. This is safe on Kubernetes, where each worker has its own
    temporary folder.
    """

    def __init__(self, parent: Path, name: str = "") -> None:
        delete_orphaned_folders(parent)
        self.path, self._lock = parent / f"{PREFIX}{name or secrets.token_hex(4)}", -1
        try:
            self.path.mkdir(0o700)
            unnamed = self.path / f"{LOCK}.new"
            self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / LOCK)  # the lock is held before it becomes visible
        except FileExistsError:  # the folder of another launcher
            raise
        except BaseException:  # SIGTERM may arrive at any time
            self.close()
            raise

    def close(self) -> None:
        """Remove the folder and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)


def create_shared_memory_folder() -> PrivateFolder | None:
    """Create a private folder in shared memory; return None if this user has no access to any."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    with suppress(OSError):
        return PrivateFolder(SHARED_MEMORY)
    return None


def folders_for_sockets() -> tuple[str, ...]:
    """Return the possible parents of private folders for sockets, in order of preference."""
    return (tempfile.gettempdir(), *SHORT_PARENTS)


def create_folder_for_sockets() -> PrivateFolder:
    """Create a private folder whose path is short enough for sockets, if possible in the temporary folder.

    Raises OSError if there is no place for one.
    """
    parents = folders_for_sockets()
    for parent in parents:
        if len(os.fsencode(parent)) <= MAX_PARENT_BYTES:
            with suppress(OSError):
                return PrivateFolder(Path(parent))
    raise OSError(
        f"no folder for sockets in {', '.join(parents)}. FIX: set TMPDIR to a writable folder with a short path"
    )


def delete_orphaned_folders(parent: Path) -> None:
    """Delete this user's folders in `parent` whose launchers are dead."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # deleted meanwhile, or no permission
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and _is_orphaned(folder):
                shutil.rmtree(folder)


def _is_orphaned(folder: Path) -> bool:
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


@dataclass(frozen=True, slots=True)
class UnpackedWorkspace:
    """This worker's copy of the workspace, until `close`; `source` is the path that was submitted, if known."""

    parent: PrivateFolder
    folder: Path
    source: Path | None

    def enter(self, command: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
        """Return the command to run instead of `command`.

        Changes to the copy, unless the returned command runs the copy's code by its path.
        """
        relocated = self._relocate(command) or self._relocate_module(command, environ)
        if relocated is None:
            os.chdir(self.folder)
            environ["PWD"] = str(self.folder)
        return relocated or list(command)

    def close(self) -> None:
        """Remove the copy."""
        self.parent.close()

    def with_known_paths(self, line: str) -> str:
        """Return a line of a traceback or a warning with the path in `source` instead of the path in the copy.

        Other lines do not change: a script that names a file it has written has written to the copy.
        """
        if self.source is None or str(self.folder) not in line:
            return line
        found = _CODE_LINE.match(line)
        if found is None:
            return line
        return f"{line[: found.start('path')]}{self.known_path(found['path'])}{line[found.end('path') :]}"

    def known_path(self, path: str) -> str:
        """Return the path in `source` of a file of the copy; another path as it is."""
        return path_in_source(path, str(self.folder), str(self.source or ""))

    def _relocate(self, command: Sequence[str]) -> list[str] | None:
        """The command with the copy's script in place of the script in `source`; None if it names no such script."""
        python = PythonCommand.parse(command)
        at = len(command) - len(python.argv) if python else 0
        script = Path(command[at])
        if self.source is None or not script.is_absolute() or not script.is_relative_to(self.source):
            return None
        copied = self.folder / script.relative_to(self.source)
        return [*command[:at], str(copied), *command[at + 1 :]] if copied.is_file() else None

    def _relocate_module(self, command: Sequence[str], environ: MutableMapping[str, str]) -> list[str] | None:
        """`python -m MODULE`, changed to import the copy's modules; None if it would not import from `source`.

        -P keeps the working folder off the module's path. Unlike $PYTHONSAFEPATH, it is not inherited by processes that
        the script starts. Only the interpreter that runs this code is known to support the flag.
        """
        python = PythonCommand.parse(command)
        if python is None or python.argv[0] != "-m" or self.source is None or not _is_same(self.source, Path.cwd()):
            return None
        if any(flag[:1] == "-" and flag[1:2] not in ("W", "X") and {*"PEI"} & {*flag} for flag in python.flags):
            return None  # it ignores its working folder or $PYTHONPATH
        if not hasattr(sys.flags, "safe_path") or not _is_same(python.interpreter, sys.executable):
            return None
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.folder), environ.get("PYTHONPATH"))))
        return [command[0], "-P", *command[1:]]


def path_in_source(path: str, copy: str, source: str) -> str:
    """Return the path in `source` of a file below `copy`; another path, or if one of them is empty, as it is."""
    return f"{source}{path[len(copy) :]}" if copy and source and path.startswith(f"{copy}/") else path


def _is_same(path: str | Path, other: str | Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not on this machine
        return False


def unpack_workspace(environ: Mapping[str, str], name: str = "") -> UnpackedWorkspace | None:
    """Unpack the workspace that the environment names; return None if it names none. `name` is as in PrivateFolder.

    Raises TrainError, with one line and its fix, if that fails.
    """
    reference = environ.get(variables.WORKSPACE, "")
    if not reference:
        return None
    url, _, digest = reference.rpartition("#")
    if not url or not is_digest(digest):
        raise TrainError(
            f"{variables.WORKSPACE} is {without_secrets(reference)!r:.100}: it must be URL#DIGEST, as submit sets it"
        )
    began_s = time.monotonic()
    parent = PrivateFolder(Path(tempfile.gettempdir()), name)
    try:
        folder = parent.path / "workspace"
        folder.mkdir()
        storage = storages.open(url)
        listing = unpack(storage, digest, folder, _announce_if_large)
    except StorageError as e:
        parent.close()
        raise TrainError(describe_failure(e, without_secrets(url), digest)) from e
    except OSError as e:
        parent.close()
        fix = ". FIX: make room in the temporary folder" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise TrainError(
            f"cannot unpack the workspace {digest[:12]} to {tempfile.gettempdir()}: {e.strerror or e}{fix}"
        ) from e
    except BaseException:  # SIGTERM may arrive at any time while this waits for the storage
        parent.close()
        raise
    took_s = time.monotonic() - began_s
    log.info("workspace %s: %s from %s in %.1f s", digest[:12], _describe(listing), storage.url, took_s)
    for link in listing.loops[:1]:
        more = f" (and {len(listing.loops) - 1} more)" if listing.loops[1:] else ""
        log.warning("workspace: left out a link that leads in a circle: %.80r -> %.80r%s", link.path, link.target, more)
    source = environ.get(variables.WORKSPACE_FROM, "")
    return UnpackedWorkspace(parent, folder, Path(source) if source else None)


def _announce_if_large(listing: Listing) -> None:
    if listing.size_bytes > LARGE_BYTES:
        log.info("workspace: fetching %s ...", _describe(listing))


def _describe(listing: Listing) -> str:
    size, count = listing.size_bytes, len(listing.files)
    return f"{count} file{'' if count == 1 else 's'}, " + (
        f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    )
