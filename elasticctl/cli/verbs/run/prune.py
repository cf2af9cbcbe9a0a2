"""`prune`: delete jobs that ended long ago, and their stored state where it is on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.api.errors import ClusterError, NotFoundError, UsageError
from elasticctl.api.text import plural, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import Table, print_data, print_table, say
from elasticctl.cli.framework.selection import Phases, final_phases, in_phases, phase_option
from elasticctl.cli.framework.target import Target, reach
from elasticctl.cli.verbs.inspect.logs import delete_stored_logs
from elasticctl.settings.contexts import LOCAL

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest

GOES, STAYS, NONE = "goes", "stays", "none"

app = new_app()


@dataclass(frozen=True, slots=True)
class PruneFilter:
    """The selected jobs; `older_than` is in seconds since their end, `phase` empty: all final phases."""

    older_than: Annotated[int | None, options.time("Jobs that ended longer ago than this: 12h, 7d.")] = None
    phase: Annotated[tuple[Phases, ...], phase_option("Only jobs that ended in this phase.", final_phases)] = ()


@dataclass(frozen=True, slots=True)
class PrunedJob:
    """A job to delete. `state` is what happens to its stored state: it is deleted, kept, or there is none."""

    job: ElasticJob
    ended_at: float
    storage: str
    state: str = STAYS
    folder: Path | None = None


@verb(app, "prune")
def prune(
    *,
    which: PruneFilter,
    state: Annotated[
        bool,
        typer.Option("--state", help="Also delete their checkpoints and workspaces in the local cluster's own folder."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    output: Annotated[
        Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format of the list.")
    ] = "table",
    yes: options.Yes = False,
    where: Where,
) -> None:
    """Delete jobs that have ended, with their logs; lists them and asks for confirmation first.

    \b
      elasticctl prune --older-than 7d --dry-run
      elasticctl prune --older-than 1d --phase failed --state -y
    """
    if which.older_than is None:
        raise UsageError("no age given. FIX: add --older-than 7d, for example")
    target, now = reach(where), time.time()
    everyone = target.cluster.list_jobs(target.namespace)
    doomed = select_jobs(everyone, which, now)
    if state and target.context.provider == LOCAL:
        doomed = _with_folders(doomed, target.cluster.list_jobs(None))
    if output != "table":
        print_data("Pruned", {"dryRun": dry_run, "jobs": [_as_data(item) for item in doomed]}, output)
    elif doomed:
        print_table(_table(doomed, now))
    if not doomed:
        say(f"no job in namespace {target.namespace} ended longer than {span(which.older_than)} ago")
    elif dry_run:
        say(f"{plural(len(doomed), 'job')} would be deleted (dry run: nothing changes)")
    elif yes or _confirm(len(doomed)):
        _delete_all(target, doomed, now, workspaces=state and target.context.provider == LOCAL)
    else:
        say("nothing deleted")


def select_jobs(manifests: Sequence[Manifest], which: PruneFilter, now: float) -> list[PrunedJob]:
    """The selected jobs, in the order of their ends. Pure; `now` is in seconds since the epoch."""
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob

    found = []
    for job in map(ElasticJob.from_manifest, manifests):
        ended_at = job.status.completion_time
        if not job.status.phase.terminal or ended_at is None or now - ended_at < (which.older_than or 0):
            continue
        if in_phases(job.status.phase.value, which.phase):
            storage = hardware(job).storage
            found.append(PrunedJob(job, ended_at, storage, STAYS if storage else NONE))
    return sorted(found, key=lambda item: item.ended_at)


def _with_folders(doomed: Sequence[PrunedJob], everyone: Sequence[Manifest]) -> list[PrunedJob]:
    """The jobs, each with the folder of its state if elasticctl may delete it, as no other job uses it."""
    from elasticctl.api.spec import ElasticJob

    going = {item.job.key for item in doomed}
    staying = [job for job in map(ElasticJob.from_manifest, everyone) if job.key not in going]
    used = {folder for job in staying for folder in _folders_of(job)}
    found = []
    for item in doomed:
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
    from elasticctl.api.podtemplate import START_FROM_VARIABLE, hardware

    found = hardware(job)
    for url in (found.storage, found.env.get(START_FROM_VARIABLE, "").rpartition("#")[0]):
        if (folder := own_folder(url)) is not None:
            yield folder


def _delete_all(target: Target, doomed: Sequence[PrunedJob], now: float, *, workspaces: bool) -> None:
    """Delete jobs with their state, and report what stays; `workspaces`: also those that no job names any more."""
    gone = [item for item in doomed if _delete(target, item)]
    _report(gone)
    if workspaces:
        _delete_unused_workspaces(target, {item.job.key for item in gone}, now)


def _delete(target: Target, item: PrunedJob) -> bool:
    """Delete a job with its state; False if it was left alone.

    Since it was listed, it may have been deleted, and another one may have its name.
    """
    try:
        now = target.cluster.get_job(target.namespace, item.job.name)
        if now["metadata"].get("uid") != item.job.uid:
            say(f"{item.job.name}: left alone: another job has that name now")
            return False
        target.cluster.delete_job(target.namespace, item.job.name)
    except NotFoundError:
        pass  # its time to live was over, or somebody was quicker
    delete_stored_logs(item.job)
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
    from elasticctl.cli.job_storage import delete_unused_workspaces, size, workspace_digests
    from elasticctl.cluster.local.paths import local_paths

    left = [
        manifest
        for manifest in target.cluster.list_jobs(None)
        if f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}" not in gone
    ]
    count, freed_bytes = delete_unused_workspaces(local_paths().workspaces, workspace_digests(left), now)
    if count:
        say(f"{plural(count, 'workspace')} no longer used deleted too, {size(freed_bytes)}")


def _report(doomed: Sequence[PrunedJob]) -> None:
    freed = sum(item.state == GOES for item in doomed)
    with_state = f"; the state of {freed} too" if freed else ""
    say(f"{plural(len(doomed), 'job')} deleted{with_state}")
    for item in doomed:
        if item.state == STAYS:
            say(f"{item.job.name}: its checkpoints stay in {item.storage}")


def _table(doomed: Sequence[PrunedJob], now: float) -> Table:
    rows = [
        (item.job.name, item.job.status.phase.value, f"{span(now - item.ended_at)} ago", item.state, item.storage)
        for item in doomed
    ]
    return Table(("NAME", "PHASE", "ENDED", "CHECKPOINTS", "STORAGE"), rows, spare=("STORAGE",))


def _as_data(item: PrunedJob) -> dict[str, str]:
    from elasticctl.api.codec import to_rfc3339

    return {
        "name": item.job.name,
        "phase": item.job.status.phase.value,
        "endedAt": to_rfc3339(item.ended_at),
        "storage": item.storage,
        "state": item.state,
    }


def _confirm(count: int) -> bool:
    what = f"{plural(count, 'job')} and their logs" if count > 1 else "this job and its logs"
    if not sys.stdin.isatty():
        raise UsageError(f"this deletes {what}. FIX: add --yes to confirm")
    return typer.confirm(f"Delete {what}?", err=True)
