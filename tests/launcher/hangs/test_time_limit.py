"""How long a job may stand still: by its own pace, unless its user has said so."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_launcher.hangs.time_limit import FACTOR, MEASURED_S, REPORT_S, UNMEASURED_S, RunPhase, TimeLimit


def test_what_the_user_says_holds_from_the_first_moment_on() -> None:
    time_limit = TimeLimit(30.0)
    time_limit.start_generation(0.0)
    found = time_limit.allowance()
    assert (found.report_s, found.end_s, found.strict) == (15.0, 30.0, False)


def test_zero_ends_nothing_and_still_tells() -> None:
    found = TimeLimit(0.0).allowance()
    assert (found.report_s, found.end_s) == (REPORT_S, None)


def test_each_phase_has_the_pace_that_it_had_before() -> None:
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


def test_commits_do_not_cut_a_step_short() -> None:
    time_limit = TimeLimit(None)
    time_limit.start_generation(0.0)
    for kind, at_s in (("resumed", 1.0), ("progress", 2.0), ("committed", 400.0), ("progress", 500.0)):
        time_limit.record_report(kind, at_s)
    assert time_limit.allowance().end_s == FACTOR * 498.0


def test_after_training_the_users_time_does_not_count() -> None:
    time_limit = TimeLimit(0.5)
    time_limit.start_generation(0.0)
    time_limit.record_report("progress", 1.0)
    time_limit.record_report("finished", 2.0)
    found = time_limit.allowance()
    assert (found.end_s, found.strict) == (UNMEASURED_S, True)


def test_a_script_that_trains_again_is_judged_by_its_steps_again() -> None:
    time_limit = TimeLimit(0.5)
    time_limit.start_generation(0.0)
    for kind, at_s in (("progress", 1.0), ("finished", 2.0), ("resumed", 3.0)):
        time_limit.record_report(kind, at_s)
    assert time_limit.allowance().end_s == 0.5


@given(st.lists(st.floats(0.0, 1e6), max_size=5), st.lists(st.sampled_from(["resumed", "progress", "waiting"])))
@settings(max_examples=30)
def test_a_spell_that_ended_by_itself_is_never_ended_the_next_time(spells: list[float], kinds: list[str]) -> None:
    time_limit = TimeLimit(None)
    time_limit.start_generation(0.0)
    for at_s, kind in enumerate(kinds, start=1):
        time_limit.record_report(kind, float(at_s))
    for still_s in spells:
        time_limit.record_standstill(still_s)
    end_s = time_limit.allowance().end_s
    assert end_s is not None
    assert end_s >= max([MEASURED_S, *(FACTOR * still_s for still_s in spells)])
