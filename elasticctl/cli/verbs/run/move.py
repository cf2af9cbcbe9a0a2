"""`move`: continue a job in another context, or with another storage, from the step at which it was stopped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import (
    ClusterError,
    ConflictError,
    ElasticctlError,
    JobStorageError,
    NotFoundError,
    UsageError,
)
from elasticctl.api.text import plural, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.contexts import complete_context
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, say
from elasticctl.cli.framework.target import Target, reach

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.submit.copies import JobLocation
    from elasticctl.cluster.base import Manifest
    from elasticctl_store.storage import Storage

_POLL_EVERY_S = 0.25
_STOPPED_WITHIN_S = 120.0
_LIVE = ("Pending", "Running", "Unknown")

app = new_app()


@verb(app, "move")
def move(
    *,
    job: options.Job,
    to: Annotated[
        str,
        typer.Option("--to", metavar="CONTEXT", autocompletion=complete_context, help="The context to move it to."),
    ],
    storage: Annotated[
        str, options.text("The storage of its state; by default a new place in that context's.", "URL")
    ] = "",
    where: Where,
) -> None:
    """Continue a job in another context, from the very step at which it stops here.

    Its newest checkpoint is copied and verified; then the job continues there under its name, and never again
    here. With its current context and --storage, only its state moves. After a failure, the same command continues.

    \b
      elasticctl move digits --to gcp
      elasticctl move digits --to local --storage s3://bucket/digits
    """
    from elasticctl.api.spec import ElasticJob

    source = reach(where)
    manifest = source.find(job)
    found = ElasticJob.from_manifest(manifest)
    source = dataclasses.replace(source, namespace=found.namespace)
    target = source if to == source.context.name else reach(Where(to, where.namespace))
    if _is_already_moved(found, target):
        return
    _plan_move(source, target, manifest, storage).run(manifest)
    hint(f"Next: follow it: elasticctl logs -f {found.name} --context {to}")


def _is_already_moved(job: ElasticJob, target: Target) -> bool:
    """Has this job been moved there already? ConflictError when it is elsewhere."""
    context, _, url = job.moved_to.partition(" ")
    if not context:
        return False
    if context != target.context.name:
        raise ConflictError(
            f"{job.name} has been moved to context {context}. FIX: move it from there, with --context {context}"
        )
    say(f"{job.name} has been moved to context {context} already, with its state in {url}")
    return True


def _plan_move(source: Target, target: Target, manifest: Manifest, storage: str) -> Move:
    """Everything that can be known beforehand is checked here: nothing has been done when it fails."""
    from elasticctl.api.objects import at
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ANNOTATION_MOVING_TO, ElasticJob
    from elasticctl.cli.submit.copies import JobLocation
    from elasticctl.cli.submit.draft import choose_storage

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
        url = choose_storage(job.name, storage, target.context)
    if not url:
        raise UsageError(
            f"--storage is needed in context {target.context.name} (FIX: add it, or set it with"
            " `elasticctl config set-context`)"
        )
    return Move(source, target, old, JobLocation(target.context, target.namespace, url), job.uid)


def _ended_error(name: str, phase: str) -> ConflictError:
    return ConflictError(f"{name} has ended ({phase}) and cannot be moved. FIX: run it again with `elasticctl rerun`")


@dataclass(frozen=True, slots=True)
class Move:
    """A job's way from one place to another; `uid` is the old one's. Each step can be done again."""

    source: Target
    target: Target
    old: JobLocation
    new: JobLocation
    uid: str

    def run(self, manifest: Manifest) -> None:
        """Move the job. A failure says where things stand; the same command continues from there."""
        from elasticctl.cli.job_storage import storage_errors
        from elasticctl_store import storage as storages
        from elasticctl_store.checkpoints import commits

        name = manifest["metadata"]["name"]
        with storage_errors():
            here, there = (storages.open(place.url, storages.AT_A_TERMINAL) for place in (self.old, self.new))
            if here.url == there.url:
                raise UsageError(f"--storage {here.url} is where the job's state is already")
            moved = commits.moved_to(here)
        if moved is not None and moved.to != there.url:
            raise JobStorageError(
                f"{self.old.url} has been moved to {moved.to}. FIX: add --storage {moved.to} to continue that move"
            )
        say(f"{name}: from {self.old.context.name} ({here.url}) to {self.new.context.name} ({there.url})")
        if moved is None:
            made = self._made(manifest)
            self._check(here, there, manifest, made)
            with self._still_here(name):
                self._stop(name)
                self._carry(name, here, there, manifest, made)
        with self._only_there(name):
            self._go_on(name, manifest)
        say(f"{name}: continues in {self.new.context.name}, with its state in {there.url}")

    @property
    def _in_place(self) -> bool:
        return self.source is self.target

    def _made(self, manifest: Manifest) -> Manifest | None:
        """The job as it will be created; None where it stays where it is."""
        from elasticctl.cli.submit.copies import moved_manifest

        return None if self._in_place else moved_manifest(manifest, self.old, self.new)

    def _check(self, here: Storage, there: Storage, manifest: Manifest, made: Manifest | None) -> None:
        """Refuse what cannot come to an end while the job still runs."""
        from elasticctl.api.spec import ElasticJob
        from elasticctl.cli.job_storage import storage_errors
        from elasticctl_store.checkpoints import transfer

        job = ElasticJob.from_manifest(manifest)
        if job.status.phase.terminal:
            raise _ended_error(job.name, job.status.phase.value)
        with storage_errors():
            transfer.check_target(there)
            if job.status.checkpoint.step is None and transfer.find_newest(here) is None:
                raise UsageError(f"{job.name} has committed no checkpoint in {here.url} yet: there is nothing to move")
        if made is not None and self._there(made) is None:
            self.target.cluster.create_job(made, dry_run=True)

    def _there(self, made: Manifest) -> Manifest | None:
        """The job in its new place, if an earlier try has made it. ConflictError for another one of that name."""
        from elasticctl.api.objects import at
        from elasticctl.api.spec import ANNOTATION_MOVED_FROM

        name = made["metadata"]["name"]
        try:
            found = self.target.cluster.get_job(self.new.namespace, name)
        except NotFoundError:
            return None
        if at(found, "metadata", "uid") == self.uid:
            names = f"{self.old.context.name} and {self.new.context.name}"
            here = f"--to {self.old.context.name} --storage URL"
            raise UsageError(f"the contexts {names} lead to the same place: {here} moves the state alone")
        if at(found, "metadata", "annotations", ANNOTATION_MOVED_FROM) != self.old.mark:
            raise ConflictError(
                f"there is another job {name} in context {self.new.context.name}. FIX: delete that one first"
            )
        return found

    def _stop(self, name: str) -> None:
        """Suspend the job, with a last commit, and wait until no worker is left."""
        from elasticctl.api.objects import at
        from elasticctl.api.spec import ANNOTATION_MOVING_TO

        cluster, namespace = self.source.cluster, self.old.namespace
        mark = {"annotations": {ANNOTATION_MOVING_TO: self.new.mark}}
        manifest = cluster.patch_job(namespace, name, {"metadata": mark, "spec": {"suspend": True}})
        grace = at(manifest, "spec", "replicaSpecs", "Worker", "template", "spec", "terminationGracePeriodSeconds")
        limit_s = _STOPPED_WITHIN_S + (grace if isinstance(grace, int) else 30)
        say(f"{name}: its workers save a last checkpoint and stop")
        deadline = time.monotonic() + limit_s
        while True:
            phase = at(cluster.get_job(namespace, name), "status", "phase")
            live = [pod for pod in cluster.list_pods(namespace, name) if at(pod, "status", "phase") in _LIVE]
            if phase == "Suspended" and not live:
                return
            if phase in ("Succeeded", "Failed", "Cancelled"):
                raise _ended_error(name, phase)
            if time.monotonic() > deadline:
                raise ClusterError(f"{plural(len(live), 'worker')} of {name} did not stop within {span(limit_s)}")
            time.sleep(_POLL_EVERY_S)

    def _carry(self, name: str, here: Storage, there: Storage, manifest: Manifest, made: Manifest | None) -> None:
        """Copy, create the job there, and close the journal here; from then on it can only go on there."""
        from elasticctl.cli.job_storage import progress_bar, size, storage_errors
        from elasticctl_store.checkpoints import commits, transfer

        with storage_errors():
            writer = commits.CommitWriter.take_over(here)  # whoever still runs cannot commit any more
            load = transfer.find_newest(here)
            if load is None:
                raise JobStorageError(f"{here.url}: there is no whole checkpoint to continue from")
            with progress_bar("copying", load.size_bytes) as on_bytes:
                carried = transfer.copy_checkpoint(here, there, load, on_bytes)
            self._carry_workspace(manifest)
        sent = plural(carried.sent, "object") + (f" sent, {carried.found} were there" if carried.found else " sent")
        say(f"{name}: step {load.commit.step} copied: {sent}, {size(load.size_bytes)}")
        if made is not None and self._there(made) is None:
            self.target.cluster.create_job(made)
        try:
            with storage_errors():
                writer.close(there.url)
        except JobStorageError:
            if made is not None:
                self.target.cluster.delete_job(self.new.namespace, name)  # it must not begin while this one can go on
            raise

    def _carry_workspace(self, manifest: Manifest) -> None:
        from elasticctl.cli.submit.copies import workspace_of, workspaces_beside
        from elasticctl_store import storage as storages
        from elasticctl_store.workspace import transfer

        url, digest = workspace_of(manifest)
        if url:
            here, there = (
                storages.open(place, storages.AT_A_TERMINAL) for place in (url, workspaces_beside(self.new.url))
            )
            transfer.copy_workspace(here, there, digest)

    def _go_on(self, name: str, manifest: Manifest) -> None:
        """Start the job in its new place, and leave word in the old one."""
        from elasticctl.api.spec import ANNOTATION_MOVED_TO, ANNOTATION_MOVING_TO
        from elasticctl.cli.submit.copies import storage_patch

        if self._in_place:
            patch = storage_patch(manifest, self.old, self.new)
            patch["metadata"]["annotations"][ANNOTATION_MOVING_TO] = None
            self.source.cluster.patch_job(self.old.namespace, name, patch)
            return
        made = self._made(manifest)
        if made is not None and self._there(made) is None:
            self.target.cluster.create_job(made)
        self.target.cluster.patch_job(self.new.namespace, name, {"spec": {"suspend": False}})
        word = {ANNOTATION_MOVING_TO: None, ANNOTATION_MOVED_TO: self.new.mark}
        patch = {"metadata": {"annotations": word}, "spec": {"suspend": True}}
        self.source.cluster.patch_job(self.old.namespace, name, patch)

    @contextmanager
    def _still_here(self, name: str) -> Iterator[None]:
        """Say of a failure that the job is where it was."""
        try:
            yield
        except (ElasticctlError, KeyboardInterrupt):
            again = f"Next: repeat the move, or: elasticctl resume {name} --context {self.old.context.name}"
            say(f"{name} is still in {self.old.context.name}, suspended. {again}")
            raise

    @contextmanager
    def _only_there(self, name: str) -> Iterator[None]:
        """Say of a failure that the job can go on in its new place only."""
        try:
            yield
        except (ElasticctlError, KeyboardInterrupt):
            say(
                f"{name} is in {self.new.url}, and can continue only from there. Next: repeat the"
                " move to start it there"
            )
            raise
