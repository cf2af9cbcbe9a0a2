"""The decision: from pools, projects and claims to what every claim gets. Pure, and made anew each time it is asked.

It depends on nothing but its arguments and not on their order; decided on its own outcome, it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticctl.api.text import shown
from elasticctl_controller.core.sharing import division, packing, reasons
from elasticctl_controller.core.sharing.claims import (
    DEFAULT_RULES,
    Claim,
    Grant,
    Pool,
    Project,
    Reason,
    SharingDecision,
    SharingRules,
    Usage,
    Worker,
)
from elasticctl_controller.core.sharing.division import Allocation, Division, ProjectAccount
from elasticctl_controller.core.sharing.packing import Packing

PACKINGS = 4
"""How often a pool is divided again because workers of several slots did not fit its nodes; then those go without."""
LOOKS = 4
"""How often a decision looks at its own outcome."""


def decide(
    pools: Iterable[Pool],
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
            by_pool[claim.pool].append(_validate(claim))
        else:
            grants[claim.key] = _without_pool(claim)
    usage: list[Usage] = []
    wake_at: list[float] = []
    for name, found in by_pool.items():
        outcome = _decide_pool(shared[name], known, found, now, rules)
        grants.update(_grants(outcome))
        usage.extend(_usage(outcome))
        wake_at.extend(_wake_at(outcome.seeking, now, rules))
    return SharingDecision(grants, tuple(usage), min(wake_at, default=None))


@dataclass(frozen=True, slots=True)
class _Outcome:
    pool: Pool
    accounts: Sequence[ProjectAccount]
    seeking: Sequence[Allocation]
    packed: Packing


def _decide_pool(
    pool: Pool, projects: Mapping[str, Project], claims: Sequence[Claim], now: float, rules: SharingRules
) -> _Outcome:
    """Divide a pool, and look at what comes of it until that changes nothing any more.

    As a rule the first look is the last. But who has started is no newcomer any more and may stand before others in the
    order, where a project's share or a node that a worker fits makes a difference. What leads back to where it began is
    left as it is, lest jobs change places for ever.
    """
    asked = {claim.key: claim for claim in claims}
    outcome = divide(pool, projects, claims, now, rules)
    for _ in range(LOOKS):
        if all(one.given == one.claim.granted for one in outcome.seeking):
            break
        after = [_followed(one, outcome.packed, now) for one in outcome.seeking]
        outcome = divide(pool, projects, after, now, rules)
        if all(one.given == asked[one.claim.key].granted for one in outcome.seeking):
            kept = {claim.key: claim.workers for claim in claims}
            outcome = replace(outcome, packed=Packing(kept, {}, {}))
            break
    for one in outcome.seeking:
        one.claim = asked[one.claim.key]
    return outcome


def _followed(one: Allocation, packed: Packing, now: float) -> Claim:
    """A claim once its workers have followed."""
    claim = one.claim
    kept = packed.kept.get(claim.key, ()) if one.given else ()
    if one.given == claim.granted and len(kept) == len(claim.workers):
        return claim
    changed_at = claim.changed_at if one.given == claim.granted else now
    return replace(claim, granted=one.given, changed_at=changed_at, workers=kept)


def divide(
    pool: Pool, projects: Mapping[str, Project], claims: Sequence[Claim], now: float, rules: SharingRules
) -> _Outcome:
    """Divide, see whether it fits the nodes, and if not divide again with what does."""
    caps = _caps(pool, claims)
    for attempt in range(PACKINGS):
        accounts = _accounts(pool.name, projects, claims)
        seeking = division.build_allocations(claims, accounts, caps, rules, now)
        divided = division.divide(pool.slots, list(accounts.values()), seeking)
        packed = packing.pack(pool, divided.admitted)
        if not packed.fitting:
            break
        if attempt + 1 < PACKINGS:
            caps.update(packed.fitting)
        else:
            _shrink_to_fit(divided, packed.fitting)
    return _Outcome(pool, divided.accounts, seeking, packed)


def _caps(pool: Pool, claims: Iterable[Claim]) -> dict[str, int]:
    """The claims that ask for more than the whole pool has, with what that is."""
    rooms: dict[int, int] = {}
    caps: dict[str, int] = {}
    for claim in claims:
        each = claim.slots_per_worker
        if each not in rooms:
            rooms[each] = packing.room_for(pool, each)
        if claim.most > rooms[each]:
            caps[claim.key] = rooms[each]
    return caps


def _accounts(pool: str, projects: Mapping[str, Project], claims: Iterable[Claim]) -> dict[str, ProjectAccount]:
    """Accounts by project, in order of name: of all that are listed or have a claim."""
    names = sorted({*projects, *(claim.project for claim in claims)})
    listed = [projects.get(name, Project(name)) for name in names]
    return {one.name: ProjectAccount(one, max(0, one.guaranteed.get(pool, 0)), one.limit.get(pool)) for one in listed}


def _shrink_to_fit(divided: Division, fitting: Mapping[str, int]) -> None:
    """Leave those that still do not fit with what does, or with nothing."""
    for one in divided.admitted:
        fits = fitting.get(one.claim.key, one.given)
        divided.take_back(one, one.given - (fits if fits >= one.claim.least else 0))


def _grants(outcome: _Outcome) -> dict[str, Grant]:
    scene = reasons.DividedPool.of(outcome.pool, outcome.accounts, outcome.seeking)
    changed = reasons.explain_changes(outcome.seeking)
    left = {account.project.name: _left(account) for account in outcome.accounts}
    found: dict[str, Grant] = {}
    for one in outcome.seeking:
        claim, name = one.claim, one.account.project.name
        why = reasons.explain(one, scene)
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
            leave=_leaving(one, outcome.packed.kept),
            nodes=outcome.packed.nodes.get(claim.key, ()) if one.given else (),
            pending=pending,
            change=change.words if change else "",
            for_key=change.for_key if change else why.for_key,
        )
    return found


def _left(account: ProjectAccount) -> float:
    """The slots that a project's limit still leaves it."""
    return math.inf if account.limit is None else max(0, account.limit - account.used)


