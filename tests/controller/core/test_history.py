"""What ranks have reported, folded into the status: never lost, never counted twice."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.status import (
    Activity,
    Cause,
    CheckpointStatus,
    Curve,
    GroupGeneration,
    Interruption,
    JobStatus,
    NotFiniteMetric,
    ProgressStatus,
    RankFailure,
    Scaling,
    ScalingPhase,
    WorkerStatus,
)
from elasticctl_controller.core.history import (
    MAX_GENERATIONS,
    NOT_YET_AGAIN,
    TrainingHistory,
    close_recovered,
    fold_reports,
    only_progress_changed,
    steps_redone,
)
from elasticctl_controller.core.observation import GroupView
from tests.support.controller.samples import NOW, a_generation, a_pod, a_running_job, a_step

FIRST = a_generation(1, 3, formed_at=Timestamp(NOW), first_step_at=Timestamp(NOW + 1), resumed_step=0, last_step=57)
SECOND = a_generation(
    2, 2, formed_at=Timestamp(NOW + 9), first_step_at=Timestamp(NOW + 10), resumed_step=50, last_step=60
)


def fold(status: JobStatus, **observed: Any) -> JobStatus:
    """One pass of the ledger, and the status as it is read back."""
    return from_json(JobStatus, to_json(close_recovered(fold_reports(status, GroupView(**observed)))))


def test_an_interruption_is_over_at_the_first_step_of_the_next_group():
    lost = Interruption(at=Timestamp(NOW + 8), worker="digits-worker-2", cause=Cause.KILLED, generation=1)
    status = fold(JobStatus(interruptions=(lost,)), generations=(FIRST,))
    assert status.interruptions[0].recovered_at is None
    forming = replace(SECOND, first_step_at=None, last_step=None)
    status = fold(status, generations=(FIRST, forming))
    assert status.interruptions[0].recovered_at is None
    status = fold(status, generations=(FIRST, SECOND))
    over = status.interruptions[0]
    assert (over.recovered_at, over.recovery_s, over.steps_redone) == (NOW + 10, 2.0, 7)
    assert status.steps_redone == 7
    third = replace(SECOND, generation=3, first_step_at=Timestamp(NOW + 30), resumed_step=60)
    status = fold(status, generations=(FIRST, SECOND, third))
    assert status.interruptions[0] == over
    assert status.steps_redone == 7


SILENT = replace(FIRST, first_step_at=None, resumed_step=None, last_step=None)
SILENT_TOO = replace(SECOND, first_step_at=None, resumed_step=None, last_step=None)
"""The same groups of a script that uses nothing of ours."""


def test_a_script_that_reports_nothing_has_recovered_when_its_group_has_formed():
    lost = Interruption(at=Timestamp(NOW + 8), worker="digits-worker-2", uid="u", cause=Cause.KILLED, generation=1)
    status = fold(JobStatus(interruptions=(lost,)), generations=(SILENT,))
    assert status.interruptions[0].recovered_at is None
    status = fold(status, generations=(SILENT, SILENT_TOO))
    over = status.interruptions[0]
    assert over.recovered_at == SECOND.formed_at
    assert (over.recovery_s, over.steps_redone, status.steps_redone) == (1.0, None, None)
    assert fold(status, generations=(SILENT, SILENT_TOO)) == status


def test_a_first_step_corrects_a_recovery_that_was_known_from_forming_only():
    """A worker may be lost before the first step of a job's life, while its ranks still import."""
    lost = Interruption(at=Timestamp(NOW + 8), worker="digits-worker-2", uid="u", cause=Cause.KILLED, generation=1)
    scaling = Scaling(at=Timestamp(NOW + 8), from_workers=3, to_workers=2, phase=ScalingPhase.IN_PROGRESS)
    status = JobStatus(interruptions=(lost,), scalings=(scaling,))
    status = fold(status, generations=(SILENT, SILENT_TOO))
    assert status.interruptions[0].recovered_at == status.scalings[0].done_at == SECOND.formed_at
    status = fold(status, generations=(SILENT, replace(SECOND, resumed_step=0)))
    assert status.interruptions[0].recovered_at == status.scalings[0].done_at == SECOND.first_step_at
    assert (status.interruptions[0].steps_redone, status.scalings[0].steps_redone, status.steps_redone) == (0, 0, 0)
    assert fold(status) == status


