"""`checkpoints`: list, verify, fetch and delete the checkpoints of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import UsageError
from elasticctl.api.text import plural, plural_are, quote, size_text, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import VerbGroup, add_group, new_app, verb
from elasticctl.cli.framework.completion import complete_job
from elasticctl.cli.framework.output import Table, emit, hint, print_data, print_table
from elasticctl.cli.framework.place import Where, reach
from elasticctl.operations import checkpoint_deletion as deletion
from elasticctl.operations import checkpoints as operations
from elasticctl.operations.checkpoints import CheckpointStorage
from elasticctl.operations.option_values import whole
from elasticctl.terminal import Terminal, say

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
    metric: Annotated[str, options.described("The metric that decides which are best.")] = ""
    mode: Annotated[
        Literal["min", "max"], typer.Option("--mode", help="Whether the lowest or the highest value is best.")
    ] = "min"


@verb(checkpoints, "list")
def list_checkpoints(*, target: JobOrUrl, output: options.Output = "table", where: Where) -> None:
    """List checkpoints, newest first, with a quick check for damage."""
    place = _find(target, where)
    found = operations.list_checkpoints(place)
    if output == "name":
        for commit in [finding.commit for finding in found if finding.commit is not None]:
            emit(str(commit.step))
    elif output in ("json", "yaml"):
        _print_list(place, found, output)
    elif not found:
        more = operations.unlisted_hint(place) or place.elsewhere
        say(f"{place.name}: no checkpoints at {place.storage.url}{more}")
    else:
        print_table(checkpoints_table(found, time.time(), wide=output == "wide"))
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
    place = _find(target, where)
    checked, gone = operations.verify_checkpoints(place, step)
    if output in ("json", "yaml"):
        _print_list(place, checked, output)
    elif checked:
        print_table(checkpoints_table(checked, time.time(), wide=output == "wide"))
    damaged = sum(bool(finding.damage) for finding in checked)
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
    path = _file_to_write(file, force)
    commit, tensors = operations.pull(_find(target, where), path, step, part)
    size = size_text(path.stat().st_size)
    say(f"{path}: {plural(tensors, 'tensor')} of {part}, step {commit.step}, {size}")


@verb(checkpoints, "rm")
def rm(
    *,
    target: JobOrUrl,
    steps: Annotated[tuple[int, ...], typer.Argument(metavar="STEP...", parser=whole(0))],
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
    place = _find(target, where, whole=True)
    chosen, found = deletion.checkpoints_to_delete(place, steps, number, force=force)
    _delete(place, chosen, found, yes)


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
    place = _find(target, where, whole=True)
    found = operations.list_checkpoints(place)
    from elasticctl_store.checkpoints.entries import Retention

    rules = Retention(keep.keep_last, keep.keep_every, keep.keep_best or 0, keep.metric, keep.mode)
    chosen = deletion.checkpoints_to_prune(place, found, rules, unread=force)
    if not chosen:
        say(f"{place.name}: nothing to delete; {plural_are(len(found), 'checkpoint')} kept")
    elif dry_run:
        print_table(checkpoints_table([finding for finding in found if finding.commit in chosen], time.time()))
        say(f"{place.name}: would delete {deletion.describe_checkpoints(chosen)}")
    else:
        _delete(place, chosen, found, yes)


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
    place = _find(target, where, whole=True)
    journal = deletion.repair(place)
    if not start_over:
        damaged, is_well = deletion.report_remaining_damage(place, journal)
        say(f"{place.name}: {plural(len(journal.listed), 'checkpoint')}, {damaged} damaged")
        return 0 if is_well else 1
    deletion.refuse_to_start_over(place, journal)
    if _confirm(place, "delete all checkpoints, none of which is intact,", yes):
        if not deletion.start_over(place, journal):
            say(f"{place.name}: does not start while this is there")
            return 1
        say(f"{place.name}: starts at step 0")
    return 0


def _find(wanted: str, where: Where, *, whole: bool = False) -> CheckpointStorage:
    """The storage of a job of this name, or at this URL or path; `whole` is as in `Target.find`, for deletions."""
    if operations.is_storage(wanted):
        return operations.open_storage(wanted, Terminal())
    target = reach(where)
    return operations.storage_of(target, target.find(wanted, whole=whole))


def _delete(place: CheckpointStorage, chosen: Sequence[Commit], found: Sequence[CheckedCommit], yes: bool) -> None:
    what = deletion.describe_checkpoints(chosen)
    if _confirm(place, f"delete {what}", yes):
        deletion.delete_checkpoints(place, chosen, found)
        say(f"{place.name}: deleted {what}")


def _confirm(place: CheckpointStorage, doing: str, yes: bool) -> bool:
    """Ask for confirmation. Raises UsageError if there is no terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{place.name}: this would {doing} permanently. FIX: add --yes to confirm")
    if typer.confirm(f"{place.name}: {doing} permanently?", err=True):
        return True
    say(f"{place.name}: nothing deleted")
    return False


