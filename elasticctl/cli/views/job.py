"""Jobs on the terminal: one as a table of facts, many as rows. `now` is in seconds since the epoch."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticctl.api.codec import Manifest
from elasticctl.api.cost import cost
from elasticctl.api.history import activity_text, fraction_done, is_training, remaining_s, steps_per_s
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import ON_DEMAND, SPOT, capacity, hardware
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import JobStatus, Phase
from elasticctl.api.text import plural, span
from elasticctl.cli.framework.output import Table, bar, joined, on_terminal
from elasticctl.cli.framework.target import Target
from elasticctl.cli.views.cost import cost_text, dollars
from elasticctl.cli.views.history import causes, failure_lines, interruptions, restarts, scalings

_HEADER = (
    "NAME", "PHASE", "WORKERS", "GPUS", "CAPACITY", "STEP", "EPOCH", "RATE", "ETA", "CHECKPOINT", "RESTARTS", "COST",
    "AGE",
)  # fmt: skip
_WIDE = ("ON-DEMAND", "CAUSES", "STORAGE")
_SPARE = (
    "STORAGE", "CAUSES", "ON-DEMAND", "CAPACITY", "EPOCH", "GPUS", "RATE", "AGE", "COST", "REASON", "RESTARTS", "ETA",
    "CHECKPOINT", "STEP",
)  # fmt: skip
_WAITING = (None, "Pending", "Restarting")
_LOOKED_AT = 5
"""Of how many waiting jobs the pods are asked for."""
_SHOWN_LAST = 3
_BAR_WIDTH = 30
CAPACITIES = {SPOT: "spot", ON_DEMAND: "on-demand"}


def status_table(manifest: Manifest, pods: Sequence[Manifest], now: float, *, bar_encoding: str | None = None) -> Table:
    """Everything about one job, a field a row; fields with nothing to say are left out.

    `bar_encoding`: draw how far it is as a bar, in characters that this encoding has.
    """
    job = ElasticJob.from_manifest(manifest)
    status = job.status
    fields = [
        ("Name", joined((job.name, f"namespace {job.namespace}"))),
        ("Phase", joined((status.phase.value, duration_text(job, now)))),
        ("Doing", activity_text(status, now)),
        ("Reason", reason(job, pods, now)),
        ("Workers", f"{_at_work(status, job.desired, pods)} ({job.bounds}), {_kind(job)}"),
        *progress_facts(status, now, bar_encoding=bar_encoding),
        ("Cost", cost_text(job, now)),
        ("Storage", hardware(job).storage),
        ("Failures", failures_text(job) if status.failures else ""),
        *(("Interruption", text) for text in _last(interruptions(status), job.name)),
        *(("Scaling", text) for text in _last(scalings(status), job.name)),
        *zip(("Failed first", "Last lines"), _failure(status), strict=False),
    ]
    return Table(("FIELD", "VALUE"), [(name, text) for name, text in fields if text], wraps=True, facts=True)


def borrowed(status: JobStatus) -> str:
    """`borrowing 2`: how many of a job's workers are lent by other projects."""
    lent = 0 if status.share is None or status.phase.terminal else status.share.borrowed
    return f"borrowing {lent}" if lent else ""


def _kind(job: ElasticJob) -> str:
    """`2 GPUs each, 8 in all, spot, borrowing 2`, or `CPU`."""
    each, taken = hardware(job).gpus_per_worker, CAPACITIES.get(capacity(job.template), "")
    kind = f"{plural(each, 'GPU')} each, {each * job.desired} in all" if each else "CPU"
    return ", ".join(part for part in (kind, taken, borrowed(job.status)) if part)


def _last(lines: list[str], job: str) -> list[str]:
    """The last few, and where the others are told: a screen has no room for the story of a long life."""
    before = len(lines) - _SHOWN_LAST
    more = [f"{before} before: elasticctl history {job}"] if before > 0 else []
    return [*more, *lines[-_SHOWN_LAST:]]


def progress_facts(status: JobStatus, now: float, *, bar_encoding: str | None = None) -> list[tuple[str, str]]:
    """How far it is, how safe, and how often it was disturbed; some may be blank."""
    return [
        ("Progress", _progress(status, bar_encoding)),
        ("Metrics", joined(f"{name} {value:g}" for name, value in status.progress.metrics.items())),
        ("Checkpoint", _checkpoint(status, now)),
        ("Restarts", causes(status)),
    ]


