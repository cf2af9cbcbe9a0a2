"""Whether what a pool's division gives fits on its nodes, a worker being on one node as a whole.

Where every worker takes one slot, it does. Otherwise workers stay where they are as long as their claims keep them, and
new ones, the largest first, go to the node they leave least free of. For a claim's least, a node may be cleared of
workers of whoever comes later: first of those above their least. They are put elsewhere if they fit there, which undoes
fragmentation.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from elasticctl_controller.core.sharing.claims import Claim, Pool, Worker
from elasticctl_controller.core.sharing.division import Allocation

PLANS = 32
"""How many ways of clearing a node are compared: on a large cluster the first ones are as good as any."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`kept`: workers by claim that stay. `nodes`: where the others of a claim fit, if not anywhere.

    `fitting`: how many fit of those claims for which it is fewer than given.
    """

    kept: Mapping[str, tuple[Worker, ...]]
    nodes: Mapping[str, tuple[str, ...]]
    fitting: Mapping[str, int]


def staying(claim: Claim, given: int) -> tuple[Worker, ...]:
    """Which workers stay when a claim is given so many: the oldest, those on a node before those that wait for one."""
    if given >= len(claim.workers):
        return claim.workers
    ordered = sorted(claim.workers, key=lambda worker: (not worker.node, worker.started_at, worker.name))
    return tuple(ordered[:given])


def room_for(pool: Pool, slots_per_worker: int) -> int:
    """How many such workers fit into the whole pool, were it empty."""
    return sum(node.slots // slots_per_worker for node in pool.nodes)


def pack(pool: Pool, admitted: Sequence[Allocation]) -> Packing:
    """Place what was given: the largest workers first, or if not all fit so, in the order in which it was given."""
    if all(one.claim.slots_per_worker == 1 for one in admitted):
        return Packing({one.claim.key: staying(one.claim, one.given) for one in admitted}, {}, {})
    in_turn = range(len(admitted))
    packing = _pack(pool, admitted, sorted(in_turn, key=lambda turn: -admitted[turn].claim.slots_per_worker))
    return _pack(pool, admitted, in_turn) if packing.fitting else packing


def _pack(pool: Pool, admitted: Sequence[Allocation], order: Sequence[int]) -> Packing:
    """Place what was given, in this order of `admitted`: first everybody's least."""
    free = [node.slots for node in pool.nodes]
    numbers = {node.name: number for number, node in enumerate(pool.nodes)}
    placed = [_keep_in_place(free, numbers, one) for one in admitted]
    floor = _Slots(free, placed, numbers)
    for turn in order:
        _place(floor, placed[turn], admitted[turn].claim.least, turn)
    for turn in order:
        _place(floor, placed[turn], admitted[turn].given, None)
    both = list(zip(admitted, placed, strict=True))
    return Packing(
        kept={one.claim.key: _kept(one, there, numbers) for one, there in both},
        nodes={one.claim.key: tuple(pool.nodes[number].name for number in there.new) for one, there in both},
        fitting={one.claim.key: there.count for one, there in both if there.count < one.given},
    )


@dataclass(slots=True, eq=False)
class _Placed:
    """Of one claim: how many have a place, the workers that keep theirs, and the nodes of new ones."""

    slots_per_worker: int
    least: int
    count: int = 0
    workers: list[Worker] = field(default_factory=list)
    new: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Resident:
    """A worker that is where it stays, unless somebody who comes first needs its node."""

    turn: int
    worker: Worker
    claim: _Placed


