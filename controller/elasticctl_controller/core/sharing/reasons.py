"""A division in words: why each claim has what it has, what a decision changed, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticctl.api.text import counted
from elasticctl_controller.core.sharing.claims import Pool, Reason
from elasticctl_controller.core.sharing.division import Allocation, ProjectAccount


@dataclass(frozen=True, slots=True)
class DividedPool:
    """A pool as it has been divided. `above`: slots of claims by priority, and the claim with most of each."""

    pool: Pool
    slots: int
    accounts: Sequence[ProjectAccount]
    running: int
    above: dict[int, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, pool: Pool, accounts: Sequence[ProjectAccount], seeking: Sequence[Allocation]) -> DividedPool:
        """The scene after the division of `pool` among `seeking`."""
        above: dict[int, tuple[int, str]] = {}
        most: dict[int, int] = {}
        for one in seeking:
            if one.given:
                slots, priority = one.given * one.claim.slots_per_worker, one.claim.priority
                total, key = above.get(priority, (0, ""))
                if slots > most.get(priority, 0):
                    most[priority], key = slots, one.claim.key
                above[priority] = (total + slots, key)
        running = sum(one.given > 0 for one in seeking)
        return cls(pool, pool.slots, accounts, running, above)

    @property
    def used(self) -> int:
        """Slots that claims have."""
        return sum(account.used for account in self.accounts)

    def amount(self, slots: int) -> str:
        """So many slots in words: `2 GPUs`."""
        return counted(slots, self.pool.unit)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A reason, in words, and the claim that is in the way, where one stands out."""

    reason: Reason
    words: str
    for_key: str = ""


def explain(one: Allocation, scene: DividedPool) -> Explanation:
    """Why this claim has what it has."""
    return _explain_running(one, scene) if one.given else _explain_waiting(one, scene)


def _explain_waiting(one: Allocation, scene: DividedPool) -> Explanation:
    account = one.account
    limit = account.limit
    if limit is not None and one.limited:
        may = f"{account.project.name} may have {scene.amount(limit)}"
        if one.need > limit:
            return Explanation(Reason.WAITS_LIMIT, f"cannot start: it needs {scene.amount(one.need)}, and {may}")
        return Explanation(Reason.WAITS_LIMIT, f"waits for other jobs of its project: {may}")
    if one.need > scene.slots:
        has = f"{scene.pool.name} has {scene.amount(scene.slots)}"
        return Explanation(Reason.NO_ROOM, f"waits for nodes: it needs {scene.amount(one.need)}, and {has}")
    missing = one.need - (scene.slots - scene.used)
    if missing <= 0 or one.most < one.claim.least:
        each = scene.amount(one.claim.slots_per_worker)
        return Explanation(
            Reason.NO_ROOM, f"waits for nodes: a worker needs {each} on one node, and too few nodes have that"
        )
    waits = f"waits for {scene.amount(missing)}"
    higher = {priority: had for priority, had in scene.above.items() if priority > one.claim.priority}
    others = [other for other in scene.accounts if other is not account and other.guaranteed and other.used]
    if others and sum(min(other.used, other.guaranteed) for other in others) >= missing:
        owner = max(others, key=lambda other: (min(other.used, other.guaranteed), other.project.name))
        return Explanation(Reason.WAITS_GUARANTEE, f"{waits} that {owner.project.name} is guaranteed")
    if sum(slots for slots, _ in higher.values()) >= missing:
        holder = higher[max(higher)][1]
        return Explanation(Reason.WAITS_PRIORITY, f"{waits} held by jobs of higher priority, such as {holder}", holder)
    return Explanation(Reason.WAITS_TURN, f"{waits} held by jobs that come first")


