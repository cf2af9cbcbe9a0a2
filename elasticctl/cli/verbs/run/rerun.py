"""`rerun`: run a job again, from step 0 or from one of its checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import ConflictError, JobStorageError, UsageError
from elasticctl.api.text import plural, quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Assignment, Where
from elasticctl.cli.framework.output import print_objects, say
from elasticctl.cli.framework.target import Target, reach
from elasticctl.cli.verbs.inspect.logs import delete_stored_logs
from elasticctl.cli.verbs.run.submit import DryRunVerb, SubmitOptions, follow_up, refuse_taken_name

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest

_DELETED_WITHIN_S = 30.0
_POLL_EVERY_S = 0.1
LATEST = "latest"

app = new_app()


def step_or_latest(text: str) -> str:
    """A step, or `latest`."""
    if text != LATEST and not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"{quote(text)} is neither a step nor {LATEST}.")
    return text


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes in the new job."""

    name: Annotated[str, options.text("The new job's name; by default the old one's with a number.")] = ""
    from_checkpoint: Annotated[
        str | None,
        typer.Option(parser=step_or_latest, metavar="STEP|latest", help="Continue from this step of the old job."),
    ] = None
    storage: Annotated[str, options.text("Where to keep its state; by default a new location.", "URL")] = ""
    same_code: Annotated[
        bool, typer.Option("--same-code", help="Run the code that was submitted, not the folder as it is now.")
    ] = False
    settings: Annotated[
        tuple[Assignment, ...],
        options.assignments("--set", "PATH=VALUE", "Change a field of the manifest: spec.backoffLimit=10"),
    ] = ()


@verb(app, "rerun", cls=DryRunVerb)
def rerun(*, job: options.Job, changes: Changes, how: SubmitOptions, where: Where) -> int:
    """Run a job again: a new job with the same command, from step 0, with its own state.

    Its folder is uploaded as it is now, if it exists; --same-code runs the code that was submitted. With
    --from-checkpoint, the job continues from a checkpoint of the old job, which is only read. If --name is the old
    job's own name, that job must have ended, and is deleted; its checkpoints stay.

    \b
      elasticctl rerun digits
      elasticctl rerun digits --from-checkpoint latest --set spec.backoffLimit=10
    """
    from elasticctl.api.podtemplate import WORKSPACE_VARIABLE, hardware
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.submit.draft import manifest_with_notifications
    from elasticctl.cli.submit.flags.set_fields import with_settings

    how.check()
    target = reach(where)
    old = target.find(job)
    found = ElasticJob.from_manifest(old)
    made, workspace = _new_manifest(target, old, changes), None
    if not changes.same_code and hardware(found).env.get(WORKSPACE_VARIABLE):
        from elasticctl.cli.submit.renew_workspace import renew_workspace  # what packs a folder

        made, workspace = renew_workspace(made, [Path.cwd()])
    made = with_settings(made, changes.settings)
    made = manifest_with_notifications(made, how.notify, target.context)
    if how.dry_run == "client":
        print_objects([made], how.output or "yaml", one=True)
        return 0
    replaces = made["metadata"]["name"] == found.name
    if changes.name and not replaces:
        refuse_taken_name(target, made)
    if workspace is not None and not how.dry_run:
        workspace.send()
    if replaces or how.dry_run:
        checked = _create_dry_run(target, made, replaces)  # before anything is deleted
    if replaces:
        _delete_old(target, found, dry_run=how.dry_run is not None)
    _say_plan(found, made, changes.from_checkpoint)
    if how.dry_run:
        print_objects([checked], how.output or "yaml", one=True)
        return 0
    return follow_up(target, _create(target, made, patient=replaces), how)


def _new_manifest(target: Target, old: Manifest, changes: Changes) -> Manifest:
    """The manifest of the new job."""
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.submit.derived_manifests import Rerun, next_name, original_name, rerun_manifest, sibling_url
    from elasticctl.cli.submit.draft import choose_storage
    from elasticctl.cli.submit.spec_from_flags import check_name

    found = ElasticJob.from_manifest(old)
    start = "" if changes.from_checkpoint is None else _start_from(found, changes.from_checkpoint)
    if changes.name:
        name = check_name(changes.name)
    else:
        taken = {other["metadata"]["name"] for other in target.cluster.list_jobs(target.namespace)}
        name = next_name(original_name(old), taken)
    before, storage = hardware(found).storage, ""
    if before or changes.storage:
        storage = choose_storage(name, changes.storage, target.context) or sibling_url(
            before, f"{name}-{int(time.time())}"
        )
        if storage == before:
            raise UsageError(f"--storage {storage} belongs to the old job. FIX: give the new one another place")
    return rerun_manifest(old, Rerun(name, storage, start, time.time()))


