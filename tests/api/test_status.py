"""The words of a status."""

from __future__ import annotations

from elasticctl.api.status import Cause, Phase


def test_states_that_end_a_job() -> None:
    assert {phase for phase in Phase if phase.terminal} == {Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED}


def test_only_the_applications_own_faults_use_up_the_budget() -> None:
    assert {cause for cause in Cause if cause.counted} == {Cause.APPLICATION, Cause.OOM_KILLED, Cause.STUCK}


def test_events_that_disturb_training() -> None:
    assert {cause for cause in Cause if not cause.interruption} == {Cause.SCALED_IN, Cause.COMPLETED}
    assert all(cause.interruption for cause in Cause if cause.counted)
