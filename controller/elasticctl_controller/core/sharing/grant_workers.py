"""The decision: from pools, projects and claims to what every claim gets, for all pools.

It depends only on its arguments, and not on their order; applied to its own outcome, it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticctl.api.text import join_and, plural, quote
from elasticctl_controller.core.sharing import allocation, packing
from elasticctl_controller.core.sharing.allocation import Allocation, Division, ProjectAccount
from elasticctl_controller.core.sharing.claims import (
    DEFAULT_RULES,
    Claim,
    Grant,
    GrantReason,
    Project,
    SharedPool,
    SharingDecision,
    SharingRules,
    Usage,
)
from elasticctl_controller.core.sharing.packing import Explanation, Packing, explain_changes, select_preempted

PACKINGS = 4
"""How often a pool is divided again because workers of several slots do not fit; after that, these get none."""
ROUNDS = 4
"""How often a decision is applied to its own outcome."""


def decide(
    pools: Iterable[SharedPool],
    projects: Iterable[Project],
    claims: Iterable[Claim],
    now: float,
    rules: SharingRules = DEFAULT_RULES,
) -> SharingDecision:
    """Divide every pool among the claims on it at `now` (seconds since the epoch)."""
    known = {project.name: project for project in projects}
    shared = {pool.name: pool for pool in sorted(pools, key=lambda pool: pool.name)}
    by_pool: dict[str, list[Claim]] = {name: [] for name in shared}
    grants: dict[str, Grant] = {}
    for claim in claims:
        if claim.pool in by_pool:
            by_pool[claim.pool].append(_normalize(claim))
        else:
            grants[claim.key] = _without_pool(claim)
    usage: list[Usage] = []
    wake_at: list[float] = []
    for name, found in by_pool.items():
        outcome = _decide_pool(shared[name], known, found, now, rules)
        grants.update(_grants(outcome))
        usage.extend(_usage(outcome))
        wake_at.extend(_wake_times(outcome.allocations, now, rules))
    return SharingDecision(grants, tuple(usage), min(wake_at, default=None))


@dataclass(frozen=True, slots=True)
class _Outcome:
    pool: SharedPool
    accounts: Sequence[ProjectAccount]
    allocations: Sequence[Allocation]
    packed: Packing


def _decide_pool(
    pool: SharedPool, projects: Mapping[str, Project], claims: Sequence[Claim], now: float, rules: SharingRules
) -> _Outcome:
    """Divide a pool, and apply the decision to its own outcome until it changes nothing.

    Usually the first round is the last. But a claim that has started is no longer new and may come before others, which
    matters for a project's share or a node that a worker fits on. If that leads back to the state before, nothing is
    changed: otherwise jobs would swap places forever.
    """
    asked = {claim.key: claim for claim in claims}
    outcome = divide(pool, projects, claims, now, rules)
    for _ in range(ROUNDS):
        if all(one.given == one.claim.granted for one in outcome.allocations):
            break
        after = [_apply_outcome(one, outcome.packed, now) for one in outcome.allocations]
        outcome = divide(pool, projects, after, now, rules)
        if all(one.given == asked[one.claim.key].granted for one in outcome.allocations):
            kept = {claim.key: claim.workers for claim in claims}
            outcome = replace(outcome, packed=Packing(kept, {}, {}))
            break
    for one in outcome.allocations:
        one.set_claim(asked[one.claim.key])
    return outcome


def _apply_outcome(one: Allocation, packed: Packing, now: float) -> Claim:
    """The claim after the outcome has been carried out."""
    claim = one.claim
    kept = packed.kept.get(claim.key, ()) if one.given else ()
    if one.given == claim.granted and len(kept) == len(claim.workers):
        return claim
    changed_at = claim.changed_at if one.given == claim.granted else now
    return replace(claim, granted=one.given, changed_at=changed_at, workers=kept)


def divide(
    pool: SharedPool, projects: Mapping[str, Project], claims: Sequence[Claim], now: float, rules: SharingRules
) -> _Outcome:
    """Divide the pool, and divide again with what fits if the result does not fit on the nodes."""
    caps = _caps(pool, claims)
    for attempt in range(PACKINGS):
        accounts = _accounts(pool.name, projects, claims)
        allocations = allocation.build_allocations(claims, accounts, caps, rules, now)
        divided = allocation.divide(pool.slots, list(accounts.values()), allocations)
        packed = packing.pack(pool, divided.admitted)
        if not packed.fitting:
            break
        if attempt + 1 < PACKINGS:
            caps.update(packed.fitting)
        else:
            _shrink_to_fit(divided, packed.fitting)
    return _Outcome(pool, divided.accounts, allocations, packed)


def _caps(pool: SharedPool, claims: Iterable[Claim]) -> dict[str, int]:
    """The number of workers that fit into the whole pool, for claims that ask for more."""
    capacities: dict[int, int] = {}
    caps: dict[str, int] = {}
    for claim in claims:
        each = claim.slots_per_worker
        if each not in capacities:
            capacities[each] = packing.room_for(pool, each)
        if claim.most > capacities[each]:
            caps[claim.key] = capacities[each]
    return caps


def _accounts(pool: str, projects: Mapping[str, Project], claims: Iterable[Claim]) -> dict[str, ProjectAccount]:
    """Accounts by project name, sorted: of all projects that have a quota or a claim."""
    names = sorted({*projects, *(claim.project for claim in claims)})
    listed = [projects.get(name, Project(name)) for name in names]
    return {one.name: ProjectAccount(one, max(0, one.guaranteed.get(pool, 0)), one.limit.get(pool)) for one in listed}


def _shrink_to_fit(divided: Division, fitting: Mapping[str, int]) -> None:
    """Reduce claims that still do not fit to what fits, or to nothing."""
    for one in divided.admitted:
        fits = fitting.get(one.claim.key, one.given)
        divided.take_back(one, one.given - (fits if fits >= one.claim.least else 0))


def _grants(outcome: _Outcome) -> dict[str, Grant]:
    divided = DividedPool.of(outcome.pool, outcome.accounts, outcome.allocations)
    changed = explain_changes(outcome.allocations, outcome.pool)
    left = {account.project.name: _left(account) for account in outcome.accounts}
    found: dict[str, Grant] = {}
    for one in outcome.allocations:
        claim, name = one.claim, one.account.project.name
        why = explain(one, divided)
        change = changed.get(claim.key)
        pending = int(min(claim.most - one.given, left[name] // claim.slots_per_worker))
        if one.given + pending < claim.least:
            pending = 0
        left[name] -= pending * claim.slots_per_worker
        found[claim.key] = Grant(
            key=claim.key,
            workers=one.given,
            reason=why.reason,
            words=why.words,
            borrowed=one.borrowed,
            leave=select_preempted(one, outcome.packed.kept),
            nodes=outcome.packed.nodes.get(claim.key, ()) if one.given else (),
            pending=pending,
            change=change.words if change else "",
            for_key=change.for_key if change else why.for_key,
        )
    return found


def _left(account: ProjectAccount) -> float:
    """The slots that a project may still use."""
    return math.inf if account.limit is None else max(0, account.limit - account.used)


def _without_pool(claim: Claim) -> Grant:
    lost = claim.granted > 0
    return Grant(
        key=claim.key,
        workers=0,
        reason=GrantReason.NO_POOL,
        words=f"waits for nodes: there is no pool {quote(claim.pool)}",
        leave=tuple(sorted(worker.name for worker in claim.workers)),
        pending=claim.most,
        change="is suspended: there are no more nodes of its kind" if lost else "",
    )


def _usage(outcome: _Outcome) -> Iterable[Usage]:
    waiting: dict[str, int] = {}
    for one in outcome.allocations:
        if not one.given:
            waiting[one.account.project.name] = waiting.get(one.account.project.name, 0) + 1
    for account in outcome.accounts:
        name = account.project.name
        if account.used or account.guaranteed or name in waiting:
            yield Usage(
                project=name,
                pool=outcome.pool.name,
                used=account.used,
                guaranteed=account.guaranteed,
                limit=account.limit,
                borrowed=account.over if any(other.guaranteed for other in outcome.accounts) else 0,
                waiting=waiting.get(name, 0),
            )


def _wake_times(allocations: Sequence[Allocation], now: float, rules: SharingRules) -> Iterable[float]:
    """When a waiting claim's patience ends, or a changed size is no longer protected while others want more."""
    wanting = any(one.given < one.most for one in allocations)
    for one in allocations:
        changed_at = one.claim.changed_at if one.given == one.claim.granted else now
        if not one.given:
            due = changed_at + rules.patience_s
        elif wanting and one.given > one.claim.least:
            due = changed_at + rules.settle_s
        else:
            continue
        if due > now:
            yield due


