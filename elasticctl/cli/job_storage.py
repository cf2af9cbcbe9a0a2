"""The checkpoints and workspaces in the storage of a job: find, select, delete and print them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import JobStorageError, NotFoundError, UsageError
from elasticctl.api.podtemplate import WORKSPACE_VARIABLE, hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import quote, span
from elasticctl.cli.framework.options import Where, check_near_url
from elasticctl.cli.framework.output import Table, console, say
from elasticctl_store import storage as storages
from elasticctl_store.errors import DamagedError, MissingError, TrainError
from elasticctl_store.storage import Storage
from elasticctl_store.workspace import transfer

if TYPE_CHECKING:
    from elasticctl_store.checkpoints.entries import Commit, Retention
    from elasticctl_store.checkpoints.verify import CheckedCommit


_COLUMNS = ("STEP", "EPOCH", "AGE", "SIZE", "RANKS", "STATE")
_WIDE = ("NUMBER", "GENERATION", "METRICS")


@dataclass(frozen=True, slots=True)
class JobStorage:
    """The storage of a job, or one named by its URL. `running`: a run may be saving there.

    `script_saves_to` is the URL that the job's ranks report saving to; empty if none has reported one.
    """

    name: str
    storage: Storage
    running: bool
    of_job: bool = False
    script_saves_to: str = ""

    @property
    def elsewhere(self) -> str:
        """A hint at the URL of checkpoints elsewhere, which is not opened unasked: a job could name any."""
        if self.script_saves_to in ("", self.storage.url):
            return ""
        return f": its script saves to {quote(self.script_saves_to)}. FIX: give that URL in place of {self.name}"


Check = Callable[[JobStorage, "CheckedCommit"], "CheckedCommit | None"]
"""Reads a checkpoint, and returns the finding with the damage that it has met; None for one that is gone."""


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn the training library's errors into ours."""
    try:
        yield
    except TrainError as e:
        raise JobStorageError(str(e)) from e


def find_storage(wanted: str, where: Where, *, whole: bool = False) -> JobStorage:
    """The storage of a job of this name, or at this URL or path. Raises UsageError for a job without one.

    `whole` is as in `Target.find`, for deletions.
    """
    check_near_url(wanted)
    if "://" in wanted or wanted.startswith((".", "/", "~")):
        with storage_errors():
            return JobStorage(wanted, storages.open(wanted, storages.AT_A_TERMINAL), running=True)
    from elasticctl.cli.framework.target import reach
    from elasticctl.cluster.job_storages import open_job_storage

    job = ElasticJob.from_manifest(reach(where).find(wanted, whole=whole))
    url = hardware(job).storage
    if not url:
        raise UsageError(f"{job.name} has no storage. FIX: give the URL of its checkpoints")
    with storage_errors():
        kept, said = open_job_storage(url), job.status.checkpoint.url
        return JobStorage(job.name, kept, not job.status.phase.terminal, of_job=True, script_saves_to=said)


def list_checkpoints(place: JobStorage) -> list[CheckedCommit]:
    """All checkpoints of a storage, newest first. Raises StorageError."""
    from elasticctl_store.checkpoints import verify

    with storage_errors():
        return list(verify.findings(place.storage))


def said_of_unlisted(place: JobStorage) -> str:
    """What may be a lost checkpoint, for a storage that lists none; empty if nothing is. Raises JobStorageError."""
    from elasticctl_store.checkpoints import repair

    with storage_errors():
        found = repair.find_unlisted(place.storage)
    if not found:
        return ""
    fix = f"FIX: unless a run is saving there, list it again: elasticctl checkpoints repair {place.name}"
    return f", but there may be a lost one: {repair.name_first(found)}. {fix}"


def check_in_full(place: JobStorage, finding: CheckedCommit) -> CheckedCommit | None:
    """Read all of a checkpoint and return the finding; None if it was deleted meanwhile. Raises JobStorageError."""
    from elasticctl_store.checkpoints import verify

    if finding.commit is None or finding.damage:
        return finding
    doing, size_bytes = f"reading step {finding.commit.step}", finding.commit.size_bytes
    with storage_errors(), progress_bar(doing, size_bytes) as on_bytes:
        return verify.check(place.storage, finding, on_bytes)


