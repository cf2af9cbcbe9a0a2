"""What launchers and ranks report about themselves, apart from steps and checkpoints (`core.history`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from elasticctl.api.usage import JobUsage, WorkerUsage
from elasticctl_protocol.reports import RankPlace

SHOW_EVERY_S = 9.0
"""How often a job's status is updated with what workers use of their machines. Launchers measure every 10 s, so with
many workers there is a new report at any moment."""


@dataclass(slots=True)
class UsageReports:
    """The newest measurement of each worker, by uid."""

    newest: dict[str, WorkerUsage] = field(default_factory=dict)
    shown_at: float = -SHOW_EVERY_S

    def add_usage(self, uid: str, usage: WorkerUsage, now: float) -> bool:
        """Keep a worker's measurement; True if the job's status should be updated now."""
        is_due = uid not in self.newest or now >= self.shown_at + SHOW_EVERY_S
        self.newest[uid] = usage
        if is_due:
            self.shown_at = now
        return is_due

    def drop_dead(self, alive: Collection[str]) -> None:
        """Drop the measurements of all workers but those that are alive."""
        for uid in [uid for uid in self.newest if uid not in alive]:
            del self.newest[uid]

    def of_group(self, alive: Mapping[str, str]) -> JobUsage | None:
        """The usage of the live workers, in their order; None if there is no measurement of any."""
        found = [self.newest[uid] for uid in alive if uid in self.newest]
        return JobUsage.of(found) if found else None


@dataclass(slots=True)
class ScriptReports:
    """What ranks say about their script and their state.

    With `stays`, ranks stay in their processes when the group changes, so workers that have to start their ranks do
    that first. `examples` is what the others call their model with, for them to compile theirs. With
    `serves_commands`, workers have no ranks, but run what a launcher program on the first of them asks for: a change of
    the group stops nothing.

    `obstacle` is what ranks are waiting for, such as a storage that does not answer, and `unsaved` why they train
    without saving. `places` is where ranks stand that do not move, by rank.
    """

    stays: bool = False
    examples: str = ""
    serves_commands: bool = False
    obstacle: str = ""
    unsaved: str = ""
    places: dict[int, RankPlace] = field(default_factory=dict)

    @property
    def cannot_save(self) -> bool:
        """Would a stop now lose what has not been saved?"""
        return bool(self.obstacle or self.unsaved)

    def set_stays(self, stays: bool) -> None:
        """Ranks report whether they will stay in their processes."""
        self.stays = stays

    def introduce(self, *, stays: bool, serves_commands: bool) -> None:
        """A launcher says what its ranks are; what one has said holds for the group."""
        self.stays |= stays
        self.serves_commands |= serves_commands

    def set_examples(self, examples: str) -> None:
        """Ranks say what they call their model with."""
        self.examples = examples

    def set_obstacle(self, obstacle: str, unsaved: str = "") -> None:
        """Ranks wait for something, or train without saving; both empty: neither any more."""
        self.obstacle, self.unsaved = obstacle, unsaved

    def clear_obstacle(self) -> None:
        """Ranks have got on."""
        self.obstacle = ""

    def set_place(self, rank: int, place: RankPlace | None) -> None:
        """A rank stands still at this place; None: it moves again."""
        self.places.pop(rank, None)
        if place is not None:
            self.places[rank] = place

    def start_generation(self) -> None:
        """A generation has formed: ranks that still wait, or stand still, say so again."""
        self.set_obstacle("")
        self.places.clear()
