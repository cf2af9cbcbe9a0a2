"""Where ranks stand, in one sentence."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from elasticctl_protocol.reports import MOST_PLACES, RankPlace, describe_hang, ranks_text


def test_the_rank_that_the_others_wait_for_comes_first() -> None:
    places = {rank: RankPlace(rank, "all_reduce", waits=True) for rank in range(8)}
    places[3] = RankPlace(3, "DataLoader._next_data")
    assert describe_hang(places) == ("rank 3 stands in DataLoader._next_data; ranks 0-2, 4-7 wait for it in all_reduce")


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    places = {
        0: RankPlace(0, "all_reduce", waits=True),
        1: RankPlace(1, "all_reduce", waits=True),
        2: RankPlace(2, "broadcast", waits=True),
    }
    assert describe_hang(places) == "ranks 0-1 wait in all_reduce; rank 2 waits in broadcast"


def test_a_thousand_places_make_a_short_sentence() -> None:
    text = describe_hang({rank: RankPlace(rank, f"train.py:{rank}") for rank in range(1000)})
    assert text.endswith(f"; {1000 - MOST_PLACES} more elsewhere")
    assert len(text) < 300
    assert describe_hang({}) == ""


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_of_ranks_say_which(ranks: set[int]) -> None:
    text = ranks_text(sorted(ranks))
    read: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        read |= set(range(int(first), int(last or first) + 1))
    assert read == ranks
