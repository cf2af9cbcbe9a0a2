"""Who has the newest state in a new group, and who takes it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank brings to a new group: how far it is, and whether its state in memory is whole (`has_state`).

    `buckets_bytes` is the length of what it says of its buckets of gradients.
    """

    step: int = 0
    epoch: int = 0
    has_state: bool = False
    buckets_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the ranks of a new group come to one state.

    `source` is the rank that has the newest; None if no rank has any. `receivers` take it over.
    """

    source: int | None
    receivers: tuple[int, ...]
    standings: tuple[Standing, ...]

    @property
    def newest(self) -> Standing:
        """That of the source. Raises ValueError without one."""
        if self.source is None:
            raise ValueError("no rank has a state")
        return self.standings[self.source]


def decide(standings: Sequence[Standing]) -> Agreement:
    """The first rank of those that are furthest is the source."""
    whole = [rank for rank, each in enumerate(standings) if each.has_state]
    if not whole:
        return Agreement(None, (), tuple(standings))
    source = max(whole, key=lambda rank: (standings[rank].step, -rank))
    newest = standings[source]
    receivers = tuple(rank for rank, each in enumerate(standings) if not each.has_state or each.step < newest.step)
    return Agreement(source, receivers, tuple(standings))
