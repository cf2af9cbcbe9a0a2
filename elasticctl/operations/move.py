"""The move of a job to another place, as a transaction: whenever it is interrupted, at most one place can train.

The journals decide which one, not the clusters. Before anything is copied, the target's journal is held, so that no
other run can take it over; then a single write closes the source's for good. Before that write, the job can only
continue here, and after it only there. The job is created there afterwards, so an earlier interruption leaves no job
that could be started.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elasticctl.api.errors import (
    ClusterError,
    ConflictError,
    ElasticctlError,
    JobStorageError,
    NotFoundError,
    UsageError,
)
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import (
    ANNOTATION_MOVED_FROM,
    ANNOTATION_MOVED_TO,
    ANNOTATION_MOVING_FROM,
    ANNOTATION_MOVING_TO,
    ElasticJob,
)
from elasticctl.api.text import plural, size_text, span
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.job_storages import open_job_storage
from elasticctl.operations.checkpoints import CheckpointStorage, report_damage, storage_errors
from elasticctl.operations.moved_manifest import (
    JobLocation,
    moved_manifest,
    storage_patch,
    workspace_of,
    workspaces_next_to,
)
from elasticctl.operations.observer import Observer
from elasticctl.operations.storage_urls import choose_storage
from elasticctl.operations.target import ENDED, Target, live_pods
from elasticctl_store.checkpoints import commits, run_records, transfer, verify
from elasticctl_store.checkpoints.retention import take_over
from elasticctl_store.checkpoints.transfer import CheckpointObjects, CopyResult
from elasticctl_store.errors import DamagedError, FencedError, MissingError, MovedError, StorageError
from elasticctl_store.storage import Storage
from elasticctl_store.workspace import transfer as workspaces

_POLL_EVERY_S = 0.25
_STOPPED_WITHIN_S = 120.0


class OvertakenError(ConflictError):
    """Another run has taken over the job's storage while it was moved."""


def move(source: Target, target: Target, manifest: Manifest, storage: str = "") -> bool:
    """Continue a job in another place, with its state at the URL `storage`, or in a new place of that context's.

    `target` is `source` itself if only the state moves. Returns False if the job has been moved there before. After an
    error, the same call continues from where it came to.
    """
    job = ElasticJob.from_manifest(manifest)
    if _is_already_moved(job, target):
        return False
    if job.moving_from:
        raise ConflictError(describe_unfinished(job))
    _plan_move(source, target, manifest, storage).run(manifest)
    return True


def describe_unfinished(job: ElasticJob) -> str:
    """A sentence about a job's unfinished move, with the commands that end it."""
    here, _, to = job.moving_from.partition(" ")
    if here:
        return (
            f"the move of {job.name} from context {here} is not finished. FIX: finish it with `elasticctl move "
            f"{job.name} --context {here} --to {to}`, or start it here with `elasticctl resume {job.name} --here`"
        )
    there, _, _ = job.moving_to.partition(" ")
    return (
        f"the move of {job.name} to context {there} is not finished. FIX: finish it with `elasticctl move {job.name} "
        f"--to {there}`, or cancel it with `elasticctl resume {job.name} --here`"
    )


def abandon(job: ElasticJob, observer: Observer) -> None:
    """Abandon an unfinished move; the job stays where it is. Raises ConflictError if the move can only be finished."""
    if not job.moving_to:
        return  # it has arrived, and is nowhere else
    there, _, url = job.moving_to.partition(" ")
    with storage_errors():
        here = open_job_storage(hardware(job).storage)
        try:
            take_over(here)  # a move that still runs cannot close it any more
        except MovedError as e:
            raise ConflictError(f"{e}. FIX: finish the move with `elasticctl move {job.name} --to {there}`") from e
    discard_leftovers(here, url, observer)


