"""One job of the simulation: its workers, the group that trains, and the work that it has done and committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.sharing_simulation.trace import Job, Settings
from elasticctl_controller.core.group.growth import GrowthOption, decide_growth
from elasticctl_controller.core.sharing.claims import Claim, Worker


@dataclass(slots=True)
class SimWorker:
    """A worker on its node; it can train from `ready_s` on."""

    name: str
    node: str
    started_s: float
    ready_s: float


@dataclass(slots=True)
class Group:
    """A job that has arrived. `members` train, except before `busy_until`; `done` and `saved` are work.

    `rates` are those at which it has trained, by size: what a controller would have measured.
    """

    job: Job
    settings: Settings
    pool: str
    fixed: bool
    granted: int = 0
    changed_at: float = 0.0
    workers: dict[str, SimWorker] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    busy_until: float = 0.0
    at: float = 0.0
    done: float = 0.0
    saved: float = 0.0
    saved_at: float = 0.0
    changes: int = 0
    began_at: float | None = None
    ended_at: float | None = None
    again_at: float | None = None
    redone: float = 0.0
    made: int = 0
    formed: int = 0
    rates: dict[int, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Return the work per second while it trains."""
        return self.job.rate(len(self.members))

    def claim(self, doomed: set[str]) -> Claim:
        """Return it in the terms of the sharing: without workers on nodes that are about to go."""
        job = self.job
        return Claim(
            key=job.key,
            project=job.project,
            pool=self.pool,
            least=job.wanted if self.fixed else job.least,
            most=job.wanted if self.fixed else job.most,
            submitted_at=job.arrives_s,
            granted=self.granted,
            changed_at=self.changed_at,
            workers=tuple(
                Worker(one.name, one.started_s, one.node) for one in self.workers.values() if one.node not in doomed
            ),
        )

    def advance(self, now: float) -> None:
        """Train until `now`, with regular commits."""
        since = max(self.at, self.busy_until)
        if self.members and now > since:
            if now - self.saved_at >= self.settings.commit_s:
                commits = (now - self.saved_at) // self.settings.commit_s
                self.saved_at += commits * self.settings.commit_s
                self.saved = max(self.saved, self.done + self.rate * max(0.0, self.saved_at - since))
            self.done += self.rate * (now - since)
            self.rates[len(self.members)] = self.rate
        self.at = max(self.at, now)

    def ends_at(self) -> float | None:
        """Return when it will be done if nothing happens."""
        if not self.members:
            return None
        return max(self.at, self.busy_until) + max(0.0, self.job.work - self.done) / self.rate

    def commit(self, now: float) -> None:
        """Commit: what is announced costs no work."""
        self.saved, self.saved_at = self.done, now

    def drop(self, names: set[str], now: float, noticed: bool) -> None:
        """Lose these workers, with notice or without."""
        for name in names:
            self.workers.pop(name, None)
        if not names & self.members:
            return
        if noticed:
            self.commit(now)
        else:
            self.redone += self.done - self.saved
            self.done = self.saved
        self.members -= names
        self.changes += 1
        pause_s = self.settings.reform_s if noticed else self.settings.loss_s
        if len(self.members) < (self.job.wanted if self.fixed else self.job.least):
            self.members = set()
        else:
            self._form(self.members | self.ready(now), now, pause_s)

    def ready(self, now: float) -> set[str]:
        """Return the workers that could train now."""
        return {one.name for one in self.workers.values() if one.ready_s <= now}

    def look(self, now: float) -> None:
        """Form a group, or admit newcomers, if it is time to."""
        self.again_at = None
        ready = self.ready(now)
        if not self.granted or not ready - self.members:
            return
        coming = max(0, self.granted - len(ready))
        if not self.members:
            if not coming:
                self._form(ready, now, 0.0)  # the workers' start is the cost of starting
            return
        newcomers = ready - self.members
        verdict = decide_growth(
            GrowthOption(
                size=len(self.members),
                ready=len(newcomers),
                coming=coming,
                ready_since=min(self.workers[name].ready_s for name in newcomers),
                reform_cost_s=self.settings.reform_s,
                changes=self.changes,
                watched_s=now - (self.began_at or now),
                remaining_s=max(0.0, self.job.work - self.done) / self.rate,
                rates=self.rates,
            ),
            now,
        )
        if verdict.grow and now >= self.busy_until:
            self.commit(now)
            self._form(ready, now, self.settings.reform_s)
        elif verdict.grow:
            self.again_at = self.busy_until
        else:
            self.again_at = verdict.again_at

    def _form(self, members: set[str], now: float, pause_s: float) -> None:
        self.members = set(members)
        self.formed += 1
        self.busy_until = now + pause_s
        self.saved_at = max(now, self.saved_at)
        self.began_at = now if self.began_at is None else self.began_at
