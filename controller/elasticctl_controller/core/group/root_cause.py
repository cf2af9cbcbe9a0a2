"""The root cause when a generation breaks: the member whose ranks failed first with an error of their own.

The loss of one member breaks the connections of all others, so most of the ranks that fail are victims. Each launcher
reports how its ranks ended and how long ago. The first end with an error of its own is the root cause. If all ends
report a broken connection, the first one is named, because the cause is among them or has been lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elasticctl.api.observed.hang_description import RankPlace, describe_hang
from elasticctl.api.status import RankFailure
from elasticctl.api.text import join_some
from elasticctl_controller.core.causes import APPLICATION


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


def find_root_cause(ends: Iterable[RanksEnd]) -> RanksEnd:
    """The end that caused the others. Raises ValueError if there is none."""
    return min(ends, key=lambda end: (end.of_peers, end.at, end.name))


def with_evidence(end: RanksEnd, finished: Mapping[str, bool], elsewhere: Mapping[int, RankPlace]) -> RanksEnd:
    """The root cause, completed with what its launcher cannot know.

    For a hang, that is where the ranks of other members stand. For a broken connection, it is the members (`finished`)
    whose ranks had ended with exit code 0 while its own still ran, and whether somebody had sent those SIGTERM.
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
    return replace(end, failure=replace(failure, verdict=APPLICATION, error=error))
