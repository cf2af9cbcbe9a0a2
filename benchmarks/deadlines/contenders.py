"""The field: what others do with the same job, machines and prices. All but ours have one size, `workers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticctl.planning.situation import ON_DEMAND, Choice, Decision, Reason, Situation
from elasticctl.simulation.replay import Policy


def _as_decision(now: Situation, choice: Choice) -> Decision:
    return Decision(choice, Reason.CHEAPEST, now.look_s, kept=True)


def spot_pool(now: Situation, workers: int) -> str:
    """Return the pool with room for the whole group: the one that it is in, else the first; '' if there is none."""
    fits = [pool.name for pool in now.pools if pool.there >= workers]
    return next((name for name in fits if now.workers(name)), fits[0] if fits else ON_DEMAND)


@dataclass(slots=True)
class OnDemandOnly:
    """On demand from the start to the end."""

    workers: int

    def __call__(self, now: Situation) -> Decision:
        return _as_decision(now, Choice(on_demand=self.workers))


@dataclass(slots=True)
class SpotOnly:
    """On spot machines whenever there are any, whatever the deadline."""

    workers: int

    def __call__(self, now: Situation) -> Decision:
        pool = spot_pool(now, self.workers)
        return _as_decision(now, Choice(pool, self.workers) if pool else Choice())


@dataclass(slots=True)
class UniformProgress:
    """Uniform Progress of "Can't Be Late" (Wu and others, NSDI 2024).

    Use spot whenever it is available, without changes until it is lost. Without spot, use on demand if progress is
    behind that of a job that is spread evenly until the deadline, until it is two changes ahead. If only on demand can
    meet the deadline, use on demand until the end. That last rule has a margin for what the simulator may add to the
    paper's model: machines are looked at once per tick, and work may be unsaved.
    """

    workers: int
    _total: float = 0.0
    _time_s: float = 0.0
    _on_demand: bool = False
    _to_the_end: bool = False

    def __call__(self, now: Situation) -> Decision:
        time_s = now.time_left_s or 0.0
        if not self._time_s:
            self._total, self._time_s = now.work_left, time_s
        change_s = now.costs.start_s + now.costs.reform_s
        slack_s = time_s - now.saved_left / now.speeds.rate(self.workers)
        self._to_the_end |= slack_s <= 2 * change_s + now.look_s
        pool = spot_pool(now, self.workers)
        if self._to_the_end:
            return _as_decision(now, Choice(on_demand=self.workers))
        if pool:
            self._on_demand = False
            return _as_decision(now, Choice(pool, self.workers))
        done = self._total - now.work_left
        gone_s = self._time_s - time_s
        if self._on_demand:
            self._on_demand = done < self._total * (gone_s + 2 * change_s) / self._time_s
        else:
            self._on_demand = done < self._total * gone_s / self._time_s
        return _as_decision(now, Choice(on_demand=self.workers) if self._on_demand else Choice())


@dataclass(slots=True)
class TimeSliced:
    """Each tenth of the time does a tenth of the work: spot or nothing, until only on demand can do the rest of it."""

    workers: int
    slices: int = 10
    _total: float = 0.0
    _time_s: float = 0.0

    def __call__(self, now: Situation) -> Decision:
        time_s = now.time_left_s or 0.0
        if not self._time_s:
            self._total, self._time_s = now.work_left, time_s
        gone = (self._time_s - time_s) / self._time_s
        slice_ends = min(self.slices, int(gone * self.slices + 1e-9) + 1) / self.slices
        left = self._total * slice_ends - (self._total - now.saved_left)
        slack_s = (slice_ends - gone) * self._time_s - left / now.speeds.rate(self.workers)
        change_s = now.costs.start_s + now.costs.reform_s
        pool = spot_pool(now, self.workers)
        forced = left > 0 and slack_s <= 2 * change_s + now.look_s
        if forced and (slice_ends == 1 or not pool):
            return _as_decision(now, Choice(on_demand=self.workers))
        return _as_decision(now, Choice(pool, self.workers) if pool else Choice())


RIGID: dict[str, Callable[[int], Policy]] = {
    "on demand only": OnDemandOnly,
    "spot only": SpotOnly,
    "uniform progress": UniformProgress,
    "time-sliced": TimeSliced,
}
