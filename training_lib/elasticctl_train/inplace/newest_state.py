"""Decides which rank of a new group has the newest state, and which ranks receive it; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank brings to a new group: how far it is, and whether its state in memory is complete (`has_state`).

    `buckets_bytes` is the length of its description of the gradient buckets. `restarts`: all ranks have to
    restart if no rank is further (see `script_loop`).
    """

    step: int = 0
    epoch: int = 0
    has_state: bool = False
    buckets_bytes: int = 0
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the ranks of a new group arrive at one state.

    `source` is the rank with the newest state; None if no rank has any. `receivers` are the ranks that take it over,
    and `standings` those of all ranks, in order.
    """

    source: int | None
    receivers: tuple[int, ...]
    standings: tuple[Standing, ...]

    @property
    def newest(self) -> Standing:
        """The standing of the source. Raises ValueError if there is none."""
        if self.source is None:
            raise ValueError("no rank has a state")
        return self.standings[self.source]

    @property
    def restarts(self) -> bool:
        """True if all ranks have to restart."""
        return self.source is not None and any(
            each.restarts and each.step == self.newest.step for each in self.standings
        )


def decide(standings: Sequence[Standing]) -> Agreement:
    """Return the agreement for these standings: the source is the first of the ranks with the newest step."""
    whole = [rank for rank, each in enumerate(standings) if each.has_state]
    if not whole:
        return Agreement(None, (), tuple(standings))
    source = max(whole, key=lambda rank: (standings[rank].step, -rank))
    newest = standings[source]
    receivers = tuple(rank for rank, each in enumerate(standings) if not each.has_state or each.step < newest.step)
    return Agreement(source, receivers, tuple(standings))