def abandon_of_deleted_job(job: ElasticJob, observer: Observer) -> None:
    """End the unfinished move of a deleted job, which can then not be created at the target. Reports leftovers."""
    there, _, url = job.moving_to.partition(" ")
    try:
        abandon(job, observer)
    except ConflictError:
        observer.report(
            f"{job.name}: its state had been moved to {url} already; it stays there, and nothing runs in {there}"
        )
    except JobStorageError as e:
        observer.report(f"{job.name}: what its move to {there} has copied to {url} stays there: {e}")


def discard_leftovers(here: Storage, url: str, observer: Observer, typed: str = "") -> None:
    """Delete what an ended move has copied to `url`, if there is nothing else; reports a failure."""
    try:
        transfer.discard_copies(here, open_job_storage(url, typed=typed))
    except StorageError as e:
        observer.report(f"what was copied to {url} stays there: {e}")


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a job. Each step can be repeated.

    `uid` is the old job's, `typed` the URL on the command line, or blank; `begun` is the URL that an earlier attempt
    copied to, and `begun_to` its context, or blank.
    """

    source: Target
    target: Target
    old: JobLocation
    new: JobLocation
    uid: str
    typed: str
    begun: str = ""
    begun_to: str = ""

    def run(self, manifest: Manifest) -> None:
        """Move the job. An error says how far it came; the same command continues from there."""
        name = manifest["metadata"]["name"]
        with storage_errors():
            here, there = (open_job_storage(place.url, typed=self.typed) for place in (self.old, self.new))
            if here.url == there.url:
                raise UsageError(f"--storage {here.url} is where the job's state already is")
            moved = commits.moved_to(here)
        to = self.begun_to or self.new.context.name  # where there may be a job by now
        if moved is not None and (moved.to, to) != (there.url, self.new.context.name):
            raise JobStorageError(
                f"{self.old.url} has been moved to {moved.to}. FIX: finish that move with `elasticctl move {name} --to "
                f"{to} --storage '{moved.to}'`"
            )
        self._observer.report(
            f"{name}: from {self.old.context.name} ({here.url}) to {self.new.context.name} ({there.url})"
        )
        if moved is None:
            made = self._manifest_there(manifest)
            self._check(here, there, manifest, made)
            with self._still_here(name):
                self._stop(name)
                self._copy_state(name, here, there, manifest)
        with self._only_there(name):
            with storage_errors():
                transfer.release_target(here, there)
            self._start_there(name, manifest)
        self._observer.report(f"{name}: continues in {self.new.context.name}, with its state in {there.url}")

    @property
    def _observer(self) -> Observer:
        return self.source.observer

    @property
    def _in_place(self) -> bool:
        return self.source is self.target

    def _manifest_there(self, manifest: Manifest) -> Manifest | None:
        """The job as it will be created; None if it stays in its place."""
        return None if self._in_place else moved_manifest(manifest, self.old, self.new)

    def _check(self, here: Storage, there: Storage, manifest: Manifest, made: Manifest | None) -> None:
        """Refuse a move that cannot be completed, while the job still runs."""
        job = ElasticJob.from_manifest(manifest)
        if job.status.phase.terminal:
            raise _ended_error(job.name, job.status.phase.value)
        with storage_errors():
            transfer.check_target(here, there)
            if job.status.checkpoint.step is None and transfer.find_newest(here) is None:
                raise UsageError(f"{job.name} has committed no checkpoint in {here.url} yet: there is nothing to move")
        if made is not None and self._find_there(made) is None:
            self.target.cluster.create_job(made, dry_run=True)
        with storage_errors():
            transfer.check_writable(there)

    def _find_there(self, made: Manifest) -> Manifest | None:
        """The job in its new place, if an earlier attempt created it. Raises ConflictError for another of that name."""
        name = made["metadata"]["name"]
        try:
            found = self.target.cluster.get_job(self.new.namespace, name)
        except NotFoundError:
            return None
        if at(found, "metadata", "uid") == self.uid:
            names = f"{self.old.context.name} and {self.new.context.name}"
            here = f"--to {self.old.context.name} --storage URL"
            raise UsageError(f"the contexts {names} lead to the same place: {here} moves the state alone")
        storage = hardware(ElasticJob.from_manifest(found)).storage
        if at(found, "metadata", "annotations", ANNOTATION_MOVED_FROM) != self.old.mark or storage != self.new.url:
            kept = f", with its state in {storage}" if storage else ""
            raise ConflictError(
                f"there is another job {name} in context {self.new.context.name}{kept}. FIX: delete that one first"
            )
        return found

    def _stop(self, name: str) -> None:
        """Suspend the job, which saves a last checkpoint, and wait until no worker is left."""
        cluster, namespace = self.source.cluster, self.old.namespace
        mark = {"annotations": {ANNOTATION_MOVING_TO: self.new.mark}}
        manifest = cluster.patch_job(namespace, name, {"metadata": mark, "spec": {"suspend": True}})
        grace = at(manifest, "spec", "replicaSpecs", "Worker", "template", "spec", "terminationGracePeriodSeconds")
        limit_s = _STOPPED_WITHIN_S + (grace if isinstance(grace, int) else 30)
        self._observer.report(f"{name}: its workers save a last checkpoint and stop")
        deadline = time.monotonic() + limit_s
        while True:
            phase = at(cluster.get_job(namespace, name), "status", "phase")
            live = live_pods(cluster, namespace, name)
            if phase == "Suspended" and not live:
                return
            if phase in ENDED:
                raise _ended_error(name, phase)
            if time.monotonic() > deadline:
                raise ClusterError(f"{plural(len(live), 'worker')} of {name} did not stop within {span(limit_s)}")
            time.sleep(_POLL_EVERY_S)

    def _copy_state(self, name: str, here: Storage, there: Storage, manifest: Manifest) -> None:
        """Hold the target's journal, copy, and close the journal here; from then on the job can only continue there."""
        with storage_errors():
            writer = take_over(here)  # a run that is still alive can no longer commit
            if self.begun not in ("", self.new.url):
                discard_leftovers(here, self.begun, self._observer, self.typed)
            transfer.hold_target(here, there, writer.generation.position)
            load, carried = self._copy_newest(name, here, there)
            run_records.copy_records(here, there)
            self._copy_workspace(manifest)
        sent = plural(carried.sent, "object") + (f" sent, {carried.found} were there" if carried.found else " sent")
        self._observer.report(f"{name}: step {load.commit.step} copied: {sent}, {size_text(load.size_bytes)}")
        with storage_errors():
            try:
                writer.close(there.url)
            except FencedError as e:
                raise self._overtaken(name, here, there) from e

    def _overtaken(self, name: str, here: Storage, there: Storage) -> OvertakenError:
        """The error if the journal was not closed; deletes the copy, unless another move goes to the same place."""
        moved = commits.moved_to(here)
        try:
            job = ElasticJob.from_manifest(self.source.cluster.get_job(self.old.namespace, name))
        except NotFoundError:
            discard_leftovers(here, self.new.url, self._observer, self.typed)
            return OvertakenError(f"{name} was not moved: it was deleted meanwhile")
        goes_there = job.moving_to == self.new.mark if moved is None else moved.to == there.url
        if not goes_there:
            discard_leftovers(here, self.new.url, self._observer, self.typed)
        if moved is not None:
            return OvertakenError(f"{name} was not moved by this command: another move has taken it to {moved.to}")
        return OvertakenError(
            f"{name} was not moved: it was resumed here meanwhile, or another move of it was begun. FIX: see which with"
            f" `elasticctl status {name}`"
        )

    def _copy_newest(self, name: str, here: Storage, there: Storage) -> tuple[CheckpointObjects, CopyResult]:
        """Copy the newest intact checkpoint, and report those that are passed over."""
        place = CheckpointStorage(name, here, running=False, observer=self._observer)
        for load in transfer.newest_first(here, lambda finding: report_damage(place, finding)):
            try:
                with self._observer.transfer("copying", load.size_bytes) as on_bytes:
                    return load, transfer.copy_checkpoint(here, there, load, on_bytes)
            except (DamagedError, MissingError):
                taken = verify.CheckedCommit(load.commit.position, load.commit)
                found = verify.check(here, taken, lambda count: None)
                if found is not None and not found.damage:
                    raise  # the other storage is to blame
                if found is not None:
                    report_damage(place, found)
        raise JobStorageError(f"{here.url}: there is no intact checkpoint to continue from")

    def _copy_workspace(self, manifest: Manifest) -> None:
        url, digest = workspace_of(manifest)
        if url:
            here, there = (
                open_job_storage(place, typed=self.typed) for place in (url, workspaces_next_to(self.new.url))
            )
            workspaces.copy_workspace(here, there, digest)

    def _start_there(self, name: str, manifest: Manifest) -> None:
        """Start the job in its new place, and note that on the old one."""
        made = self._manifest_there(manifest)
        if made is None:
            patch = storage_patch(manifest, self.old, self.new)
            patch["metadata"]["annotations"][ANNOTATION_MOVING_TO] = None
            self.source.cluster.patch_job(self.old.namespace, name, patch)
            return
        if self._find_there(made) is None:
            self.target.cluster.create_job(made)
        start = {"metadata": {"annotations": {ANNOTATION_MOVING_FROM: None}}, "spec": {"suspend": False}}
        self.target.cluster.patch_job(self.new.namespace, name, start)
        word = {ANNOTATION_MOVING_TO: None, ANNOTATION_MOVED_TO: self.new.mark}
        patch = {"metadata": {"annotations": word}, "spec": {"suspend": True}}
        self.source.cluster.patch_job(self.old.namespace, name, patch)

    @contextmanager
    def _still_here(self, name: str) -> Iterator[None]:
        """The error with a note that the job is still in its old place."""
        try:
            yield
        except OvertakenError:
            raise
        except (ElasticctlError, KeyboardInterrupt):
            again = f"Next: repeat the move, or: elasticctl resume {name} --here --context {self.old.context.name}"
            self._observer.report(f"{name} is still in {self.old.context.name}, suspended. {again}")
            raise

    @contextmanager
    def _only_there(self, name: str) -> Iterator[None]:
        """The error with a note that the job can only continue in its new place."""
        try:
            yield
        except (ElasticctlError, KeyboardInterrupt):
            self._observer.report(
                f"{name} is in {self.new.url}, and can continue only from there. Next: repeat the"
                " move to start it there"
            )
            raise


