"""Who is to blame when a generation breaks: the one whose ranks failed first with an error of their own.

The loss of one member breaks the connections of all others, so most of the ranks that fail are victims. Each launcher
reports how its ranks ended and how long ago. The first end with an error of its own is to blame; if all of them speak
of a broken connection, the first end is named, because whoever caused the others' is among them or has been lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """How the ranks of one member ended, by the first of them that failed; `at` is in seconds since the epoch.

    `of_peers`: the error is one that a lost peer causes. `permanent`: trying again cannot help, as with a SyntaxError.
    """

    uid: str
    name: str
    at: float
    failure: RankFailure = RankFailure()
    of_peers: bool = False
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """Who was found to be to blame for the end of `generation`; `exits`: its worker is not to try again.

    `explains` is the generation before, if that broke by the same failure: a rank that failed there was still cleaning
    up when it got a place in this one, in which no rank has begun. It is counted once.
    """

    generation: int
    end: RanksEnd
    exits: bool = False
    explains: int = 0


@dataclass(frozen=True, slots=True)
class GroupRules:
    """How a job's spec wants its group to be run.

    `desired` workers are to be there; `automatic`: their number is chosen for the job; `asked`: somebody has just asked
    for it. Ranks that fail are started again at most `limit` times without a new checkpoint, after growing pauses.
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
        """May the ranks be started again after `end`, the last of so many failures since the last checkpoint?"""
        code = end.failure.exit_code
        if end.permanent or self.policy is RestartPolicy.NEVER or failures > self.limit:
            return False
        return not (self.policy is RestartPolicy.EXIT_CODE and not end.of_peers and code in PERMANENT_EXIT_CODES)

    def pause_after(self, failures: int) -> float:
        """Seconds before the ranks are started again; none after a first failure."""
        if failures < 2:
            return 0.0
        return min(self.longest_pause_s, self.pause_s * 2.0 ** min(failures - 2, 60))


def first_to_blame(ends: Iterable[RanksEnd]) -> RanksEnd:
    """The end that is to blame. Raises ValueError if there is none."""
    return min(ends, key=lambda end: (end.of_peers, end.at, end.name))


def with_evidence(end: RanksEnd, finished: Sequence[str], elsewhere: Mapping[int, RankPlace]) -> RanksEnd:
    """The end that is to blame, with what its launcher cannot know.

    In a hang, that is where the ranks of others stand; where connections broke, whose ranks (`finished`) had ended with
    exit code 0 while its own still ran.
    """
    failure = end.failure
    if failure.is_hang:
        others = describe_standstill(elsewhere)
        return replace(end, failure=replace(failure, error=f"{failure.error}; {others}" if others else failure.error))
    if not end.of_peers or not finished:
        return end
    error = f"the ranks of {join_some(finished, 'worker')} had ended with exit code 0 by then: {failure.error}"
    return replace(end, failure=replace(failure, verdict=APPLICATION, error=error))
