"""The stories that arrangements are compared by, and how it is judged in the end."""

from __future__ import annotations

import pytest

from benchmarks.stories.settle import Rest, Stand, judge
from benchmarks.stories.story import EVENTS, GPUS, MOST_JOBS, PROJECTS, Job, Story

OURS, THEIRS = PROJECTS


def stand(name: str, has: int, least: int, most: int, project: str = OURS, *, suspended: bool = False) -> Stand:
    return Stand(Job(name, project, least, most, most > least, suspended), has)


def rest(*stands: Stand) -> Rest:
    taken = {project: sum(one.has for one in stands if one.job.project == project) for project in PROJECTS}
    return judge({one.job.name: one for one in stands}, taken)


def test_a_story_is_the_same_each_time_it_is_told() -> None:
    def told(seed: int) -> list[str]:
        story = Story(seed)
        return [str(story.next()) for _ in range(EVENTS)]

    assert told(3) == told(3)
    assert len({tuple(told(seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize("seed", range(20))
def test_its_jobs_can_all_run_by_themselves(seed: int) -> None:
    story = Story(seed)
    for _ in range(EVENTS):
        story.next()
        assert len(story.jobs) <= MOST_JOBS
        for job in story.jobs.values():
            assert 1 <= job.least <= job.most <= GPUS
            assert job.elastic or job.least == job.most


def test_nothing_is_idle_that_nobody_could_use() -> None:
    assert rest(stand("a", 2, 1, 2), stand("b", 3, 1, 3, THEIRS)).is_ideal
    assert rest(stand("a", 5, 5, 5), stand("b", 0, 2, 2), stand("c", 0, 1, 1, suspended=True)).is_ideal


def test_gpus_are_idle_that_a_job_could_grow_by_or_start_with() -> None:
    assert rest(stand("a", 2, 1, 4)) == Rest(2, (), 0)
    assert rest(stand("a", 3, 3, 3), stand("b", 0, 3, 6)) == Rest(3, ("b",), 0)
    assert rest(stand("a", 4, 4, 4), stand("b", 0, 3, 6)).idle == 0


def test_what_is_held_by_less_than_a_minimum_is_idle() -> None:
    """Two gangs of four, each with half of what both need."""
    assert rest(stand("a", 3, 4, 4), stand("b", 3, 4, 4, THEIRS)) == Rest(4, ("a", "b"), 0)


def test_a_minimum_waits_where_others_have_more_than_theirs() -> None:
    grown = stand("a", 5, 1, 5)
    assert rest(grown, stand("b", 0, 3, 3)).waits == ("b",)
    assert rest(grown, stand("b", 0, 3, 3, THEIRS)).waits == ("b",), "two of the five are borrowed, and one is free"
    own = stand("a", 3, 1, 3)
    others = stand("c", 3, 3, 3, THEIRS)
    assert rest(own, others, stand("b", 0, 1, 1, THEIRS)).waits == (), "those above the minimum are its project's own"