def test_a_size_that_a_script_without_reports_has_reached_is_not_superseded():
    scaling = Scaling(at=Timestamp(NOW), from_workers=3, to_workers=2, phase=ScalingPhase.IN_PROGRESS)
    status = fold(JobStatus(scalings=(scaling,)), generations=(SILENT, SILENT_TOO))
    assert (status.scalings[0].phase, status.scalings[0].done_at) == (ScalingPhase.DONE, SECOND.formed_at)


def test_an_activity_finer_than_what_is_stored_is_not_written_again():
    status = fold(JobStatus(), activity=Activity("first step", Timestamp(NOW + 0.123456789)))
    assert fold_reports(status, GroupView(activity=Activity("first step", Timestamp(NOW + 0.123456789)))) == status


def test_a_loss_seen_after_the_group_formed_again_is_still_closed():
    job, _ = a_step(a_running_job(), [a_pod(0), a_pod(1), a_pod(2)], generations=(FIRST,))
    job, _ = a_step(job, [a_pod(0), a_pod(1)], NOW + 20, generations=(FIRST, SECOND))
    assert (job.status.interruptions[0].generation, job.status.interruptions[0].recovered_at) == (1, NOW + 10)
    assert job.status.interruptions[0].recovery_s == 0.0


def test_a_recovery_counts_from_when_the_group_noticed_the_loss_if_that_was_first():
    forming = replace(SECOND, opened_at=Timestamp(NOW + 8.5))
    lost = Interruption(at=Timestamp(NOW + 10.5), worker="digits-worker-2", cause=Cause.KILLED, generation=1)
    status = fold(JobStatus(interruptions=(lost,)), generations=(FIRST, forming))
    assert status.interruptions[0].recovery_s == 1.5


def test_a_scaling_is_done_when_that_many_take_their_first_step():
    scaling = Scaling(at=Timestamp(NOW + 8), from_workers=3, to_workers=2)
    status = fold(JobStatus(scalings=(scaling,)), generations=(FIRST,))
    assert status.scalings[0].done_at is None
    status = fold(status, generations=(FIRST, SECOND))
    assert (status.scalings[0].done_at, status.scalings[0].recovery_s) == (NOW + 10, 2.0)
    assert status.scalings[0].steps_redone == 7


def test_a_scaling_that_was_overtaken_is_not_done_later():
    scalings = (Scaling(at=Timestamp(NOW), to_workers=2), Scaling(at=Timestamp(NOW + 1), to_workers=4))
    status = fold(JobStatus(scalings=scalings), generations=(FIRST, SECOND))
    assert [item.done_at for item in status.scalings] == [None, None]


def test_a_generation_without_a_step_is_passed_over():
    nothing = a_generation(2, 2)
    third = replace(SECOND, generation=3)
    assert steps_redone((FIRST, nothing, third), third) == 7
    assert steps_redone((FIRST, nothing, third), nothing) is None
    assert steps_redone((FIRST,), FIRST) == 0


def test_a_restarted_service_takes_nothing_away():
    status = fold(
        JobStatus(),
        generations=(FIRST, SECOND),
        progress=ProgressStatus(step=60),
        checkpoint=CheckpointStatus(step=60, committed=6),
    )
    after = fold(status)
    assert after == status
    after = fold(status, generations=(a_generation(2, 2, reason="service restarted"),), progress=ProgressStatus())
    assert after.generations[1] == replace(SECOND, reason="service restarted")
    assert (after.progress, after.steps_redone) == (status.progress, 7)
    after = fold(status, checkpoint=CheckpointStatus(step=70, at=Timestamp(NOW), committed=1))
    assert (after.checkpoint.step, after.checkpoint.committed) == (70, 6)


def test_a_generation_that_fell_off_the_end_is_not_counted_again():
    world = tuple(replace(SECOND, generation=number) for number in range(1, 26))
    status = JobStatus()
    for item in world:
        status = fold(status, generations=(item,))
    assert status.steps_redone == 24 * 10
    assert [item.generation for item in status.generations] == list(range(6, 26))
    assert fold(status, generations=world) == status


