"""The folder that goes along with a job, unpacked for this worker before anything is started.

    ELASTICCTL_WORKSPACE        URL#DIGEST: where it is kept, and which one
    ELASTICCTL_WORKSPACE_FROM   its path on the machine that it comes from

A command that names its script by that path gets the copy's script, and the working folder stays: so a job of the local
cluster finds its data where they are, and keeps the code that it was submitted with. Any other runs in the copy.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticctl_launcher.folders import PrivateFolder
from elasticctl_launcher.rank_processes import PythonCommand
from elasticctl_store import storage as storages
from elasticctl_store.errors import StorageError, TrainError
from elasticctl_store.storage.base import without_secrets
from elasticctl_store.workspace.listing import Listing, is_digest
from elasticctl_store.workspace.transfer import explained, unpack

VARIABLE, FROM_VARIABLE = "ELASTICCTL_WORKSPACE", "ELASTICCTL_WORKSPACE_FROM"
LARGE_BYTES = 20_000_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnpackedWorkspace:
    """An unpacked workspace, there until `close`; `source` is its path where it comes from, if that is said."""

    own: PrivateFolder
    folder: Path
    source: Path | None

    def enter(self, command: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
        """The command to run instead of `command`; makes the copy the working folder where the module says so."""
        located = _located(command, self.source, self.folder)
        if located is None:
            os.chdir(self.folder)
            environ["PWD"] = str(self.folder)
        return located or list(command)

    def close(self) -> None:
        """Remove it."""
        self.own.close()


def unpack_workspace(environ: Mapping[str, str]) -> UnpackedWorkspace | None:
    """This worker's copy of the workspace that the environment names; None where it names none.

    Raises TrainError, in one line with its mend, when it cannot be had.
    """
    reference = environ.get(VARIABLE, "")
    if not reference:
        return None
    url, _, digest = reference.rpartition("#")
    if not url or not is_digest(digest):
        raise TrainError(
            f"{VARIABLE} is {without_secrets(reference)!r:.100}: it must be URL#DIGEST, as submit makes it"
        )
    own, began_s = PrivateFolder(Path(tempfile.gettempdir())), time.monotonic()
    try:
        folder = own.path / "workspace"
        folder.mkdir()
        place = storages.open(url)
        listing = unpack(place, digest, folder, _announce)
    except (StorageError, OSError) as e:
        own.close()
        raise TrainError(_why(e, url, digest)) from e
    took_s = time.monotonic() - began_s
    log.info("workspace %s: %s from %s in %.1f s", digest[:12], _told(listing), place.url, took_s)
    source = environ.get(FROM_VARIABLE, "")
    return UnpackedWorkspace(own, folder, Path(source) if source else None)


def _announce(listing: Listing) -> None:
    """Say what is on its way, if that may take a while."""
    if listing.size_bytes > LARGE_BYTES:
        log.info("workspace: fetching %s ...", _told(listing))


def _told(listing: Listing) -> str:
    size, count = listing.size_bytes, len(listing.files)
    return f"{count} file{'' if count == 1 else 's'}, " + (
        f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    )


def _why(error: StorageError | OSError, url: str, digest: str) -> str:
    if isinstance(error, StorageError):
        return explained(error, without_secrets(url), digest)
    mend = "; it needs more room in the temporary folder" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"cannot unpack the workspace {digest[:12]} to {tempfile.gettempdir()}: {error.strerror or error}{mend}"


def _located(command: Sequence[str], source: Path | None, folder: Path) -> list[str] | None:
    """The command with the copy's script in the place of that in `source`; None where it names none of those."""
    python = PythonCommand.parse(command)
    at = len(command) - len(python.argv) if python else 0
    named = Path(command[at])
    if source is None or not named.is_absolute() or not named.is_relative_to(source):
        return None
    ours = folder / named.relative_to(source)
    return [*command[:at], str(ours), *command[at + 1 :]] if ours.is_file() else None
