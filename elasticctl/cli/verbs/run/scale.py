"""`scale`: change the number of workers of a running job, and wait until they run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from elasticctl.api.codec import to_json
from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.observed.cost import prices_of
from elasticctl.api.observed.history import unkept_s
from elasticctl.api.observed.plan_text import goal_words
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ANNOTATION_SCALED_BY, MAX_WORKERS, ElasticJob, Manifest, PodPhase
from elasticctl.api.status import WorkerStatus
from elasticctl.api.text import plural, plural_are, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import Verb, new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, say
from elasticctl.cli.framework.target import PATIENCE_S, Poller, Target, full_worker_name, reach
from elasticctl.cli.submit.flags.goal_flags import ChangedGoal
from elasticctl.cli.submit.goals import SIMULATED
from elasticctl.settings.contexts import LOCAL

TIMED_OUT = 124
BY_USER, BY_ROLLBACK = "user", "rollback"
_POLL_EVERY_S = 0.25
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """The result of a request: the wanted numbers of workers before and after, and whether they are automatic."""

    before: int
    after: int
    was_automatic: bool = False
    is_automatic: bool = False
    goal: str = ""

    @property
    def words(self) -> str:
        """`2 -> 4 workers`."""
        if self.goal:
            return self.goal
        if self.is_automatic:
            return f"as many workers as fit, {self.after} at most"
        return f"{self.before} -> {self.after} workers"


def apply_change(target: Target, found: Manifest, wish: ScaleFlags) -> ScaleChange:
    """Patch the job, so that scalings apply one after another."""
    before, after = _patch_with_retries(target, found, lambda manifest: _patch_for(target, manifest, wish))
    return _change_between(before, after)


def preview_change(target: Target, found: Manifest, wish: ScaleFlags) -> ScaleChange:
    """What `apply_change` would do now, without doing it; raises the same errors."""
    from elasticctl.api.objects import merge_patch

    manifest = target.reread(found)
    patch = _patch_for(target, manifest, wish)
    return _change_between(manifest, {**manifest, "spec": merge_patch(manifest["spec"], patch["spec"])})


def scale_patch(manifest: Manifest, pods: list[Manifest], wish: ScaleFlags) -> dict[str, Any]:
    """The merge patch for a request; a number of workers ends an automatic size. Pure.

    Raises UsageError if the request is out of bounds, NotFoundError for a worker that is not there, ConflictError when
    the job has ended.
    """
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}) and cannot be scaled")
    metadata = {"annotations": {ANNOTATION_SCALED_BY: BY_USER}, "resourceVersion": job.resource_version}
    without_goal: dict[str, Any] = {"goal": None} if job.goal is not None else {}
    if wish.auto:
        return {"metadata": metadata, "spec": {**without_goal, "sharing": {"automatic": True}}}
    leaving = _workers_to_remove(job, pods, wish.remove_worker)
    workers = _workers(job, wish) - len(leaving)
    _check_bounds(job, manifest["spec"], workers)
    spec: dict[str, Any] = {**without_goal, "replicaSpecs": {"Worker": {"replicas": workers}}}
    if job.sharing.automatic:
        spec["sharing"] = {"automatic": False}
    if leaving:
        # Those asked for before and still there; the others have done their duty.
        present = {pod["metadata"].get("uid") for pod in pods}
        named = {ref.uid: ref.name for ref in job.remove_workers if ref.uid in present} | leaving
        spec["removeWorkers"] = [{"name": name, "uid": uid} for uid, name in named.items()]
    return {"metadata": metadata, "spec": spec}


def goal_patch(manifest: Manifest, wish: ChangedGoal, *, local: bool) -> dict[str, Any]:
    """The merge patch that changes a goal, or sets one, with known prices. Pure.

    Raises UsageError for an invalid goal, ConflictError if the job has ended.
    """
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}): its goal cannot be changed")
    goal = wish.as_spec()
    if job.goal is None:
        if not goal.keys() & {"finishBy", "budget"}:
            raise UsageError(f"{job.name} has no goal. FIX: add --finish-by TIME or --budget USD")
        prices = prices_of(job)
        if prices is not None:
            goal["prices"] = to_json(prices)
        elif local:
            goal["prices"] = dict(SIMULATED)
        elif "budget" in goal:
            raise UsageError("--budget: no price of the machines of this job is known")
    metadata = {"annotations": {ANNOTATION_SCALED_BY: BY_USER}, "resourceVersion": job.resource_version}
    return {"metadata": metadata, "spec": {"goal": goal}}


def _patch_for(target: Target, manifest: Manifest, wish: ScaleFlags) -> dict[str, Any]:
    """The patch for a request."""
    if wish.is_goal:
        return goal_patch(manifest, wish, local=target.context.provider == LOCAL)
    job = ElasticJob.from_manifest(manifest)
    return scale_patch(manifest, target.cluster.pods_of([job])[job.uid] if wish.remove_worker else [], wish)


def _patch_with_retries(
    target: Target, found: Manifest, patch_of: Callable[[Manifest], dict[str, Any] | None]
) -> tuple[Manifest, Manifest]:
    """The job before and after its patch; retries if the job or its status was changed in between.

    Without a patch (None), both are the same.
    """
    for attempt in range(_ATTEMPTS):
        manifest = target.reread(found)
        patch = patch_of(manifest)
        if patch is None:
            return manifest, manifest
        try:
            return manifest, target.cluster.patch_job(target.namespace, found["metadata"]["name"], patch)
        except ConflictError:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _change_between(manifest: Manifest, patched: Manifest) -> ScaleChange:
    """The change that a patch makes, or would make."""
    before, after = ElasticJob.from_manifest(manifest), ElasticJob.from_manifest(patched)
    goal = goal_words(patched["spec"]["goal"]) if after.goal is not None else ""
    return ScaleChange(_size(before), after.desired, before.sharing.automatic, after.sharing.automatic, goal)


def roll_back(target: Target, found: Manifest, change: ScaleChange) -> int:
    """Restore the previous size, unless another one has been requested since; returns the exit code."""
    name = found["metadata"]["name"]
    before, after = _patch_with_retries(target, found, lambda manifest: _rollback_patch(manifest, change))
    if after is before:
        say(f"{name}: not rolled back, as it has ended or was scaled again")
    else:
        say(f"{name}: rolled back to {plural(change.before, 'worker')}")
    return TIMED_OUT


def _rollback_patch(manifest: Manifest, change: ScaleChange) -> dict[str, Any] | None:
    """The patch that reverts a change; None if that is no longer the newest, or the job has ended."""
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase.terminal or job.desired != change.after or job.sharing.automatic:
        return None
    metadata = {"annotations": {ANNOTATION_SCALED_BY: BY_ROLLBACK}, "resourceVersion": job.resource_version}
    spec: dict[str, Any] = {"replicaSpecs": {"Worker": {"replicas": change.before}}}
    if change.was_automatic:
        spec["sharing"] = {"automatic": True}
    return {"metadata": metadata, "spec": spec}


def _size(job: ElasticJob) -> int:
    """The wanted number of workers; for a job of automatic size, the number that it was given."""
    return job.status.desired if job.sharing.automatic and job.status.share is not None else job.desired


def _workers_to_remove(job: ElasticJob, pods: list[Manifest], names: tuple[str, ...]) -> dict[str, str]:
    """UID -> name of the workers to remove."""
    present = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}
    leaving = {}
    for name in (full_worker_name(job.name, wanted) for wanted in names):
        if name not in present:
            raise NotFoundError(f"{job.name} has no worker {name}. It has {', '.join(sorted(present)) or 'none now'}")
        leaving[present[name]] = name
    return leaving


def _workers(job: ElasticJob, wish: ScaleFlags) -> int:
    if wish.gpus is not None:
        each = hardware(job).gpus_per_worker
        if each == 0:
            raise UsageError(f"{job.name} runs on CPUs. FIX: give the number of workers with --to N")
        if wish.gpus % each:
            raise UsageError(
                f"--gpus {wish.gpus}: a worker of {job.name} has {each} GPUs, so it must be a multiple of {each}"
            )
        return wish.gpus // each
    if wish.to is not None:
        return wish.to
    return _size(job) + (wish.add or 0) - (wish.remove or 0)


def _check_bounds(job: ElasticJob, spec: Any, workers: int) -> None:
    low = spec.get("minReplicas") or 1
    high = spec.get("maxReplicas") or MAX_WORKERS
    if workers < low:
        raise UsageError(f"{plural_are(workers, 'worker')} fewer than the minimum of {job.name}, {low}")
    if workers > high:
        raise UsageError(f"{plural_are(workers, 'worker')} more than the maximum of {job.name}, {high}")


def await_workers(
    target: Target, scaled: Manifest, workers: int, timeout_s: int | None, *, goes_on: bool = True
) -> int:
    """Wait until this many workers run, and return the exit code: 1 if they never will, 124 after the time limit.

    `goes_on` False: the caller rolls back at the time limit, so do not say that the job keeps running.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    name = scaled["metadata"]["name"]
    answers = Poller(lambda: target.reread(scaled), _POLL_EVERY_S, deadline, PATIENCE_S, say)
    for manifest in answers.each():
        job = ElasticJob.from_manifest(manifest)
        status, running = job.status, sum(_is_running(worker) for worker in job.status.workers)
        if running == status.active == status.desired == workers:
            say(f"{name}: {plural_are(workers, 'worker')} running")
            return 0
        if status.phase.terminal:
            say(f"{name} ended ({status.phase.value}) before that")
            return 1
        if job.suspend:
            say(f"{name} is suspended: its workers start when it is resumed")
            return 1
        if time.monotonic() >= deadline:
            end = "; it keeps running" if goes_on else ""
            say(f"{name}: {running} of {plural(workers, 'worker')} running after {timeout_s} s{end}")
            return TIMED_OUT
    raise AssertionError("unreachable")


