"""The share of wall time in which training moved forward."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.observed.history import Goodput, goodput
from elasticctl.api.status import GroupGeneration, JobStatus, Phase, ProgressStatus


def group(
    number: int, opened: float, first: float | None, resumed: int = 0, last: int | None = None
) -> GroupGeneration:
    return GroupGeneration(
        generation=number,
        opened_at=Timestamp(opened),
        formed_at=Timestamp(opened + 0.5),
        first_step_at=None if first is None else Timestamp(first),
        resumed_step=resumed,
        last_step=last,
    )


def status(*groups: GroupGeneration, reported: float | None = None, **fields: Any) -> JobStatus:
    at = None if reported is None else Timestamp(reported)
    return JobStatus(start_time=Timestamp(0.0), generations=groups, progress=ProgressStatus(at=at), **fields)


def test_starting_is_time_without_progress() -> None:
    assert goodput(status(group(1, 15.0, 20.0, 0, 80), reported=99.0), 100.0) == Goodput(100.0, 79.0, 0.0)


def test_the_time_of_steps_that_were_done_again_is_taken_off() -> None:
    """80 steps in 80 s; 20 of them were lost; 2 s until the next step; then 18 s more."""
    story = status(group(1, 0.0, 0.0, 0, 80), group(2, 80.0, 82.0, 60, 78), reported=100.0)
    assert goodput(story, 100.0) == Goodput(100.0, 78.0, 20.0)


def test_a_group_that_did_no_step_hides_no_loss() -> None:
    """The second group was cut off before its first step; what the third resumed at is what the first lost."""
    cut_off = GroupGeneration(2, opened_at=Timestamp(40.0))
    story = status(group(1, 0.0, 0.0, 0, 40), cut_off, group(3, 45.0, 50.0, 30, 80), reported=100.0)
    found = goodput(story, 100.0)
    assert found == Goodput(100.0, 80.0, 10.0)
    assert found.share == pytest.approx(0.8)


def test_the_clock_of_an_ended_job_stands() -> None:
    story = status(group(1, 0.0, 10.0, 0, 50), reported=60.0, phase=Phase.SUCCEEDED, completion_time=Timestamp(61.0))
    assert goodput(story, 5000.0) == Goodput(61.0, 50.0, 0.0)


def test_a_resumed_job_counts_from_its_first_group() -> None:
    resumed = status(group(1, 5.0, 10.0, 0, 9), group(2, 50.0, 52.0, 9, 12), reported=60.0)
    found = goodput(resumed, 60.0)
    assert found is not None
    assert found.wall_s == 60.0
    later = JobStatus(start_time=Timestamp(49.0), generations=resumed.generations, progress=resumed.progress)
    assert goodput(later, 60.0) == Goodput(55.0, 48.0, 0.0)


def test_of_a_long_story_only_what_is_known_is_counted() -> None:
    assert goodput(status(group(7, 70.0, 75.0, 700, 800), reported=100.0), 100.0) == Goodput(30.0, 25.0, 0.0, False)


def test_before_the_first_step_there_is_none() -> None:
    assert goodput(status(), 100.0) is None
    assert goodput(status(group(1, 1.0, None)), 100.0) is None


moments = st.none() | st.floats(0, 100).map(Timestamp)
steps = st.none() | st.integers(0, 100)
groups = st.builds(
    GroupGeneration,
    generation=st.integers(0, 9),
    opened_at=moments,
    formed_at=moments,
    first_step_at=moments,
    resumed_step=steps,
    last_step=steps,
)


@given(st.lists(groups, max_size=5), moments, moments, moments)
@settings(max_examples=150)
def test_it_is_a_share_whatever_is_known(
    many: list[GroupGeneration], start: Timestamp | None, end: Timestamp | None, at: Timestamp | None
) -> None:
    story = JobStatus(start_time=start, completion_time=end, generations=tuple(many), progress=ProgressStatus(at=at))
    found = goodput(story, 100.0)
    if found is not None:
        assert 0.0 <= found.share <= 1.0
        assert found.wall_s > 0
        assert min(found.forward_s, found.redone_s) >= 0
