"""How many workers each claim on a pool gets, by numbers alone: `packing` checks whether they fit on the nodes.

Every division starts from zero, in an order of precedence; what claims have now only breaks ties and delays changes
that can wait. So the result does not depend on history, and dividing again gives the same result.

1. Each project's guarantee is reserved for it, as far as its claims can use it without exceeding it.
2. Each claim gets its least or nothing. Claims within a guarantee come first, then those of higher priority, then those
   of the project that has borrowed least for its weight, then the earliest. A claim that does not fit is skipped, and
   later ones use what is free; as soon as it fits it comes before them. A running job is not suspended for one of equal
   priority that has waited for less than `patience_s`.
3. Reserved slots that their project cannot use are released, and step 2 is repeated.
4. What is left goes to running claims that want more, one worker at a time: within guarantees first, then to the
   project that has borrowed least for its weight, there to the highest priority, and then to the job with the fewest
   slots. Among equals, a claim keeps the worker it has; a job whose size has just changed keeps its workers for
   `settle_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from elasticctl_controller.core.sharing.claims import Claim, Project, SharingRules

_Wanting = dict[int, list[tuple[bool, int, int, bool, int, "Allocation"]]]
"""A project's claims that want more, by slots per worker: each time a heap."""
LEAST_WEIGHT = 1e-9
RELEASES = 16
"""How often step 2 is repeated because reserved slots have been released."""


@dataclass(slots=True)
class ProjectAccount:
    """A project's part of the pool, in slots; `reserved` slots are set aside for it, used or not."""

    project: Project
    guaranteed: int
    limit: int | None
    reserved: int = 0
    used: int = 0

    @property
    def aside(self) -> int:
        """Its reserved slots that are unused."""
        return self.reserved - self.used if self.reserved > self.used else 0

    @property
    def over(self) -> int:
        """The slots it uses beyond its guarantee."""
        return self.used - self.guaranteed if self.used > self.guaranteed else 0

    def allows(self, slots: int) -> bool:
        """True if its limit allows `slots` more."""
        return self.limit is None or self.used + slots <= self.limit

    def start_over(self) -> None:
        """Nothing of the pool is used."""
        self.used = 0

    def use(self, slots: int) -> int:
        """Use more slots; returns how many of these had been reserved."""
        before, self.used = self.used, self.used + slots
        return min(slots, self.reserved - before) if before < self.reserved else 0

    def give_back(self, slots: int) -> None:
        """Use fewer slots."""
        self.used -= slots

    def reserve(self, slots: int) -> None:
        """Set slots aside."""
        self.reserved = slots

    def release_idle(self, usable: int) -> int:
        """Release the reserved slots that its claims cannot use; returns how many there were."""
        idle = max(0, self.aside - usable)
        self.reserved -= idle
        return idle

    def share(self, within: bool) -> float:
        """How much it has relative to what it is due: of its guarantee, or beyond that by weight."""
        if within:
            return self.used / max(1, self.guaranteed)
        over = self.used - self.guaranteed
        return over / max(self.project.weight, LEAST_WEIGHT) if over > 0 else 0.0


@dataclass(slots=True)
class Allocation:
    """A claim while its pool is divided. `most`: the claim's own, or fewer if fewer fit on the nodes.

    `place`: its place in the order of submission. `fresh`: it waits, but has not waited for long. `keeps`: workers that
    are not taken from it for the sake of fairness. `limited`: its project's limit kept it from getting more.
    """

    claim: Claim
    account: ProjectAccount
    place: int
    most: int
    fresh: bool
    keeps: int
    given: int = 0
    borrowed: int = 0
    limited: bool = False

    def start_over(self) -> None:
        """Nothing has been given."""
        self.given = self.borrowed = 0

    def give(self, workers: int, borrowed: int) -> None:
        """Give more workers, some of them from beyond the project's guarantee."""
        self.given += workers
        self.borrowed += borrowed

    def give_back(self, workers: int) -> None:
        """Take workers away again."""
        self.given -= workers
        self.borrowed = min(self.borrowed, self.given)

    def check_limit(self, slots: int) -> bool:
        """True if its project's limit does not allow `slots` more."""
        self.limited = not self.account.allows(slots)
        return self.limited

    def set_claim(self, claim: Claim) -> None:
        """Replace the claim, after the division."""
        self.claim = claim

    @property
    def need(self) -> int:
        """The slots that its least number of workers takes."""
        return self.claim.least * self.claim.slots_per_worker

    @property
    def holds(self) -> bool:
        """True if the next worker would be one that it has been granted before."""
        return self.given < self.claim.granted