def _normalize(claim: Claim) -> Claim:
    """The claim with valid numbers: users may have entered others."""
    if 1 <= claim.least <= claim.most and claim.slots_per_worker >= 1:
        return claim
    least = max(1, claim.least)
    return replace(claim, least=least, most=max(least, claim.most), slots_per_worker=max(1, claim.slots_per_worker))


@dataclass(frozen=True, slots=True)
class DividedPool:
    """A pool after its division.

    `by_priority`: the slots of claims by priority, and the largest claim of each. `loans`: how many slots claims have
    that are guaranteed to other projects, which do not use them, by claim and project.
    """

    pool: SharedPool
    slots: int
    accounts: Sequence[ProjectAccount]
    running: int
    by_priority: Mapping[int, tuple[int, str]]
    loans: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, pool: SharedPool, accounts: Sequence[ProjectAccount], allocations: Sequence[Allocation]) -> DividedPool:
        """The `pool` after its division."""
        by_priority: dict[int, tuple[int, str]] = {}
        most: dict[int, int] = {}
        for one in allocations:
            if one.given:
                slots, priority = one.given * one.claim.slots_per_worker, one.claim.priority
                total, key = by_priority.get(priority, (0, ""))
                if slots > most.get(priority, 0):
                    most[priority], key = slots, one.claim.key
                by_priority[priority] = (total + slots, key)
        running = sum(one.given > 0 for one in allocations)
        return cls(pool, pool.slots, accounts, running, by_priority, _loans(pool.slots, accounts, allocations))

    @property
    def used(self) -> int:
        """The slots that claims have."""
        return sum(account.used for account in self.accounts)

    def amount(self, slots: int) -> str:
        """The number of slots in words: `2 GPUs`."""
        return plural(slots, self.pool.unit)


