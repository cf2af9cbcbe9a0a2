"""Who is in the training group: the state of one job's rendezvous, without a clock, a thread or a socket.

A group is either *formed* (its members train as generation N) or *open* (they stop, and join generation N+1). It opens
when a member is lost, leaves or fails, and when a newcomer is ready. It forms as soon as everybody has joined who is
alive and was in it before: nobody waits for a last call, and nobody waits for a worker that is still starting, except
at the very beginning, where forming early would only mean forming twice. A group of automatic size weighs what taking
newcomers in costs against what it brings; one whose size somebody has asked for takes them in as they come.

A change that is known beforehand (a newcomer, a removal, a spot notice) is announced first: the formed group *drains*,
which means that its ranks agree on a step, commit it and stop, so that no step is lost. Draining has a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import CheckpointStatus, Generation, JobStatus, Progress
from elasticctl_controller.core.sharing.resizing import growth_of, weigh
from elasticctl_controller.core.workers import is_member

FIRST_SETTLE_S = 30.0
"""How long the first generation waits for workers that are alive but have not joined, once `min` have."""
NEWCOMER_SETTLE_S = 2.0
"""How long a newcomer waits for others that are starting, so that they cost the group one re-forming, not several."""
FIRST_STEP_S = 20.0
"""How long newcomers leave a young generation alone that has not done its first step: training comes first."""
REJOIN_S = 10.0
"""How long a member that is alive but silent holds up the others."""
ADOPT_S = 45.0
"""How long newcomers wait for a restarted service to hear of the group that may train meanwhile: a launcher whose
connection died without a word asks again after 40 s."""
DRAIN_S = 10.0
"""How long members have to commit the step they agreed to stop at, before the group opens without it."""
COLD_S = 10.0
"""How long a group's pace says nothing yet about its size: its first steps are slow."""
RATE_WEIGHT = 0.1
"""How much of a rate is the newest report's: one slow step says little about a size."""
GENERATIONS_KEPT = 20
MAX_METRICS = 64
"""Kept of all that a script ever reported: one that names them by its steps must not fill the job's status."""
UNEXPLAINED_LIMIT = 3
"""Re-formings in a row without a step, a loss or an error of somebody's own, before the first to fail is blamed."""


@dataclass(frozen=True, slots=True)
class Member:
    """An agent as it introduced itself: the address of its store, and how many ranks (`slots`) it runs."""

    uid: str
    name: str
    host: str
    port: int
    slots: int


@dataclass(frozen=True, slots=True)
class World:
    """A formed generation; `members` in order of group rank. The store of rank 0's agent serves it."""

    generation: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """An announced change: why, and until when (seconds since the epoch) the members may take to stop in order."""

    reason: str
    deadline: float


