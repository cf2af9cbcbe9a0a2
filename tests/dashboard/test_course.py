"""Workers over time, from a status."""

from __future__ import annotations

from typing import Any

from elasticctl.api.spec import ElasticJob
from elasticctl.dashboard.page_data import training_steps, wanted_steps
from tests.support.job_samples import AT, at, job

GROUPS = [
    {"generation": 1, "workers": ["a", "b", "c"], "openedAt": at(1), "formedAt": at(3)},
    {"generation": 2, "workers": ["a", "b"], "openedAt": at(20), "formedAt": at(21)},
    {"generation": 3, "workers": ["a", "b", "c", "d"], "openedAt": at(40)},
]


def read(**status: Any) -> ElasticJob:
    return ElasticJob.from_manifest(job(**status))


def since_at(steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return [(round(moment - AT, 3), workers) for moment, workers in steps]


def test_nobody_trains_between_two_groups() -> None:
    assert since_at(training_steps(read(generations=GROUPS))) == [(3, 3), (20, 0), (21, 2), (40, 0)]


def test_it_stops_with_the_job() -> None:
    over = read(generations=GROUPS[:2], phase="Succeeded", completionTime=at(50))
    assert since_at(training_steps(over))[-1] == (50, 0)
    paused = [{"type": "Suspended", "status": "True", "lastTransitionTime": at(30)}]
    assert since_at(training_steps(read(generations=GROUPS[:2], phase="Suspended", conditions=paused)))[-1] == (30, 0)


def test_before_the_first_group_there_is_nothing() -> None:
    assert training_steps(read()) == []


def test_wanted_follows_the_scalings() -> None:
    assert since_at(wanted_steps(read(), AT + 60)) == [(0, 3), (30, 4), (60, 4)]
    assert since_at(wanted_steps(read(scalings=[], completionTime=at(9), phase="Failed"), AT + 60)) == [(0, 4), (9, 4)]