def _loans(
    slots: int, accounts: Sequence[ProjectAccount], allocations: Sequence[Allocation]
) -> dict[str, dict[str, int]]:
    """The loans by claim and lender. Slots that are guaranteed to no project go to the first claims, and are not
    loans."""
    unguaranteed = max(0, slots - sum(account.guaranteed for account in accounts))
    idle = {one.project.name: one.guaranteed - one.used for one in accounts if one.guaranteed > one.used}
    over = {account.project.name: account.over for account in accounts}
    loans: dict[str, dict[str, int]] = {}
    for one in sorted(allocations, key=lambda one: (-one.claim.priority, one.place)):
        project = one.account.project.name
        wanted = min(_beyond(one), over[project])
        over[project] -= wanted
        free = min(wanted, unguaranteed)
        unguaranteed, wanted = unguaranteed - free, wanted - free
        for lender in sorted(idle, key=lambda name: (-idle[name], name)):
            lent = min(wanted, idle[lender])
            if lent:
                loans.setdefault(one.claim.key, {})[lender] = lent
                idle[lender] -= lent
                wanted -= lent
    return loans


def _beyond(one: Allocation) -> int:
    """The slots of a claim beyond its project's guarantee."""
    return min(one.borrowed * one.claim.slots_per_worker, one.account.over)


def explain(one: Allocation, divided: DividedPool) -> Explanation:
    """Explain why this claim has what it has."""
    return _explain_running(one, divided) if one.given else _explain_waiting(one, divided)


