"""What Kueue's answer means for a job, case by case; any order of events is for `test_kueue_growth`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl_controller.core.sharing.kueue import (
    SUSPENDED_BY_OWNER,
    KueueStep,
    KueueVerdict,
    judge_admission,
)
from tests.support.controller.kueue import UID, admission, queued, stored

NOW = 1_767_229_200.0
IN_PLACE = ("QuotaReserved", "Admitted")
PREEMPTED = (*IN_PLACE, "Evicted")


def running(**fields: Any) -> ElasticJob:
    return queued(**{"suspend": False, "admitted": UID, "status": JobStatus(phase=Phase.RUNNING), **fields})


def left_aside(job: ElasticJob, *holds: str, by_owner: bool = False) -> Manifest:
    workload = stored(job, *holds)
    workload["spec"]["active"] = False
    if by_owner:
        workload["metadata"]["annotations"][SUSPENDED_BY_OWNER] = "true"
    return workload


def test_a_job_is_put_into_the_queue_once_it_is_suspended_and_has_no_workers() -> None:
    words = "is about to join Kueue's queue team"
    assert judge_admission(running(), None, 3) == KueueVerdict(held=words, step=KueueStep.STOP)
    assert judge_admission(queued(), None, 1) == KueueVerdict(held=words)
    assert judge_admission(queued(), None, 0) == KueueVerdict(held=words, step=KueueStep.CREATE)


def test_it_waits_and_says_for_what() -> None:
    workload = stored(queued())
    assert judge_admission(queued(), workload, 0) == KueueVerdict(held="waits to be admitted to Kueue's queue team")
    assert judge_admission(queued(suspend=False), workload, 0).step is KueueStep.STOP
    workload["status"]["conditions"] = [{"type": "QuotaReserved", "status": "False", "message": "insufficient\n quota"}]
    assert (
        judge_admission(queued(), workload, 0).held == "waits to be admitted to Kueue's queue team: insufficient quota"
    )
    checks = [{"name": "budget", "state": "Pending"}, {"name": "nodes", "state": "Ready"}]
    checked = stored(queued(), "QuotaReserved", admissionChecks=checks)
    assert (
        judge_admission(queued(), checked, 0).held
        == "has quota in Kueue's queue team, and waits for its checks: budget"
    )
    ready = judge_admission(queued(), stored(queued(), "QuotaReserved"), 0)
    assert ready.held == "has quota in Kueue's queue team, and is about to be admitted"


def test_what_a_waiting_job_asks_for_follows_it() -> None:
    more = queued(desired=4)
    assert judge_admission(more, stored(queued()), 0).step is KueueStep.UPDATE
    assert (
        judge_admission(more, stored(queued(), "QuotaReserved"), 0).step is KueueStep.DELETE
    )  # what has quota cannot be changed
    assert judge_admission(more, stored(queued()), 1).step is None


def test_an_admitted_job_starts_and_runs_no_larger_than_it_was_admitted() -> None:
    workload = stored(queued(), *IN_PLACE, admission=admission(2, gpu="spot"))
    verdict = judge_admission(queued(), workload, 0)
    assert (verdict.workers, verdict.step) == (None, KueueStep.START)
    assert verdict.held == "is admitted to Kueue's queue team, and starts"
    assert judge_admission(running(), workload, 2) == KueueVerdict(workers=2, step=KueueStep.READY)
    assert judge_admission(running(status=JobStatus()), workload, 0) == KueueVerdict(workers=2)
    assert judge_admission(running(), stored(queued(), *IN_PLACE, "PodsReady"), 3) == KueueVerdict(workers=3)
    assert judge_admission(running(admitted="another"), workload, 2) == KueueVerdict(workers=2, step=KueueStep.START)


def test_growing_beyond_it_waits_until_it_is_queued_again_and_other_pods_do_not() -> None:
    workload = stored(queued(), *IN_PLACE, "PodsReady")
    assert judge_admission(running(desired=4), workload, 3) == KueueVerdict(workers=3)
    other = running(template={"spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "9"}}}]}})
    assert judge_admission(other, workload, 3).step is KueueStep.STOP
    stopped = replace(other, suspend=True, admitted="")
    assert judge_admission(stopped, workload, 1).step is None
    assert judge_admission(stopped, workload, 0).step is KueueStep.DELETE


def test_an_evicted_job_gives_its_quota_back_when_its_workers_are_gone() -> None:
    workload = stored(queued(), *PREEMPTED)
    words = "gives back its quota in Kueue's queue team: Evicted it is"
    assert judge_admission(running(), workload, 3) == KueueVerdict(held=words, step=KueueStep.STOP)
    assert judge_admission(queued(), workload, 3) == KueueVerdict(held=words)
    assert judge_admission(queued(), workload, 0) == KueueVerdict(held=words, step=KueueStep.RELEASE)
    assert judge_admission(queued(), stored(queued(), "Evicted"), 0).step is None


def test_a_job_that_its_owner_suspends_leaves_the_queue_until_it_is_resumed() -> None:
    asleep = running(suspend=True)
    for pods in (3, 0):  # also where an administrator has it admitted again
        assert judge_admission(asleep, stored(queued(), *IN_PLACE), pods) == KueueVerdict(step=KueueStep.DEACTIVATE)
    aside = left_aside(queued(), *PREEMPTED, by_owner=True)
    assert judge_admission(asleep, aside, 3) == KueueVerdict()
    assert judge_admission(asleep, aside, 0) == KueueVerdict(step=KueueStep.RELEASE)
    assert judge_admission(asleep, left_aside(queued(), "Evicted", by_owner=True), 0) == KueueVerdict()
    assert judge_admission(asleep, None, 0) == KueueVerdict()
    resumed = judge_admission(running(), left_aside(queued(), "Evicted", by_owner=True), 0)
    assert (resumed.step, resumed.workers) == (KueueStep.ACTIVATE, None)


@pytest.mark.parametrize("mark", ["moving_to", "moved_to"])
def test_a_job_that_is_moved_away_is_not_started_here(mark: str) -> None:
    moved = queued(**{mark: "elsewhere s3://b/x"})
    assert judge_admission(moved, stored(queued(), *IN_PLACE), 0) == KueueVerdict(step=KueueStep.DEACTIVATE)
    assert judge_admission(moved, stored(queued()), 0) == KueueVerdict(step=KueueStep.DEACTIVATE)
    assert judge_admission(moved, None, 0) == KueueVerdict()
    stayed = judge_admission(queued(), left_aside(queued(), by_owner=True), 0)  # the move came to nothing
    assert stayed.step is KueueStep.ACTIVATE


def test_what_somebody_else_has_deactivated_is_not_activated() -> None:
    aside = left_aside(queued(), *PREEMPTED)
    held = judge_admission(running(), aside, 3)
    assert held.step is KueueStep.STOP
    assert "was deactivated: Evicted it is" in held.held
    assert judge_admission(queued(), aside, 0).step is KueueStep.RELEASE
    assert judge_admission(queued(suspend=False), left_aside(queued(), "Evicted"), 0).step is KueueStep.STOP


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase.terminal])
def test_the_end_is_told_once(phase: Phase) -> None:
    over = running(status=JobStatus(phase=phase))
    assert judge_admission(over, stored(queued(), *IN_PLACE), 1) == KueueVerdict(step=KueueStep.FINISH)
    assert judge_admission(over, stored(queued(), "Finished"), 1) == KueueVerdict()
    assert judge_admission(over, None, 0) == KueueVerdict()


def test_a_workload_that_is_closed_or_on_its_way_out_admits_nobody() -> None:
    held = judge_admission(queued(), stored(queued(), "Finished"), 0)
    assert held == KueueVerdict(held="will not be admitted: Kueue has closed its Workload: Finished it is")
    going = stored(queued(), *IN_PLACE)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert judge_admission(running(), going, 3).step is KueueStep.STOP
    assert judge_admission(queued(), going, 0).step is None
