"""Jobs on the terminal: one as a table of facts, many as rows. `now` is in seconds since the epoch."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elasticctl.api.codec import Manifest
from elasticctl.api.goal import ON_DEMAND, SPOT, capacity_of
from elasticctl.api.observed.history import (
    activity_text,
    fraction_done,
    is_training,
    makes_steps,
    not_finite_text,
    rate_text,
    redone_s,
    remaining_s,
)
from elasticctl.api.observed.plan_text import outlook_text, pools_text
from elasticctl.api.observed.usage import idle_text, mean_times, times_text, usage_text
from elasticctl.api.observed.workers import count_workers
from elasticctl.api.podtemplate import capacity, hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import ConditionType, JobStatus, Phase
from elasticctl.api.text import part_of, plural, span
from elasticctl.cli.framework.output import Table, bar, joined, on_terminal
from elasticctl.cli.views.history import causes, cost_text, failure_lines, interruptions, scalings

if TYPE_CHECKING:
    from elasticctl.diagnosis import Observations

_SHOWN_LAST = 3
_BAR_WIDTH = 30
_CAPACITIES = {SPOT: "spot", ON_DEMAND: "on-demand"}


def status_table(
    manifest: Manifest,
    pods: Sequence[Manifest],
    now: float,
    *,
    bar_encoding: str | None = None,
    seen: Observations | None = None,
) -> Table:
    """Everything about one job, one row per field, without empty fields.

    `bar_encoding`: draw its progress as a bar, in characters of this encoding. `seen`: the cluster's observations of
    its pods.
    """
    job = ElasticJob.from_manifest(manifest)
    status = job.status
    fields = [
        ("Name", joined((job.name, f"namespace {job.namespace}"))),
        ("Phase", joined((status.phase.value, duration_text(job, now)))),
        ("Doing", activity_text(status, now)),
        ("Reason", reason(job, pods, now, seen)),
        ("Workers", f"{_at_work(status, job.desired)} ({job.bounds}), {_kind(job)}"),
        ("Waiting", waiting_text(job)),
        *progress_facts(job, now, bar_encoding=bar_encoding),
        ("On a loss", on_a_loss(status)),
        ("In use", usage_text(status.usage)),
        ("Step time", times_text(mean_times(status.usage.workers)) if status.usage else ""),
        ("Idle", idle_text(status.usage, job.name)),
        ("Goal", outlook_text(job, now)),
        ("Pools", pools_text(job, now)),
        ("Cost", cost_text(job, now)),
        ("Storage", hardware(job).storage),
        ("Failures", failures_text(job) if status.failures else ""),
        *(("Interruption", text) for text in _last(interruptions(status), job.name)),
        *(("Scaling", text) for text in _last(scalings(status), job.name)),
        *zip(("Failed last", "Last lines"), _failure(status), strict=False),
    ]
    return Table(("FIELD", "VALUE"), [(name, text) for name, text in fields if text], wraps=True, facts=True)


def borrowed(status: JobStatus) -> str:
    """`borrowing 2`: how many of a job's workers are lent by other projects."""
    lent = 0 if status.share is None or status.phase.terminal else status.share.borrowed
    return f"borrowing {lent}" if lent else ""


def _kind(job: ElasticJob) -> str:
    """`2 GPUs each, 8 in all, spot, borrowing 2`, or `CPU`."""
    each, taken = hardware(job).gpus_per_worker, capacity_text(job)
    kind = f"{plural(each, 'GPU')} each, {each * job.desired} in all" if each else "CPU"
    return ", ".join(part for part in (kind, taken, borrowed(job.status)) if part)


def capacity_text(job: ElasticJob) -> str:
    """`spot`, from the template; for a job with an order of pools, the capacity that its workers have or request."""
    present = (worker for worker in job.status.workers if worker.cause is None and not worker.removal)
    kinds = {capacity(job.template)} if job.pools is None else {capacity_of(worker.pool) for worker in present}
    return ", ".join(words for kind, words in _CAPACITIES.items() if kind in kinds)


def _last(lines: list[str], job: str) -> list[str]:
    """The last few, and a pointer to the others: a screen has no room for a long history."""
    before = len(lines) - _SHOWN_LAST
    more = [f"{before} before: elasticctl history {job}"] if before > 0 else []
    return [*more, *lines[-_SHOWN_LAST:]]


def progress_facts(job: ElasticJob, now: float, *, bar_encoding: str | None = None) -> list[tuple[str, str]]:
    """Its progress, safety and disturbances; some may be blank."""
    status = job.status
    return [
        ("Progress", _progress(status, now, bar_encoding)),
        (
            "Metrics",
            joined(
                (not_finite_text(status), *(f"{name} {value:g}" for name, value in status.progress.metrics.items()))
            ),
        ),
        ("Checkpoint", _checkpoint(status, now)),
        ("Restarts", causes(status)),
        ("Redone", "" if hardware(job).in_launcher_role else redone_text(status)),
    ]


def on_a_loss(status: JobStatus) -> str:
    """The cost of losing a worker now, in a few words; `describe` also says why it is not less.

    Empty while it is unknown.
    """
    newest = status.generations[-1] if status.generations else None
    if status.phase.terminal or newest is None or newest.stays is None:
        return ""
    if newest.stays:
        return "others go on in their processes, no step is lost"
    steps_back = copied_steps_back(status)
    if steps_back is None:
        return "all ranks restart from the last checkpoint"
    unless = ", if those are not lost as well" if newest.copies_lack else ""
    return f"all ranks restart from copies in memory, about {plural(steps_back, 'step')} back{unless}"