def check_until_intact(
    place: JobStorage, found: Iterable[CheckedCommit], check: Check | None = None
) -> list[CheckedCommit]:
    """Read the checkpoints, newest first, up to the first intact one, and return the findings in order.

    The last of them is intact, unless none is. `check` reads one, in place of `check_in_full`. Raises JobStorageError.
    """
    seen: list[CheckedCommit] = []
    for finding in found:
        checked = (check or check_in_full)(place, finding)
        if checked is None:
            continue
        seen.append(checked)
        if checked.commit is not None and not checked.damage:
            break
    return seen


def pick_checkpoint(place: JobStorage, step: int | None, check: Check | None = None) -> Commit:
    """The newest intact checkpoint, or the newest of a step. Reports those that it passes over.

    Reads no more of a long list than necessary. `check` as for `check_until_intact`. Raises NotFoundError,
    JobStorageError.
    """
    from elasticctl_store.checkpoints import verify

    listed: list[CheckedCommit] = []

    def wanted() -> Iterator[CheckedCommit]:
        for finding in verify.findings(place.storage):
            listed.append(finding)
            if step is None or (finding.commit is not None and finding.commit.step == step):
                yield finding

    with storage_errors():
        seen = check_until_intact(place, wanted(), check)
    last = seen[-1] if seen else None
    if last is None or last.commit is None or last.damage:
        of_step = "" if step is None else f" of step {step}"
        which = "no intact checkpoint" if step is None or last is not None else "no checkpoint"
        why = f" ({last.damage})" if last is not None else ""
        raise NotFoundError(f"{which}{of_step} exists{why}{_others(listed)}")
    for finding in seen[:-1]:
        say_damage(place, finding)
    if len(seen) > 1:
        say(f"{place.name}: taking step {last.commit.step}, the newest that is intact")
    return last.commit


def say_damage(place: JobStorage, finding: CheckedCommit) -> None:
    """Report what is wrong with a checkpoint."""
    what = f"step {finding.commit.step}" if finding.commit is not None else "a checkpoint"
    say(f"{place.name}: {what} is damaged: {finding.damage}")


def checkpoints_of_step(found: Sequence[CheckedCommit], step: int) -> list[Commit]:
    """The checkpoints of a step, intact or not, newest first. Raises NotFoundError if there are none."""
    wanted = [finding.commit for finding in found if finding.commit is not None and finding.commit.step == step]
    if not wanted:
        raise NotFoundError(f"no checkpoint of step {step} exists{_others(found)}")
    return wanted


def one_of_step(found: Sequence[CheckedCommit], step: int, number: int | None) -> Commit:
    """The checkpoint of a step, intact or not; if there are several, the one with this number.

    Raises NotFoundError, or UsageError if there are several and no number is given.
    """
    there = checkpoints_of_step(found, step)
    wanted = [commit for commit in there if number in (None, commit.number)]
    numbers = ", ".join(str(commit.number) for commit in there)
    if not wanted:
        raise NotFoundError(f"no checkpoint of step {step} has number {number}; there are: {numbers}")
    if len(wanted) > 1:
        raise UsageError(
            f"there are {len(wanted)} checkpoints of step {step}, with the numbers {numbers}. FIX: say which with"
            " --number; `elasticctl checkpoints list -o wide` shows them"
        )
    return wanted[0]


def _others(found: Iterable[CheckedCommit]) -> str:
    """`; there are: 40, 30`: the steps that have checkpoints; "" if none has."""
    listed = [str(finding.commit.step) for finding in found if finding.commit is not None]
    return f"; there are: {', '.join(listed)}" if listed else ""


def newest(found: Sequence[CheckedCommit]) -> Commit | None:
    """The newest checkpoint, intact or not; deleting it stops a run that is saving there."""
    return found[0].commit if found else None


def choose_doomed(
    place: JobStorage, found: Sequence[CheckedCommit], keep: Retention, *, unread: bool = False
) -> list[Commit]:
    """The checkpoints that `keep` does not keep, oldest first. Those to keep are read first: damaged ones do not count.

    With `unread`, they are only checked briefly. Raises JobStorageError.
    """
    from elasticctl_store.checkpoints.entries import commits_to_delete

    found, read = list(found), set[int]()
    while True:
        whole = [finding.commit for finding in found if finding.commit is not None and not finding.damage]
        doomed = commits_to_delete(whole, keep)
        going = {commit.position for commit in doomed}
        staying = [
            (index, finding)
            for index, finding in enumerate(found)
            if finding.commit is not None and not finding.damage and finding.position not in going | read
        ]
        if unread or not doomed or not staying:
            return doomed
        index, finding = staying[0]
        checked = check_in_full(place, finding)
        found[index : index + 1] = [checked] if checked is not None else []
        read.add(finding.position)
        if checked is not None and checked.damage:
            say_damage(place, checked)


