"""A phase in TorchElastic's words."""

from __future__ import annotations

import pytest

from elasticctl.api.status import Condition, Phase
from elasticctl_controller.core.phase import has_run, update_conditions

NOW = 1_000_000.0


def statuses(conditions: tuple[Condition, ...]) -> dict[str, str]:
    return {item.type: item.status for item in conditions}


def after(*phases: Phase) -> tuple[Condition, ...]:
    """The conditions of a job that has gone through these phases, ten seconds each."""
    conditions: tuple[Condition, ...] = ()
    for number, phase in enumerate(phases):
        conditions = update_conditions(conditions, phase, f"message {number}", NOW + 10 * number)
    return conditions


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([Phase.PENDING], {"Created": "True"}),
        ([Phase.PENDING, Phase.RUNNING], {"Created": "True", "Running": "True"}),
        ([Phase.RUNNING, Phase.RESTARTING], {"Created": "True", "Restarting": "True"}),
        ([Phase.RESTARTING, Phase.RUNNING], {"Created": "True", "Running": "True"}),
        ([Phase.RUNNING, Phase.SUCCEEDED], {"Created": "True", "Running": "False", "Succeeded": "True"}),
        ([Phase.RESTARTING, Phase.FAILED], {"Created": "True", "Restarting": "False", "Failed": "True"}),
        ([Phase.RUNNING, Phase.SUSPENDED], {"Created": "True", "Running": "False", "Suspended": "True"}),
        ([Phase.SUSPENDED, Phase.PENDING], {"Created": "True", "Suspended": "False"}),
        ([Phase.SUSPENDED, Phase.CANCELLED], {"Created": "True", "Suspended": "False", "Failed": "True"}),
    ],
)
def test_phases_become_conditions(phases, expected):
    assert statuses(after(*phases)) == expected


def test_nothing_changes_while_the_phase_stays():
    once = after(Phase.RUNNING)
    assert update_conditions(once, Phase.RUNNING, "other words", NOW + 99) == once


def test_reasons_and_times():
    failed = after(Phase.RUNNING, Phase.FAILED)
    running, end = failed[1], failed[2]
    assert (running.reason, running.last_transition_time) == ("ElasticJobFailed", NOW + 10)
    assert (end.reason, end.message, end.last_transition_time) == ("ElasticJobFailed", "message 1", NOW + 10)
    assert failed[0] == Condition("Created", "True", "ElasticJobCreated", "", NOW, NOW)


def test_whether_a_job_has_run_outlives_its_suspension():
    assert not has_run(after(Phase.PENDING, Phase.SUSPENDED))
    assert has_run(after(Phase.RUNNING, Phase.SUSPENDED))
