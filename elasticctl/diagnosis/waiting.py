"""Rules about workers that cannot start: pods that are refused or not scheduled, containers that cannot be created."""

from __future__ import annotations

import re
from collections.abc import Iterator

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.gpu_types import INSTANCE_LABEL
from elasticctl.api.objects import as_list, as_text, at
from elasticctl.api.observed.pod_events import (
    COMES_WITHIN_S,
    COMING,
    NOT_COMING,
    failed_mount,
    is_of_autoscaler,
    seen_at,
    words_of,
)
from elasticctl.api.observed.workers import (
    FAILED_CREATE,
    GATED,
    INITIALIZING,
    MOUNTS,
    NAME_TAKEN,
    NO_SCHEDULER,
    STILL_ENDING,
    UNSCHEDULABLE,
)
from elasticctl.api.podtemplate import covering_budgets
from elasticctl.api.spec import PodPhase
from elasticctl.api.text import join_and, plural, shorten, span
from elasticctl.diagnosis.findings import Case, Finding, NextStep, Severity, WorkerWait, short_worker_name

_SHOWN_HOLDERS = 3
_SECRET = re.compile(r'[Ss]ecret "?(?:[-a-z0-9]+/)?([-a-z0-9.]+)"?')
_ACCOUNT = re.compile(r'serviceaccount "([-a-z0-9.]+)" not found')
_OTHER_POD = re.compile(r"pod ([-a-z0-9.]+) exists, and it does not belong to this job")
_OWNED = re.compile(r"([A-Za-z]+) ([-a-z0-9.]+) in namespace [-a-z0-9]+ does not belong to this job")
_CLAIM = re.compile(r"nodeclaim/([-a-z0-9.]+)")
_STARTABLE = (UNSCHEDULABLE, GATED, INITIALIZING)
_STAGES = (("Launched", "launching {}"), ("Registered", "launched {}, which joins the cluster"))


def refused(case: Case) -> Finding | None:
    """The API server refuses to create workers: a quota, an admission rule, something that their template names."""
    words = _held(case, FAILED_CREATE)
    if words is None:
        return None
    missing = max(1, case.job.desired - case.status.active)
    words = words.partition(" FIX:")[0].removesuffix(".")
    text = f"{plural(missing, 'worker')} of {case.job.desired} cannot be created: {words}. It will continue by itself"
    account, other, owned = _ACCOUNT.search(words), _OTHER_POD.match(words), _OWNED.match(words)
    if owned is not None:
        command = f"kubectl delete {owned[1].lower()} {owned[2]} -n {case.job.namespace}"
        step = NextStep("delete it if it is not needed", command)
    elif other is not None:
        step = NextStep("delete it if it is not needed", f"kubectl delete pod {other[1]} -n {case.job.namespace}")
    elif account is not None:
        step = NextStep("create it", f"kubectl create serviceaccount {account[1]} -n {case.job.namespace}")
    elif "exceeded quota" in words:
        step = NextStep("see the quota", f"kubectl describe resourcequota -n {case.job.namespace}")
    elif "LimitRange" in words or "per Container" in words or "per Pod" in words:
        step = NextStep("see the limits", f"kubectl describe limitrange -n {case.job.namespace}")
    else:
        step = NextStep("or submit it again with what it needs", f"elasticctl rerun {case.name} --set PATH=VALUE")
    return Finding(
        "refused", Severity.ERROR, f"{text} within seconds, once that is changed.", (step,), decisive=case.waiting
    )


def name_taken(case: Case) -> Finding | None:
    """A pod that is not the job's has a worker's name."""
    words = _held(case, NAME_TAKEN)
    if words is None:
        return None
    pod = words.removeprefix("pod ").partition(" ")[0]
    step = NextStep("delete it if it is not needed", f"kubectl delete pod {pod} -n {case.job.namespace}")
    return Finding(
        "name-taken", Severity.ERROR, f"A worker cannot be created: {words}.", (step,), decisive=case.waiting
    )


def still_ending(case: Case) -> Finding | None:
    """Previous workers have not ended yet, and their places are needed."""
    words = _held(case, STILL_ENDING)
    if words is None:
        return None
    text = f"It waits for room: {words}. New workers start as soon as they have ended."
    step = NextStep("see what they do", f"elasticctl logs {case.name} --tail 20")
    return Finding("still-ending", Severity.INFO, text, (step,), decisive=case.waiting)


