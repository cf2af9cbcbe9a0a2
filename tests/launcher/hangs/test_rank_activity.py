"""Does a rank move?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_launcher.hangs.process_activity import ProcessActivity
from elasticctl_launcher.hangs.rank_activity import BUSY_CORES, Sighting, follow, moves
from elasticctl_launcher.hangs.rank_location import NOWHERE, Kind, StackPlace
from elasticctl_launcher.hangs.stacks import StackFrame, ThreadStack

STACKS = (ThreadStack(1, "MainThread", (StackFrame("load", "/job/data.py", 9),)),)
BESIDE = (*STACKS, ThreadStack(1, "Thread-1", (StackFrame("run", "/job/log.py", 1),)))
ELSEWHERE = (ThreadStack(1, "MainThread", (StackFrame("load", "/job/data.py", 10),)),)
QUIET = ProcessActivity(10.0, 1000, 50, running=False)
STILL = Sighting(0.0, 3, QUIET, STACKS, StackPlace(Kind.CODE, "load (data.py:9)"))
WAITING = replace(STILL, place=StackPlace(Kind.COLLECTIVE, "all_reduce"))
STEP_S = 10.0


def after(before: Sighting, cpu_s: float = 0.0, io_bytes: int = 0, wakeups: int = 0, **changes: object) -> Sighting:
    """What is seen ten seconds later."""
    activity = ProcessActivity(QUIET.cpu_s + cpu_s, QUIET.io_bytes + io_bytes, QUIET.wakeups + wakeups, running=False)
    return replace(before, at_s=before.at_s + STEP_S, activity=activity, **changes)  # type: ignore[arg-type]


def test_nothing_is_nothing() -> None:
    assert not moves(STILL, after(STILL), strict=True)
    assert not moves(WAITING, after(WAITING), strict=True)


@pytest.mark.parametrize(
    "seen",
    [after(STILL, lines=4), after(STILL, stacks=ELSEWHERE), after(STILL, cpu_s=6.0), after(STILL, io_bytes=10**9)],
    ids=["prints", "goes on in its script", "computes in C", "reads"],
)
def test_work_of_each_kind_is_movement(seen: Sighting) -> None:
    assert moves(STILL, seen, strict=False)


def test_a_rank_in_a_collective_may_spin_and_have_threads_beside_it() -> None:
    assert not moves(WAITING, after(WAITING, cpu_s=STEP_S, io_bytes=10**9, stacks=BESIDE), strict=False)
    assert moves(WAITING, after(WAITING, stacks=ELSEWHERE), strict=False)
    assert moves(WAITING, after(WAITING, lines=4), strict=False)


def test_a_rank_that_has_left_the_collective_is_at_work_again() -> None:
    assert moves(WAITING, after(STILL, cpu_s=6.0), strict=False)


@pytest.mark.parametrize(
    "seen",
    [after(STILL, wakeups=100), after(STILL, stacks=None, place=NOWHERE), replace(after(STILL), activity=None)],
    ids=["receives a little at a time", "cannot be read", "cannot be seen at all"],
)
def test_a_doubt_is_movement_where_proof_is_wanted(seen: Sighting) -> None:
    assert moves(STILL, seen, strict=True)


def test_without_stacks_the_processor_decides() -> None:
    unread = replace(STILL, stacks=None, place=NOWHERE)
    assert not moves(unread, after(unread), strict=False)
    assert moves(unread, after(unread, cpu_s=1.0), strict=False)
    assert moves(unread, replace(after(unread), activity=None), strict=False)


def test_a_rank_that_looks_for_something_again_and_again_waits() -> None:
    polling = follow(follow(None, STILL, strict=False), after(STILL, wakeups=1000), strict=False)
    assert (polling.moved_at_s, polling.waits) == (0.0, True)
    asleep = follow(follow(None, STILL, strict=False), after(STILL), strict=False)
    assert not asleep.waits


@given(st.lists(st.booleans(), min_size=1, max_size=30))
@settings(max_examples=20)
def test_the_time_without_movement_counts_from_the_last_movement(moved: list[bool]) -> None:
    track, seen, last_s = follow(None, STILL, strict=True), STILL, 0.0
    for works in moved:
        cpu_s = (seen.activity or QUIET).cpu_s + (10 * BUSY_CORES * STEP_S if works else 0.0)
        seen = replace(seen, at_s=seen.at_s + STEP_S, activity=replace(QUIET, cpu_s=cpu_s))
        track = follow(track, seen, strict=True)
        last_s = seen.at_s if works else last_s
        assert track.moved_at_s == last_s
