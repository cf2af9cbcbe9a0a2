"""What is shared, who asks for it, and what each gets: plain data, so that who observes and who decides stay apart.

A *slot* is what a worker takes of a node: a GPU, or a processor where there are none. A *pool* is the slots of one
kind; a claim asks for slots of one pool, so pools are decided one by one. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Node:
    """A healthy node and the slots of it that may be shared: without what others than claims hold there."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The slots of one kind, by node, because a worker's slots have to be on one; `unit` is a slot's name in words."""

    name: str
    nodes: tuple[Node, ...]
    unit: str = "GPU"

    @property
    def slots(self) -> int:
        """All of it."""
        return sum(node.slots for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Project:
    """Whose jobs they are: slots by pool that it is guaranteed and that it may have at most (missing: 0; no limit).

    `weight` is its share of what nobody is guaranteed, beside the others'. A project that is not listed has weight 1,
    no guarantee and no limit.
    """

    name: str
    weight: float = 1.0
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that a claim has: since when, and on which node (empty: it waits for one).

    Those that have been told to go are not listed, though they still run: their slots are about to be free.
    """

    name: str
    started_at: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that wants to run: at least `least` workers or none at all, at most `most` (equal: a fixed size).

    `granted` is what the last decision gave (0: it waits or was suspended), `changed_at` when that last changed (for a
    new claim: when it was submitted). Jobs that ended, are suspended by their owner, or belong to another scheduler
    are no claims.
    """

    key: str
    project: str
    pool: str
    least: int
    most: int
    slots_per_worker: int = 1
    priority: int = 0
    submitted_at: float = 0.0
    granted: int = 0
    changed_at: float = 0.0
    workers: tuple[Worker, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """How hard the sharing tries to leave things alone.

    `patience_s`: a job that runs is not suspended for one of its own priority that has waited for less; after that the
    one submitted first goes first, so that nobody starves. `settle_s`: a job whose size has just changed keeps what it
    has for so long, unless a guarantee or another job's least needs it: fairness can wait, a start cannot.
    """

    patience_s: float = 600.0
    settle_s: float = 60.0


DEFAULT_RULES = Rules()


class Reason(StrEnum):
    """Why a claim has what it has; `Grant.words` says the same to a person."""

    FULL = "Full"  # all it asks for
    SHARED = "Shared"  # less than it asks for, because others have the rest
    LIMITED = "Limited"  # less than it asks for: its project's limit
    SMALL_POOL = "SmallPool"  # less than it asks for: there is no more, whoever else ends
    WAITS_GUARANTEE = "WaitsForGuarantee"  # nothing: what it would need is guaranteed to others who use it
    WAITS_PRIORITY = "WaitsForPriority"  # nothing: held by jobs of higher priority
    WAITS_TURN = "WaitsForTurn"  # nothing: held by jobs that come first
    WAITS_LIMIT = "WaitsForLimit"  # nothing: its project has used its limit
    NO_ROOM = "NoRoom"  # nothing: the pool is too small, or cut up so that a worker fits nowhere
    NO_POOL = "NoPool"  # nothing: there is no such pool

    @property
    def waits(self) -> bool:
        """Does it have nothing?"""
        return self not in (Reason.FULL, Reason.SHARED, Reason.LIMITED, Reason.SMALL_POOL)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim gets: 0 workers (it waits, or is suspended at a commit), or `least` to `most`.

    `borrowed`: how many of them hold more than the project is guaranteed, where guarantees are given at all: the first
    to be taken back. `leave`: names of the workers that have to go now, the youngest. `pending`: how many more it
    would take if there were nodes for them; what an autoscaler should know of. `words` is why it has what it has, in
    one sentence without a subject ("waits for 2 GPUs that team-b is guaranteed"); `change` is what this decision
    changed, empty when nothing ("gives 2 workers to team-b/train, as team-b is guaranteed so many"), and `for_key` whom
    it was changed for. `nodes`: where workers take several slots, the nodes kept for those that have none yet; they
    should go there, because elsewhere they might stand in somebody's way.
    """

    key: str
    workers: int
    reason: Reason
    words: str
    borrowed: int = 0
    leave: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    pending: int = 0
    change: str = ""
    for_key: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """A project's part of a pool after a decision, in slots; `waiting`: claims of it that have nothing."""

    project: str
    pool: str
    used: int
    guaranteed: int
    limit: int | None
    borrowed: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Decision:
    """All grants by claim, who uses what, and when to decide again though nothing changed (None: no need).

    Grants of a pool never come to more than its slots; workers that are told to go may hold theirs a little longer,
    so those who get them wait for them as pending workers.
    """

    grants: Mapping[str, Grant]
    usage: tuple[Usage, ...] = ()
    wake_at: float | None = None
