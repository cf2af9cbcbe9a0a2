"""Whether the result of a division fits on the pool's nodes, and which workers a claim gives up, and for which other.

If every worker takes one slot, the result fits. Otherwise a worker needs all its slots on one node. Workers stay where
they are as long as their claims keep them, and new ones, the largest first, go to the node on which they leave the
fewest slots free (best fit). To give a claim its least, a node may be cleared of workers of later claims, first of
those above their least. These are placed elsewhere if they fit there, which undoes fragmentation.

A division may leave a claim with fewer workers than it was granted before, or with none, which suspends it. The oldest
workers stay and the youngest leave. `explain_changes` explains the change to both jobs: the explanation to the job that
loses workers names the job that gets them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from elasticctl.api.text import plural
from elasticctl_controller.core.sharing.allocation import Allocation
from elasticctl_controller.core.sharing.claims import Claim, GrantReason, SharedPool, Worker

PLANS = 32
"""How many ways to clear a node are compared: on a large cluster the first ones are as good as any."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`kept`: the workers that stay, by claim. `nodes`: where the new workers of a claim fit, if that matters.

    `fitting`: how many workers fit, for claims that were given more than that.
    """

    kept: Mapping[str, tuple[Worker, ...]]
    nodes: Mapping[str, tuple[str, ...]]
    fitting: Mapping[str, int]


def room_for(pool: SharedPool, slots_per_worker: int) -> int:
    """How many such workers would fit into the empty pool."""
    return sum(node.slots // slots_per_worker for node in pool.nodes)


def pack(pool: SharedPool, admitted: Sequence[Allocation]) -> Packing:
    """Place the workers: the largest first, or if not all fit that way, in the order in which they were given."""
    if all(one.claim.slots_per_worker == 1 for one in admitted):
        return Packing({one.claim.key: select_remaining(one.claim, one.given) for one in admitted}, {}, {})
    in_turn = range(len(admitted))
    packing = _pack(pool, admitted, sorted(in_turn, key=lambda turn: -admitted[turn].claim.slots_per_worker))
    return _pack(pool, admitted, in_turn) if packing.fitting else packing


def _pack(pool: SharedPool, admitted: Sequence[Allocation], order: Sequence[int]) -> Packing:
    """Place the workers in this order of `admitted`: first the least of every claim, then the others."""
    # Workers that stay keep their nodes, so they come first.
    free = [node.slots for node in pool.nodes]
    numbers = {node.name: number for number, node in enumerate(pool.nodes)}
    placed = [_keep_in_place(free, numbers, one) for one in admitted]
    slots = _Slots(free, placed, numbers)
    # Minima may evict workers of claims that come later; what is above a minimum gets what is left.
    for turn in order:
        _place(slots, placed[turn], admitted[turn].claim.least, turn)
    for turn in order:
        _place(slots, placed[turn], admitted[turn].given, None)
    both = list(zip(admitted, placed, strict=True))
    return Packing(
        kept={one.claim.key: _kept(one, there, numbers) for one, there in both},
        nodes={one.claim.key: tuple(pool.nodes[number].name for number in there.new) for one, there in both},
        fitting={one.claim.key: there.count for one, there in both if there.count < one.given},
    )


@dataclass(slots=True, eq=False)
class _Placed:
    """The placement of one claim: the workers that keep their nodes, and the nodes of new ones."""

    slots_per_worker: int
    least: int
    workers: list[Worker]
    new: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many workers have a node."""
        return len(self.workers) + len(self.new)

    def evict(self, worker: Worker) -> None:
        """A worker has to leave its node."""
        self.workers.remove(worker)

    def add_node(self, number: int) -> None:
        """There is room for a new worker on this node."""
        self.new.append(number)


@dataclass(slots=True, eq=False)
class _Resident:
    """A worker that stays on its node unless an earlier claim needs that node."""

    turn: int
    worker: Worker
    claim: _Placed