def _is_running(worker: WorkerStatus) -> bool:
    """True for a worker that runs and is not being removed."""
    return worker.phase == PodPhase.RUNNING and worker.cause is None and not worker.removal


app = new_app()


@dataclass(frozen=True, slots=True)
class ScaleFlags(ChangedGoal):
    """A goal, or exactly one of the other fields. `bare` is N without an option, which is short for --to N."""

    bare: Annotated[int | None, typer.Argument(metavar="N", parser=options.whole(1), show_default=False)] = None
    auto: Annotated[bool, typer.Option("--auto", help="As many workers as fit, within the job's bounds.")] = False

    to: Annotated[int | None, options.count("N workers in total.")] = None
    gpus: Annotated[int | None, options.count("N GPUs in total.")] = None
    add: Annotated[int | None, options.count("K more workers.", letter="K")] = None
    remove: Annotated[int | None, options.count("K fewer workers: those with the highest numbers go.", letter="K")] = (
        None
    )
    remove_worker: Annotated[
        tuple[str, ...],
        options.worker("Remove this worker, by name or number.", "--remove-worker"),
    ] = ()

    def with_bare_number(self) -> ScaleFlags:
        """The flags with N as --to N. Raises UsageError if an option gives a size too."""
        if self.bare is None:
            return self
        if self != ScaleFlags(bare=self.bare):
            raise UsageError(f"two sizes given, {self.bare} and an option. FIX: leave one of them out")
        return ScaleFlags(to=self.bare)

    @property
    def sizes(self) -> int:
        """The number of sizes that were requested, of which there may only be one."""
        return sum(map(bool, (self.auto, self.to, self.gpus, self.add, self.remove, self.remove_worker)))

    @property
    def is_goal(self) -> bool:
        """True if a goal is changed or set."""
        return bool(self.finish_by or self.budget or self.prefer)


