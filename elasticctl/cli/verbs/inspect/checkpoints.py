"""`checkpoints`: list, verify, fetch and delete the checkpoints of a job."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elasticctl.api.errors import JobStorageError, UsageError
from elasticctl.api.text import plural
from elasticctl.cli import job_storage
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import VerbGroup, add_group, new_app, verb
from elasticctl.cli.framework.contexts import complete_job
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import emit, hint, print_data, print_table, say

if TYPE_CHECKING:
    from elasticctl_store.checkpoints.entries import Commit
    from elasticctl_store.checkpoints.verify import CheckedCommit


class ListByDefault(VerbGroup):
    """`checkpoints JOB` is `checkpoints list JOB`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        alone = len(args) == 1 or args[1].startswith("-")
        if args[0] not in self.list_commands(ctx) and alone and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().resolve_command(ctx, args)


app = new_app()
checkpoints = add_group(
    app,
    "checkpoints",
    "List, check, fetch and delete the checkpoints of a job, or of a storage URL. JOB alone lists them.",
    ListByDefault,
)

JobOrUrl = Annotated[str, typer.Argument(metavar="JOB|URL", autocompletion=complete_job)]
Output = Annotated[
    Literal["table", "wide", "json", "yaml"], typer.Option("-o", "--output", help="How to print; wide has metrics too.")
]
Step = Annotated[int | None, options.count("The checkpoint of this step; the newest whole one by default.", low=0)]


@dataclass(frozen=True, slots=True)
class KeepRules:
    """Which checkpoints `prune` keeps."""

    keep_last: Annotated[int, options.count("Keep the newest N.", default=True)] = 3
    keep_every: Annotated[int | None, options.time("Also keep one in every 6h, 1d.")] = None
    keep_best: Annotated[int | None, options.count("Also keep the K best by --metric.", letter="K")] = None
    metric: Annotated[str, options.text("The metric that says which are best.")] = ""
    mode: Annotated[
        Literal["min", "max"], typer.Option("--mode", help="Whether the lowest or the highest value is best.")
    ] = "min"


@verb(checkpoints, "list")
def list_checkpoints(*, target: JobOrUrl, output: options.Output = "table", where: Where) -> None:
    """List checkpoints, newest first, each whole or damaged as far as a glance tells."""
    place = job_storage.find_storage(target, where)
    found = job_storage.list_checkpoints(place)
    if output == "name":
        for commit in [finding.commit for finding in found if finding.commit is not None]:
            emit(str(commit.step))
    elif output in ("json", "yaml"):
        _print_list(place, found, output)
    elif not found:
        say(f"{place.name}: no checkpoints at {place.storage.url}")
    else:
        print_table(job_storage.checkpoints_table(found, time.time(), wide=output == "wide"))
        hint(f"Next: check every byte: elasticctl checkpoints verify {target}")


@verb(checkpoints, "verify")
def verify(
    *,
    target: JobOrUrl,
    step: Annotated[int | None, options.count("Only the checkpoint of this step.", low=0)] = None,
    output: Output = "table",
    where: Where,
) -> int:
    """Read every byte of the checkpoints and compare it with their checksums; exit code 1 when one is damaged.

    \b
      elasticctl checkpoints verify digits
      elasticctl checkpoints verify s3://bucket/run --step 1200
    """
    place = job_storage.find_storage(target, where)
    found = job_storage.list_checkpoints(place)
    if step is not None:
        wanted = job_storage.checkpoint_of_step(found, step)
        found = [finding for finding in found if finding.commit == wanted]
    checked = [_verify_checkpoint(place, finding) for finding in found]
    if output in ("json", "yaml"):
        _print_list(place, checked, output)
    elif checked:
        print_table(job_storage.checkpoints_table(checked, time.time(), wide=output == "wide"))
    damaged = sum(bool(finding.damage) for finding in checked)
    say(f"{place.name}: {plural(len(checked), 'checkpoint')}, {damaged} damaged")
    return 1 if damaged else 0


@verb(checkpoints, "pull")
def pull(
    *,
    target: JobOrUrl,
    file: Annotated[str, typer.Argument(metavar="FILE")],
    step: Step = None,
    part: Annotated[str, typer.Option("--part", metavar="NAME", help="The part of the state.")] = "model",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    where: Where,
) -> None:
    """Write the model of a checkpoint, or another part, to one plain safetensors FILE.

    \b
      elasticctl checkpoints pull digits model.safetensors
      elasticctl checkpoints pull digits adam.safetensors --part optimizer
      elasticctl checkpoints pull s3://bucket/run best.safetensors --step 1200
    """
    path = job_storage.target_file(file, force)
    place = job_storage.find_storage(target, where)
    commit = job_storage.pick_checkpoint(place, step)
    from elasticctl_store.checkpoints import verify as archive

    with job_storage.storage_errors(), job_storage.progress_bar(f"step {commit.step}", commit.size_bytes) as on_bytes:
        count = archive.pull(place.storage, commit, part, path, on_bytes)
    size = job_storage.size(path.stat().st_size)
    say(f"{path}: {plural(count, 'tensor')} of {part}, step {commit.step}, {size}")