@dataclass(slots=True)
class Group:
    """The rendezvous of one job. Every method that can change it takes `now`, seconds since the epoch.

    `growth` says why newcomers that are ready are not taken in yet, `rates` how fast groups of each size have trained.
    `unheard`: members, by uid, of the group that trained when the service was restarted.
    """

    job_uid: str
    alive: Mapping[str, str] = field(default_factory=dict)
    min: int = 1
    automatic: bool = False
    growth: str = ""
    rates: dict[int, float] = field(default_factory=dict)
    generation: int = 0
    world: World | None = None
    joined: dict[str, Member] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    opened_at: float | None = None
    first_join_at: float | None = None
    reason: str = "start"
    unexplained: int = 0
    blamed: str = ""
    unheard: frozenset[str] = frozenset()
    progress: Progress | None = None
    checkpoint: CheckpointStatus = CheckpointStatus()
    newest_commit: tuple[int, int] = (0, 0)
    records: list[Generation] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    leaving: frozenset[str] = frozenset()
    gone: set[str] = field(default_factory=set)
    drain: Drain | None = None
    silent: set[str] = field(default_factory=set)

    @classmethod
    def restored(cls, job_uid: str, status: JobStatus) -> Group:
        """The group as a restarted service knows it: its agents fill the rest in again when they next speak."""
        newest = status.generations[-1:]
        return cls(
            job_uid=job_uid,
            generation=status.generation,
            checkpoint=status.checkpoint,
            records=list(status.generations),
            unheard=frozenset(
                w.uid for w in status.workers if w.cause is None and any(is_member(w, g) for g in newest)
            ),
        )

    @property
    def is_open(self) -> bool:
        """True while there is no formed generation."""
        return self.world is None

    def set_alive(
        self, alive: Mapping[str, str], minimum: int, now: float, leaving: frozenset[str] = frozenset()
    ) -> None:
        """Take over the controller's list of live workers (uid -> name); a member that is missing from it is lost.

        Those in `leaving` have been told to go: they are members until they have gone, but not of the next generation.
        """
        self.gone &= alive.keys()
        self.silent &= alive.keys()
        before, self.alive = self.alive, {uid: name for uid, name in alive.items() if uid not in self.gone}
        if any(uid in before and uid not in self.alive and self._explains(uid) for uid in self.order):
            self.unexplained = 0
        self.min, self.leaving = max(1, minimum), leaving
        for uid in [uid for uid in self.joined if uid not in self.alive or uid in leaving]:
            del self.joined[uid]
        self._open_if_lost(now)
        self.settle(now)

    def join(self, member: Member, generation: int, now: float) -> None:
        """An agent is ready for a generation after `generation`, the last it was in (0: none)."""
        if member.uid in self.leaving:
            return
        if self.world and self._is_member(member.uid):
            if generation < self.world.generation:
                return  # it has not yet heard that it is in: the answer is the world
            self._open(self.drain.reason if self.drain else f"{member.name} joins again", now)
        self.generation = max(self.generation, generation)
        if generation and self.world is None and self.opened_at is None:
            self.opened_at = now  # this service was restarted: its old world has just lost a member
        if not self.joined:
            self.first_join_at = now
        self.silent.discard(member.uid)
        self.joined[member.uid] = member
        self.settle(now)

    def adopts(self, generation: int) -> bool:
        """Is this a restarted service that does not know the running generation yet?"""
        return self.world is None and self.opened_at is None and generation >= self.generation

    def adopt(self, world: World, now: float) -> None:
        """A running agent tells a restarted service what it is in: training that runs is not to be disturbed.

        A member may have been lost while there was no service, and the others wait for it in vain.
        """
        if not self.adopts(world.generation):
            return
        self.world, self.generation = world, world.generation
        self.order = {m.uid: rank for rank, m in enumerate(world.members)}
        if not self.records or self.records[-1].generation != world.generation:
            self._record(Generation(world.generation, tuple(m.name for m in world.members), "service restarted"))
        self._open_if_lost(now)

    def notice(self, uid: str, reason: str, now: float) -> None:
        """A member will have to go soon: let the group drain."""
        if self._is_member(uid) and uid not in self.finished:
            self._begin_drain(reason, now)

    def leave(self, uid: str, reason: str, now: float) -> None:
        """An agent goes, or has to be left out; the others re-form."""
        self.joined.pop(uid, None)
        if uid in self.alive:
            self.gone.add(uid)
        self.alive = {other: name for other, name in self.alive.items() if other != uid}
        if uid in self.order and self._explains(uid):
            self.unexplained = 0
        if self.world and self._is_member(uid) and uid not in self.finished:
            self._open(self.drain.reason if self.drain else reason, now)
        self.settle(now)

    def finish(self, uid: str) -> bool:
        """An agent's ranks have all succeeded; True once that holds for every member that is still alive."""
        if self._is_member(uid):
            self.finished.add(uid)
        members = self.world.members if self.world else ()
        return all(m.uid in self.finished or m.uid not in self.alive for m in members)

    def fail(self, uid: str, name: str, generation: int, *, of_peers: bool, now: float) -> bool:
        """Ranks of an agent failed; returns True when it is to blame, False when it shall join again.

        `of_peers`: the error is one that a peer's loss causes (a broken connection). It is blamed on the agent itself
        only when the group keeps failing like that with nobody lost and no step done.
        """
        if self.world is None or generation != self.world.generation:
            return False
        blamed = not of_peers
        if of_peers:
            self.unexplained += 1
            blamed = self.unexplained > UNEXPLAINED_LIMIT
        else:
            self.unexplained = 0
        self.blamed = uid if blamed else self.blamed
        self._open(f"{name} failed" if blamed else f"{name} lost a connection", now)
        return blamed

    def settle(self, now: float) -> float | None:
        """Open or form the group if it is time; returns after how many seconds to look again (None: no need)."""
        if self.world is not None and self.drain is None:
            return self._settle_newcomers(now)
        if self.world is not None and self.drain is not None:
            if now < self.drain.deadline:
                return self.drain.deadline - now
            self._open(self.drain.reason, now)
        if not self.joined:
            return None
        if len(self.joined) < self.min:
            return None
        wait_s = self._patience_s(now)
        if wait_s > 0:
            return wait_s
        self._form(now)
        return None

    def note_step(self, generation: int, progress: Progress, now: float) -> bool:
        """A rank reports progress; True when it is the first step of the generation."""
        if not self.records or self.records[-1].generation != generation or progress.step is None:
            return False
        record = self.records[-1]
        first = record.first_step_at is None
        last_step = max(progress.step, record.last_step or 0)
        self.records[-1] = replace(
            record, first_step_at=Timestamp(now) if first else record.first_step_at, last_step=last_step
        )
        if self.progress is None or first or progress.step >= (self.progress.step or 0):
            known = self.progress.metrics if self.progress else {}
            older = [(name, value) for name, value in known.items() if name not in progress.metrics]
            metrics = dict([*older, *progress.metrics.items()][-MAX_METRICS:])
            self.progress = replace(progress, at=Timestamp(now), metrics=metrics)
        warm = record.first_step_at is not None and now >= record.first_step_at + COLD_S
        if warm and progress.samples_per_s is not None and progress.samples_per_s > 0:
            rate = self.rates.setdefault(len(record.workers), progress.samples_per_s)
            self.rates[len(record.workers)] += (progress.samples_per_s - rate) * RATE_WEIGHT
        self.unexplained = 0
        return first

    def note_resumed(self, generation: int, step: int) -> None:
        """A rank has restored the state of `step` (0: there was nothing to restore)."""
        if self.records and self.records[-1].generation == generation:
            self.records[-1] = replace(self.records[-1], resumed_step=step)

    def note_commit(
        self, generation: int, number: int, step: int, url: str, size_bytes: int, duration_s: float, now: float
    ) -> None:
        """A generation has committed a checkpoint, its `number`-th at the URL; one that is told twice counts once."""
        if (generation, number) <= self.newest_commit:
            return
        first_told, self.newest_commit = self.newest_commit == (0, 0), (generation, number)
        if first_told and (url, step) == (self.checkpoint.url, self.checkpoint.step):
            return  # it was told to the service before this one
        self.checkpoint = CheckpointStatus(
            step=step,
            at=Timestamp(now),
            committed=self.checkpoint.committed + 1,
            url=url,
            size_bytes=size_bytes,
            duration_s=duration_s,
        )

    def _is_member(self, uid: str) -> bool:
        return self.world is not None and uid in self.order

    def _explains(self, uid: str) -> bool:
        """Is the end of this member what others' broken connections came from, rather than what came of them?"""
        return uid != self.blamed and uid not in self.finished

    def _settle_newcomers(self, now: float) -> float | None:
        newcomers = [member.name for uid, member in self.joined.items() if not self._is_member(uid)]
        told, self.growth = self.growth, ""
        if not newcomers or self.first_join_at is None:
            return None
        starting = [uid for uid in self.alive if uid not in self.joined and not self._is_member(uid)]
        waits = [self.first_join_at + NEWCOMER_SETTLE_S - now] if starting and not self.automatic else []
        if self.records and self.records[-1].first_step_at is None and self.records[-1].formed_at is not None:
            waits.append(self.records[-1].formed_at + FIRST_STEP_S - now)
        if max(waits, default=0.0) > 0:
            return max(waits)
        if self.automatic:
            measured = growth_of(self.records, self.rates, self.progress, now)
            verdict = weigh(
                replace(measured, ready=len(newcomers), coming=len(starting), ready_since=self.first_join_at), now
            )
            if not verdict.grow:
                self.growth = told or verdict.words  # the first: what is left to wait changes all the time
                return None if verdict.again_at is None else max(0.0, verdict.again_at - now)
        self._begin_drain(f"{', '.join(newcomers)} joined", now)
        return DRAIN_S

    def _patience_s(self, now: float) -> float:
        """How long still to wait for workers that are alive but have not joined; <= 0: not at all."""
        missing = (uid for uid in self.alive if uid not in self.joined and uid not in self.leaving)
        first = next(missing, None)  # of a large group almost every join ends here: no list of all the others
        if first is None:
            return 0.0
        if self.generation == 0:
            return (self.first_join_at or now) + FIRST_SETTLE_S - now
        if self._may_train_elsewhere():
            return (self.first_join_at or now) + ADOPT_S - now
        if not self.order or first in self.order or any(uid in self.order for uid in missing):
            return (self.opened_at if self.opened_at is not None else self.first_join_at or now) + REJOIN_S - now
        return 0.0

    def _may_train_elsewhere(self) -> bool:
        """Is this a restarted service that only newcomers have spoken to, while members of the last group live?"""
        unheard = () if self.order or self.opened_at is not None else self.unheard
        return any(uid in self.alive and uid not in self.joined and uid not in self.leaving for uid in unheard)

    def _open_if_lost(self, now: float) -> None:
        members = self.world.members if self.world else ()
        lost = [m.name for m in members if m.uid not in self.alive and m.uid not in self.finished]
        if lost:
            self._open(f"lost {', '.join(lost)}", now)

    def _begin_drain(self, reason: str, now: float) -> None:
        if self.drain is None:
            self.drain = Drain(reason, now + DRAIN_S)

    def _open(self, reason: str, now: float) -> None:
        """End the formed generation; its members are told to stop and to join the next."""
        self.world = self.drain = None
        self.finished.clear()
        self.opened_at, self.reason = now, reason

    def _form(self, now: float) -> None:
        """Number the members (survivors keep their order, newcomers follow by name) and start the generation.

        Members of the last one who live but have not come by now are `silent`: the controller should replace them.
        """
        self.silent |= self.order.keys() & self.alive.keys() - self.joined.keys() - self.leaving
        newcomers = len(self.order)
        members = sorted(self.joined.values(), key=lambda m: (self.order.get(m.uid, newcomers), len(m.name), m.name))
        self.generation += 1
        self.world = World(self.generation, tuple(members))
        self.order = {m.uid: rank for rank, m in enumerate(members)}
        self._record(
            Generation(
                generation=self.generation,
                workers=tuple(m.name for m in members),
                reason=self.reason,
                opened_at=Timestamp(self.opened_at if self.opened_at is not None else self.first_join_at or now),
                formed_at=Timestamp(now),
            )
        )
        self.joined.clear()
        self.opened_at = self.first_join_at = None

    def _record(self, generation: Generation) -> None:
        self.records.append(generation)
        del self.records[:-GENERATIONS_KEPT]