def test_times_finer_than_what_is_stored_do_not_change_the_status_again():
    fine = replace(FIRST, first_step_at=Timestamp(NOW + 0.123456789))
    seen: dict[str, Any] = {
        "generations": (fine,),
        "progress": ProgressStatus(step=1, at=Timestamp(NOW + 0.123456789)),
        "checkpoint": CheckpointStatus(step=1, at=Timestamp(NOW + 0.123456789)),
    }
    status = fold(JobStatus(), **seen)
    assert close_recovered(fold_reports(status, GroupView(**seen))) == status


def test_an_older_checkpoint_does_not_replace_a_newer_one():
    newer = CheckpointStatus(step=70, at=Timestamp(NOW))
    status = fold(JobStatus(checkpoint=newer), checkpoint=CheckpointStatus(step=60, at=Timestamp(NOW - 5)))
    assert status.checkpoint == newer


def test_numbers_that_json_cannot_hold_are_left_out():
    progress = ProgressStatus(step=3, samples_per_s=float("inf"), metrics={"loss": float("nan"), "accuracy": 0.5})
    status = fold(JobStatus(), progress=progress)
    assert (status.progress.samples_per_s, status.progress.metrics) == (None, {"accuracy": 0.5})


def test_since_when_a_metric_is_no_number_outlives_the_service():
    lost = NotFiniteMetric("NaN", 81, Timestamp(NOW))
    status = fold(JobStatus(), progress=ProgressStatus(step=90, at=Timestamp(NOW + 1), not_finite={"loss": lost}))
    assert status.progress.not_finite == {"loss": lost}
    later = replace(lost, value="inf", at=Timestamp(NOW + 5))
    status = fold(status, progress=ProgressStatus(step=91, at=Timestamp(NOW + 5), not_finite={"loss": later}))
    assert status.progress.not_finite == {"loss": replace(lost, value="inf")}
    assert status.curve.metrics == {"loss": (None, None)}
    assert fold(status) == status


def test_a_group_that_hung_keeps_the_time_of_its_last_step():
    history = TrainingHistory()
    history.add_generation(GroupGeneration(1))
    history.note_step(1, ProgressStatus(step=1), NOW)
    history.note_step(1, ProgressStatus(step=2), NOW + 1)
    history.note_step(1, ProgressStatus(step=2), NOW + 50)
    history.note_failure(1, RankFailure(error="the group hangs: rank 0 has been in x for 49s"))
    assert history.newest is not None
    assert history.newest.last_step_at == NOW + 1


def test_a_group_that_failed_otherwise_trained_until_it_was_stopped():
    history = TrainingHistory()
    history.add_generation(GroupGeneration(1))
    history.note_step(1, ProgressStatus(step=1), NOW)
    history.note_failure(1, RankFailure(error="ValueError: a bug"))
    assert history.newest is not None
    assert history.newest.last_step_at is None


def test_a_group_that_resumes_from_an_earlier_step_begins_without_it():
    history = TrainingHistory()
    for generation, reported in enumerate(
        ({"not_finite": {"loss": NotFiniteMetric("NaN", 81)}}, {"metrics": {"loss": 0.5}}, {}), 1
    ):
        history.add_generation(a_generation(generation, 2))
        history.note_step(generation, ProgressStatus(step=90, **reported), NOW)
        assert history.progress is not None
        assert history.progress.not_finite.keys() | history.progress.metrics.keys() == {"loss"}
        assert bool(history.progress.not_finite) == (generation == 1)


def test_the_curve_grows_with_progress_and_rests_with_it():
    status = JobStatus()
    for step in range(3):
        progress = ProgressStatus(
            step=step, at=Timestamp(NOW + step), samples_per_s=9.0, metrics={"loss": 1.0 - step / 4}
        )
        status = fold(status, progress=progress)
        assert fold(status, progress=progress) == fold(status) == status
    assert status.curve == Curve(
        Timestamp(NOW), (0.0, 1.0, 2.0), (0, 1, 2), (9.0, 9.0, 9.0), {"loss": (1.0, 0.75, 0.5)}
    )


def test_progress_alone_is_recognized():
    status = fold(JobStatus(), generations=(FIRST,), progress=ProgressStatus(step=57))
    further = fold(
        status,
        generations=(replace(FIRST, last_step=58),),
        progress=ProgressStatus(step=58, at=Timestamp(NOW + 1)),
        checkpoint=CheckpointStatus(step=58),
    )
    assert further.curve.step == (58,)
    assert only_progress_changed(status, replace(further, last_reconcile_time=Timestamp(NOW)))
    assert not only_progress_changed(status, status)
    assert not only_progress_changed(status, fold(status, generations=(FIRST, SECOND)))
    assert not only_progress_changed(status, replace(further, failures=1))


