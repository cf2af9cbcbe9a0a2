"""The checkpoints in the storage of a job: list, verify, choose and fetch them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import JobStorageError, NotFoundError, UsageError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import quote
from elasticctl.operations.observer import SILENT, Observer
from elasticctl.operations.storage_urls import check_near_url
from elasticctl.operations.target import Target
from elasticctl_store import storage as storages
from elasticctl_store.errors import DamagedError, MissingError, TrainError
from elasticctl_store.storage import Storage

if TYPE_CHECKING:
    from elasticctl_store.checkpoints.entries import Commit
    from elasticctl_store.checkpoints.verify import CheckedCommit


@dataclass(frozen=True, slots=True)
class CheckpointStorage:
    """The storage of a job, or one named by its URL. `running`: a run may be saving there.

    `target` is where the job is; None for a URL. `script_saves_to` is the URL that the job's ranks report saving to;
    empty if none has reported one.
    """

    name: str
    storage: Storage
    running: bool
    target: Target | None = None
    script_saves_to: str = ""
    observer: Observer = SILENT

    @property
    def elsewhere(self) -> str:
        """A hint at the URL of checkpoints elsewhere, which is not opened unasked: a job could name any."""
        if self.script_saves_to in ("", self.storage.url):
            return ""
        return f": its script saves to {quote(self.script_saves_to)}. FIX: give that URL in place of {self.name}"


Check = Callable[[CheckpointStorage, "CheckedCommit"], "CheckedCommit | None"]
"""Reads a checkpoint, and returns the finding with the damage that it has met; None for one that is gone."""


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn the training library's errors into ours."""
    try:
        yield
    except TrainError as e:
        raise JobStorageError(str(e)) from e


def is_storage(wanted: str) -> bool:
    """True for the URL or the path of a storage, False for the name of a job. Raises UsageError for a misspelt URL."""
    check_near_url(wanted)
    return "://" in wanted or wanted.startswith((".", "/", "~"))


def open_storage(url: str, observer: Observer = SILENT) -> CheckpointStorage:
    """The storage at a URL or a path. Raises JobStorageError."""
    with storage_errors():
        return CheckpointStorage(url, storages.open(url, storages.AT_A_TERMINAL), running=True, observer=observer)


def storage_of(target: Target, found: Manifest) -> CheckpointStorage:
    """The storage of a job. Raises UsageError for a job without one, JobStorageError."""
    from elasticctl.cluster.job_storages import open_job_storage

    job = ElasticJob.from_manifest(found)
    url = hardware(job).storage
    if not url:
        raise UsageError(f"{job.name} has no storage. FIX: give the URL of its checkpoints")
    with storage_errors():
        opened = open_job_storage(url)
    said = job.status.checkpoint.url
    return CheckpointStorage(job.name, opened, not job.status.phase.terminal, target, said, target.observer)


def list_checkpoints(place: CheckpointStorage) -> list[CheckedCommit]:
    """All checkpoints of a storage, newest first. Raises StorageError."""
    from elasticctl_store.checkpoints import verify

    with storage_errors():
        return list(verify.findings(place.storage))


def unlisted_hint(place: CheckpointStorage) -> str:
    """What may be a lost checkpoint, for a storage that lists none; empty if nothing is. Raises JobStorageError."""
    from elasticctl_store.checkpoints import repair

    with storage_errors():
        found = repair.find_unlisted(place.storage)
    if not found:
        return ""
    fix = f"FIX: unless a run is saving there, list it again: elasticctl checkpoints repair {place.name}"
    return f", but there may be a lost one: {repair.name_first(found)}. {fix}"


def verify_checkpoints(place: CheckpointStorage, step: int | None = None) -> tuple[list[CheckedCommit], int]:
    """Read every byte of all checkpoints, or those of a step; returns the findings, and how many are gone meanwhile.

    Raises NotFoundError if there are none, JobStorageError.
    """
    found = list_checkpoints(place)
    if step is not None:
        wanted = checkpoints_of_step(found, step)
        found = [finding for finding in found if finding.commit in wanted]
    if not found:
        nothing = f"{place.name}: there are no checkpoints at {place.storage.url} to verify"
        raise NotFoundError(nothing + (unlisted_hint(place) or place.elsewhere))
    checked = [check_in_full(place, finding) for finding in found]
    left = [finding for finding in checked if finding is not None]
    return left, len(checked) - len(left)


def check_in_full(place: CheckpointStorage, finding: CheckedCommit) -> CheckedCommit | None:
    """Read all of a checkpoint and return the finding; None if it was deleted meanwhile. Raises JobStorageError."""
    from elasticctl_store.checkpoints import verify

    if finding.commit is None or finding.damage:
        return finding
    doing, size_bytes = f"reading step {finding.commit.step}", finding.commit.size_bytes
    with storage_errors(), place.observer.transfer(doing, size_bytes) as on_bytes:
        return verify.check(place.storage, finding, on_bytes)


def check_until_intact(
    place: CheckpointStorage, found: Iterable[CheckedCommit], check: Check | None = None
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


def pick_checkpoint(place: CheckpointStorage, step: int | None, check: Check | None = None) -> Commit:
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
        report_damage(place, finding)
    if len(seen) > 1:
        place.observer.report(f"{place.name}: taking step {last.commit.step}, the newest that is intact")
    return last.commit


def pull(place: CheckpointStorage, path: Path, step: int | None, part: str) -> tuple[Commit, int]:
    """Write a part of the newest intact checkpoint, or of that of a step, to one file.

    Returns the checkpoint and the number of tensors. Raises NotFoundError, JobStorageError.
    """
    from elasticctl_store.checkpoints import verify

    pulled = 0

    def try_pull(place: CheckpointStorage, finding: CheckedCommit) -> CheckedCommit:
        nonlocal pulled
        commit = finding.commit
        if commit is not None and not finding.damage:
            try:
                with place.observer.transfer(f"step {commit.step}", commit.size_bytes) as on_bytes:
                    pulled = verify.pull(place.storage, commit, part, path, on_bytes)
            except (DamagedError, MissingError) as e:
                return dataclasses.replace(finding, damage=str(e))
        return finding

    return pick_checkpoint(place, step, try_pull), pulled


def report_damage(place: CheckpointStorage, finding: CheckedCommit) -> None:
    """Report what is wrong with a checkpoint."""
    what = f"step {finding.commit.step}" if finding.commit is not None else "a checkpoint"
    place.observer.report(f"{place.name}: {what} is damaged: {finding.damage}")


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


def newest_checkpoint(found: Sequence[CheckedCommit]) -> Commit | None:
    """The newest checkpoint, intact or not; deleting it stops a run that is saving there."""
    return found[0].commit if found else None