class ScaleVerb(Verb):
    """Lists sizes and goals apart."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Size": ("to", "gpus", "add", "remove", "remove_worker", "auto"),
        "Deadline and budget": ("finish_by", "budget", "prefer"),
    }


@verb(app, "scale", cls=ScaleVerb)
def scale(
    *,
    job: options.Job,
    wish: ScaleFlags,
    wait: Annotated[bool, typer.Option("--wait", help="Return when that many workers run.")] = False,
    timeout: options.Timeout = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="With --timeout: return to the previous size if the time is over.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would change, or why it would be refused.")
    ] = False,
    where: Where,
) -> int:
    """Change the number of workers of a running job, which continues from its current step. N is short for --to N.

    With --finish-by, --budget or --prefer, change the job's goal; the number of workers is then decided again at once.

    If the script reports no steps, its ranks start again; --dry-run says how much training that may cost.

    \b
      elasticctl scale digits 4
      elasticctl scale digits --remove-worker 2 --wait
      elasticctl scale digits --add 4 --timeout 10m --rollback
      elasticctl scale digits --auto
      elasticctl scale digits --finish-by 'Fri 18:00' --budget 200
    """
    wish = wish.with_bare_number()
    _check(wish, wait, timeout, rollback)
    target = reach(where)
    found = target.find(job)
    name = found["metadata"]["name"]
    if dry_run:
        change = preview_change(target, found, wish)
        say(f"{name}: {change.words} (dry run: nothing changes)")
        _point_out_redone(found, change)
        return 0
    change = apply_change(target, found, wish)
    say(f"{name}: {change.words}")
    _point_out_redone(found, change)
    if wait or rollback:
        code = await_workers(target, found, change.after, timeout, goes_on=not rollback)
        return roll_back(target, found, change) if rollback and code == TIMED_OUT else code
    hint(f"Next: watch it: elasticctl status -w {name}")
    return 0


def _point_out_redone(found: Manifest, change: ScaleChange) -> None:
    """Print what the ranks of a script without checkpoints repeat because of the change."""
    job = ElasticJob.from_manifest(found)
    trained_s = unkept_s(job.status, time.time())
    if change.before != change.after and trained_s is not None and not hardware(job).in_launcher_role:
        say(f"its script reports no steps: unless it keeps checkpoints of its own, {span(trained_s)} are redone from 0")


def _check(wish: ScaleFlags, wait: bool, timeout: int | None, rollback: bool) -> None:
    """Raise UsageError for contradicting options."""
    if wish.is_goal and wish.sizes:
        raise UsageError("a goal determines the number of workers. FIX: give a number or a goal, not both")
    if wish.sizes != 1 and not wish.is_goal:
        raise UsageError(
            "no size given. FIX: add one of --to N, --gpus N, --add K, --remove K, --remove-worker NAME, --auto,"
            " or a goal with --finish-by TIME or --budget USD"
        )
    if rollback and timeout is None:
        raise UsageError("--rollback needs a time limit. FIX: add --timeout 10m, for example")
    if timeout is not None and not (wait or rollback):
        raise UsageError("--timeout has no effect without waiting. FIX: add --wait or --rollback")
    if (wish.auto or wish.is_goal) and (wait or rollback):
        what = "a goal" if wish.is_goal else "--auto"
        raise UsageError(f"{what} sets no number of workers to wait for. FIX: leave out --wait and --rollback")