def _failure(status: JobStatus) -> list[str]:
    """The first failing rank, and what it printed last as one text."""
    head, *lines = failure_lines(status) or [""]
    return [head, textwrap.dedent("\n".join(lines))]


def duration_text(job: ElasticJob, now: float) -> str:
    """`for 3m20s`, or `after 3m20s` once it has ended."""
    status = job.status
    if status.start_time is None:
        return ""
    if status.phase.terminal:
        return f"after {span((status.completion_time or now) - status.start_time)}"
    return f"for {span(now - status.start_time)}"


def _at_work(status: JobStatus, desired: int, pods: Sequence[Manifest]) -> str:
    """How many workers train; of a job that waits, and of a group that makes no steps yet, how many run."""
    if status.phase in (Phase.PENDING, Phase.RESTARTING):
        running = sum(at(pod, "status", "phase") == PodPhase.RUNNING for pod in pods)
        return f"{running} of {desired} running"
    if not is_training(status):
        return f"{status.active} of {desired} running"
    members = len(status.generations[-1].workers) if status.generations else status.active
    return f"{min(status.active, members)} of {desired} training"


def failures_text(job: ElasticJob) -> str:
    """`2 of 3 allowed since the last checkpoint`, and how many there were in all."""
    status = job.status
    if status.failures_since_commit is None:  # an older controller limits all of them
        return f"{status.failures} of {job.backoff_limit} allowed"
    since = "since the last checkpoint" if status.checkpoint.step is not None else "before the first checkpoint"
    whole = f", {status.failures} in all" if status.failures > status.failures_since_commit else ""
    return f"{status.failures_since_commit} of {job.backoff_limit} allowed {since}{whole}"


def reason(job: ElasticJob, pods: Sequence[Manifest], now: float) -> str:
    """Why a job does not train (any more): the first cause, and once it has ended, the controller's word."""
    status = job.status
    if status.phase is Phase.SUCCEEDED:
        return ""
    if status.phase.terminal:
        return ": ".join(part for part in (status.reason, status.message) if part)
    from elasticctl.diagnosis import Case, diagnose  # not for a list of jobs that train

    case = Case(job, tuple(pods), now)
    first = diagnose(case)[0]
    return first.text if first.decisive or case.waiting else ""


def _progress(status: JobStatus, bar_encoding: str | None) -> str:
    """How far it is in words, and above them as a bar where there is an end and somebody to see it."""
    progress, done, left = status.progress, fraction_done(status), remaining_s(status)
    if progress.step is None:
        return ""
    epoch = part_of(progress.epoch, progress.total_epochs)
    words = joined(
        (
            f"step {part_of(progress.step, progress.total_steps)}",
            f"epoch {epoch}" if epoch else "",
            rate(status, long=True),
            "" if left is None or status.phase.terminal else f"{span(left)} to go",
        )
    )
    if done is None or bar_encoding is None:
        return words
    return f"{bar(done, _BAR_WIDTH, bar_encoding)} {done:.0%}\n{words}"


def rate(status: JobStatus, *, long: bool = False) -> str:
    """Samples a second, or steps where the script does not say how large they are."""
    samples, steps = status.progress.samples_per_s, steps_per_s(status)
    if samples is not None:
        return f"{samples:,.0f}{' samples' if long else ''}/s"
    return "" if steps is None else f"{steps:,.3g} steps/s"


def _checkpoint(status: JobStatus, now: float) -> str:
    checkpoint = status.checkpoint
    if checkpoint.step is None:
        return ""
    return f"step {checkpoint.step}{ago(checkpoint.at, now, status)}, {checkpoint.committed} committed"


def ago(at: float | None, now: float, status: JobStatus) -> str:
    """The age of a checkpoint counts while something could be lost."""
    return "" if at is None or status.phase.terminal else f" {span(now - at)} ago"


def part_of(part: int | None, whole: int | None) -> str:
    if part is None:
        return ""
    return str(part) if whole is None else f"{part}/{whole}"


@dataclass(frozen=True, slots=True)
class Shape:
    """Which columns are wanted."""

    wide: bool = False
    namespaces: bool = False

    @property
    def header(self) -> tuple[str, ...]:
        """Their titles."""
        return (*(("NAMESPACE",) if self.namespaces else ()), *_HEADER, *(_WIDE if self.wide else ()), "REASON")


