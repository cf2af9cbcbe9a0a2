"""What is news, and how it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import (
    Cause,
    GroupGeneration,
    Interruption,
    JobStatus,
    NotFiniteMetric,
    Phase,
    ProgressStatus,
)
from elasticctl_controller.core import notifications
from tests.support.controller.samples import NOW, a_job

RUNNING = JobStatus(phase=Phase.RUNNING, active=3, desired=3, start_time=Timestamp(NOW - 3720))
LOSS = Interruption(Timestamp(NOW), "digits-worker-1", "u1", Cause.PREEMPTED, "spot interruption")
BACK = replace(LOSS, recovered_at=Timestamp(NOW + 4), recovery_s=4.2, steps_redone=1)

BROKEN = Interruption(Timestamp(NOW), "digits-worker-1", "", Cause.APPLICATION, "no luck", 1, generation=1)
"""The worker stayed, and started its ranks again."""


def diverging(step: int) -> JobStatus:
    """Its loss is NaN since step 81."""
    return replace(RUNNING, progress=ProgressStatus(step=step, not_finite={"loss": NotFiniteMetric("NaN", 81)}))


def said(old: JobStatus, new: JobStatus) -> list[tuple[str, str]]:
    return [(item.kind.value, item.text) for item in notifications.list_notifications(a_job(status=old), new, NOW)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (JobStatus(), RUNNING, [("started", "started with 3 workers")]),
        (RUNNING, RUNNING, []),
        (RUNNING, replace(RUNNING, progress=ProgressStatus(step=7)), []),
        (
            replace(RUNNING, phase=Phase.SUSPENDED, generations=(GroupGeneration(1),)),
            replace(RUNNING, generations=(GroupGeneration(1),)),
            [("started", "resumed with 3 workers")],
        ),
        (
            RUNNING,
            replace(RUNNING, phase=Phase.RESTARTING, interruptions=(LOSS,)),
            [("interrupted", "lost digits-worker-1 (Preempted: spot interruption)")],
        ),
        (
            RUNNING,
            replace(RUNNING, interruptions=tuple(replace(LOSS, uid=f"u{n}", cause=Cause.NODE_LOST) for n in range(4))),
            [("interrupted", "lost 4 workers (NodeLost 4 times)")],
        ),
        (
            replace(RUNNING, interruptions=(LOSS,)),
            replace(RUNNING, interruptions=(BACK,), progress=ProgressStatus(step=3)),
            [("recovered", "recovered 4.2 s after the loss, 1 step repeated")],
        ),
        (replace(RUNNING, interruptions=(BACK,)), replace(RUNNING, interruptions=(BACK,)), []),
        (RUNNING, diverging(82), []),  # it may be a step that mixed precision leaves out
        (diverging(82), diverging(84), [("not-finite", "diverges: loss NaN since step 81")]),
        (diverging(84), diverging(99), []),
        (
            replace(RUNNING, interruptions=(LOSS,)),
            replace(
                RUNNING,
                interruptions=(replace(BACK, steps_redone=None),),
                generations=(GroupGeneration(2, ("digits-worker-0", "digits-worker-2")),),
            ),
            [("recovered", "formed its group again 4.2 s after the loss, with 2 workers")],
        ),
        (
            replace(RUNNING, interruptions=(BROKEN,)),
            replace(RUNNING, interruptions=(BROKEN, replace(BROKEN, at=Timestamp(NOW + 9), generation=2))),
            [("interrupted", "the ranks of digits-worker-1 failed, and start again (ApplicationError: no luck)")],
        ),
        (
            RUNNING,
            replace(RUNNING, interruptions=(LOSS, BROKEN)),
            [("interrupted", "was interrupted twice (Preempted once, ApplicationError once)")],
        ),
        (
            replace(RUNNING, interruptions=(replace(LOSS, cause=Cause.UNRESPONSIVE),)),
            replace(RUNNING, interruptions=(replace(LOSS, cause=Cause.NODE_LOST),)),
            [],  # the loss was reported already; the status shows the corrected cause
        ),
        (replace(RUNNING, phase=Phase.RESTARTING), RUNNING, [("recovered", "runs again with 3 workers")]),
        (
            replace(RUNNING, phase=Phase.RESTARTING, progress=ProgressStatus(step=3)),
            replace(RUNNING, progress=ProgressStatus(step=3)),
            [],
        ),
        (
            RUNNING,
            replace(RUNNING, phase=Phase.FAILED, message="rank 2: ValueError: no", completion_time=Timestamp(NOW)),
            [("failed", "failed after 1h02m: rank 2: ValueError: no")],
        ),
        (
            RUNNING,
            replace(
                RUNNING,
                phase=Phase.SUCCEEDED,
                message="worker 0 completed",
                completion_time=Timestamp(NOW),
                progress=ProgressStatus(step=560),
            ),
            [("succeeded", "succeeded after 1h02m, at step 560")],
        ),
        (RUNNING, replace(RUNNING, phase=Phase.CANCELLED), [("cancelled", "cancelled")]),
        (replace(RUNNING, phase=Phase.FAILED), replace(RUNNING, phase=Phase.FAILED, active=0), []),
    ],
)
def test_what_is_news(old: JobStatus, new: JobStatus, expected: list[tuple[str, str]]) -> None:
    assert said(old, new) == expected


def test_a_long_message_is_shortened_and_kept_on_one_line() -> None:
    failed = replace(RUNNING, phase=Phase.FAILED, message="Traceback\n" + "x" * 5000)
    text = said(RUNNING, failed)[0][1]
    assert "\n" not in text
    assert len(text) < 400