@verb(checkpoints, "rm")
def rm(
    *,
    target: JobOrUrl,
    steps: Annotated[tuple[int, ...], typer.Argument(metavar="STEP...", parser=options.whole(0))],
    force: Annotated[
        bool, typer.Option("--force", help="Delete the newest one too, though the job may be running: it restarts.")
    ] = False,
    yes: options.Yes = False,
    where: Where,
) -> None:
    """Delete the checkpoints of these steps."""
    place = job_storage.find_storage(target, where)
    found = job_storage.list_checkpoints(place)
    doomed = [job_storage.checkpoint_of_step(found, step) for step in dict.fromkeys(steps)]
    whole, last = job_storage.newest_whole(found), job_storage.newest(found)
    if place.running and not force:
        if whole in doomed:
            raise UsageError(
                f"step {whole.step} is the newest whole checkpoint, from which {place.name} would continue. "
                f"FIX: add --force to delete it anyway"
            )
        if last in doomed:
            raise UsageError(
                f"step {last.step} is the newest checkpoint, though damaged. Deleting it stops a run of {place.name} "
                f"that is saving there, which starts again. FIX: add --force to delete it anyway"
            )
    _delete(place, doomed, found, yes)


@verb(checkpoints, "prune")
def prune(
    *,
    target: JobOrUrl,
    keep: KeepRules,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    yes: options.Yes = False,
    where: Where,
) -> None:
    """Delete checkpoints by age and metric; the newest whole one, and damaged ones, always stay."""
    if bool(keep.metric) != bool(keep.keep_best):
        raise UsageError("--keep-best and --metric need each other. FIX: give both or neither")
    place = job_storage.find_storage(target, where)
    found = job_storage.list_checkpoints(place)
    whole = [finding.commit for finding in found if finding.commit is not None and not finding.damage]
    from elasticctl_store.checkpoints.entries import Retention, commits_to_delete

    rules = Retention(keep.keep_last, keep.keep_every, keep.keep_best or 0, keep.metric, keep.mode)
    doomed = commits_to_delete(whole, rules)
    if not doomed:
        say(f"{place.name}: nothing to delete, {plural(len(whole), 'checkpoint')} stay")
    elif dry_run:
        print_table(job_storage.checkpoints_table([f for f in found if f.commit in doomed], time.time()))
        say(f"{place.name}: would delete {_describe_checkpoints(doomed)}")
    else:
        _delete(place, doomed, found, yes)


def _print_list(place: job_storage.JobStorage, found: list[CheckedCommit], output: str) -> None:
    data = {"storage": place.storage.url, "checkpoints": [job_storage.checkpoint_data(finding) for finding in found]}
    print_data("CheckpointList", data, output)


def _verify_checkpoint(place: job_storage.JobStorage, finding: CheckedCommit) -> CheckedCommit:
    """The finding after every byte has been read."""
    from elasticctl_store.checkpoints import verify as archive
    from elasticctl_store.errors import DamagedError, MissingError

    commit = finding.commit
    if commit is None or finding.damage:
        return finding
    try:
        with (
            job_storage.progress_bar(f"step {commit.step}", commit.size_bytes) as on_bytes,
            job_storage.storage_errors(),
        ):
            archive.verify(place.storage, commit, on_bytes)
    except JobStorageError as e:
        if isinstance(e.__cause__, DamagedError | MissingError):
            return archive.CheckedCommit(finding.position, commit, str(e))
        raise
    return finding


def _delete(place: job_storage.JobStorage, doomed: list[Commit], found: list[CheckedCommit], yes: bool) -> None:
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"{place.name}: this deletes {_describe_checkpoints(doomed)} for good. FIX: add --yes to confirm"
            )
        if not typer.confirm(f"{place.name}: delete {_describe_checkpoints(doomed)} for good?", err=True):
            say(f"{place.name}: nothing deleted")
            return
    job_storage.delete_checkpoints(place, doomed, found)
    say(f"{place.name}: deleted {_describe_checkpoints(doomed)}")


def _describe_checkpoints(doomed: list[Commit]) -> str:
    steps = ", ".join(str(commit.step) for commit in sorted(doomed, key=lambda commit: commit.step))
    freed = job_storage.size(sum(commit.size_bytes for commit in doomed))
    return f"{plural(len(doomed), 'checkpoint')} ({'step' if len(doomed) == 1 else 'steps'} {steps}, {freed})"