def no_scheduler(case: Case) -> Finding | None:
    """The scheduler that the pods name does nothing."""
    words = _held(case, NO_SCHEDULER)
    if words is None:
        return None
    path = "spec.replicaSpecs.Worker.template.spec.schedulerName"
    step = NextStep("name another", f"elasticctl rerun {case.name} --set {path}=default-scheduler")
    text = f"{short_worker_name(words, case.name)}: perhaps no scheduler of that name is running."
    if as_list(at(case.job.template, "spec", "resourceClaims")):
        step = NextStep("see the claims", f"kubectl get resourceclaims -n {case.job.namespace}")
        text = f"{short_worker_name(words, case.name)}: perhaps a resource claim that it names is not there."
    return Finding("no-scheduler", Severity.ERROR, text, (step,), decisive=case.waiting)


def gated(case: Case) -> Finding | None:
    """A scheduling gate holds its pods back from the scheduler."""
    wait = next((wait for wait in case.pod_waits() if wait.reason == GATED), None)
    if wait is None or case.status.phase.terminal:
        return None
    text = f"{_who(case, wait)} cannot be scheduled until its scheduling gates are removed: {wait.message}."
    return Finding("gated", Severity.WARNING, text, decisive=case.waiting)


def not_startable(case: Case) -> Finding | None:
    """A worker's container cannot be created: its image, a secret, its configuration."""
    if case.status.phase.terminal:
        return None
    wait = next((wait for wait in case.pod_waits() if wait.reason not in _STARTABLE), None)
    if wait is None:
        return None
    secret = _SECRET.search(wait.message) if wait.reason == "CreateContainerConfigError" else None
    if secret is not None:
        step = NextStep("create it; the worker then starts by itself", f"elasticctl secret set {secret[1]} KEY")
        text = f"{_who(case, wait)} cannot start: {shorten(wait.message)}."
        return Finding("secret-missing", Severity.ERROR, text, (step,), decisive=case.waiting)
    image = "Image" in wait.reason or "ErrImage" in wait.reason
    what = f"its image {case.hardware.image} cannot be pulled" if image else "its container cannot be created"
    said = f": {shorten(wait.message)}" if wait.message else ""
    again = NextStep("submit it again with what it needs", f"elasticctl rerun {case.name} --set PATH=VALUE")
    return Finding(
        "image-not-pulled" if image else "container-not-made",
        Severity.ERROR,
        f"{_who(case, wait)} cannot start, because {what} ({wait.reason}{said}).",
        (again, NextStep("see what the cluster said", f"elasticctl events {case.name}")),
        decisive=case.waiting,
    )


def not_mounted(case: Case) -> Finding | None:
    """A worker's node cannot mount one of its volumes, which only events report."""
    if case.status.phase.terminal:
        return None
    for pod in case.pods:
        if at(pod, "status", "phase") not in (None, PodPhase.PENDING) or not at(pod, "spec", "nodeName"):
            continue
        failed = failed_mount(_events_about(case, pod))
        if failed is not None:
            name = short_worker_name(str(at(pod, "metadata", "name")), case.name)
            return _not_mounted(case, f"{name} cannot start on {at(pod, 'spec', 'nodeName')}: {words_of(failed)}")
    words = next((found for found in (_held(case, reason) for reason in MOUNTS) if found), None)
    return None if words is None else _not_mounted(case, short_worker_name(words, case.name))


def _not_mounted(case: Case, words: str) -> Finding:
    step = NextStep("see what the cluster said", f"elasticctl events {case.name}")
    text = f"{words}. It is retried automatically."
    return Finding("not-mounted", Severity.ERROR, text, (step,), decisive=case.waiting)


def initializing(case: Case) -> Finding | None:
    """A worker's init containers still run."""
    wait = next((wait for wait in case.pod_waits() if wait.reason == INITIALIZING), None)
    if wait is None or case.status.phase.terminal:
        return None
    step = NextStep("see what the cluster said", f"elasticctl events {case.name}")
    text = f"{_who(case, wait)} starts once its init containers have ended: {wait.message}."
    return Finding("initializing", Severity.INFO, text, (step,), decisive=case.waiting)