def _file_to_write(name: str, force: bool) -> Path:
    """The file to write. Raises UsageError if it exists, unless `force`, or if it is a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise UsageError(f"{quote(name)} is a folder. FIX: name a file, such as {path / 'model.safetensors'}")
    if path.exists() and not force:
        raise UsageError(f"{quote(name)} exists. FIX: add --force to replace it")
    return path


def _print_list(place: CheckpointStorage, found: Sequence[CheckedCommit], output: str) -> None:
    data = {"storage": place.storage.url, "checkpoints": [checkpoint_data(finding) for finding in found]}
    print_data("CheckpointList", data, output)


_COLUMNS = ("STEP", "EPOCH", "AGE", "SIZE", "RANKS", "STATE")
_WIDE = ("NUMBER", "GENERATION", "METRICS")


def checkpoints_table(found: Sequence[CheckedCommit], now: float, *, wide: bool = False) -> Table:
    """One row per checkpoint. `now` is in seconds since the epoch."""
    rows = []
    for finding in found:
        commit, state = finding.commit, f"damaged: {finding.damage}" if finding.damage else "whole"
        if commit is not None and commit.not_finite:
            state = f"{state}, but not finite: {_first(commit.not_finite)}"
        if commit is None:
            rows.append(("", "", "", "", "", *(("", "", "") if wide else ()), state))
            continue
        more = (str(commit.number), str(commit.generation), _metrics(commit)) if wide else ()
        ranks = str(len(commit.shares))
        what = (str(commit.step), str(commit.epoch), span(now - commit.at), size_text(commit.size_bytes), ranks)
        rows.append((*what, *more, state))
    return Table((*_COLUMNS[:-1], *(_WIDE if wide else ()), _COLUMNS[-1]), rows, wraps=True)


def checkpoint_data(finding: CheckedCommit) -> dict[str, Any]:
    """A checkpoint for programs."""
    state = {"whole": not finding.damage, **({"damage": finding.damage} if finding.damage else {})}
    commit = finding.commit
    if commit is None:
        return {"position": finding.position, **state}
    return {
        "position": finding.position,
        "step": commit.step,
        "epoch": commit.epoch,
        "at": to_rfc3339(commit.at),
        "sizeBytes": commit.size_bytes,
        "worldSize": len(commit.shares),
        "number": commit.number,
        "generation": commit.generation,
        "metrics": dict(commit.metrics),
        **({"notFinite": list(commit.not_finite)} if commit.not_finite else {}),
        "objects": [{"key": ref.key, "sizeBytes": ref.size_bytes, "checksum": ref.checksum} for ref in commit.shares],
        **state,
    }


def _first(names: Sequence[str]) -> str:
    """`model/0.weight and 3 more`."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _metrics(commit: Commit) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(commit.metrics.items()))
