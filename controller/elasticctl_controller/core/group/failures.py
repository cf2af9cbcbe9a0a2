"""Failures of ranks: which member is to blame when a generation breaks, and whether the ranks restart.

The loss of one member breaks the connections of all others, so most of the ranks that fail are victims. Each launcher
reports how its ranks ended and how long ago. The first end with an error of its own is the root cause. If all ends
report a broken connection, the first one is named, because the cause is among them or has been lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticctl.api.spec import ElasticJob, RestartPolicy
from elasticctl.api.status import RankFailure
from elasticctl.api.text import join_some
from elasticctl_controller.core.group.signs_of_life import ADOPT_S
from elasticctl_protocol.failures import FailureVerdict
from elasticctl_protocol.reports import RankPlace, describe_hang

PERMANENT_EXIT_CODES = range(1, 128)
"""restartPolicy ExitCode: as in TorchElastic, 128 and above may be retried."""
VICTIMS_S, CULPRIT_S, LAST_CALL_S = 10.0, 1.0, 2 * ADOPT_S
"""How long to wait for the ends of the other members' ranks: after broken connections, which must have a cause (four
times as long with each such failure in a row), after an error of a rank's own, and at least if broken connections would
end the job: long enough for a launcher whose report was lost to report twice more."""


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
    """The end that was found to be the root cause of the end of `generation`; `exits`: its worker must not try again.

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


def find_root_cause(ends: Iterable[RanksEnd]) -> RanksEnd:
    """The end that caused the others. Raises ValueError if there is none."""
    return min(ends, key=lambda end: (end.of_peers, end.at, end.name))


def with_evidence(end: RanksEnd, finished: Mapping[str, bool], elsewhere: Mapping[int, RankPlace]) -> RanksEnd:
    """The root cause, completed with what its launcher cannot know.

    For a hang, that is where the ranks of other members stand. For a broken connection, it is the members (`finished`)
    whose ranks had ended with exit code 0 while its own still ran, and whether those ranks had been sent SIGTERM.
    """
    failure = end.failure
    if failure.is_hang:
        others = describe_hang(elsewhere)
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
    return replace(end, failure=replace(failure, verdict=FailureVerdict.APPLICATION, error=error))


@dataclass(slots=True)
class Failures:
    """What is known about failures of the group's ranks.

    `count` failures have happened since the last checkpoint; `judged` is the newest of them until the next generation
    forms. `ends` is how ranks of the newest generation have ended, by uid of the member. `unexplained` is a generation
    that broke although every member that reported its end had lost a peer. `hangs` have ended generations since the
    last step.
    """

    count: int = 0
    hangs: int = 0
    ends: dict[str, RanksEnd] = field(default_factory=dict)
    judged: Judgement | None = None
    unexplained: int = 0

    def add_end(self, end: RanksEnd) -> None:
        """Ranks of a member have ended; of several of one member, the root cause is kept."""
        self.ends[end.uid] = find_root_cause((self.ends.get(end.uid, end), end))

    def count_one(self) -> None:
        """Count a failure."""
        self.count += 1

    def count_hang(self) -> None:
        """A generation has ended because its ranks hung."""
        self.hangs += 1

    def judge(self, judged: Judgement) -> None:
        """The newest generation broke because of this."""
        self.judged = judged

    def judged_with(self, end: RanksEnd) -> RanksEnd:
        """The end that is to blame if this one is considered as well. A worker that is to exit stays to blame."""
        if self.judged is None:
            return end
        return self.judged.end if self.judged.exits else find_root_cause((self.judged.end, end))

    def correct_judgement(self, end: RanksEnd, *, may_restart: bool) -> None:
        """This end has been found to be to blame after the judgement; a worker that is to exit still is."""
        if self.judged is not None:
            self.judged = replace(self.judged, end=end, exits=self.judged.exits or not may_restart)

    def let_rejoin(self) -> None:
        """The worker that is to blame has joined again already."""
        self.judged = None if self.judged is None else replace(self.judged, exits=False)

    def excuse(self) -> bool:
        """A member has been lost, which explains the failure of its peers: it does not count. True if there was one."""
        if self.judged is None or self.judged.exits:
            return False
        self.count = max(0, self.count - (not self.judged.explains))
        self.judged = None
        return True

    def start_generation(self) -> None:
        """A generation has formed."""
        self.unexplained = self.judged.generation if self.judged is not None and self.judged.end.of_peers else 0
        self.judged = None
        self.ends.clear()

    def refill_budget(self) -> None:
        """A newer checkpoint has been committed."""
        self.count = 0

    def clear_hangs(self) -> None:
        """A rank has made a step."""
        self.hangs = 0

    @property
    def has_culprit(self) -> bool:
        """Has a rank of the newest generation failed with an error of its own?"""
        return any(not end.of_peers for end in self.ends.values())

    def is_blamed_without_kill(self, uid: str) -> bool:
        """Is this member to blame for the last failure, with an error rather than a kill?

        The others wait for it, because a script that cannot run at this size must not seem to succeed at a smaller one.
        """
        return self.judged is not None and self.judged.end.uid == uid and not self.judged.end.failure.signal

    def is_blamed(self, uid: str, generation: int) -> bool:
        """Is this member to blame for the end of this generation?"""
        return self.judged is not None and (self.judged.generation, self.judged.end.uid) == (generation, uid)

    def exits(self, uid: str, generation: int) -> bool:
        """Is it to blame, and must its worker exit?"""
        return self.judged is not None and self.judged.exits and self.is_blamed(uid, generation)

    def error_of(self, uid: str, generation: int) -> str:
        """The error of this member, if its failure is to blame for the end of `generation`; else empty."""
        return self.judged.end.failure.error if self.judged is not None and self.is_blamed(uid, generation) else ""
