"""Rules about jobs on their way to the first step: their workers start, join and form a group."""

from __future__ import annotations

from elasticctl.api.observed.history import activity_text, reports_steps
from elasticctl.api.observed.workers import MOUNTS, STILL_ENDING, WITHOUT_EVENTS
from elasticctl.api.status import Phase
from elasticctl.api.text import plural, plural_are, shorten, span
from elasticctl.diagnosis.findings import Case, Finding, NextStep, Severity
from elasticctl_protocol import variables

LONG_START_S = 60.0
"""A worker that takes longer than this to start, import or join gets a warning."""
LONG_FIRST_STEP_S = 120.0
"""The first step includes compilation and warm-up; it should be done by then, or..."""
_LONGER = 1.5
"""... by so many times what it took before."""


def starting(case: Case) -> Finding | None:
    """Workers are being created, and the cluster reports no problem."""
    if not case.waiting or case.job.suspend or case.job.desired == 0 or any(case.pod_waits()):
        return None
    if case.wait is not None and case.wait.reason in (*WITHOUT_EVENTS, *MOUNTS, STILL_ENDING):
        return None
    until = case.status.backoff.until
    if until is not None and until > case.now:
        return None
    if case.status.share is not None and not case.status.share.workers:
        return None  # `waiting_for_its_share` reports it: nothing is starting
    needed, waited_s = max(1, case.job.min), case.since(case.starting_since)
    text = f"Its workers are starting: {case.running} of at least {needed} {'runs' if case.running == 1 else 'run'}."
    if waited_s < LONG_START_S:
        return Finding("starting", Severity.INFO, text, decisive=True)
    step = NextStep("see what the cluster said", f"elasticctl events {case.name}")
    return Finding("starting", Severity.WARNING, f"{text} {span(waited_s)} so far.", (step,), decisive=True)


def joining(case: Case) -> Finding | None:
    """Enough workers run, but have not formed their first group: they are importing, or wait for a slow one."""
    status, group = case.status, case.group
    known = group is not None or status.progress.step is not None
    if status.phase is not Phase.RUNNING or status.reason == "Finishing" or not case.hardware.launched or known:
        return None
    waited_s = case.since(status.start_time)
    command = shorten(case.hardware.env.get(variables.SETUP, ""), 60)
    doing = f"running `{command}`, as --setup says, or importing modules" if command else "importing modules"
    text = f"{plural_are(case.running, 'worker')} running and about to join, still {doing}."
    return _slow("joining", case, text, waited_s, LONG_START_S)


def before_the_first_step(case: Case) -> Finding | None:
    """The group has formed, but made no step."""
    group = case.group
    if case.status.phase is not Phase.RUNNING or group is None or group.first_step_at is not None:
        return None
    if case.status.reason == "Finishing" or not reports_steps(case.status):
        return None
    members, doing = plural(len(group.workers), "worker"), activity_text(case.status, case.now)
    waited_s = case.since(group.formed_at)
    text = f"A group of {members} formed {span(waited_s)} ago and has not made its first step" + (
        f": {doing}." if doing else "."
    )
    return _slow("before-the-first-step", case, text, waited_s, max(LONG_FIRST_STEP_S, _LONGER * _first_step_s(case)))


def says_nothing(case: Case) -> Finding | None:
    """The group has formed, and its ranks have reported nothing: they are starting, or use no reporting library."""
    group = case.group
    if case.status.phase is not Phase.RUNNING or group is None or reports_steps(case.status):
        return None
    if case.status.reason == "Finishing":
        return None
    unknown = (
        "No step has been reported: its script is still starting, or does not report its progress because it does not"
        " use elasticctl_train."
    )
    if case.hardware.in_launcher_role:
        unknown = (
            f"The launcher program, on {group.workers[0]}, starts its ranks: only its output shows how far they are."
        )
    since = span(case.since(group.formed_at))
    text = f"A group of {plural(len(group.workers), 'worker')} formed {since} ago and runs. {unknown}"
    return Finding("says-nothing", Severity.INFO, text)


def _slow(rule: str, case: Case, text: str, waited_s: float, patience_s: float) -> Finding:
    """A finding that becomes a warning after `patience_s`."""
    if waited_s < patience_s:
        return Finding(rule, Severity.INFO, text, decisive=True)
    step = NextStep("see their output", f"elasticctl logs {case.name} --tail 20")
    return Finding(rule, Severity.WARNING, text, (step,), decisive=True)


def _first_step_s(case: Case) -> float:
    """The longest that an earlier group took to its first step; 0 where none has made one."""
    took = (g.first_step_at - g.formed_at for g in case.status.generations if g.first_step_at and g.formed_at)
    return max(took, default=0.0)
