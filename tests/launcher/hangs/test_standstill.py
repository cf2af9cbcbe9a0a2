"""Whether a rank moves, and how long it may stand still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_launcher.hangs.process_activity import ProcessActivity
from elasticctl_launcher.hangs.rank_location import NOWHERE, Kind, StackPlace
from elasticctl_launcher.hangs.stacks import StackFrame, ThreadStack
from elasticctl_launcher.hangs.standstill import (
    BUSY_CORES,
    FACTOR,
    MEASURED_S,
    REPORT_S,
    UNMEASURED_S,
    RunPhase,
    Sighting,
    TimeLimit,
    follow,
    moves,
)

STACKS = (ThreadStack(1, "MainThread", (StackFrame("load", "/job/data.py", 9),)),)
OTHER_THREAD = (*STACKS, ThreadStack(1, "Thread-1", (StackFrame("run", "/job/log.py", 1),)))
ELSEWHERE = (ThreadStack(1, "MainThread", (StackFrame("load", "/job/data.py", 10),)),)
QUIET = ProcessActivity(10.0, 1000, 50, running=False)
STILL = Sighting(0.0, 3, QUIET, STACKS, StackPlace(Kind.CODE, "load (data.py:9)"))
WAITING = replace(STILL, place=StackPlace(Kind.COLLECTIVE, "all_reduce"))
STEP_S = 10.0


def after(before: Sighting, cpu_s: float = 0.0, io_bytes: int = 0, wakeups: int = 0, **changes: object) -> Sighting:
    """The sighting ten seconds later."""
    activity = ProcessActivity(QUIET.cpu_s + cpu_s, QUIET.io_bytes + io_bytes, QUIET.wakeups + wakeups, running=False)
    return replace(before, at_s=before.at_s + STEP_S, activity=activity, **changes)  # type: ignore[arg-type]


def test_a_rank_without_any_activity_does_not_move() -> None:
    assert not moves(STILL, after(STILL), strict=True)
    assert not moves(WAITING, after(WAITING), strict=True)


@pytest.mark.parametrize(
    "seen",
    [after(STILL, lines=4), after(STILL, stacks=ELSEWHERE), after(STILL, cpu_s=6.0), after(STILL, io_bytes=10**9)],
    ids=["prints", "another line of its script", "computes in C", "reads"],
)
def test_each_kind_of_work_counts_as_movement(seen: Sighting) -> None:
    assert moves(STILL, seen, strict=False)


def test_in_a_collective_cpu_use_and_other_threads_do_not_count() -> None:
    assert not moves(WAITING, after(WAITING, cpu_s=STEP_S, io_bytes=10**9, stacks=OTHER_THREAD), strict=False)
    assert moves(WAITING, after(WAITING, stacks=ELSEWHERE), strict=False)
    assert moves(WAITING, after(WAITING, lines=4), strict=False)


def test_a_rank_that_has_left_the_collective_moves() -> None:
    assert moves(WAITING, after(STILL, cpu_s=6.0), strict=False)


@pytest.mark.parametrize(
    "seen",
    [after(STILL, wakeups=100), after(STILL, stacks=None, place=NOWHERE), replace(after(STILL), activity=None)],
    ids=["receives slowly", "stack cannot be read", "process cannot be read"],
)
def test_with_strict_an_uncertain_sighting_counts_as_movement(seen: Sighting) -> None:
    assert moves(STILL, seen, strict=True)


def test_without_stacks_cpu_use_decides() -> None:
    unread = replace(STILL, stacks=None, place=NOWHERE)
    assert not moves(unread, after(unread), strict=False)
    assert moves(unread, after(unread, cpu_s=1.0), strict=False)
    assert moves(unread, replace(after(unread), activity=None), strict=False)


def test_a_rank_that_polls_counts_as_waiting() -> None:
    polling = follow(follow(None, STILL, strict=False), after(STILL, wakeups=1000), strict=False)
    assert (polling.moved_at_s, polling.waits) == (0.0, True)
    asleep = follow(follow(None, STILL, strict=False), after(STILL), strict=False)
    assert not asleep.waits


@given(st.lists(st.booleans(), min_size=1, max_size=30))
@settings(max_examples=20)
def test_standstill_counts_from_the_last_movement(moved: list[bool]) -> None:
    track, seen, last_s = follow(None, STILL, strict=True), STILL, 0.0
    for works in moved:
        cpu_s = (seen.activity or QUIET).cpu_s + (10 * BUSY_CORES * STEP_S if works else 0.0)
        seen = replace(seen, at_s=seen.at_s + STEP_S, activity=replace(QUIET, cpu_s=cpu_s))
        track = follow(track, seen, strict=True)
        last_s = seen.at_s if works else last_s
        assert track.moved_at_s == last_s


def test_the_users_limit_applies_from_the_start() -> None:
    time_limit = TimeLimit(30.0)
    time_limit.start_generation(0.0)
    found = time_limit.allowance()
    assert (found.report_s, found.end_s, found.strict) == (15.0, 30.0, False)


def test_with_limit_0_standstills_are_only_reported() -> None:
    found = TimeLimit(0.0).allowance()
    assert (found.report_s, found.end_s) == (REPORT_S, None)


def test_each_phase_has_a_limit_from_its_own_duration() -> None:
    time_limit = TimeLimit(None)
    time_limit.start_generation(0.0)
    assert time_limit.allowance().end_s == UNMEASURED_S
    time_limit.record_report("resumed", 200.0)
    assert time_limit.phase is RunPhase.FIRST_STEP
    assert time_limit.allowance().end_s == UNMEASURED_S, "a first step that compiles has not been measured yet"
    time_limit.record_report("progress", 800.0)
    time_limit.record_report("progress", 801.0)
    assert (time_limit.phase, time_limit.allowance().end_s) == (RunPhase.STEP, MEASURED_S)
    time_limit.start_generation(2000.0)
    assert (time_limit.phase, time_limit.allowance().end_s) == (RunPhase.STARTING, FACTOR * 200.0)
    time_limit.record_report("resumed", 2010.0)
    assert time_limit.allowance().end_s == FACTOR * 600.0
    assert time_limit.allowance().strict


def test_a_commit_does_not_end_the_measurement_of_a_step() -> None:
    time_limit = TimeLimit(None)
    time_limit.start_generation(0.0)
    for kind, at_s in (("resumed", 1.0), ("progress", 2.0), ("committed", 400.0), ("progress", 500.0)):
        time_limit.record_report(kind, at_s)
    assert time_limit.allowance().end_s == FACTOR * 498.0


def test_after_training_the_users_limit_does_not_apply() -> None:
    time_limit = TimeLimit(0.5)
    time_limit.start_generation(0.0)
    time_limit.record_report("progress", 1.0)
    time_limit.record_report("finished", 2.0)
    found = time_limit.allowance()
    assert (found.end_s, found.strict) == (UNMEASURED_S, True)


def test_the_users_limit_applies_again_when_a_script_trains_again() -> None:
    time_limit = TimeLimit(0.5)
    time_limit.start_generation(0.0)
    for kind, at_s in (("progress", 1.0), ("finished", 2.0), ("resumed", 3.0)):
        time_limit.record_report(kind, at_s)
    assert time_limit.allowance().end_s == 0.5


@given(st.lists(st.floats(0.0, 1e6), max_size=5), st.lists(st.sampled_from(["resumed", "progress", "waiting"])))
@settings(max_examples=30)
def test_the_limit_is_above_every_standstill_that_ended_by_itself(spells: list[float], kinds: list[str]) -> None:
    time_limit = TimeLimit(None)
    time_limit.start_generation(0.0)
    for at_s, kind in enumerate(kinds, start=1):
        time_limit.record_report(kind, float(at_s))
    for still_s in spells:
        time_limit.record_standstill(still_s)
    end_s = time_limit.allowance().end_s
    assert end_s is not None
    assert end_s >= max([MEASURED_S, *(FACTOR * still_s for still_s in spells)])