def _explain_waiting(one: Allocation, divided: DividedPool) -> Explanation:
    account = one.account
    limit = account.limit
    if limit is not None and one.limited:
        may = f"{account.project.name} may have {divided.amount(limit)}"
        if one.need > limit:
            return Explanation(GrantReason.WAITS_LIMIT, f"cannot start: it needs {divided.amount(one.need)}, and {may}")
        return Explanation(GrantReason.WAITS_LIMIT, f"waits for other jobs of its project: {may}")
    if one.need > divided.slots:
        has = f"{divided.pool.name} has {divided.amount(divided.slots)}"
        return Explanation(GrantReason.NO_ROOM, f"waits for nodes: it needs {divided.amount(one.need)}, and {has}")
    missing = one.need - (divided.slots - divided.used)
    if missing <= 0 or one.most < one.claim.least:
        each = divided.amount(one.claim.slots_per_worker)
        return Explanation(
            GrantReason.NO_ROOM, f"waits for nodes: a worker needs {each} on one node, and too few nodes have that"
        )
    waits = f"waits for {divided.amount(missing)}"
    owned = {
        other.project.name: min(other.used, other.guaranteed)
        for other in divided.accounts
        if other is not account and other.guaranteed and other.used
    }
    barred = one.need - (divided.slots - sum(owned.values()))  # it would still lack this many if all others gave way
    if barred > 0:
        names, part = _owners(owned, barred), "that" if barred >= missing else f"{barred} of which"
        be = "is" if len(names) == 1 else "are"
        comma = "" if barred >= missing else ","
        return Explanation(GrantReason.WAITS_GUARANTEE, f"{waits}{comma} {part} {join_and(names)} {be} guaranteed")
    higher = {priority: had for priority, had in divided.by_priority.items() if priority > one.claim.priority}
    if sum(slots for slots, _ in higher.values()) >= missing:
        holder = higher[max(higher)][1]
        return Explanation(
            GrantReason.WAITS_PRIORITY, f"{waits} held by jobs of higher priority, such as {holder}", holder
        )
    return Explanation(GrantReason.WAITS_TURN, f"{waits} held by jobs that come first")


def _owners(owned: Mapping[str, int], slots: int) -> list[str]:
    """The projects that are guaranteed so many slots together, those with the most first."""
    found: list[str] = []
    for name in sorted(owned, key=lambda name: (-owned[name], name)):
        if slots <= 0:
            break
        found.append(name)
        slots -= owned[name]
    return found


def _explain_running(one: Allocation, divided: DividedPool) -> Explanation:
    claim, account = one.claim, one.account
    borrows = _borrowing(one, divided)
    if one.given >= claim.most:
        all_of = "the worker" if claim.most == 1 else f"all {claim.most} workers"
        return Explanation(GrantReason.FULL, f"has {all_of} that it asks for{borrows}")
    has = f"has {one.given} of {claim.most} workers"
    if one.limited and account.limit is not None:
        may = f"{account.project.name} may have {divided.amount(account.limit)}"
        return Explanation(GrantReason.LIMITED, f"{has}: {may}{borrows}")
    if divided.running == 1:
        all_of = f"{divided.pool.name} has {divided.amount(divided.slots)} in all"
        return Explanation(GrantReason.SMALL_POOL, f"{has}: {all_of}{borrows}")
    if one.given >= one.most:
        each = divided.amount(claim.slots_per_worker)
        return Explanation(
            GrantReason.SMALL_POOL, f"{has}: no more nodes of {divided.pool.name} have {each} for one{borrows}"
        )
    others = plural(divided.running - 1, "other job")
    return Explanation(
        GrantReason.SHARED,
        f"{has}: {divided.pool.name} has {divided.amount(divided.slots)}, shared with {others}{borrows}",
    )


def _borrowing(one: Allocation, divided: DividedPool) -> str:
    slots = _beyond(one)
    if slots <= 0:
        return ""
    loans = divided.loans.get(one.claim.key, {})
    lent = sum(loans.values())
    beyond = f"{divided.amount(slots - lent)} beyond what {one.account.project.name} is guaranteed"
    if not loans:
        return f"; {beyond}"
    borrows = join_and([f"{divided.amount(count)} from {lender}" for lender, count in loans.items()])
    return f"; borrows {borrows}" + (f", and has {beyond}" if lent < slots else "")
