"""Who is in a job's training group: the live workers, the newest generation's members, and who joins the next one."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from elasticctl.api.text import join_some
from elasticctl_protocol.requests import Member


@dataclass(slots=True)
class Members:
    """The live workers, as the controller sees them, and the members of the newest generation.

    `alive` are the live workers (uid -> name), without those that are `gone`: these have left although their pods are
    still ending. Those in `leaving` stay members until they are gone, but will not be in the next generation. A
    generation needs at least `minimum` workers.

    `ranked` are the members by uid, in order of rank. `trained` have done the last step; `finished` are those whose
    ranks have all succeeded, `terminated` the members among them whose ranks had been sent SIGTERM.
    """

    alive: Mapping[str, str] = field(default_factory=dict)
    leaving: frozenset[str] = frozenset()
    minimum: int = 1
    gone: set[str] = field(default_factory=set)
    ranked: dict[str, Member] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    terminated: set[str] = field(default_factory=set)

    def set_alive(self, alive: Mapping[str, str], minimum: int, leaving: frozenset[str]) -> bool:
        """Set the live workers; True if a member that has not finished was alive and no longer is."""
        self.gone.intersection_update(alive)
        self.trained.intersection_update(alive)
        before, self.alive = self.alive, {uid: name for uid, name in alive.items() if uid not in self.gone}
        self.minimum, self.leaving = max(1, minimum), leaving
        return any(uid in before and uid not in self.alive for uid in self.ranked if uid not in self.finished)

    def mark_leaving(self, uids: Iterable[str]) -> None:
        """These workers will not be in the next generation."""
        self.leaving |= frozenset(uids)

    def mark_gone(self, uid: str) -> None:
        """A worker has left, although its pod may still be ending."""
        if uid in self.alive:
            self.gone.add(uid)
        self.alive = {other: name for other, name in self.alive.items() if other != uid}

    def set_ranked(self, members: Iterable[Member]) -> None:
        """A generation with these members is training."""
        self.ranked = {member.uid: member for member in members}

    def start_generation(self) -> None:
        """A generation has formed: what ranks had finished belonged to the previous one."""
        for results in (self.finished, self.terminated, self.trained):
            results.clear()

    def mark_trained(self, uid: str, *, is_done: bool) -> None:
        """Record whether the ranks of a worker have done the last step; they may hang or stop after that."""
        if not is_done:
            self.trained.discard(uid)
        elif uid in self.ranked:
            self.trained.add(uid)

    def mark_finished(self, uids: Iterable[str], terminated: Iterable[str]) -> None:
        """All ranks of these members have succeeded, after those of `terminated` were sent SIGTERM."""
        self.finished.update(uids)
        self.terminated.update(terminated)

    def mark_unfinished(self, uid: str) -> None:
        """A worker joins again."""
        self.finished.discard(uid)

    def is_awaited(self, uid: str) -> bool:
        """Do the ranks of the other members wait for the ranks of this one?"""
        return uid in self.ranked and uid in self.alive and uid not in self.finished

    def awaited(self) -> Iterator[str]:
        """The uids of the members whose ranks the others wait for."""
        return (uid for uid in self.ranked if self.is_awaited(uid))

    def lost(self) -> list[str]:
        """The names of the members that are no longer alive and have not finished."""
        return [m.name for uid, m in self.ranked.items() if uid not in self.alive and uid not in self.finished]

    def name_some(self, uids: Collection[str]) -> str:
        """These members in words, in order of rank."""
        return join_some([member.name for uid, member in self.ranked.items() if uid in uids], "worker")

    def who_stops(self, uids: Collection[str]) -> str:
        """Which members have to stop, in words."""
        names = join_some([self.ranked[uid].name for uid in uids], "worker")
        return f"{names} {'has' if len(uids) == 1 else 'have'} to stop"


@dataclass(slots=True)
class NextGeneration:
    """Who is ready for the next generation.

    `joined` are the workers that are ready for it, the first of them since `first_join_at` (seconds since the epoch).
    Where ranks stay in their processes, workers that have to start theirs do that first (`preparing`), while the others
    train. `growth` is why newcomers that are ready are not admitted yet.
    """

    joined: dict[str, Member] = field(default_factory=dict)
    first_join_at: float | None = None
    preparing: set[str] = field(default_factory=set)
    growth: str = ""

    def add_worker(self, member: Member, now: float) -> None:
        """A worker is ready."""
        if not self.joined:
            self.first_join_at = now
        self.preparing.discard(member.uid)
        self.joined[member.uid] = member

    def remove_worker(self, uid: str) -> None:
        """A worker that was ready is not any more."""
        self.joined.pop(uid, None)

    def prepare(self, uid: str) -> None:
        """A worker starts its ranks before it joins."""
        self.preparing.add(uid)

    def drop_absent(self, members: Members) -> None:
        """Drop the workers that are not alive, or leave."""
        self.preparing.intersection_update(members.alive)
        for uid in [uid for uid in self.joined if uid not in members.alive or uid in members.leaving]:
            del self.joined[uid]

    def newcomers(self, members: Members) -> list[str]:
        """The names of the workers that are ready and not members of the newest generation."""
        return [member.name for uid, member in self.joined.items() if uid not in members.ranked]

    def rank(self, members: Members) -> list[Member]:
        """The members of the next generation in order of rank: survivors keep theirs, newcomers follow by name."""
        ranks = {uid: rank for rank, uid in enumerate(members.ranked)}
        return sorted(self.joined.values(), key=lambda m: (ranks.get(m.uid, len(ranks)), len(m.name), m.name))

    def explain_waiting(self, reason: str) -> None:
        """Set why newcomers that are ready have to wait ("": there are none, or they are admitted)."""
        self.growth = reason

    def start_generation(self) -> None:
        """It has formed, and this is now the one after it."""
        self.first_join_at = None
        self.joined.clear()


@dataclass(slots=True)
class RestoredService:
    """What a restarted service knows about its job from before the restart, until the launchers have called.

    It knows the job since `known_at` (seconds since the epoch). Until it hears who the members are, it has
    `remembered`: the uids of members in the status, and of members that have called. When it started, it knew nothing
    after the generation `stored`; `first_known` is the first that it has formed or heard of (0: none yet), and
    `recalled` are the generations in between whose failures were reported to it. `unseen` is a generation that may have
    ended while there was no service.
    """

    known_at: float | None = None
    remembered: set[str] = field(default_factory=set)
    stored: int = 0
    first_known: int = 0
    recalled: set[int] = field(default_factory=set)
    unseen: int = 0

    def set_known(self, now: float) -> None:
        """The controller has set which workers are alive."""
        self.known_at = now if self.known_at is None else self.known_at

    def remember(self, uid: str) -> None:
        """A member has called."""
        self.remembered.add(uid)

    def hear_of(self, generation: int) -> None:
        """A generation has formed, or is known to be running."""
        self.first_known = self.first_known or generation

    def suspect_end_of(self, generation: int) -> None:
        """A member of this generation has called; the generation may have ended while there was no service."""
        self.unseen = max(self.unseen, generation)

    def explain_unseen(self) -> None:
        """Nothing may have ended unseen: a generation has formed, or a loss explains its end."""
        self.unseen = 0

    def forget_members(self) -> None:
        """The members are known: a generation has formed, or has been reported."""
        self.remembered.clear()

    def count_failure_of(self, generation: int) -> None:
        """A failure in this generation has been reported after the fact."""
        self.recalled.add(generation)

    def may_have_missed(self, generation: int) -> bool:
        """Could this generation have ended without a service that stored it?"""
        return max(1, self.stored) <= generation and (not self.first_known or generation < self.first_known)

    def knows_others(self, members: Members, uid: str) -> bool:
        """Is another member than this worker known and alive?"""
        known = itertools.chain(members.ranked, self.remembered)
        return any(other != uid and other in members.alive for other in known)
