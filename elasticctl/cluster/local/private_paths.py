"""Checks that folders and sockets on this machine are private to this user before anything is written or sent.

Wherever other users may write, such as below /tmp, they can create a folder or a socket first, and answer in our place.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path

from elasticctl.api.errors import ClusterError, StorageFullError
from elasticctl_protocol import variables

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED = 0, 1, "=IIh"
"""macOS's way to ask for the other end of a socket (sys/un.h): a version, a user, the number of groups."""


def make_private(folder: Path) -> None:
    """Create `folder` with mode 0700, or check that an existing one is private to this user. Raises ClusterError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(folder)
    except OSError as e:
        raise storage_error(f"make the folder {folder}", e) from e


def check_folder(folder: Path) -> None:
    """Check that a folder is this user's, not a link, and closed to others, and close it if it is open.

    Raises ClusterError with its owner's name, and OSError where there is none.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise _not_ours(folder, "folder", f"it is a link of {owner_name(found.st_uid)} to {os.readlink(folder)}")
    if not stat.S_ISDIR(found.st_mode):
        raise _not_ours(folder, "folder", f"it is a file of {owner_name(found.st_uid)}")
    if found.st_uid != os.getuid():
        raise _not_ours(folder, "folder", f"it belongs to {owner_name(found.st_uid)}")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    if found.st_mode & 0o022:  # others could write here, and may have left something
        for entry in os.scandir(folder):
            owner = entry.stat(follow_symlinks=False).st_uid
            if owner != os.getuid():
                raise _not_ours(Path(entry.path), "file", f"it belongs to {owner_name(owner)}")


def connect_private(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket of this user's on which a process of this user's answers.

    Raises ClusterError if the folder, the socket or the process belongs to another user, and OSError if nothing
    listens. Nothing has been sent by then.
    """
    check_folder(path.parent)
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        raise _not_ours(path, "socket", f"it belongs to {owner_name(found.st_uid)}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        peer = peer_uid(connection)
        if peer not in (None, os.getuid()):
            raise _not_ours(path, "socket", f"a process of {owner_name(peer or 0)} answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def peer_uid(connection: socket.socket) -> int | None:
    """The user of the process at the other end of a Unix socket; None where the system does not report it."""
    credentials = getattr(socket, "SO_PEERCRED", None)  # Linux
    if credentials is not None:
        peer = connection.getsockopt(socket.SOL_SOCKET, credentials, struct.calcsize("3i"))
        return int(struct.unpack("3i", peer)[1])
    if os.uname().sysname == "Darwin":
        peer = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 128)
        return int(struct.unpack_from(_XUCRED, peer)[1])
    return None


def owner_name(uid: int) -> str:
    """`maria`, or `user 1234` if it has no name here."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def storage_error(doing: str, error: OSError) -> ClusterError:
    """Return the error for a failed operation on files; `doing` completes "cannot …"."""
    if error.errno in _NO_ROOM:
        return StorageFullError(f"cannot {doing}: the disk is full. FIX: free some space and try again")
    return ClusterError(f"cannot {doing}: {error.strerror or error}")


def _not_ours(path: Path, what: str, why: str) -> ClusterError:
    return ClusterError(
        f"{path} is not a {what} of yours: {why}. FIX: remove it, or set {variables.HOME} to another folder"
    )
