"""`checkpoints`: list, verify, fetch and delete the checkpoints of a job."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.api.text import plural, plural_are
from elasticctl.cli import job_storage
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import VerbGroup, add_group, new_app, verb
from elasticctl.cli.framework.contexts import complete_job
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import emit, hint, print_data, print_table, say

if TYPE_CHECKING:
    from pathlib import Path

    from elasticctl_store.checkpoints.commits import CommitWriter
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
    "List, verify, fetch and delete the checkpoints of a job or of a storage URL. JOB alone lists them.",
    ListByDefault,
)

JobOrUrl = Annotated[str, typer.Argument(metavar="JOB|URL", autocompletion=complete_job)]
Output = Annotated[
    Literal["table", "wide", "json", "yaml"],
    typer.Option("-o", "--output", help="Output format; wide includes metrics."),
]
Step = Annotated[int | None, options.count("The checkpoint of this step; by default the newest intact one.", low=0)]


@dataclass(frozen=True, slots=True)
class KeepRules:
    """The checkpoints that `prune` keeps."""

    keep_last: Annotated[int, options.count("Keep the newest N.", default=True)] = 3
    keep_every: Annotated[int | None, options.time("Also keep one per this much time: 6h, 1d.")] = None
    keep_best: Annotated[int | None, options.count("Also keep the K best by --metric.", letter="K")] = None
    metric: Annotated[str, options.text("The metric that decides which are best.")] = ""
    mode: Annotated[
        Literal["min", "max"], typer.Option("--mode", help="Whether the lowest or the highest value is best.")
    ] = "min"


@verb(checkpoints, "list")
def list_checkpoints(*, target: JobOrUrl, output: options.Output = "table", where: Where) -> None:
    """List checkpoints, newest first, with a quick check for damage."""
    place = job_storage.find_storage(target, where)
    found = job_storage.list_checkpoints(place)
    if output == "name":
        for commit in [finding.commit for finding in found if finding.commit is not None]:
            emit(str(commit.step))
    elif output in ("json", "yaml"):
        _print_list(place, found, output)
    elif not found:
        more = job_storage.said_of_unlisted(place) or place.elsewhere
        say(f"{place.name}: no checkpoints at {place.storage.url}{more}")
    else:
        print_table(job_storage.checkpoints_table(found, time.time(), wide=output == "wide"))
        hint(f"Next: check every byte: elasticctl checkpoints verify {target}")


@verb(checkpoints, "verify")
def verify(
    *,
    target: JobOrUrl,
    step: Annotated[int | None, options.count("Only the checkpoints of this step.", low=0)] = None,
    output: Output = "table",
    where: Where,
) -> int:
    """Read every byte of the checkpoints and compare checksums; exit code 1 if one is damaged.

    \b
      elasticctl checkpoints verify digits
      elasticctl checkpoints verify s3://bucket/run --step 1200
    """
    place = job_storage.find_storage(target, where)
    found = job_storage.list_checkpoints(place)
    if step is not None:
        wanted = job_storage.checkpoints_of_step(found, step)
        found = [finding for finding in found if finding.commit in wanted]
    if not found:
        nothing = f"{place.name}: there are no checkpoints at {place.storage.url} to verify"
        raise NotFoundError(nothing + (job_storage.said_of_unlisted(place) or place.elsewhere))
    looked_at = [job_storage.check_in_full(place, finding) for finding in found]
    checked = [finding for finding in looked_at if finding is not None]
    if output in ("json", "yaml"):
        _print_list(place, checked, output)
    elif checked:
        print_table(job_storage.checkpoints_table(checked, time.time(), wide=output == "wide"))
    damaged = sum(bool(finding.damage) for finding in checked)
    gone = len(looked_at) - len(checked)
    meanwhile = f", {gone} deleted by the job meanwhile" if gone else ""
    say(f"{place.name}: {plural(len(checked), 'checkpoint')}, {damaged} damaged{meanwhile}")
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
    """Write the model of a checkpoint, or another part of it, to one plain safetensors FILE.

    \b
      elasticctl checkpoints pull digits model.safetensors
      elasticctl checkpoints pull digits adam.safetensors --part optimizer
      elasticctl checkpoints pull s3://bucket/run best.safetensors --step 1200
    """
    from elasticctl_store.errors import DamagedError, MissingError

    path = job_storage.target_file(file, force)
    place = job_storage.find_storage(target, where)
    pulled = 0

    def try_pull(place: job_storage.JobStorage, finding: CheckedCommit) -> CheckedCommit:
        nonlocal pulled
        if finding.commit is not None and not finding.damage:
            try:
                pulled = _pull(place, finding.commit, part, path)
            except (DamagedError, MissingError) as e:
                return dataclasses.replace(finding, damage=str(e))
        return finding

    commit = job_storage.pick_checkpoint(place, step, try_pull)
    size = job_storage.size(path.stat().st_size)
    say(f"{path}: {plural(pulled, 'tensor')} of {part}, step {commit.step}, {size}")


def _pull(place: job_storage.JobStorage, commit: Commit, part: str, path: Path) -> int:
    from elasticctl_store.checkpoints import verify

    with job_storage.progress_bar(f"step {commit.step}", commit.size_bytes) as on_bytes:
        return verify.pull(place.storage, commit, part, path, on_bytes)


@verb(checkpoints, "rm")
def rm(
    *,
    target: JobOrUrl,
    steps: Annotated[tuple[int, ...], typer.Argument(metavar="STEP...", parser=options.whole(0))],
    number: Annotated[
        int | None, options.count("If the step has several checkpoints, the one with this number (list -o wide).")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete the newest intact one; a running job restarts.")
    ] = False,
    yes: options.Yes = False,
    where: Where,
) -> None:
    """Delete the checkpoints of these steps; without --force, the newest intact one stays."""
    place = job_storage.find_storage(target, where, whole=True)
    found = job_storage.list_checkpoints(place)
    if number is not None and len(set(steps)) > 1:
        raise UsageError("--number says which checkpoint of one step is meant. FIX: give one step")
    doomed = [job_storage.one_of_step(found, step, number) for step in dict.fromkeys(steps)]
    if not force:
        _refuse_the_newest(place, doomed, found)
    _delete(place, doomed, found, yes, where)


@verb(checkpoints, "prune")
def prune(
    *,
    target: JobOrUrl,
    keep: KeepRules,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Do not read the checkpoints that stay: trust the quick check.")
    ] = False,
    yes: options.Yes = False,
    where: Where,
) -> None:
    """Delete checkpoints by age and metric; the newest intact one, and damaged ones, always stay.

    First, every byte of the checkpoints that stay is read; damaged ones do not count.
    """
    if bool(keep.metric) != bool(keep.keep_best):
        raise UsageError("--keep-best and --metric need each other. FIX: give both or neither")
    place = job_storage.find_storage(target, where, whole=True)
    found = job_storage.list_checkpoints(place)
    from elasticctl_store.checkpoints.entries import Retention

    rules = Retention(keep.keep_last, keep.keep_every, keep.keep_best or 0, keep.metric, keep.mode)
    doomed = job_storage.choose_doomed(place, found, rules, unread=force)
    if not doomed:
        say(f"{place.name}: nothing to delete; {plural_are(len(found), 'checkpoint')} kept")
    elif dry_run:
        print_table(job_storage.checkpoints_table([f for f in found if f.commit in doomed], time.time()))
        say(f"{place.name}: would delete {_describe_checkpoints(doomed)}")
    else:
        _delete(place, doomed, found, yes, where)


@verb(checkpoints, "repair")
def repair(
    *,
    target: JobOrUrl,
    start_over: Annotated[
        bool,
        typer.Option("--start-over", help="If no checkpoint is intact, delete them all: the job starts at step 0."),
    ] = False,
    yes: options.Yes = False,
    where: Where,
) -> int:
    """Recreate lost or damaged entries of the journal; exit code 1 if something stays damaged.

    A run does this itself when it starts, for entries that are newer than its newest checkpoint. A run that is saving
    there is stopped and restarts.
    """
    from elasticctl_store.checkpoints import repair as archive
    from elasticctl_store.checkpoints.retention import take_over

    place = job_storage.find_storage(target, where, whole=True)
    with job_storage.storage_errors():
        writer = take_over(place.storage)
        rebuilt = archive.rebuild(place.storage, writer, everything=True)
    for commit in rebuilt.commits:
        say(f"{place.name}: step {commit.step} is listed again")
    found = job_storage.list_checkpoints(place)
    if start_over:
        return _start_over(place, writer, found, where, yes=yes)
    damaged = [finding for finding in found if finding.damage]
    for finding in damaged:
        job_storage.say_damage(place, finding)
    for line in rebuilt.rejected:
        say(f"{place.name}: not listed: {line}")
    traces = () if found or rebuilt.rejected else _find_traces(place, writer)
    say(f"{place.name}: {plural(len(found), 'checkpoint')}, {len(damaged)} damaged")
    return 1 if damaged or rebuilt.rejected or traces else 0


def _start_over(
    place: job_storage.JobStorage, writer: CommitWriter, found: list[CheckedCommit], where: Where, *, yes: bool
) -> int:
    """Delete all checkpoints after a confirmation; returns the exit code. Raises UsageError if one is intact."""
    from elasticctl_store.checkpoints import repair as archive

    seen = job_storage.check_until_intact(place, found)
    if seen and not seen[-1].damage and seen[-1].commit is not None:
        step = seen[-1].commit.step
        raise UsageError(f"step {step} is intact, and {place.name} continues from it. FIX: leave out --start-over")
    if _confirm(place, "delete all checkpoints, none of which is intact,", yes):
        with job_storage.storage_errors():
            archive.start_over(place.storage, writer)
        _note(place, "all", where)
        if _find_traces(place, writer):
            say(f"{place.name}: does not start while this is there")
            return 1
        say(f"{place.name}: starts at step 0")
    return 0


def _find_traces(place: job_storage.JobStorage, writer: CommitWriter) -> list[str]:
    """Return, and report, what keeps a run from starting at step 0 where no checkpoint is listed."""
    from elasticctl_store.checkpoints import repair as archive

    with job_storage.storage_errors():
        found = archive.find_traces(place.storage, writer.generation.position)
    for line in found:
        say(f"{place.name}: a trace of a checkpoint: {line}")
    return found


def _refuse_the_newest(place: job_storage.JobStorage, doomed: list[Commit], found: list[CheckedCommit]) -> None:
    """Raise UsageError if the newest intact checkpoint would be deleted, or one that a run builds on."""
    seen = job_storage.check_until_intact(place, found)
    whole, last = seen[-1].commit if seen and not seen[-1].damage else None, job_storage.newest(found)
    if whole is not None and whole in doomed:
        raise UsageError(
            f"step {whole.step} is the newest intact checkpoint, from which {place.name} would continue. "
            f"FIX: add --force to delete it anyway"
        )
    if place.running and last in doomed:
        raise UsageError(
            f"step {last.step} is the newest checkpoint, though damaged. Deleting it stops a run of {place.name} "
            f"that is saving there, which starts again. FIX: add --force to delete it anyway"
        )


def _print_list(place: job_storage.JobStorage, found: list[CheckedCommit], output: str) -> None:
    data = {"storage": place.storage.url, "checkpoints": [job_storage.checkpoint_data(finding) for finding in found]}
    print_data("CheckpointList", data, output)


def _delete(
    place: job_storage.JobStorage, doomed: list[Commit], found: list[CheckedCommit], yes: bool, where: Where
) -> None:
    if _confirm(place, f"delete {_describe_checkpoints(doomed)}", yes):
        job_storage.delete_checkpoints(place, doomed, found)
        _note(place, _describe_checkpoints(doomed), where)
        say(f"{place.name}: deleted {_describe_checkpoints(doomed)}")


def _note(place: job_storage.JobStorage, deleted: str, where: Where) -> None:
    """Record the deletion, on the job if one was named."""
    from elasticctl.cli.framework.target import reach
    from elasticctl.cluster import audit_log

    if not place.of_job:
        audit_log.note_here("delete checkpoints", "storage", place.storage.url, was=deleted)
        return
    target = reach(where)
    audit_log.note_deleted_checkpoints(target.cluster, target.namespace, place.name, deleted)


def _confirm(place: job_storage.JobStorage, doing: str, yes: bool) -> bool:
    """Ask for confirmation. Raises UsageError if there is no terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{place.name}: this would {doing} permanently. FIX: add --yes to confirm")
    if typer.confirm(f"{place.name}: {doing} permanently?", err=True):
        return True
    say(f"{place.name}: nothing deleted")
    return False


def _describe_checkpoints(doomed: list[Commit]) -> str:
    steps = ", ".join(str(commit.step) for commit in sorted(doomed, key=lambda commit: commit.step))
    freed = job_storage.size(sum(commit.size_bytes for commit in doomed))
    return f"{plural(len(doomed), 'checkpoint')} ({'step' if len(doomed) == 1 else 'steps'} {steps}, {freed})"
