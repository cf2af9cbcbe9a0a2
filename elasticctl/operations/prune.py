"""Delete jobs that ended long ago, and their stored state where it is on this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from elasticctl.api.errors import ClusterError, NotFoundError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural, size_text
from elasticctl.cluster.base import Manifest
from elasticctl.operations.checkpoints import storage_errors
from elasticctl.operations.logs import delete_stored_logs
from elasticctl.operations.option_values import duration
from elasticctl.operations.selection import Phases, final_phases, in_phases
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import LOCAL
from elasticctl_protocol import variables
from elasticctl_store import storage as storages
from elasticctl_store.errors import DamagedError, MissingError
from elasticctl_store.storage import Storage
from elasticctl_store.workspace import transfer

GOES, STAYS, NONE = "goes", "stays", "none"
KEEP_YOUNGER_S = 3600.0


@dataclass(frozen=True, slots=True)
class PruneFilter:
    """The selected jobs; `older_than` is in seconds since their end, `phase` empty: all final phases."""

    older_than: Annotated[int | None, duration] = None
    phase: Annotated[tuple[Phases, ...], final_phases] = ()


@dataclass(frozen=True, slots=True)
class PrunedJob:
    """A job to delete. `state` is what happens to its stored state: it is deleted, kept, or there is none."""

    job: ElasticJob
    ended_at: float
    storage: str
    state: str = STAYS
    folder: Path | None = None


def jobs_to_prune(target: Target, which: PruneFilter, now: float, *, state: bool = False) -> list[PrunedJob]:
    """The jobs to delete, in the order of their ends; `state`: with their state in the local cluster's own folder."""
    chosen = select_jobs(target.cluster.list_jobs(target.namespace), which, now)
    if state and target.context.provider == LOCAL:
        return _with_folders(chosen, target.cluster.list_jobs(None))
    return chosen


def prune(target: Target, chosen: Sequence[PrunedJob], now: float, *, state: bool = False) -> list[PrunedJob]:
    """Delete jobs, their logs and, with `state`, their state and unused workspaces on this machine.

    Returns those that were deleted; reports what is left alone.
    """
    gone = [item for item in chosen if _delete(target, item)]
    freed = sum(item.state == GOES for item in gone)
    with_state = f"; the state of {freed} too" if freed else ""
    target.observer.report(f"{plural(len(gone), 'job')} deleted{with_state}")
    for item in gone:
        if item.state == STAYS:
            target.observer.report(f"{item.job.name}: its checkpoints stay in {item.storage}")
    if state and target.context.provider == LOCAL:
        _delete_unused_workspaces(target, {item.job.key for item in gone}, now)
    return gone


def select_jobs(manifests: Sequence[Manifest], which: PruneFilter, now: float) -> list[PrunedJob]:
    """The selected jobs, in the order of their ends. Pure; `now` is in seconds since the epoch."""
    found = []
    for job in map(ElasticJob.from_manifest, manifests):
        ended_at = job.status.completion_time
        if not job.status.phase.terminal or ended_at is None or now - ended_at < (which.older_than or 0):
            continue
        if in_phases(job.status.phase.value, which.phase):
            storage = hardware(job).storage
            found.append(PrunedJob(job, ended_at, storage, STAYS if storage else NONE))
    return sorted(found, key=lambda item: item.ended_at)


def _with_folders(chosen: Sequence[PrunedJob], everyone: Sequence[Manifest]) -> list[PrunedJob]:
    """The jobs, each with the folder of its state if elasticctl may delete it, as no other job uses it."""
    going = {item.job.key for item in chosen}
    staying = [job for job in map(ElasticJob.from_manifest, everyone) if job.key not in going]
    used = {folder for job in staying for folder in _folders_of(job)}
    found = []
    for item in chosen:
        folder = own_folder(item.storage)
        found.append(item if folder is None or folder in used else replace(item, state=GOES, folder=folder))
    return found


def own_folder(url: str) -> Path | None:
    """The folder of a storage URL, if the local cluster made it: directly below its folder for state."""
    from urllib.parse import unquote

    from elasticctl.cluster.local.paths import local_paths

    if not url.startswith("file:///"):
        return None
    folder, own = Path(unquote(url.removeprefix("file://"))), local_paths().storage
    return folder if folder.parent == own and ".." not in folder.parts and not folder.is_symlink() else None