@pytest.mark.slow
def test_the_history_of_the_largest_job_fits_an_object():
    name = "a" * 51
    workers = tuple(f"{name}-worker-{index}" for index in range(2000))
    past = tuple(replace(FIRST, generation=n, workers=workers) for n in range(1, 41))
    status = JobStatus()
    for last in (20, 39, 40):
        status = fold(status, generations=past[last - 20 : last])
    assert [item.generation for item in status.generations] == [36, 37, 38, 39, 40]
    node = "ip-10-100-200-100.eu-central-1.compute.internal"
    uid = "0123456789abcdef0123456789abcdef0123"
    roster = tuple(
        WorkerStatus(name, uid, index, "Running", node, Timestamp(NOW + 0.5)) for index, name in enumerate(workers)
    )
    assert len(json.dumps(to_json(replace(status, workers=roster)))) < 1_400_000


def test_a_small_group_keeps_all_of_its_history():
    past = tuple(replace(FIRST, generation=n) for n in range(1, 41))
    assert len(fold(JobStatus(), generations=past).generations) == MAX_GENERATIONS


steps = st.none() | st.integers(0, 100)
times = st.none() | st.floats(NOW, NOW + 100).map(Timestamp)
generations = st.builds(GroupGeneration, first_step_at=times, formed_at=times, resumed_step=steps, last_step=steps)


@settings(max_examples=60)
@given(world=st.lists(generations, max_size=30), cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_steps_are_counted_once_in_any_order_of_reports(world, cuts):
    """The service loses its past at any time and reports the rest again; the sum grows once per generation."""
    world = [replace(item, generation=number, workers=("a",)) for number, item in enumerate(world, 1)]
    status, counted = JobStatus(), set()
    for first, last in sorted(cuts, key=lambda cut: cut[1]):
        reported = tuple(world[first:last][-MAX_GENERATIONS:])  # the service keeps no more
        old, status = status, fold(status, generations=reported)
        stepped = {
            g.generation for g in status.generations if g.first_step_at is not None and g.resumed_step is not None
        }
        growth = sum(
            steps_redone(status.generations, g) or 0 for g in status.generations if g.generation in stepped - counted
        )
        assert (status.steps_redone or 0) - (old.steps_redone or 0) <= growth
        assert status.generation >= old.generation
        assert len(status.generations) <= MAX_GENERATIONS
        counted |= stepped
        assert fold(status, generations=reported) == status


def test_a_reason_that_no_longer_applies_leaves_the_status() -> None:
    stored = GroupGeneration(
        2, resumed_step=3, resumed_from="storage", resumed_because="no copies", stays=False, restarts_because="streams"
    )
    status = fold(JobStatus(), generations=(replace(stored, copied_every_steps=7, copies_lack="no room"),))
    seen = GroupGeneration(2, resumed_step=3, resumed_from="memory", stays=True, copied_every_steps=9)
    (now,) = fold(status, generations=(seen,)).generations
    assert (now.copies_lack, now.restarts_because, now.resumed_because) == ("", "", "")
    (restarted,) = fold(status, generations=(GroupGeneration(2),)).generations
    assert (restarted.copies_lack, restarted.restarts_because) == ("no room", "streams")


def test_after_a_loss_the_copies_that_training_resumed_from_still_protect_it() -> None:
    history = TrainingHistory()
    history.add_generation(GroupGeneration(1))
    history.note_copied(1, 7, "")
    history.add_generation(GroupGeneration(2))
    history.note_resumed(2, 30, "copies", stays=False)
    assert history.newest is not None
    assert (history.newest.copied_every_steps, history.newest.copies_lack) == (7, NOT_YET_AGAIN)
    history.note_copied(2, 9, "")
    history.note_resumed(2, 30, "copies", stays=True)
    assert (history.newest.copied_every_steps, history.newest.copies_lack) == (9, "")
    history.add_generation(GroupGeneration(3))
    history.note_resumed(3, 20, "storage", stays=False)
    assert history.newest.copied_every_steps is None
