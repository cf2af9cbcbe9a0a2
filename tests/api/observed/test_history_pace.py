"""How fast training goes, and when it will be done."""

from __future__ import annotations

import dataclasses

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.observed.history import fraction_done, remaining_s, steps_per_s, unkept_s
from elasticctl.api.status import GroupGeneration, JobStatus, Phase, ProgressStatus

GROUP = GroupGeneration(generation=2, first_step_at=Timestamp(100.0), resumed_step=40)
STATUS = JobStatus(
    phase=Phase.RUNNING,
    generations=(GroupGeneration(generation=1, first_step_at=Timestamp(1.0)), GROUP),
    progress=ProgressStatus(at=Timestamp(110.0), step=61, total_steps=161),
)


def test_the_pace_is_that_of_the_group_that_trains_now() -> None:
    assert steps_per_s(STATUS) == pytest.approx(2.0)  # 20 steps after its first, in 10 s
    assert remaining_s(STATUS) == pytest.approx(50.0)
    assert fraction_done(STATUS) == pytest.approx(61 / 161)


def test_what_a_silent_script_would_do_again_is_what_its_group_has_run_for() -> None:
    silent = JobStatus(phase=Phase.RUNNING, generations=(GroupGeneration(2, formed_at=Timestamp(100.0)),))
    assert unkept_s(silent, 160.0) == pytest.approx(60.0)
    assert unkept_s(dataclasses.replace(silent, phase=Phase.SUSPENDED), 160.0) is None
    assert unkept_s(JobStatus(phase=Phase.RUNNING), 160.0) is None
    assert unkept_s(STATUS, 160.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"phase": Phase.RESTARTING},
        {"generations": ()},
        {"generations": (dataclasses.replace(GROUP, first_step_at=None),)},
        {"progress": ProgressStatus(step=61, total_steps=161)},
        {"progress": ProgressStatus(at=Timestamp(100.5), step=61, total_steps=161)},
        {"progress": ProgressStatus(at=Timestamp(110.0), step=41, total_steps=161)},
    ],
)
def test_what_cannot_be_told_is_not_said(change: dict[str, object]) -> None:
    status = dataclasses.replace(STATUS, **change)  # type: ignore[arg-type]
    assert steps_per_s(status) is None
    assert remaining_s(status) is None


def test_without_an_end_there_is_no_share() -> None:
    for total in (None, 0, -3):
        progress = dataclasses.replace(STATUS.progress, total_steps=total)
        assert fraction_done(dataclasses.replace(STATUS, progress=progress)) is None
    assert remaining_s(dataclasses.replace(STATUS, progress=ProgressStatus(at=Timestamp(110.0), step=61))) is None
