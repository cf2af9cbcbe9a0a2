"""Whether what a pool's division gives fits on its nodes, a worker being on one node as a whole.

Where every worker takes one slot, it does. Otherwise workers stay where they are as long as their claims keep them, and
new ones go to the node they leave least free of. For a claim's least, a node may be cleared of workers of whoever comes
later: first of those above their least. They are put elsewhere if they fit there, which undoes fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from elasticctl_controller.sharing.division import Seeker
from elasticctl_controller.sharing.model import Claim, Pool, Worker


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


def pack(pool: Pool, admitted: Sequence[Seeker]) -> Packing:
    """Place what was given, in the order it was given."""
    if all(one.claim.slots_per_worker == 1 for one in admitted):
        return Packing({one.claim.key: staying(one.claim, one.given) for one in admitted}, {}, {})
    free = [node.slots for node in pool.nodes]
    numbers = {node.name: number for number, node in enumerate(pool.nodes)}
    placed = [_settle(free, numbers, one) for one in admitted]
    floor = _Floor(free, placed)
    for turn, one in enumerate(admitted):
        _place(floor, one, placed[turn], one.claim.least, turn)
    for turn, one in enumerate(admitted):
        _place(floor, one, placed[turn], one.given, None)
    kept = {one.claim.key: _kept(one, there, numbers) for one, there in zip(admitted, placed, strict=True)}
    fitting = {
        one.claim.key: there.count for one, there in zip(admitted, placed, strict=True) if there.count < one.given
    }
    nodes = {
        one.claim.key: tuple(pool.nodes[number].name for number in there.new)
        for one, there in zip(admitted, placed, strict=True)
    }
    return Packing(kept, nodes, fitting)


@dataclass(slots=True, eq=False)
class _Placed:
    """Of one claim: how many have a place, the workers that keep theirs with their nodes, and the nodes of new ones."""

    slots_per_worker: int
    least: int
    count: int = 0
    workers: dict[Worker, int] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Resident:
    """A worker that is where it stays, unless somebody who comes first needs its node."""

    turn: int
    worker: Worker
    claim: _Placed


class _Floor:
    """What is free of each node, with nodes by how much that is, and who stays where."""

    def __init__(self, free: list[int], placed: Sequence[_Placed]) -> None:
        self.free = free
        self.placed = placed
        self.by_free: dict[int, list[int]] = {}
        for number, slots in enumerate(free):
            self.by_free.setdefault(slots, []).append(number)
        self.residents: dict[int, list[_Resident]] | None = None

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
        if self.residents is None:
            self.residents = _residents(self.placed)
        plans = [
            (plan, number)
            for number, there in sorted(self.residents.items())
            if (plan := self._plan(there, slots - self.free[number], turn)) is not None
        ]
        if not plans:
            return None
        (_, _, goers), number = min(plans, key=lambda found: (*found[0][:2], found[1]))
        for resident in goers:
            self.residents[number].remove(resident)
            del resident.claim.workers[resident.worker]
            resident.claim.count -= 1
            self.change(number, resident.claim.slots_per_worker)
        return number

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


def _residents(placed: Sequence[_Placed]) -> dict[int, list[_Resident]]:
    """Who stays where."""
    found: dict[int, list[_Resident]] = {}
    for turn, claim in enumerate(placed):
        for worker, number in claim.workers.items():
            found.setdefault(number, []).append(_Resident(turn, worker, claim))
    return found


def _settle(free: list[int], numbers: Mapping[str, int], one: Seeker) -> _Placed:
    """Leave a claim's workers where they are, as many as it keeps and as are on nodes of the pool."""
    each = one.claim.slots_per_worker
    placed = _Placed(each, one.claim.least)
    for worker in staying(one.claim, one.given):
        number = numbers.get(worker.node)
        if number is not None and free[number] >= each:
            free[number] -= each
            placed.workers[worker] = number
    placed.count = len(placed.workers)
    return placed


def _place(floor: _Floor, one: Seeker, placed: _Placed, wanted: int, turn: int | None) -> None:
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


def _kept(one: Seeker, placed: _Placed, numbers: Mapping[str, int]) -> tuple[Worker, ...]:
    """The workers that stay where they are, and as many of those that wait for a node as there are places."""
    waiting = [worker for worker in staying(one.claim, one.given) if worker.node not in numbers]
    return (*placed.workers, *waiting[: placed.count - len(placed.workers)])
