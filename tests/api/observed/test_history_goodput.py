"""The share of wall time in which training moved forward."""

from __future__ import annotations

from typing import Any

import pytest

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