def _ended_error(name: str, phase: str) -> ConflictError:
    return ConflictError(f"{name} has ended ({phase}) and cannot be moved. FIX: run it again with `elasticctl rerun`")


def _is_already_moved(job: ElasticJob, target: Target) -> bool:
    """True if this job has already been moved there. Raises ConflictError if it was moved elsewhere."""
    context, _, url = job.moved_to.partition(" ")
    if not context:
        return False
    if context != target.context.name:
        raise ConflictError(
            f"{job.name} has been moved to context {context}. FIX: move it from there, with --context {context}"
        )
    target.observer.report(f"{job.name} has been moved to context {context} already, with its state in {url}")
    return True


def _plan_move(source: Target, target: Target, manifest: Manifest, storage: str) -> Move:
    """Check everything that can be known beforehand; nothing has been changed if it fails."""
    job = ElasticJob.from_manifest(manifest)
    old = JobLocation(source.context, source.namespace, hardware(job).storage)
    if not old.url:
        raise UsageError(f"{job.name} names no storage, so it has no checkpoint to continue from elsewhere")
    context, _, begun = str(at(manifest, "metadata", "annotations", ANNOTATION_MOVING_TO) or "").partition(" ")
    in_place = target is source
    if begun and not storage and context == target.context.name:
        url = begun  # where an earlier attempt has copied to
    elif in_place and not storage:
        raise UsageError(
            f"{job.name} is already in context {context or old.context.name}. FIX: give --storage, or another --to"
        )
    else:
        url = choose_storage(storage, target.context).url_for(job.name)
    place = JobLocation(target.context, target.namespace, url)
    return Move(source, target, old, place, job.uid, storage, begun, context if begun else "")