def delete_checkpoints(place: JobStorage, doomed: Sequence[Commit], found: Sequence[CheckedCommit]) -> None:
    """Delete checkpoints, oldest first.

    If the newest entry of the journal is among them, the URL is taken over first, since its position must never be free
    while a run could fill it. That stops such a run. Raises JobStorageError.
    """
    from elasticctl_store.checkpoints import commits, retention

    with storage_errors():
        # A moved job's journal can never be taken again.
        if newest(found) in doomed and commits.moved_to(place.storage) is None:
            retention.take_over(place.storage)
        left = [finding.commit for finding in found if finding.commit is not None]
        for commit in sorted(doomed, key=lambda commit: commit.position):
            left.remove(commit)
            commits.delete_commit(place.storage, commit, left)
        retention.delete_unneeded_bases(place.storage, doomed)


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
        what = (str(commit.step), str(commit.epoch), span(now - commit.at), size(commit.size_bytes), ranks)
        rows.append((*what, *more, state))
    return Table((*_COLUMNS[:-1], *(_WIDE if wide else ()), _COLUMNS[-1]), rows, wraps=True)


def checkpoint_data(finding: CheckedCommit) -> dict[str, Any]:
    """A checkpoint for programs."""
    from elasticctl.api.codec import to_rfc3339

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


def size(count: int) -> str:
    """Bytes in a readable unit: 812 B, 1.4 MB, 3.2 GB."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


@contextmanager
def progress_bar(doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress on a terminal; yields a function to call with the number of additional bytes."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console(sys.stderr), transient=True) as progress:
        task, lock = progress.add_task(doing, total=total_bytes), threading.Lock()

        def advance(count: int) -> None:
            with lock:
                progress.advance(task, count)

        yield advance


def target_file(name: str, force: bool) -> Path:
    """The file to write. Raises UsageError if it exists, unless `force`, or if it is a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise UsageError(f"{quote(name)} is a folder. FIX: name a file, such as {path / 'model.safetensors'}")
    if path.exists() and not force:
        raise UsageError(f"{quote(name)} exists. FIX: add --force to replace it")
    return path


def _metrics(commit: Commit) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(commit.metrics.items()))


KEEP_YOUNGER_S = 3600.0


def workspace_digests(manifests: Iterable[Manifest]) -> set[str]:
    """The digests of the workspaces that jobs name."""
    references = (
        hardware(ElasticJob.from_manifest(manifest)).env.get(WORKSPACE_VARIABLE, "") for manifest in manifests
    )
    return {reference.rpartition("#")[2] for reference in references if reference}


def delete_unused_workspaces(folder: Path, wanted: Collection[str], now: float) -> tuple[int, int]:
    """Delete unused workspaces below `folder`; returns their number and the bytes of their contents.

    `wanted` are the digests that jobs name; `now` in seconds since the epoch. Raises JobStorageError.
    """
    with storage_errors():
        place = storages.open(str(folder), storages.AT_A_TERMINAL)
        heads = {transfer.newest(place, origin) for origin in transfer.names(place, transfer.HEADS)}
        gone = [digest for digest in _old(place, folder, transfer.LISTINGS, now) if digest not in heads | set(wanted)]
        packs = _old(place, folder, transfer.PACKS, now)
        place.delete([f"{transfer.LISTINGS}/{digest}" for digest in gone])
        used = _packs_of(place, transfer.names(place, transfer.LISTINGS))
        doomed = [folder / transfer.PACKS / pack for pack in packs if pack not in used]
        freed_bytes = sum(path.stat().st_size for path in doomed)
        place.delete([f"{transfer.PACKS}/{path.name}" for path in doomed])
    return len(gone), freed_bytes


def _old(place: Storage, folder: Path, kind: str, now: float) -> list[str]:
    return [
        name for name in transfer.names(place, kind) if now - (folder / kind / name).stat().st_mtime > KEEP_YOUNGER_S
    ]


def _packs_of(place: Storage, digests: Iterable[str]) -> set[str]:
    used: set[str] = set()
    for digest in digests:
        try:
            places = transfer.find(place, digest).places
        except (DamagedError, MissingError):
            continue  # nobody could unpack it either
        used |= {piece.pack for pieces in places.values() for piece in pieces}
    return used