def _leaving(one: Allocation, kept: Mapping[str, tuple[Worker, ...]]) -> tuple[str, ...]:
    workers = one.claim.workers
    stay = kept.get(one.claim.key, ()) if one.given else ()
    if len(stay) == len(workers):
        return ()
    names = {worker.name for worker in stay}
    return tuple(sorted(worker.name for worker in workers if worker.name not in names))


def _without_pool(claim: Claim) -> Grant:
    lost = claim.granted > 0
    return Grant(
        key=claim.key,
        workers=0,
        reason=Reason.NO_POOL,
        words=f"waits for nodes: there is no pool {shown(claim.pool)}",
        leave=tuple(sorted(worker.name for worker in claim.workers)),
        pending=claim.most,
        change="is suspended: there are no nodes of its kind any more" if lost else "",
    )


def _usage(outcome: _Outcome) -> Iterable[Usage]:
    waiting: dict[str, int] = {}
    for one in outcome.seeking:
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


def _wake_at(seeking: Sequence[Allocation], now: float, rules: SharingRules) -> Iterable[float]:
    """When somebody's patience ends, or the time for which a size is left alone while others want more."""
    wanting = any(one.given < one.most for one in seeking)
    for one in seeking:
        changed_at = one.claim.changed_at if one.given == one.claim.granted else now
        if not one.given:
            due = changed_at + rules.patience_s
        elif wanting and one.given > one.claim.least:
            due = changed_at + rules.settle_s
        else:
            continue
        if due > now:
            yield due


def _validate(claim: Claim) -> Claim:
    """The claim, with numbers that can be meant: what a job asks for is typed by people."""
    if 1 <= claim.least <= claim.most and claim.slots_per_worker >= 1:
        return claim
    least = max(1, claim.least)
    return replace(claim, least=least, most=max(least, claim.most), slots_per_worker=max(1, claim.slots_per_worker))
