"""What is news to whom: whoever comes back hears of everything that changed meanwhile, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.dashboard import feed
from elasticctl.dashboard.feed import Row, Update, VersionedRows


def rows(**values: int) -> list[Row]:
    return [{"uid": uid, "value": value} for uid, value in values.items()]


def test_only_changes_are_news() -> None:
    board = VersionedRows()
    assert board.replace(rows(a=1, b=1))
    assert not board.replace(rows(b=1, a=1))
    assert board.replace(rows(a=2, b=1, c=1))
    assert board.since(1) == Update(2, False, tuple(rows(a=2, c=1)))
    assert board.replace(rows(a=2, c=1))
    assert board.since(2) == Update(3, False, (), ("b",))
    assert board.since(1).gone == ("b",)


def test_who_knows_nothing_or_something_else_is_told_everything() -> None:
    board = VersionedRows()
    board.replace(rows(a=1))
    for known in (None, 7):
        assert board.since(known) == Update(1, True, tuple(rows(a=1)))


def test_what_comes_back_is_not_gone() -> None:
    board = VersionedRows()
    for now in (rows(a=1), [], rows(a=1)):
        board.replace(now)
    assert board.since(1) == Update(3, False, tuple(rows(a=1)))


def test_deletions_are_remembered_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_GONE", 20)
    board = VersionedRows()
    for left in range(22, -1, -1):
        board.replace([{"uid": str(n)} for n in range(left)])
    assert board.since(1).whole
    late = board.since(board.version - 20)
    assert not late.whole
    assert len(late.gone) == 20


worlds = st.lists(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 2)), max_size=12)


@given(worlds, st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_viewer_that_misses_some_ends_up_with_all(history: list[dict[str, Any]], looks: list[bool]) -> None:
    board, seen, known = VersionedRows(), {}, None
    for world, looked in zip([*history, history[-1] if history else {}], [*looks[: len(history)], True], strict=True):
        board.replace(rows(**world))
        if looked:
            update = board.since(known)
            known = update.version
            seen = {} if update.whole else seen
            seen |= {row["uid"]: row for row in update.rows}
            for uid in update.gone:
                seen.pop(uid, None)
            assert seen == {row["uid"]: row for row in rows(**world)}
