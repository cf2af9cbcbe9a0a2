"""A job's group of workers, driven by hand."""

from __future__ import annotations

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import ProgressStatus, RankFailure
from elasticctl_controller.core.group.failures import RanksEnd
from elasticctl_controller.core.group.membership import Group
from elasticctl_protocol.requests import Member


def member(index: int) -> Member:
    return Member(uid=f"u{index}", name=f"job-worker-{index}", host="127.0.0.1", port=1000 + index, slots=1)


def alive(*indexes: int) -> dict[str, str]:
    return {f"u{i}": f"job-worker-{i}" for i in indexes}


def formed(*indexes: int, minimum: int = 1, steps: bool = True) -> Group:
    """A group that has formed at 0 s and has done its first step, or reports none."""
    group = Group(job_uid="j")
    group.set_alive(alive(*indexes), minimum, 0.0)
    for i in indexes:
        group.join(member(i), 0, 0.0)
    if steps:
        group.note_step(1, ProgressStatus(step=1), 0.0)
    return group


def join_all(group: Group, *indexes: int, now: float) -> None:
    """These workers join, one after the other, from the generation that the group is in now."""
    generation = group.generation
    for index in indexes:
        group.join(member(index), generation, now)


def fail(
    group: Group, index: int, now: float, *, of_peers: bool = False, permanent: bool = False, **failure: str
) -> None:
    """The ranks of this member end with an error, its own or that of a lost peer."""
    failure = {"verdict": "collateral" if of_peers else "application", **failure}
    found = RankFailure(worker=f"job-worker-{index}", exit_code=1, at=Timestamp(now), **failure)
    end = RanksEnd(f"u{index}", f"job-worker-{index}", now, found, of_peers, permanent)
    group.fail(end, group.generation, now)