def _folders_of(job: ElasticJob) -> Iterator[Path]:
    """The folders made by elasticctl that a job keeps its state in, or starts from."""

    found = hardware(job)
    for url in (found.storage, found.env.get(variables.START_FROM, "").rpartition("#")[0]):
        if (folder := own_folder(url)) is not None:
            yield folder


def _delete(target: Target, item: PrunedJob) -> bool:
    """Delete a job with its state; False if it was left alone.

    Since it was listed, it may have been deleted, and another one may have its name.
    """
    try:
        now = target.cluster.get_job(target.namespace, item.job.name)
        if now["metadata"].get("uid") != item.job.uid:
            target.observer.report(f"{item.job.name}: left alone: another job has that name now")
            return False
        target.cluster.delete_job(target.namespace, item.job.name)
    except NotFoundError:
        pass  # its time to live was over, or someone else was faster
    delete_stored_logs(item.job, target.observer)
    _delete_state(item)
    return True


def _delete_state(item: PrunedJob) -> None:
    if item.folder is None:
        return
    import shutil

    try:
        shutil.rmtree(item.folder)
    except FileNotFoundError:
        pass
    except OSError as e:
        raise ClusterError(
            f"{item.job.name} is deleted, but not all of its state in {item.folder}: {e.strerror}"
        ) from e


def _delete_unused_workspaces(target: Target, gone: Collection[str], now: float) -> None:
    """Delete the workspaces of the local cluster that none of its jobs names any more."""
    from elasticctl.cluster.local.paths import local_paths

    left = [
        manifest
        for manifest in target.cluster.list_jobs(None)
        if f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}" not in gone
    ]
    count, freed_bytes = delete_unused_workspaces(local_paths().workspaces, workspace_digests(left), now)
    if count:
        target.observer.report(f"{plural(count, 'workspace')} no longer used deleted too, {size_text(freed_bytes)}")


def workspace_digests(manifests: Iterable[Manifest]) -> set[str]:
    """The digests of the workspaces that jobs name."""
    references = (
        hardware(ElasticJob.from_manifest(manifest)).env.get(variables.WORKSPACE, "") for manifest in manifests
    )
    return {reference.rpartition("#")[2] for reference in references if reference}


def delete_unused_workspaces(folder: Path, wanted: Collection[str], now: float) -> tuple[int, int]:
    """Delete unused workspaces below `folder`; returns their number and the bytes of their contents.

    `wanted` are the digests that jobs name; `now` in seconds since the epoch. Raises JobStorageError.
    """
    with storage_errors():
        place = storages.open(str(folder), storages.AT_A_TERMINAL)
        heads = {transfer.newest(place, origin) for origin in transfer.names(place, transfer.HEADS)}
        gone = [
            digest
            for digest in _older_names(place, folder, transfer.LISTINGS, now)
            if digest not in heads | set(wanted)
        ]
        packs = _older_names(place, folder, transfer.PACKS, now)
        place.delete([f"{transfer.LISTINGS}/{digest}" for digest in gone])
        used = _packs_of(place, transfer.names(place, transfer.LISTINGS))
        unused = [folder / transfer.PACKS / pack for pack in packs if pack not in used]
        freed_bytes = sum(path.stat().st_size for path in unused)
        place.delete([f"{transfer.PACKS}/{path.name}" for path in unused])
    return len(gone), freed_bytes


def _older_names(place: Storage, folder: Path, kind: str, now: float) -> list[str]:
    return [
        name for name in transfer.names(place, kind) if now - (folder / kind / name).stat().st_mtime > KEEP_YOUNGER_S
    ]


def _packs_of(place: Storage, digests: Iterable[str]) -> set[str]:
    used: set[str] = set()
    for digest in digests:
        try:
            places = transfer.find(place, digest).places
        except (DamagedError, MissingError):
            continue  # it could not be unpacked either
        used |= {piece.pack for pieces in places.values() for piece in pieces}
    return used