def unschedulable(case: Case) -> Finding | None:
    """No node has room for a worker: another node is on its way, or other jobs hold the GPUs."""
    if case.status.phase.terminal:
        return None
    waits = [wait for wait in case.pod_waits() if wait.reason == UNSCHEDULABLE]
    if not waits:
        return None
    message = shorten(waits[0].message).removesuffix(".")
    text = f"{_who(case, waits[0])} {message if message.startswith('waits ') else f'cannot be placed: {message}'}."
    if len(waits) > 1:
        text = f"{plural(len(waits), 'worker')} are waiting to be placed. {text}"
    coming, words = _autoscaler(case, {wait.worker for wait in waits})
    if coming:
        return Finding("node-coming", Severity.INFO, f"{text} {words}", decisive=case.waiting)
    steps = []
    if max(1, case.job.min) <= case.running < case.job.desired:
        steps.append(NextStep("ask for fewer", f"elasticctl scale {case.name} --to {case.running}"))
    holders = sorted(case.holders.items(), key=lambda item: (-item[1], item[0]))
    if holders:
        named = [f"{name} ({plural(gpus, 'GPU')})" for name, gpus in holders[:_SHOWN_HOLDERS]]
        if len(holders) > _SHOWN_HOLDERS:
            named.append(f"{len(holders) - _SHOWN_HOLDERS} more jobs")
        text += f" Held by {join_and(named)}."
        steps.insert(0, NextStep("make room", f"elasticctl suspend {holders[0][0]}"))
    text = f"{text} {words}" if words else text
    return Finding("no-room", Severity.WARNING, text, tuple(steps), decisive=case.waiting)


def budget_of_others(case: Case) -> Finding | None:
    """Another PodDisruptionBudget decides how many of its workers a drain may evict."""
    others = [str(at(item, "metadata", "name")) for item in covering_budgets(case.job, case.seen.budgets)]
    if not others or case.status.phase.terminal:
        return None
    if len(others) == 1:
        text = f"PodDisruptionBudget {others[0]} covers its workers, so the controller keeps none of its own."
        return Finding("budget-of-others", Severity.INFO, text)
    text = (
        f"PodDisruptionBudgets {join_and(sorted(others))} cover its workers:"
        " with more than one, Kubernetes refuses every eviction."
    )
    step = NextStep("keep only one of them", f"kubectl delete pdb {sorted(others)[-1]} -n {case.job.namespace}")
    return Finding("budgets-of-others", Severity.WARNING, text, (step,))


def _held(case: Case, reason: str) -> str | None:
    """The controller's message about workers that wait for this reason, if they do."""
    wait = case.wait
    if wait is None or wait.reason != reason or case.status.phase.terminal or case.job.suspend:
        return None
    return wait.message.removesuffix(".")


def _autoscaler(case: Case, workers: set[str]) -> tuple[bool, str]:
    """Whether a node is on its way for one of these workers, and a sentence about it, if any."""
    waiting = [pod for pod in case.pods if at(pod, "metadata", "name") in workers]
    said = [event for pod in waiting for event in _events_about(case, pod) if is_of_autoscaler(event)]
    asked = [event for event in said if at(event, "reason") in COMING and _is_pending(case, event)]
    if asked:
        newest = asked[-1]
        claim = _claim_of(case, newest)
        ago = span(case.since(seen_at(newest)))
        coming = _describe_claim(case, claim) if claim else f"{words_of(newest)}, said {ago} ago"
        return True, f"A node is being provisioned: {coming}."
    refusals = [event for event in said if at(event, "reason") in NOT_COMING]
    if not refusals:
        return False, ""
    return False, f"The autoscaler is not adding a node: {words_of(refusals[-1])}."


def _is_pending(case: Case, event: Manifest) -> bool:
    """True while the node that this event announces may still come."""
    moment = seen_at(event)
    if moment is None or case.now - moment > COMES_WITHIN_S:
        return False
    named = _CLAIM.search(as_text(at(event, "message")))
    return named is None or case.seen.claims is None or _claim_of(case, event) is not None


def _claim_of(case: Case, event: Manifest) -> Manifest | None:
    named = _CLAIM.search(as_text(at(event, "message")))
    claims = case.seen.claims or ()
    return next((claim for claim in claims if named and at(claim, "metadata", "name") == named[1]), None)


def _describe_claim(case: Case, claim: Manifest) -> str:
    """`nodeclaim default-dwdn5 launching g4dn.xlarge, requested 40s ago`."""
    done = {at(item, "type") for item in as_list(at(claim, "status", "conditions")) if at(item, "status") == "True"}
    kind = at(claim, "metadata", "labels", INSTANCE_LABEL) or "a node"
    stage = next((words for condition, words in _STAGES if condition not in done), "has {}, which is getting ready")
    asked = from_rfc3339(at(claim, "metadata", "creationTimestamp"))
    ago = "" if asked is None else f", requested {span(case.since(asked))} ago"
    return f"nodeclaim {at(claim, 'metadata', 'name')} {stage.format(kind)}{ago}"


def _events_about(case: Case, pod: Manifest) -> Iterator[Manifest]:
    """The events about this very pod, oldest first."""
    uid = at(pod, "metadata", "uid")
    yield from (event for event in case.seen.events if uid and at(event, "involvedObject", "uid") == uid)


def _who(case: Case, wait: WorkerWait) -> str:
    return short_worker_name(wait.worker, case.name)