class _Slots:
    """The free slots of each node, the nodes by free slots, and the workers that stay on each."""

    def __init__(self, free: list[int], placed: Sequence[_Placed], numbers: Mapping[str, int]) -> None:
        self.free = free
        self.placed = placed
        self.numbers = numbers
        self.by_free: dict[int, list[int]] = {}
        for number, slots in enumerate(free):
            self.by_free.setdefault(slots, []).append(number)
        self.residents: dict[int, list[_Resident]] | None = None
        self.hopeless = sys.maxsize

    def change(self, number: int, slots: int) -> None:
        self.free[number] += slots
        heappush(self.by_free.setdefault(self.free[number], []), number)

    def best(self, slots: int) -> int | None:
        """The node with the fewest free slots among those with enough."""
        for free in sorted(free for free in self.by_free if free >= slots):
            # `change` only adds entries, so each heap may begin with nodes whose free slots have changed since.
            nodes = self.by_free[free]
            while nodes:
                if self.free[nodes[0]] == free:
                    return nodes[0]
                heappop(nodes)
            del self.by_free[free]
        return None

    def clear(self, slots: int, turn: int) -> int | None:
        """Free `slots` on one node by evicting workers of claims after `turn`; None if that is impossible."""
        if slots >= self.hopeless:
            return None
        # Of the first plans, choose the one that takes the fewest workers from minima, then the fewest slots.
        if self.residents is None:
            self.residents = _residents(self.placed, self.numbers)
        plans = itertools.islice(self._plans(self.residents, slots, turn), PLANS)
        best = min(plans, key=lambda plan: plan[:3], default=None)
        if best is None:
            self.hopeless = slots  # later claims may evict fewer, and clearing nodes for smaller ones adds no room
            return None
        _, _, number, evicted = best
        for resident in evicted:
            self.residents[number].remove(resident)
            resident.claim.evict(resident.worker)
            self.change(number, resident.claim.slots_per_worker)
        return number

    def _plans(
        self, residents: Mapping[int, list[_Resident]], slots: int, turn: int
    ) -> Iterator[tuple[int, int, int, list[_Resident]]]:
        """The plans for all nodes, those with most free slots first, with the node's number before the workers."""
        seen = set[int]()
        for free in sorted(self.by_free, reverse=True):
            for number in sorted(self.by_free[free]):
                if self.free[number] == free and number in residents and number not in seen:
                    seen.add(number)
                    plan = self._plan(residents[number], slots - free, turn)
                    if plan is not None:
                        leasts, moved, evicted = plan
                        yield leasts, moved, number, evicted

    def _plan(self, there: list[_Resident], needed: int, turn: int) -> tuple[int, int, list[_Resident]] | None:
        """The workers to evict from a node: how many belong to a claim's least, their slots, and which they are."""
        evicted: list[_Resident] = []
        leasts = 0
        spare: dict[int, int] = {}
        # First workers above minima of any claim, then those of minima of later claims; the newest workers first.
        there = sorted(there, key=lambda one: (-one.turn, -one.worker.started_at, one.worker.name))
        for only_spare in (True, False):
            for resident in there:
                if needed <= 0:
                    break
                left = spare.setdefault(resident.turn, resident.claim.count - resident.claim.least)
                if resident in evicted or (left <= 0 if only_spare else resident.turn <= turn):
                    continue
                spare[resident.turn] = left - 1
                leasts += not only_spare
                evicted.append(resident)
                needed -= resident.claim.slots_per_worker
        return (leasts, sum(one.claim.slots_per_worker for one in evicted), evicted) if needed <= 0 else None


def _residents(placed: Sequence[_Placed], numbers: Mapping[str, int]) -> dict[int, list[_Resident]]:
    """The workers that stay, by node number."""
    found: dict[int, list[_Resident]] = {}
    for turn, claim in enumerate(placed):
        for worker in claim.workers:
            found.setdefault(numbers[worker.node], []).append(_Resident(turn, worker, claim))
    return found


def _keep_in_place(free: list[int], numbers: Mapping[str, int], one: Allocation) -> _Placed:
    """Keep a claim's workers on their nodes: as many as it was given, if their nodes are in the pool."""
    each = one.claim.slots_per_worker
    kept: list[Worker] = []
    for worker in select_remaining(one.claim, one.given):
        number = numbers.get(worker.node)
        if number is not None and free[number] >= each:
            free[number] -= each
            kept.append(worker)
    return _Placed(each, one.claim.least, kept)


def _place(slots: _Slots, placed: _Placed, wanted: int, turn: int | None) -> None:
    """Find nodes until `wanted` workers have one; with a `turn`, evict workers of later claims."""
    while placed.count < wanted:
        number = slots.best(placed.slots_per_worker)
        if number is None and turn is not None:
            number = slots.clear(placed.slots_per_worker, turn)
        if number is None:
            break
        slots.change(number, -placed.slots_per_worker)
        placed.add_node(number)


def _kept(one: Allocation, placed: _Placed, numbers: Mapping[str, int]) -> tuple[Worker, ...]:
    """The workers that stay on their nodes, and as many waiting workers as there are new places."""
    if not placed.new:
        return tuple(placed.workers)
    waiting = (worker for worker in select_remaining(one.claim, one.given) if worker.node not in numbers)
    return (*placed.workers, *itertools.islice(waiting, len(placed.new)))


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
    """What changes for each claim whose size changes, by key; claims that lose workers name the one that gains them."""
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
