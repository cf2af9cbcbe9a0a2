"""Run a job again: a new job with the same command, from step 0 or from a checkpoint of the old job."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.errors import ConflictError, JobStorageError, UsageError
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import hardware, set_variable, worker_container
from elasticctl.api.spec import ANNOTATION_NOTIFY, ANNOTATION_RERUN_OF, GROUP, QUEUE_LABEL, ElasticJob
from elasticctl.api.text import plural, quote
from elasticctl.operations.job_names import check_name, next_name, refuse_taken_name, taken_names
from elasticctl.operations.logs import delete_stored_logs
from elasticctl.operations.option_values import Assignment, assignment
from elasticctl.operations.storage_urls import find_storage_choice, sibling_url
from elasticctl.operations.target import Target
from elasticctl_protocol import variables

if TYPE_CHECKING:
    from elasticctl.operations.workspace.workspace import Workspace

_DELETED_WITHIN_S = 30.0
_POLL_EVERY_S = 0.1
LATEST = "latest"
_RUN_FIELDS = ("suspend", "cancel", "removeWorkers")
"""Fields of a spec that are about one run of the job."""


def step_or_latest(text: str) -> str:
    """A step, or `latest`."""
    if text != LATEST and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{quote(text)} is neither a step nor {LATEST}.")
    return text


@dataclass(frozen=True, slots=True)
class RerunChanges:
    """The changes in the new job; blank: as in the old one, but with a new name and a new place for its state."""

    name: str = ""
    from_checkpoint: Annotated[str | None, step_or_latest] = None
    storage: str = ""
    same_code: bool = False
    settings: Annotated[tuple[Assignment, ...], assignment("PATH=VALUE")] = ()
    notify: str = ""


@dataclass(frozen=True, slots=True)
class RerunPlan:
    """A planned rerun: the old job, the new one, and the folder to send, if its code is sent again."""

    old: Manifest
    made: Manifest
    workspace: Workspace | None
    changes: RerunChanges

    @property
    def replaces(self) -> bool:
        """True if the new job gets the old one's name, and the old one is deleted."""
        name: str = self.old["metadata"]["name"]
        return bool(self.made["metadata"]["name"] == name)


def plan_rerun(target: Target, old: Manifest, changes: RerunChanges) -> RerunPlan:
    """Plan to run a job again. Raises UsageError, NotFoundError for a missing checkpoint."""
    from elasticctl.operations.manifest_changes import with_notifications, with_settings

    made, workspace = _new_manifest(target, old, changes), None
    if not changes.same_code and hardware(ElasticJob.from_manifest(old)).env.get(variables.WORKSPACE):
        from elasticctl.operations.workspace.workspace import renew_workspace  # what packs a folder

        made, workspace = renew_workspace(made, [Path.cwd()], target.observer)
    made = with_settings(made, changes.settings)
    made = with_notifications(made, changes.notify, target.context)
    return RerunPlan(old, made, workspace, changes)


def rerun(target: Target, plan: RerunPlan, *, dry_run: bool = False) -> Manifest:
    """Create the new job, or with `dry_run` only have the cluster check it; returns it as it is stored.

    Raises ConflictError if the name is taken, or if the old job, whose name the new one would get, still runs.
    """
    old, made = ElasticJob.from_manifest(plan.old), plan.made
    if plan.changes.name and not plan.replaces:
        refuse_taken_name(target, made)
    if plan.workspace is not None and not dry_run:
        plan.workspace.send(target.observer)
    if plan.replaces or dry_run:
        checked = _create_dry_run(target, made, plan.replaces)  # before anything is deleted
    if plan.replaces:
        _delete_old(target, old, dry_run=dry_run)
    for line in plan_lines(old, made, plan.changes.from_checkpoint):
        target.observer.report(line)
    return checked if dry_run else _create(target, made, patient=plan.replaces)


def _new_manifest(target: Target, old: Manifest, changes: RerunChanges) -> Manifest:
    """The manifest of the new job."""
    found = ElasticJob.from_manifest(old)
    start = "" if changes.from_checkpoint is None else _start_from(target, found, changes.from_checkpoint)
    name = check_name(changes.name) if changes.name else next_name(original_name(old), taken_names(target))
    before, storage = hardware(found).storage, ""
    if before or changes.storage:
        choice = find_storage_choice(changes.storage, target.context)
        storage = choice.url_for(name) if choice else sibling_url(before, f"{name}-{int(time.time())}")
        if storage == before:
            raise UsageError(f"--storage {storage} belongs to the old job. FIX: give the new one another place")
    return rerun_manifest(old, Rerun(name, storage, start, time.time()))


def _start_from(target: Target, old: ElasticJob, wanted: str) -> str:
    """`URL#STEP` of a checkpoint of the old job. Raises UsageError or NotFoundError if there is none."""
    url = hardware(old).storage
    if not url:
        raise UsageError(f"{old.name} has no storage URL, so it has no checkpoint to start from")
    if not url.startswith("file://") and old.status.checkpoint.step is None:
        raise UsageError(f"{old.name} has committed no checkpoint. FIX: leave out --from-checkpoint to start at step 0")
    _check_there(target, old, url, None if wanted == LATEST else int(wanted))
    if not old.status.phase.terminal:
        target.observer.report(
            f"{old.name} is still {old.status.phase.value}: it may delete that checkpoint before the new job reads it"
        )
    return f"{url}#{wanted}"