class _Slots:
    """What is free of each node, with nodes by how much that is, and who stays where."""

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
        """The node with the least free of those with enough."""
        for free in sorted(free for free in self.by_free if free >= slots):
            nodes = self.by_free[free]
            while nodes:
                if self.free[nodes[0]] == free:
                    return nodes[0]
                heappop(nodes)  # it has changed since
            del self.by_free[free]
        return None

    def clear(self, slots: int, turn: int) -> int | None:
        """Free so many slots of one node of workers that come later than `turn`; None where that is impossible."""
        if slots >= self.hopeless:
            return None
        if self.residents is None:
            self.residents = _residents(self.placed, self.numbers)
        plans = itertools.islice(self._plans(self.residents, slots, turn), PLANS)
        best = min(plans, key=lambda plan: plan[:3], default=None)
        if best is None:
            self.hopeless = slots  # who comes later may send fewer away, and clearing for smaller ones adds no room
            return None
        _, _, number, goers = best
        for resident in goers:
            self.residents[number].remove(resident)
            resident.claim.workers.remove(resident.worker)
            resident.claim.count -= 1
            self.change(number, resident.claim.slots_per_worker)
        return number

    def _plans(
        self, residents: Mapping[int, list[_Resident]], slots: int, turn: int
    ) -> Iterator[tuple[int, int, int, list[_Resident]]]:
        """Ways to clear a node, as `_plan` has them and with its number before who leaves; most free nodes first."""
        seen = set[int]()
        for free in sorted(self.by_free, reverse=True):
            for number in sorted(self.by_free[free]):
                if self.free[number] == free and number in residents and number not in seen:
                    seen.add(number)
                    plan = self._plan(residents[number], slots - free, turn)
                    if plan is not None:
                        leasts, moved, goers = plan
                        yield leasts, moved, number, goers

    def _plan(self, there: list[_Resident], needed: int, turn: int) -> tuple[int, int, list[_Resident]] | None:
        """Who has to leave a node: how many of them are of a claim's least, how many slots they have, and who."""
        goers: list[_Resident] = []
        leasts = 0
        spare: dict[int, int] = {}
        there = sorted(there, key=lambda one: (-one.turn, -one.worker.started_at, one.worker.name))
        for only_spare in (True, False):
            for resident in there:
                if needed <= 0:
                    break
                left = spare.setdefault(resident.turn, resident.claim.count - resident.claim.least)
                if resident in goers or (left <= 0 if only_spare else resident.turn <= turn):
                    continue
                spare[resident.turn] = left - 1
                leasts += not only_spare
                goers.append(resident)
                needed -= resident.claim.slots_per_worker
        return (leasts, sum(one.claim.slots_per_worker for one in goers), goers) if needed <= 0 else None


def _residents(placed: Sequence[_Placed], numbers: Mapping[str, int]) -> dict[int, list[_Resident]]:
    """Who stays where."""
    found: dict[int, list[_Resident]] = {}
    for turn, claim in enumerate(placed):
        for worker in claim.workers:
            found.setdefault(numbers[worker.node], []).append(_Resident(turn, worker, claim))
    return found


def _keep_in_place(free: list[int], numbers: Mapping[str, int], one: Allocation) -> _Placed:
    """Leave a claim's workers where they are, as many as it keeps and as are on nodes of the pool."""
    each = one.claim.slots_per_worker
    placed = _Placed(each, one.claim.least)
    for worker in staying(one.claim, one.given):
        number = numbers.get(worker.node)
        if number is not None and free[number] >= each:
            free[number] -= each
            placed.workers.append(worker)
    placed.count = len(placed.workers)
    return placed


def _place(floor: _Slots, placed: _Placed, wanted: int, turn: int | None) -> None:
    """Find nodes until so many have one, clearing some if it is a claim's `turn`."""
    while placed.count < wanted:
        number = floor.best(placed.slots_per_worker)
        if number is None and turn is not None:
            number = floor.clear(placed.slots_per_worker, turn)
        if number is None:
            break
        floor.change(number, -placed.slots_per_worker)
        placed.new.append(number)
        placed.count += 1


def _kept(one: Allocation, placed: _Placed, numbers: Mapping[str, int]) -> tuple[Worker, ...]:
    """The workers that stay where they are, and as many of those that wait for a node as there are places."""
    if not placed.new:
        return tuple(placed.workers)
    waiting = (worker for worker in staying(one.claim, one.given) if worker.node not in numbers)
    return (*placed.workers, *itertools.islice(waiting, len(placed.new)))