@dataclass(slots=True)
class Division:
    """A pool while it is divided: its free slots, and how many of those are reserved (`aside`)."""

    free: int
    accounts: Sequence[ProjectAccount]
    guarantees: bool
    admitted: list[Allocation] = field(default_factory=list)
    aside: int = 0

    @classmethod
    def start(cls, slots: int, accounts: Sequence[ProjectAccount]) -> Division:
        """A pool that has not been divided yet."""
        for account in accounts:
            account.start_over()
        guarantees = any(account.guaranteed > 0 for account in accounts)
        return cls(slots, accounts, guarantees, aside=sum(account.reserved for account in accounts))

    def room(self, account: ProjectAccount) -> int:
        """The slots that this project can take without using what is reserved for others."""
        return self.free - (self.aside - account.aside)

    def give(self, seeker: Allocation, workers: int) -> None:
        """Give `workers` more workers to a claim."""
        account, each = seeker.account, seeker.claim.slots_per_worker
        slots = workers * each
        self.free -= slots
        self.aside -= account.use(slots)
        seeker.give(workers, -(-min(slots, account.over) // each) if self.guarantees else 0)

    def admit(self, seeker: Allocation) -> None:
        """Give a claim its least."""
        self.give(seeker, seeker.claim.least)
        self.admitted.append(seeker)

    def take_back(self, seeker: Allocation, workers: int) -> None:
        """Take workers away from a claim, after the division."""
        slots = workers * seeker.claim.slots_per_worker
        seeker.give_back(workers)
        seeker.account.give_back(slots)
        self.free += slots

    def release(self, usable: Mapping[str, int]) -> bool:
        """Release reserved slots that their projects cannot use; True if there were any."""
        released = sum(account.release_idle(usable.get(account.project.name, 0)) for account in self.accounts)
        self.aside -= released
        return released > 0


def build_allocations(
    claims: Iterable[Claim],
    accounts: Mapping[str, ProjectAccount],
    caps: Mapping[str, int],
    rules: SharingRules,
    now: float,
) -> list[Allocation]:
    """The allocations in order of submission; `caps`: how many workers of some claims fit on the nodes."""
    ordered = sorted(claims, key=lambda claim: (claim.submitted_at, claim.key))
    return [
        Allocation(
            claim=claim,
            account=accounts[claim.project],
            place=place,
            most=min(claim.most, caps.get(claim.key, claim.most)),
            fresh=claim.granted <= 0 and now < claim.changed_at + rules.patience_s,
            keeps=claim.granted if now < claim.changed_at + rules.settle_s else 0,
        )
        for place, claim in enumerate(ordered)
    ]


def divide(slots: int, accounts: Sequence[ProjectAccount], allocations: Sequence[Allocation]) -> Division:
    """Fill in `given` of all allocations. The division lists the claims that got workers, in the order in which they
    did."""
    queues = _queues(allocations)
    for account in accounts:
        account.reserve(_usable_guarantee(account, queues.get(account.project.name, ())))
    for _ in range(RELEASES):
        division = _admit(slots, accounts, queues)
        if not division.release(_usable_slots(division)):
            break
    _grow(division)
    if division.free > 0 and division.release({}):  # reserved slots that are too few for one of their project's workers
        _grow(division)
    return division


def _usable_slots(division: Division) -> dict[str, int]:
    """The slots by project that claims with their least could still use."""
    found: dict[str, int] = {}
    for one in division.admitted:
        name = one.account.project.name
        found[name] = found.get(name, 0) + (one.most - one.given) * one.claim.slots_per_worker
    return found


def _queues(allocations: Sequence[Allocation]) -> dict[str, list[Allocation]]:
    """The allocations by project, in the order in which each project's get their least."""
    queues: dict[str, list[Allocation]] = {}
    for one in sorted(allocations, key=lambda one: (-one.claim.priority, one.fresh, one.place)):
        queues.setdefault(one.account.project.name, []).append(one)
    return queues


def _usable_guarantee(account: ProjectAccount, queue: Iterable[Allocation]) -> int:
    """How much of its guarantee a project's claims can use without exceeding it."""
    most = account.guaranteed if account.limit is None else min(account.guaranteed, max(0, account.limit))
    used = more = 0
    for one in queue if most else ():
        if one.claim.least <= one.most and used + one.need <= most:
            used += one.need
            more += (one.most - one.claim.least) * one.claim.slots_per_worker
    return min(most, used + more)


def _admit(slots: int, accounts: Sequence[ProjectAccount], queues: Mapping[str, Sequence[Allocation]]) -> Division:
    """Give claims their least, in order of precedence, if they fit."""
    division = Division.start(slots, accounts)
    next_of = {name: _in_turn(queue) for name, queue in queues.items()}
    heads = [_precedence(one, name) for name, queue in next_of.items() if (one := next(queue, None))]
    heapify(heads)
    while heads:
        *_, name, one = turn = heads[0]
        one.start_over()
        room = division.free if turn[0] == 0 else division.room(one.account)
        if not one.check_limit(one.need) and one.need <= room and one.most >= one.claim.least:
            division.admit(one)
        following = next(next_of[name], None)
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, _precedence(following, name))
    return division


def _in_turn(queue: Sequence[Allocation]) -> Iterator[Allocation]:
    """A project's claims: first the ones within its guarantee when their turn comes, then the others.

    A claim that the guarantee does not cover would keep later ones from what it does cover. As the project only gets
    more, what is not covered once never is.
    """
    beyond = []
    for one in queue:
        if _is_within(one, one.need):
            yield one
        else:
            beyond.append(one)
    yield from beyond


def _is_within(one: Allocation, slots: int) -> bool:
    """True if its project's guarantee covers so many slots more."""
    return one.account.used + slots <= one.account.reserved


def _precedence(one: Allocation, name: str) -> tuple[int, int, bool, float, int, str, Allocation]:
    """The precedence of a project's next claim for its least: the lowest comes first."""
    within = _is_within(one, one.need)
    return (0 if within else 1, -one.claim.priority, one.fresh, one.account.share(within), one.place, name, one)


def _grow(division: Division) -> None:
    """Give what is left, worker by worker, to claims that have their least and want more."""
    wanting: dict[str, _Wanting] = {}
    for one in division.admitted:
        if one.given < one.most:
            wanting.setdefault(one.account.project.name, {}).setdefault(one.claim.slots_per_worker, []).append(
                _precedence_in_project(one)
            )
    for queues in wanting.values():
        for queue in queues.values():
            heapify(queue)
    heads = [_next_of(queues, name) for name, queues in wanting.items()]
    heapify(heads)
    while heads and division.free > 0:
        tier, *_, name, one = heads[0]
        queues, each = wanting[name], one.claim.slots_per_worker
        queue = queues[each]
        if one.check_limit(each) or each > (division.free if tier == 0 else division.room(one.account)):
            heappop(queue)
        else:
            division.give(one, 1)
            if one.given < one.most:
                heapreplace(queue, _precedence_in_project(one))
            else:
                heappop(queue)
        if not queue:
            del queues[each]
        if queues:
            heapreplace(heads, _next_of(queues, name))
        else:
            heappop(heads)


def _next_of(queues: _Wanting, name: str) -> tuple[int, float, bool, str, Allocation]:
    """The project's next worker, with its precedence: one within the guarantee before a larger one beyond it."""
    heads = [queue[0] for queue in queues.values()]
    one = min(heads, key=lambda head: (not _is_within(head[-1], head[-1].claim.slots_per_worker), head[:-1]))[-1]
    return (*_project_precedence(one, name), one)


def _precedence_in_project(one: Allocation) -> tuple[bool, int, int, bool, int, Allocation]:
    """The precedence within a project for the next worker: the lowest comes first."""
    level = one.given * one.claim.slots_per_worker
    return (one.given >= one.keeps, -one.claim.priority, level, not one.holds, one.place, one)


def _project_precedence(one: Allocation, name: str) -> tuple[int, float, bool, str]:
    """The precedence among projects for the next worker, which would be this claim's: the lowest comes first."""
    within = _is_within(one, one.claim.slots_per_worker)
    tier = 0 if within else 1 if one.given < one.keeps else 2
    return (tier, one.account.share(within), not one.holds, name)