def _check_there(target: Target, old: ElasticJob, url: str, step: int | None) -> None:
    """Raise NotFoundError unless the checkpoint exists; it is read in full in a folder, checked briefly in a bucket.

    If this machine may not read a bucket, as the job might, a message says so.
    """
    from elasticctl.cluster.job_storages import open_job_storage
    from elasticctl.operations import checkpoints
    from elasticctl_store.storage import Patience

    if url.startswith("file://"):
        place = checkpoints.open_storage(url, target.observer)
        checkpoints.pick_checkpoint(place, step)
        return
    soon = Patience(tries=3, total_s=10.0, connect_s=5.0, silence_s=15.0)
    try:
        with checkpoints.storage_errors():
            place = checkpoints.CheckpointStorage(
                old.name, open_job_storage(url, soon), running=False, observer=target.observer
            )
        checkpoints.pick_checkpoint(place, step, lambda place, finding: finding)
    except JobStorageError as e:
        target.observer.report(f"{old.name}: this machine cannot check whether that checkpoint exists: {e}")


def plan_lines(old: ElasticJob, made: Manifest, from_checkpoint: str | None) -> Sequence[str]:
    """What will run again, from which step, and what it costs."""
    from elasticctl.api.observed.cost import rate_of
    from elasticctl.operations.prices import plan_line, with_live_spot

    new = ElasticJob.from_manifest(made)
    start = "step 0"
    if from_checkpoint is not None:
        start = f"the newest checkpoint of {old.name}" if from_checkpoint == LATEST else f"its step {from_checkpoint}"
    storage, workers = hardware(new).storage, plural(new.desired, "worker")
    what = f"{new.name}: {old.name} again, {workers}, from {start}" + (f", state in {storage}" if storage else "")
    one = with_live_spot(rate_of(new))
    return (what,) if one is None else (what, plan_line(one, new.desired))


def _create_dry_run(target: Target, made: Manifest, replaces: bool) -> Manifest:
    """The job as the cluster would store it; if its name is still taken, it is checked under another one."""
    name = made["metadata"]["name"]
    stand_in = {**made["metadata"], "name": next_name(name, taken_names(target)) if replaces else name}
    stored = target.cluster.create_job({**made, "metadata": stand_in}, dry_run=True)
    return {**stored, "metadata": {**stored["metadata"], "name": name}}


def _delete_old(target: Target, old: ElasticJob, *, dry_run: bool) -> None:
    """Delete the old job, whose name the new one gets. Raises ConflictError while it runs."""
    if not old.status.phase.terminal:
        phase = old.status.phase.value
        raise ConflictError(
            f"{old.name} is still {phase}. FIX: give the new job another --name, or cancel the old one first"
        )
    kept = hardware(old).storage
    doing = "would be deleted" if dry_run else "is deleted, with its logs"
    target.observer.report(f"the old {old.name} {doing}" + (f"; its checkpoints stay in {kept}" if kept else ""))
    if not dry_run:
        target.cluster.delete_job(target.namespace, old.name)
        delete_stored_logs(old, target.observer)


def _create(target: Target, made: Manifest, *, patient: bool) -> Manifest:
    """Create the job; `patient`: wait until the deleted job's name is free."""
    deadline = time.monotonic() + _DELETED_WITHIN_S
    while True:
        try:
            return target.cluster.create_job(made)
        except ConflictError:
            if not patient or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_EVERY_S)


@dataclass(frozen=True, slots=True)
class Rerun:
    """The changes of a rerun: its name, storage URL ("": none), and starting point (`URL#STEP`; "": step 0)."""

    name: str
    storage: str = ""
    start_from: str = ""
    at: float = 0.0


def rerun_manifest(manifest: Manifest, rerun: Rerun) -> Manifest:
    """The same job as a new object, with the number of workers that it was last scaled to.

    A deadline that has passed `at` the time of the rerun is left out of its goal.
    """
    metadata = manifest["metadata"]
    labels = dict(metadata.get("labels") or {})
    spec = {key: value for key, value in copy.deepcopy(manifest["spec"]).items() if key not in _RUN_FIELDS}
    finish_by = from_rfc3339(at(spec, "goal", "finishBy"))
    if finish_by is not None and finish_by <= rerun.at:
        del spec["goal"]["finishBy"]
        if "budget" not in spec["goal"]:
            del spec["goal"]
    container = worker_container(at(spec, "replicaSpecs", "Worker", "template") or {})
    for variable, value in ((variables.STORAGE, rerun.storage), (variables.START_FROM, rerun.start_from)):
        set_variable(container, variable, value)
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if GROUP not in key or key == ANNOTATION_NOTIFY
    }
    annotations[ANNOTATION_RERUN_OF] = original_name(manifest)
    made: Manifest = {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {"name": rerun.name, "namespace": metadata["namespace"], "annotations": annotations},
        "spec": spec,
    }
    if labels:
        made["metadata"]["labels"] = labels
    if QUEUE_LABEL in labels:
        spec["suspend"] = True  # until it is admitted, as the first time
    return made


def original_name(manifest: Manifest) -> str:
    """The name of the original job of a rerun, possibly of several."""
    found = at(manifest, "metadata", "annotations", ANNOTATION_RERUN_OF)
    return found if isinstance(found, str) and found else str(manifest["metadata"]["name"])