def copied_steps_back(status: JobStatus) -> int | None:
    """About how many steps a loss costs with the copies in workers' memory; None if there are none.

    No more than since the last checkpoint: if that is newer than the copies, it is used.
    """
    every_steps = status.generations[-1].copied_every_steps if status.generations else None
    step, saved = status.progress.step, status.checkpoint.step
    if every_steps is None or step is None or saved is None:
        return every_steps
    return min(every_steps, max(0, step - saved))


def redone_text(status: JobStatus) -> str:
    """`from 0: 31m00s so far`, for a script that reports neither steps nor checkpoints."""
    redone = redone_s(status)
    return "" if redone is None else f"from 0: {span(redone)} so far, unless the script keeps checkpoints of its own"


def _failure(status: JobStatus) -> list[str]:
    """The rank that failed last, and its last output, as one text."""
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


def _at_work(status: JobStatus, desired: int) -> str:
    """`3 of 4 training, 1 waiting`: the workers that train, or run if there are no steps yet, and the others by state.

    Workers without a node, or that cannot even be created, are waiting; those with a node that do not run yet are
    starting. Workers that have been asked to end, and still clean up, are stopping.
    """
    count = count_workers(status)
    number, word = (count.training, "training") if is_training(status) else (count.running, "running")
    starting, waiting = count.placed - number, desired - count.placed
    if status.phase.terminal or status.phase is Phase.SUSPENDED:
        starting = waiting = 0
    return ", ".join(
        f"{amount} {words}"
        for amount, words in (
            (number, f"of {desired} {word}"),
            (starting, "starting"),
            (waiting, "waiting"),
            (count.stopping, "stopping"),
        )
        if amount > 0 or words.endswith(word)
    )


def waiting_text(job: ElasticJob) -> str:
    """`1 of 4 workers: digits-worker-3: 0/3 nodes are available`: what keeps workers from joining those that run."""
    wait = job.status.condition(ConditionType.WORKERS_WAITING)
    if wait is None or wait.status != "True" or job.status.phase is not Phase.RUNNING:
        return ""
    missing = max(1, job.desired - count_workers(job.status).running)
    return f"{missing} of {plural(job.desired, 'worker')}: {wait.message.removeprefix(f'{job.name}-') or wait.reason}"


def failures_text(job: ElasticJob) -> str:
    """`2 of 3 allowed since the last checkpoint`, and the total number."""
    status = job.status
    if status.failures_since_commit is None:  # an older controller limits all of them
        return f"{status.failures} of {job.backoff_limit} allowed"
    since = "since the last checkpoint" if status.checkpoint.step is not None else "before the first checkpoint"
    whole = f", {status.failures} in all" if status.failures > status.failures_since_commit else ""
    return f"{status.failures_since_commit} of {job.backoff_limit} allowed {since}{whole}"


def reason(job: ElasticJob, pods: Sequence[Manifest], now: float, seen: Observations | None = None) -> str:
    """Why a job does not train, or no longer trains: the first cause or, once it has ended, the controller's reason."""
    status = job.status
    if status.phase is Phase.SUCCEEDED:
        return ""
    if status.phase.terminal:
        return ": ".join(part for part in (status.reason, status.message) if part)
    from elasticctl.diagnosis import Case, Observations, diagnose  # not for a list of jobs that train

    case = Case(job, tuple(pods), now, seen=seen or Observations())
    first = diagnose(case)[0]
    return first.text if first.decisive or case.waiting else ""


def _progress(status: JobStatus, now: float, bar_encoding: str | None) -> str:
    """Its progress as text, below a bar if there is a known end and a person is reading."""
    progress, done, left = status.progress, fraction_done(status), remaining_s(status)
    if progress.step is None:
        return ""
    epoch = part_of(progress.epoch, progress.total_epochs)
    words = joined(
        (
            f"step {part_of(progress.step, progress.total_steps)}",
            f"epoch {epoch}" if epoch else "",
            rate_text(status, now, long=True),
            "" if left is None or not makes_steps(status, now) else f"{span(left)} to go",
        )
    )
    if done is None or bar_encoding is None:
        return words
    return f"{bar(done, _BAR_WIDTH, bar_encoding)} {done:.0%}\n{words}"


def _checkpoint(status: JobStatus, now: float) -> str:
    checkpoint = status.checkpoint
    if checkpoint.step is None:
        return ""
    return f"step {checkpoint.step}{ago(checkpoint.at, now, status)}, {checkpoint.committed} committed"


def ago(at: float | None, now: float, status: JobStatus) -> str:
    """The age of a checkpoint, which matters while progress could be lost."""
    return "" if at is None or status.phase.terminal else f" {span(now - at)} ago"


def bar_encoding() -> str | None:
    """The encoding of stdout for a bar; None if no person is reading."""
    return sys.stdout.encoding if on_terminal() else None


def next_line(manifest: Manifest, *, live: bool = False) -> str:
    """What to type next about a job; `live`: it is already being watched."""
    job = ElasticJob.from_manifest(manifest)
    if job.status.phase in (Phase.PENDING, Phase.RESTARTING, Phase.FAILED):
        return f"Next: find out why: elasticctl explain {job.name}   see its output: elasticctl logs {job.name}"
    if job.status.phase.terminal:
        return f"Next: see what it cost: elasticctl history {job.name}   see its output: elasticctl logs {job.name}"
    more = "" if live else f"   watch it: elasticctl status -w {job.name}"
    return f"Next: follow its output: elasticctl logs -f {job.name}{more}"
