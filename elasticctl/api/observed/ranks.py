"""Where the ranks of a group that hangs are, and which of them the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticctl_protocol.reports import RankPlace, ranks_text

MOST_PLACES = 5
"""Further ranks are only counted: a status holds the sentence."""


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


def _by_where(places: Mapping[int, RankPlace], *, waits: bool) -> list[tuple[str, list[int]]]:
    """The ranks that wait, or those that do not, grouped by place, in the order of each group's first rank."""
    found: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        if place.waits is waits:
            found.setdefault(place.where, []).append(rank)
    return list(found.items())


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
