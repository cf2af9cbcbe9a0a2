"""A trace of spot machines that is played faster than it was recorded, and the simulator's forecast for a job on it.

An hour of the trace passes in `HOUR_S` seconds, and machines come and go at most every `TICK_S`. Starts, losses and
joins take their real time, so relative to the trace, machines seem to need hours to start: the forecast is made with
the same costs, in the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.planning.availability import Seen
from elasticctl.planning.choose_workers import decide
from elasticctl.planning.situation import Costs, Speeds
from elasticctl.simulation.replay import Outcome, Plan, Replay
from elasticctl.simulation.traces import Recording, Trace

HOUR_S, TICK_S = 10.0, 5.0
ON_DEMAND_USD, SPOT_USD = 1.0, 0.3
"""For a worker and an hour of the trace."""


@dataclass(frozen=True, slots=True)
class Tape:
    """A compressed trace from a tick on; ticks are `trace.gap_s` seconds of the cluster's time apart."""

    trace: Trace
    first: int

    @classmethod
    def of(cls, trace: Trace, workers: int, from_h: float) -> Tape:
        """Start that many hours into a trace, as if this many workers had been requested."""
        faster = replace(trace.scaled(workers), gap_s=trace.gap_s * HOUR_S / 3600).at_gap(TICK_S)
        return cls(faster, int(from_h * HOUR_S / TICK_S))

    def there(self, after_s: float) -> int:
        """Return how many machines exist, that many seconds of the cluster's time after the start."""
        tick = self.first + int(after_s / self.trace.gap_s)
        return self.trace.there[min(tick, len(self.trace.there) - 1)]

    def foretell(self, plan: Plan) -> Outcome:
        """Simulate one run of the policy; dollars and hours are the trace's."""
        recording = Recording.of((self.trace,), max(self.trace.there), SPOT_USD * 3600 / HOUR_S)
        found = Replay(plan, recording, self.first, decide).run()
        return found

    def seen(self, pool: str, at: float) -> Manifest:
        """Return the `status.plan.pools` of a job that has watched up to the start."""
        seen, gap_h = Seen(self.trace.there[0] > 0), self.trace.gap_s / 3600
        for count in self.trace.there[1 : self.first]:
            seen = seen.after(gap_h, count > 0)
        rows = {"awayHours": seen.hours[0], "upHours": seen.hours[1], "awayEnds": seen.ends[0], "upEnds": seen.ends[1]}
        return {"name": pool, "at": to_rfc3339(at), "up": seen.up, **{name: list(row) for name, row in rows.items()}}


def plan_of(work: float, rates: Mapping[int, float], costs: Costs, deadline_s: float) -> Plan:
    """Return the plan in the cluster's time; prices are per hour of it."""
    return Plan(work, Speeds.of(rates), costs, ON_DEMAND_USD * 3600 / HOUR_S, deadline_s, blind=True)


def hours_of(found: Outcome) -> Sequence[float]:
    """Return the paid hours of the trace: on spot, and on demand."""
    return found.spot_h * 3600 / HOUR_S, found.on_demand_h * 3600 / HOUR_S