def job_table(
    manifests: Sequence[Manifest], now: float, shape: Shape = Shape(), reasons: Mapping[str, str] | None = None
) -> Table:
    """One row a job. `reasons`: UID -> why it waits, for those of which that is known better than their status says."""
    rows = [_row(manifest, now, shape, reasons or {}) for manifest in manifests]
    return Table(shape.header, rows, spare=_SPARE)


def why_ended(job: ElasticJob) -> str:
    """The controller's word on a job that waits or has failed; on other phases it has nothing to add."""
    status = job.status
    if status.phase in (Phase.SUCCEEDED, Phase.RUNNING, Phase.CANCELLED):
        return ""
    return ": ".join(part for part in (status.reason, status.message) if part)


def _row(manifest: Manifest, now: float, shape: Shape, reasons: Mapping[str, str]) -> tuple[str, ...]:
    job = ElasticJob.from_manifest(manifest)
    status, progress, found = job.status, job.status.progress, hardware(job)
    spent, left = cost(job, now), remaining_s(status)
    cells = (
        job.name,
        status.phase.value,
        f"{status.active}/{job.desired} ({job.bounds})",
        str(found.gpus_per_worker * job.desired) if found.gpus_per_worker else "",
        CAPACITIES.get(capacity(job.template), ""),
        part_of(progress.step, progress.total_steps),
        part_of(progress.epoch, progress.total_epochs),
        rate(status),
        "" if left is None else span(left),
        "" if status.checkpoint.step is None else f"{status.checkpoint.step}{ago(status.checkpoint.at, now, status)}",
        str(restarts(status)),
        "" if spent is None else dollars(spent.spent),
        "" if job.created_at is None else span(now - job.created_at),
    )
    wide = ("" if spent is None else dollars(spent.on_demand), causes(status), found.storage) if shape.wide else ()
    return (
        *((job.namespace,) if shape.namespaces else ()),
        *cells,
        *wide,
        reasons.get(job.uid, "") or why_ended(job) or joined((_not_training_yet(status, now), borrowed(status))),
    )


def _not_training_yet(status: JobStatus, now: float) -> str:
    """What the group does instead of making steps."""
    doing = status.activity.doing if status.activity is not None else ""
    return "" if doing in ("training", "running") else activity_text(status, now)


def bar_encoding() -> str | None:
    """The encoding in which stdout takes a bar; None where no person looks."""
    return sys.stdout.encoding if on_terminal() else None


def waiting_reasons(target: Target, jobs: list[Manifest], now: float) -> dict[str, str]:
    """UID -> why a job waits, of the first few that do: for that their pods are looked at."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING][:_LOOKED_AT]
    if not waiting:
        return {}
    found = [ElasticJob.from_manifest(manifest) for manifest in waiting]
    pods = target.cluster.pods_of(found)
    return {job.uid: reason(job, pods[job.uid], now) for job in found}


def no_jobs_line(target: Target, namespace: str | None) -> str:
    """What to say where there are no jobs."""
    place = "in any namespace" if namespace is None else f"in namespace {namespace}"
    return f"no jobs {place} of context {target.context.name}. Next: elasticctl submit train.py"


def next_of_list(jobs: list[Manifest]) -> str:
    """What to type next: about a job that waits, if there is one, else about the newest."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING]
    if waiting:
        return f"Next: find out why one is waiting: elasticctl explain {waiting[-1]['metadata']['name']}"
    return f"Next: details: elasticctl status {jobs[-1]['metadata']['name']}"


def next_line(manifest: Manifest, *, live: bool = False) -> str:
    """What to type next about a job; `live`: it is being watched already."""
    from elasticctl.api.spec import ElasticJob
    from elasticctl.api.status import Phase

    job = ElasticJob.from_manifest(manifest)
    if job.status.phase in (Phase.PENDING, Phase.RESTARTING, Phase.FAILED):
        return f"Next: find out why: elasticctl explain {job.name}   see its output: elasticctl logs {job.name}"
    if job.status.phase.terminal:
        return f"Next: see what it cost: elasticctl history {job.name}   see its output: elasticctl logs {job.name}"
    more = "" if live else f"   watch it: elasticctl status -w {job.name}"
    return f"Next: follow its output: elasticctl logs -f {job.name}{more}"
