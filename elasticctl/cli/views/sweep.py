"""The results of a sweep: a row for each of its jobs, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elasticctl.api.codec import Manifest
from elasticctl.api.observed.cost import cost
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import dollars, span
from elasticctl.cli.framework.output import Table


def sweep_table(
    jobs: Sequence[Manifest], points: Sequence[dict[str, str]], now: float, metric: str = "", *, lowest: bool = True
) -> Table:
    """Name, phase, values of the parameters, steps, metrics, time and cost; sorted by `metric` if given."""
    found = [(ElasticJob.from_manifest(job), point) for job, point in zip(jobs, points, strict=True)]
    parameters = list(dict.fromkeys(name for _, point in found for name in point))
    reported = dict.fromkeys(name for job, _ in found for name in job.status.progress.metrics)
    metrics = sorted(reported, key=lambda name: name != metric)
    if metric:
        found.sort(key=lambda pair: _rank(pair[0], metric, lowest=lowest))
    rows = []
    for job, point in found:
        status, spent = job.status, cost(job, now)
        values = [status.progress.metrics.get(name) for name in metrics]
        took_s = None if status.start_time is None else (status.completion_time or now) - status.start_time
        rows.append(
            (
                job.name,
                status.phase.value,
                *(point.get(name, "") for name in parameters),
                "" if status.progress.step is None else str(status.progress.step),
                *("" if value is None else f"{value:.6g}" for value in values),
                "" if took_s is None else span(took_s),
                "" if spent is None else dollars(spent.spent),
            )
        )
    header = ("NAME", "PHASE", *(name.upper() for name in parameters), "STEP", *(name.upper() for name in metrics))
    return Table((*header, "TOOK", "COST"), rows, spare=("COST", "TOOK", "STEP"))


def _rank(job: ElasticJob, metric: str, *, lowest: bool) -> float:
    value = job.status.progress.metrics.get(metric)
    if value is None or metric in job.status.progress.not_finite:
        return math.inf
    return value if lowest else -value
