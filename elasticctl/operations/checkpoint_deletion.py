"""Delete checkpoints, by step or by age and metric, and repair a journal that has lost entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticctl.api.errors import UsageError
from elasticctl.api.text import plural, size_text
from elasticctl.operations.checkpoints import (
    CheckpointStorage,
    check_in_full,
    check_until_intact,
    list_checkpoints,
    newest_checkpoint,
    one_of_step,
    report_damage,
    storage_errors,
)

if TYPE_CHECKING:
    from elasticctl_store.checkpoints.commits import CommitWriter
    from elasticctl_store.checkpoints.entries import Commit, Retention
    from elasticctl_store.checkpoints.verify import CheckedCommit


def checkpoints_to_delete(
    place: CheckpointStorage, steps: Sequence[int], number: int | None, *, force: bool = False
) -> tuple[list[Commit], list[CheckedCommit]]:
    """The checkpoints of these steps, and all that there are; unless `force`, the newest intact one is refused.

    Raises NotFoundError, and UsageError for one that is refused, or if several are meant.
    """
    found = list_checkpoints(place)
    if number is not None and len(set(steps)) > 1:
        raise UsageError("--number says which checkpoint of one step is meant. FIX: give one step")
    chosen = [one_of_step(found, step, number) for step in dict.fromkeys(steps)]
    if not force:
        _refuse_the_newest(place, chosen, found)
    return chosen, found


def checkpoints_to_prune(
    place: CheckpointStorage, found: Sequence[CheckedCommit], keep: Retention, *, unread: bool = False
) -> list[Commit]:
    """The checkpoints that `keep` does not keep, oldest first. Those to keep are read first: damaged ones do not count.

    With `unread`, they are only checked briefly. Raises JobStorageError.
    """
    from elasticctl_store.checkpoints.entries import commits_to_delete

    found, read = list(found), set[int]()
    while True:
        intact = [finding.commit for finding in found if finding.commit is not None and not finding.damage]
        chosen = commits_to_delete(intact, keep)
        going = {commit.position for commit in chosen}
        staying = [
            (index, finding)
            for index, finding in enumerate(found)
            if finding.commit is not None and not finding.damage and finding.position not in going | read
        ]
        if unread or not chosen or not staying:
            return chosen
        index, finding = staying[0]
        checked = check_in_full(place, finding)
        found[index : index + 1] = [checked] if checked is not None else []
        read.add(finding.position)
        if checked is not None and checked.damage:
            report_damage(place, checked)


def delete_checkpoints(place: CheckpointStorage, chosen: Sequence[Commit], found: Sequence[CheckedCommit]) -> None:
    """Delete checkpoints, oldest first.

    If the newest entry of the journal is among them, the URL is taken over first, since its position must never be free
    while a run could fill it. That stops such a run. Raises JobStorageError.
    """
    from elasticctl_store.checkpoints import commits, retention

    with storage_errors():
        # A moved job's journal can never be taken again.
        if newest_checkpoint(found) in chosen and commits.moved_to(place.storage) is None:
            retention.take_over(place.storage)
        left = [finding.commit for finding in found if finding.commit is not None]
        for commit in sorted(chosen, key=lambda commit: commit.position):
            left.remove(commit)
            commits.delete_commit(place.storage, commit, left)
        retention.delete_unneeded_bases(place.storage, chosen)
    _record_deletion(place, describe_checkpoints(chosen))


def describe_checkpoints(chosen: Sequence[Commit]) -> str:
    """`2 checkpoints (steps 10, 20, 1.4 MB)`."""
    steps = ", ".join(str(commit.step) for commit in sorted(chosen, key=lambda commit: commit.step))
    freed = size_text(sum(commit.size_bytes for commit in chosen))
    return f"{plural(len(chosen), 'checkpoint')} ({'step' if len(chosen) == 1 else 'steps'} {steps}, {freed})"


def _refuse_the_newest(place: CheckpointStorage, chosen: Sequence[Commit], found: Sequence[CheckedCommit]) -> None:
    """Raise UsageError if the newest intact checkpoint would be deleted, or one that a run builds on."""
    seen = check_until_intact(place, found)
    intact, last = seen[-1].commit if seen and not seen[-1].damage else None, newest_checkpoint(found)
    if intact is not None and intact in chosen:
        raise UsageError(
            f"step {intact.step} is the newest intact checkpoint, from which {place.name} would continue. "
            f"FIX: add --force to delete it anyway"
        )
    if place.running and last is not None and last in chosen:
        raise UsageError(
            f"step {last.step} is the newest checkpoint, though damaged. Deleting it stops a run of {place.name} "
            f"that is saving there, which starts again. FIX: add --force to delete it anyway"
        )


@dataclass(frozen=True, slots=True)
class RepairedJournal:
    """A journal that is ours now: what it lists, and lines about checkpoints that could not be listed again."""

    writer: CommitWriter
    listed: Sequence[CheckedCommit]
    rejected: Sequence[str]


def repair(place: CheckpointStorage) -> RepairedJournal:
    """Recreate lost or damaged entries of the journal, and report each; a run that is saving there restarts.

    Raises JobStorageError.
    """
    from elasticctl_store.checkpoints import repair as journals
    from elasticctl_store.checkpoints.retention import take_over

    with storage_errors():
        writer = take_over(place.storage)
        rebuilt = journals.rebuild(place.storage, writer, everything=True)
    for commit in rebuilt.commits:
        place.observer.report(f"{place.name}: step {commit.step} is listed again")
    return RepairedJournal(writer, list_checkpoints(place), rebuilt.rejected)


def report_remaining_damage(place: CheckpointStorage, journal: RepairedJournal) -> tuple[int, bool]:
    """Report what stays damaged after a repair; returns how many checkpoints do, and whether all is well."""
    damaged = [finding for finding in journal.listed if finding.damage]
    for finding in damaged:
        report_damage(place, finding)
    for line in journal.rejected:
        place.observer.report(f"{place.name}: not listed: {line}")
    traces = () if journal.listed or journal.rejected else _find_traces(place, journal.writer)
    return len(damaged), not (damaged or journal.rejected or traces)


def refuse_to_start_over(place: CheckpointStorage, journal: RepairedJournal) -> None:
    """Raise UsageError if a checkpoint is intact, from which the job continues."""
    seen = check_until_intact(place, journal.listed)
    if seen and not seen[-1].damage and seen[-1].commit is not None:
        step = seen[-1].commit.step
        raise UsageError(f"step {step} is intact, and {place.name} continues from it. FIX: leave out --start-over")


def start_over(place: CheckpointStorage, journal: RepairedJournal) -> bool:
    """Delete all checkpoints, so that the job starts at step 0; False if something keeps it from that."""
    from elasticctl_store.checkpoints import repair as journals

    with storage_errors():
        journals.start_over(place.storage, journal.writer)
    _record_deletion(place, "all")
    return not _find_traces(place, journal.writer)


def _find_traces(place: CheckpointStorage, writer: CommitWriter) -> list[str]:
    """Return, and report, what keeps a run from starting at step 0 where no checkpoint is listed."""
    from elasticctl_store.checkpoints import repair as journals

    with storage_errors():
        found = journals.find_traces(place.storage, writer.generation.position)
    for line in found:
        place.observer.report(f"{place.name}: a trace of a checkpoint: {line}")
    return found


def _record_deletion(place: CheckpointStorage, deleted: str) -> None:
    """Record the deletion in the audit log, and on the job if there is one."""
    from elasticctl.cluster import audit_log

    if place.target is None:
        audit_log.record_locally("delete checkpoints", "storage", place.storage.url, was=deleted)
    else:
        audit_log.record_deleted_checkpoints(place.target.cluster, place.target.namespace, place.name, deleted)
