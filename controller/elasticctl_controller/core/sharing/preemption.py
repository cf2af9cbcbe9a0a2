"""Preemption: which workers a claim gives up, and for which other claim.

A division may leave a claim with fewer workers than it was granted before, or with none, which suspends it. The oldest
workers stay and the youngest leave. `explain_changes` explains the change to both jobs: the one that loses workers
learns which job gets them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticctl.api.text import plural
from elasticctl_controller.core.sharing.allocation import Allocation
from elasticctl_controller.core.sharing.claims import Claim, GrantReason, SharedPool, Worker


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a claim has what it has, and the key of the claim that is in its way, if there is one."""

    reason: GrantReason
    words: str
    for_key: str = ""


def select_remaining(claim: Claim, given: int) -> tuple[Worker, ...]:
    """The workers that stay if a claim is given `given`: the oldest, and those on a node before waiting ones."""
    if given >= len(claim.workers):
        return claim.workers
    ordered = sorted(claim.workers, key=lambda worker: (not worker.node, worker.started_at, worker.name))
    return tuple(ordered[:given])


def select_preempted(one: Allocation, kept: Mapping[str, tuple[Worker, ...]]) -> tuple[str, ...]:
    """The names of the workers that have to leave: all except those `kept` by the packing."""
    workers = one.claim.workers
    stay = kept.get(one.claim.key, ()) if one.given else ()
    if len(stay) == len(workers):
        return ()
    names = {worker.name for worker in stay}
    return tuple(sorted(worker.name for worker in workers if worker.name not in names))


def explain_changes(seeking: Sequence[Allocation], pool: SharedPool) -> dict[str, Explanation]:
    """What changes for each claim whose size changes, by key; those that lose workers name who gains them."""
    gainers = [(one, one.given - one.claim.granted) for one in seeking if one.given > one.claim.granted]
    losers = [one for one in seeking if one.given < one.claim.granted]
    found = {one.claim.key: Explanation(GrantReason.FULL, _explain_gain(one, workers)) for one, workers in gainers}
    left = [workers * one.claim.slots_per_worker for one, workers in gainers]
    turn = 0
    for one in losers:
        while turn < len(gainers) and left[turn] <= 0:
            turn += 1
        gainer = gainers[turn][0] if turn < len(gainers) and _is_preempted(one) else None
        if gainer is not None:
            left[turn] -= (one.claim.granted - one.given) * one.claim.slots_per_worker
        found[one.claim.key] = _explain_loss(one, gainer, pool)
    return found


def _is_preempted(one: Allocation) -> bool:
    """True if workers were taken from it, rather than given up because it asks for fewer or reached a limit."""
    return one.claim.granted <= one.claim.most and not one.limited


def _explain_gain(one: Allocation, workers: int) -> str:
    if one.claim.granted > 0:
        return f"gets {plural(workers, 'more worker')}"
    return f"{'resumes' if one.claim.ran else 'starts'} with {plural(workers, 'worker')}"


def _explain_loss(one: Allocation, gainer: Allocation | None, pool: SharedPool) -> Explanation:
    lost = plural(one.claim.granted - one.given, "worker")
    if gainer is None:
        if one.limited:
            cause = f"{one.account.project.name} may have no more"
        elif one.claim.granted > one.claim.most:
            cause = "it asks for fewer"
        else:
            cause = f"{pool.name} has only {plural(pool.slots, pool.unit)}"
        return Explanation(GrantReason.SHARED, f"gives up {lost}: {cause}" if one.given else f"is suspended: {cause}")
    key, owner = gainer.claim.key, gainer.account
    if owner is not one.account and owner.guaranteed and not gainer.borrowed:
        claim = f"because {owner.project.name} is guaranteed that many"
    elif gainer.claim.priority > one.claim.priority:
        claim = "which has a higher priority"
    elif gainer.claim.granted <= 0:
        claim = "which needs them to start" if one.given else "which comes first"
    else:
        claim = "for a fair share"
    if one.given:
        return Explanation(GrantReason.SHARED, f"gives {lost} to {key}, {claim}", key)
    return Explanation(GrantReason.SHARED, f"is suspended for {key}, {claim}", key)