def _start_from(old: ElasticJob, wanted: str) -> str:
    """`URL#STEP` of a checkpoint of the old job. Raises UsageError or NotFoundError if there is none."""
    from elasticctl.api.podtemplate import hardware

    url = hardware(old).storage
    if not url:
        raise UsageError(f"{old.name} has no storage URL, so it has no checkpoint to start from")
    if not url.startswith("file://") and old.status.checkpoint.step is None:
        raise UsageError(f"{old.name} has committed no checkpoint. FIX: leave out --from-checkpoint to start at step 0")
    _check_there(old, url, None if wanted == LATEST else int(wanted))
    if not old.status.phase.terminal:
        say(f"{old.name} is still {old.status.phase.value}: it may delete that checkpoint before the new job reads it")
    return f"{url}#{wanted}"


def _check_there(old: ElasticJob, url: str, step: int | None) -> None:
    """Raise NotFoundError unless the checkpoint exists; it is read in full in a folder, checked briefly in a bucket.

    If this machine may not read a bucket, as the job might, a message says so.
    """
    from elasticctl.cli import job_storage
    from elasticctl.cluster.job_storages import open_job_storage
    from elasticctl_store.storage import Patience

    if url.startswith("file://"):
        job_storage.pick_checkpoint(job_storage.find_storage(url, Where()), step)
        return
    soon = Patience(tries=3, total_s=10.0, connect_s=5.0, silence_s=15.0)
    try:
        with job_storage.storage_errors():
            place = job_storage.JobStorage(old.name, open_job_storage(url, soon), running=False)
        job_storage.pick_checkpoint(place, step, lambda place, finding: finding)
    except JobStorageError as e:
        say(f"{old.name}: whether that checkpoint is there cannot be seen from this machine: {e}")


def _say_plan(old: ElasticJob, made: Manifest, from_checkpoint: str | None) -> None:
    from elasticctl.api.observed.cost import rate_of
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.cost import plan_line, with_live_spot

    new = ElasticJob.from_manifest(made)
    begin = "step 0"
    if from_checkpoint is not None:
        begin = f"the newest checkpoint of {old.name}" if from_checkpoint == LATEST else f"its step {from_checkpoint}"
    kept = hardware(new).storage
    workers = plural(new.desired, "worker")
    say(f"{new.name}: {old.name} again, {workers}, from {begin}" + (f", state in {kept}" if kept else ""))
    one = with_live_spot(rate_of(new))
    if one is not None:
        say(plan_line(one, new.desired))


def _create_dry_run(target: Target, made: Manifest, replaces: bool) -> Manifest:
    """The job as the cluster would store it; if its name is still taken, it is checked under another one."""
    from elasticctl.cli.submit.derived_manifests import next_name

    name = made["metadata"]["name"]
    taken = {other["metadata"]["name"] for other in target.cluster.list_jobs(target.namespace)} if replaces else set()
    stand_in = {**made["metadata"], "name": next_name(name, taken) if replaces else name}
    stored = target.cluster.create_job({**made, "metadata": stand_in}, dry_run=True)
    return {**stored, "metadata": {**stored["metadata"], "name": name}}


def _delete_old(target: Target, old: ElasticJob, *, dry_run: bool) -> None:
    """Delete the old job, whose name the new one gets. Raises ConflictError while it runs."""
    from elasticctl.api.podtemplate import hardware

    if not old.status.phase.terminal:
        phase = old.status.phase.value
        raise ConflictError(
            f"{old.name} is still {phase}. FIX: give the new job another --name, or cancel the old one first"
        )
    kept = hardware(old).storage
    doing = "would be deleted" if dry_run else "is deleted, with its logs"
    say(f"the old {old.name} {doing}" + (f"; its checkpoints stay in {kept}" if kept else ""))
    if not dry_run:
        target.cluster.delete_job(target.namespace, old.name)
        delete_stored_logs(old)


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
