"""Which member is to blame when a generation breaks: the one whose ranks failed first with an error of their own.

The loss of one member breaks the connections of all others, so most of the ranks that fail are victims. Each launcher
reports how its ranks ended and how long ago. The first end with an error of its own is to blame. If all ends report a
broken connection, the first one is named, because the cause is among them or has been lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elasticctl.api.observed.standstill import RankPlace, describe_standstill
from elasticctl.api.spec import ElasticJob, RestartPolicy
from elasticctl.api.status import RankFailure
from elasticctl.api.text import join_some
from elasticctl_controller.core.causes import APPLICATION

PERMANENT_EXIT_CODES = range(1, 128)
"""restartPolicy ExitCode: as in TorchElastic, 128 and above may be retried."""


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """How the first rank of one member that failed has ended; `at` is in seconds since the epoch.

    `of_peers`: the error is one that a lost peer causes. `permanent`: another try cannot help, as with a SyntaxError.
    """

    uid: str
    name: str
    at: float
    failure: RankFailure = RankFailure()
    of_peers: bool = False
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The end that was found to be to blame for the end of `generation`; `exits`: its worker must not try again.

    `explains` is the previous generation, if the same failure broke that one: a rank that had failed there was still
    cleaning up when it got a place in this one, in which no rank had begun. The failure is counted once.
    """

    generation: int
    end: RanksEnd
    exits: bool = False
    explains: int = 0


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


def first_to_blame(ends: Iterable[RanksEnd]) -> RanksEnd:
    """The end that is to blame. Raises ValueError if there is none."""
    return min(ends, key=lambda end: (end.of_peers, end.at, end.name))


def with_evidence(end: RanksEnd, finished: Mapping[str, bool], elsewhere: Mapping[int, RankPlace]) -> RanksEnd:
    """The end that is to blame, completed with what its launcher cannot know.

    For a hang, that is where the ranks of other members stand. For a broken connection, it is the members (`finished`)
    whose ranks had ended with exit code 0 while its own still ran, and whether somebody had sent those SIGTERM.
    """
    failure = end.failure
    if failure.is_hang:
        others = describe_standstill(elsewhere)
        return replace(end, failure=replace(failure, error=f"{failure.error}; {others}" if others else failure.error))
    if not end.of_peers or not finished:
        return end
    terminated = [name for name, is_so in finished.items() if is_so]
    names = join_some(terminated or list(finished), "worker")
    error = f"the ranks of {names} had ended with exit code 0 by then: {failure.error}"
    if terminated:
        error = (
            f"the ranks of {names} got SIGTERM, not from their launcher, and ended with exit code 0: {failure.error}"
        )
        failure = RankFailure(worker=terminated[0], signal="SIGTERM", generation=failure.generation, at=failure.at)
    return replace(end, failure=replace(failure, verdict=APPLICATION, error=error))
