"""Where the ranks of a group that hangs are, and which of them the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_PLACES = 5
"""Further ranks are only counted: a status holds the sentence."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The call `where` that a rank is in; `waits`: it waits there for other ranks, as far as its launcher knows."""

    where: str
    waits: bool = False


def describe_hang(places: Mapping[int, RankPlace]) -> str:
    """`rank 3 stands in DataLoader._next_data; ranks 0-2, 4-7 wait for it in all_reduce`; empty for no ranks."""
    standing = _by_where(places, waits=False)
    waiting = _by_where(places, waits=True)
    if not standing:
        parts = [f"{ranks_text(ranks)} {_verb(ranks, 'wait')} in {where}" for where, ranks in waiting]
    else:
        one = sum(len(ranks) for _, ranks in standing) == 1
        parts = [f"{ranks_text(ranks)} {_verb(ranks, 'stand')} in {where}" for where, ranks in standing]
        parts += [
            f"{ranks_text(ranks)} {_verb(ranks, 'wait')} for {'it' if one else 'them'} in {where}"
            for where, ranks in waiting
        ]
    left = sum(len(ranks) for _, ranks in [*standing, *waiting][MOST_PLACES:])
    more = [f"{left} more elsewhere"] if left else []
    return "; ".join([*parts[:MOST_PLACES], *more])


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 4-7`; `ranks` ascend."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _by_where(places: Mapping[int, RankPlace], *, waits: bool) -> list[tuple[str, list[int]]]:
    """The ranks that wait, or those that do not, grouped by place, in the order of each group's first rank."""
    found: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        if place.waits is waits:
            found.setdefault(place.where, []).append(rank)
    return list(found.items())


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
