"""How the group of a job is run, by the job's spec: its size, and whether and when ranks that fail are restarted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elasticctl.api.spec import ElasticJob, RestartPolicy
from elasticctl_controller.core.group.root_cause import RanksEnd

PERMANENT_EXIT_CODES = range(1, 128)
"""restartPolicy ExitCode: as in TorchElastic, 128 and above may be retried."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """How the group of a job is run, according to its spec.

    `desired` is the number of workers; `automatic`: that number is chosen for the job; `asked`: a person has just asked
    for it. Ranks that fail are restarted at most `limit` times without a new checkpoint, after growing pauses.
    """

    desired: float = math.inf
    automatic: bool = False
    asked: bool = False
    limit: int = 3
    policy: RestartPolicy = RestartPolicy.ON_FAILURE
    pause_s: float = 0.0
    longest_pause_s: float = 60.0

    @classmethod
    def of(cls, job: ElasticJob, *, asked: bool) -> GroupRules:
        """The rules that the job's spec gives."""
        return cls(
            desired=job.desired,
            automatic=job.sharing.automatic,
            asked=asked,
            limit=job.backoff_limit,
            policy=job.restart_policy,
            pause_s=job.policy.backoff_seconds,
            longest_pause_s=job.policy.backoff_max_seconds,
        )

    def allow_restart(self, end: RanksEnd, failures: int) -> bool:
        """May the ranks restart after `end`, the newest of this many `failures` since the last checkpoint?"""
        code = end.failure.exit_code
        if end.permanent or self.policy is RestartPolicy.NEVER or failures > self.limit:
            return False
        return not (self.policy is RestartPolicy.EXIT_CODE and not end.of_peers and code in PERMANENT_EXIT_CODES)

    def pause_after(self, failures: int) -> float:
        """Seconds before the ranks restart; none after the first failure."""
        if failures < 2:
            return 0.0
        return min(self.longest_pause_s, self.pause_s * 2.0 ** min(failures - 2, 60))