def _explain_running(one: Allocation, scene: DividedPool) -> Explanation:
    claim, account = one.claim, one.account
    borrows = _borrowing(one, scene)
    if one.given >= claim.most:
        all_of = "the worker" if claim.most == 1 else f"all {claim.most} workers"
        return Explanation(Reason.FULL, f"has {all_of} that it asks for{borrows}")
    has = f"has {one.given} of {claim.most} workers"
    if one.limited and account.limit is not None:
        may = f"{account.project.name} may have {scene.amount(account.limit)}"
        return Explanation(Reason.LIMITED, f"{has}: {may}{borrows}")
    if scene.running == 1:
        all_of = f"{scene.pool.name} has {scene.amount(scene.slots)} in all"
        return Explanation(Reason.SMALL_POOL, f"{has}: {all_of}{borrows}")
    if one.given >= one.most:
        each = scene.amount(claim.slots_per_worker)
        return Explanation(Reason.SMALL_POOL, f"{has}: no more nodes of {scene.pool.name} have {each} for one{borrows}")
    others = counted(scene.running - 1, "other job")
    return Explanation(
        Reason.SHARED, f"{has}: {scene.pool.name} has {scene.amount(scene.slots)}, shared with {others}{borrows}"
    )


def _borrowing(one: Allocation, scene: DividedPool) -> str:
    slots = min(one.borrowed * one.claim.slots_per_worker, one.account.over)
    if slots <= 0:
        return ""
    lenders = [other for other in scene.accounts if other is not one.account and other.guaranteed > other.used]
    if not lenders:
        return f"; {scene.amount(slots)} beyond what {one.account.project.name} is guaranteed"
    lender = max(lenders, key=lambda other: (other.guaranteed - other.used, other.project.name))
    return f"; borrows {scene.amount(slots)} from {lender.project.name}"


def explain_changes(seeking: Sequence[Allocation]) -> dict[str, Explanation]:
    """What was changed of each claim whose size changes, by key; who loses is told who gains."""
    gainers = [(one, one.given - one.claim.granted) for one in seeking if one.given > one.claim.granted]
    losers = [one for one in seeking if one.given < one.claim.granted]
    found = {one.claim.key: Explanation(Reason.FULL, _explain_gain(one, workers)) for one, workers in gainers}
    left = [workers * one.claim.slots_per_worker for one, workers in gainers]
    turn = 0
    for one in losers:
        while turn < len(gainers) and left[turn] <= 0:
            turn += 1
        gainer = gainers[turn][0] if turn < len(gainers) and _chose_not(one) else None
        if gainer is not None:
            left[turn] -= (one.claim.granted - one.given) * one.claim.slots_per_worker
        found[one.claim.key] = _explain_loss(one, gainer)
    return found


def _chose_not(one: Allocation) -> bool:
    """Was it taken from, rather than asking for less itself or being over its project's limit?"""
    return one.claim.granted <= one.claim.most and not one.limited


def _explain_gain(one: Allocation, workers: int) -> str:
    if one.claim.granted > 0:
        return f"gets {counted(workers, 'more worker')}"
    back = one.claim.changed_at > one.claim.submitted_at
    return f"{'comes back' if back else 'starts'} with {counted(workers, 'worker')}"


def _explain_loss(one: Allocation, gainer: Allocation | None) -> Explanation:
    lost = counted(one.claim.granted - one.given, "worker")
    if gainer is None:
        if one.limited:
            cause = f"{one.account.project.name} may have no more"
        elif one.claim.granted > one.claim.most:
            cause = "it asks for fewer"
        else:
            cause = "there are fewer nodes"
        return Explanation(Reason.SHARED, f"gives up {lost}: {cause}" if one.given else f"is suspended: {cause}")
    key, owner = gainer.claim.key, gainer.account
    if owner is not one.account and owner.guaranteed and not gainer.borrowed:
        claim = f"as {owner.project.name} is guaranteed so many"
    elif gainer.claim.priority > one.claim.priority:
        claim = "which has a higher priority"
    elif gainer.claim.granted <= 0:
        claim = "which needs them to start" if one.given else "which comes first"
    else:
        claim = "for a fair share"
    if one.given:
        return Explanation(Reason.SHARED, f"gives {lost} to {key}, {claim}", key)
    return Explanation(Reason.SHARED, f"is suspended for {key}, {claim}", key)
