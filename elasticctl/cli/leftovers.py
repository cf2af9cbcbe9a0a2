"""Workspaces of the local cluster that no job names any more, and how they are deleted.

Only the local cluster knows all the jobs that could name one. What is young stays: somebody may be about to submit it.
The newest of each folder stays too, because the next one is compared with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from elasticctl.cli.stored import errors_shown
from elasticctl.codec import Manifest
from elasticctl.podtemplate import WORKSPACE_VARIABLE, hardware
from elasticctl.spec import ElasticJob
from elasticctl_train import storage as storages
from elasticctl_train.errors import DamagedError, MissingError
from elasticctl_train.storage import Storage
from elasticctl_train.workspace import store

YOUNG_S = 3600.0


def named(manifests: Iterable[Manifest]) -> set[str]:
    """The digests of the workspaces that jobs name."""
    references = (
        hardware(ElasticJob.from_manifest(manifest)).env.get(WORKSPACE_VARIABLE, "") for manifest in manifests
    )
    return {reference.rpartition("#")[2] for reference in references if reference}


def sweep(folder: Path, wanted: Collection[str], now: float) -> tuple[int, int]:
    """Delete what is left over below `folder`; returns how many workspaces, and how many bytes of contents.

    `wanted`: the digests that jobs name; `now` in seconds since the epoch. Raises StorageError.
    """
    with errors_shown():
        place = storages.open(str(folder))
        heads = {store.newest(place, origin) for origin in store.names(place, store.HEADS)}
        gone = [digest for digest in _old(place, folder, store.LISTINGS, now) if digest not in heads | set(wanted)]
        packs = _old(place, folder, store.PACKS, now)
        place.delete([f"{store.LISTINGS}/{digest}" for digest in gone])
        used = _packs_of(place, store.names(place, store.LISTINGS))
        doomed = [folder / store.PACKS / pack for pack in packs if pack not in used]
        freed_bytes = sum(path.stat().st_size for path in doomed)
        place.delete([f"{store.PACKS}/{path.name}" for path in doomed])
    return len(gone), freed_bytes


def _old(place: Storage, folder: Path, kind: str, now: float) -> list[str]:
    return [name for name in store.names(place, kind) if now - (folder / kind / name).stat().st_mtime > YOUNG_S]


def _packs_of(place: Storage, digests: Iterable[str]) -> set[str]:
    used: set[str] = set()
    for digest in digests:
        try:
            places = store.find(place, digest).places
        except (DamagedError, MissingError):
            continue  # nobody could unpack it either
        used |= {piece.pack for pieces in places.values() for piece in pieces}
    return used
