"""Applies what an administrator allows the jobs of each project, before the loop and the allocator see a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticctl.api.codec import Manifest
from elasticctl.api.limits import AllowedJobs
from elasticctl.api.objects import as_mapping
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.workers import is_active


class ProjectLimits:
    """Restricts jobs to what their projects allow; thread-safe if its two functions are.

    `quota_of(project)` returns the project's ElasticQuota, if it has one; `spent_today(project)` US dollars.
    """

    def __init__(
        self,
        quota_of: Callable[[str], Manifest | None],
        spent_today: Callable[[str], float] = lambda project: 0.0,
    ) -> None:
        self._quota_of, self._spent_today = quota_of, spent_today

    def restrict(self, job: ElasticJob) -> ElasticJob:
        """The job with the priority and the nodes that its project may have, suspended if it must not run.

        A job that has workers continues when limits change, until it stops for another reason; only a daily budget that
        is spent stops it.
        """
        quota = self._quota_of(job.namespace)
        limits = AllowedJobs.from_spec(as_mapping((quota or {}).get("spec")))
        if limits == AllowedJobs() or job.status.phase.terminal or job.deleting:
            return job
        over = self._over_limit(job, limits)
        priority = job.sharing.priority if limits.priority is None else min(job.sharing.priority, limits.priority)
        return replace(
            job,
            suspend=job.suspend or bool(over),
            over_limit=over,
            node_types=limits.node_types,
            sharing=replace(job.sharing, priority=priority),
        )

    def _over_limit(self, job: ElasticJob, limits: AllowedJobs) -> str:
        """Why the job must not run; "" if it may, or if its owner has suspended it anyway."""
        if job.suspend and not job.queue:
            return ""
        if not any(map(is_active, job.status.workers)):
            breaches = limits.breaches(job)
            if breaches:
                return f"project {job.namespace} does not allow this job: {'; '.join(breaches)}"
        if limits.usd_per_day is not None and self._spent_today(job.namespace) >= limits.usd_per_day:
            return (
                f"project {job.namespace} has spent the {limits.usd_per_day:.2f} USD that it may spend in a day;"
                " the job continues at 00:00 UTC"
            )
        return ""
