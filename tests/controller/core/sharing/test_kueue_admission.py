"""What Kueue's answer means for a job: each case, and any order of events in a small world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl_controller.core.sharing.kueue import (
    SUSPENDED_BY_OWNER,
    KueueStep,
    KueueVerdict,
    build_finish,
    build_pods_ready,
    build_release,
    build_update,
    build_workload,
    condition,
    is_active,
    is_true,
    judge_admission,
)
from tests.support.controller.kueue import API_VERSION, UID, admission, queued, stored

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
    assert judge_admission(asleep, stored(queued(), *IN_PLACE), 3) == KueueVerdict(step=KueueStep.DEACTIVATE)
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


def merged(item: Any, patch: Any) -> Any:
    """As a server applies a merge patch."""
    if not isinstance(item, dict) or not isinstance(patch, dict):
        return patch
    found = {**item, **{key: merged(item.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in found.items() if value is not None}


class QueueWorld(RuleBasedStateMachine):
    """A job, its Workload, its pods; Kueue, owners and administrators do what they may at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.job, self.workload, self.pods, self.made = queued(), None, 0, 0
        self.asleep = False  # its owner wants it so, and has seen it run

    def _set(self, **holds: bool) -> None:
        assert self.workload is not None
        found = {item["type"]: item for item in self.workload["status"].get("conditions", [])}
        for name, value in holds.items():
            new = {"type": name, "status": str(value), "reason": "Preempted", "message": "m"}
            found[name] = {**new, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        self.workload["status"]["conditions"] = list(found.values())

    def _step(self, step: KueueStep) -> None:
        """What the controller does, without a server."""
        self.made += 1
        if step is KueueStep.START:
            self.job = replace(self.job, suspend=False, admitted=self._uid())
        elif step is KueueStep.STOP:
            self.job = replace(self.job, suspend=True, admitted="")
        elif step is KueueStep.CREATE:
            self.workload = build_workload(self.job, API_VERSION, None)
            self.workload["metadata"] |= {"uid": f"w{self.made}", "resourceVersion": "1"}
            self.workload["status"] = {}
        elif step is KueueStep.DELETE:
            self.workload = None
        else:
            self.workload = merged(self.workload, self._patch(step))

    def _patch(self, step: KueueStep) -> Manifest:
        assert self.workload is not None
        if step is KueueStep.UPDATE:
            assert not is_true(self.workload, "QuotaReserved"), "Kueue refuses that"
            return build_update(build_workload(self.job, API_VERSION, None))
        if step is KueueStep.RELEASE:
            assert self.pods == 0, "quota is given back while workers live"
        active = {KueueStep.ACTIVATE: (True, None), KueueStep.DEACTIVATE: (False, "true")}
        if step in active:
            wanted, left = active[step]
            return {"metadata": {"annotations": {SUSPENDED_BY_OWNER: left}}, "spec": {"active": wanted}}
        tell = {KueueStep.RELEASE: build_release, KueueStep.READY: build_pods_ready}
        return tell[step](self.workload, NOW) if step in tell else build_finish(self.workload, self.job, NOW)

    def _uid(self) -> str:
        assert self.workload is not None
        return str(self.workload["metadata"]["uid"])

    def _settle(self) -> KueueVerdict:
        """Pass after pass until nothing is left to do; workers come and go as the passes say."""
        for _ in range(20):
            verdict = judge_admission(self.job, self.workload, self.pods)
            wanted = min(self.job.desired, verdict.workers or 0) if not self.job.suspend else 0
            if verdict.step is None and self.pods == wanted:
                return verdict
            if verdict.step is not None:
                self._step(verdict.step)
            self.pods = 0 if verdict.workers is None else wanted
        raise AssertionError(f"it does not come to rest: {self.job}, {self.workload}")

    @rule()
    def look(self) -> None:
        self._settle()

    @rule()
    def look_once(self) -> None:
        verdict = judge_admission(self.job, self.workload, self.pods)
        if verdict.step is not None:
            self._step(verdict.step)

    @rule(wanted=st.integers(0, 4))
    def scale(self, wanted: int) -> None:
        self.job = replace(self.job, desired=wanted)

    @rule(value=st.booleans())
    def suspend_or_resume(self, value: bool) -> None:
        self.asleep = value and (self.asleep or bool(self.job.admitted))
        self.job = replace(self.job, suspend=value)

    @precondition(lambda self: self.workload is not None and not is_true(self.workload, "QuotaReserved"))
    @rule(count=st.integers(0, 4))
    def admit(self, count: int) -> None:
        assert self.workload is not None
        if is_active(self.workload):
            asked = self.workload["spec"]["podSets"][0]["count"]
            self._set(QuotaReserved=True, Admitted=True, Evicted=False)
            self.workload["status"]["admission"] = admission(min(count, asked))

    @precondition(lambda self: self.workload is not None and is_true(self.workload, "QuotaReserved"))
    @rule()
    def evict(self) -> None:
        self._set(Evicted=True)

    @precondition(lambda self: self.workload is not None)
    @rule(value=st.booleans())
    def administrate(self, value: bool) -> None:
        assert self.workload is not None
        self.workload["spec"]["active"] = value

    @precondition(lambda self: self.workload is not None)
    @rule()
    def delete(self) -> None:
        self.workload = None

    @precondition(lambda self: self.workload is not None and not is_active(self.workload))
    @rule()
    def evict_what_is_left_aside(self) -> None:
        assert self.workload is not None
        if is_true(self.workload, "QuotaReserved"):
            self._set(Evicted=True)

    @invariant()
    def at_rest_nobody_runs_without_quota(self) -> None:
        before = self.job, self.workload, self.pods, self.made
        verdict = self._settle()
        if self.pods:
            assert self.workload is not None
            assert is_true(self.workload, "Admitted")
            assert not is_true(self.workload, "Evicted")
            assert self.pods <= (verdict.workers or 0)
            assert not self.job.suspend
        elif verdict.held and self.workload is not None and is_true(self.workload, "QuotaReserved"):
            assert not is_true(self.workload, "Evicted"), "quota is kept for nothing"
        if self.asleep:
            assert self.pods == 0, "it was suspended by its owner"
            assert self.job.suspend
            assert not verdict.held
        made = self.made
        self._settle()
        assert self.made == made, "a job at rest is written"
        self.job, self.workload, self.pods, self.made = before


TestQueueWorld = QueueWorld.TestCase
TestQueueWorld.settings = settings(max_examples=30, stateful_step_count=25)


def test_the_owners_word_outlasts_every_admission() -> None:
    """Suspended, admitted again by an administrator's hand, and still suspended."""
    world = QueueWorld()
    world._settle()
    world.admit(4)
    world._settle()
    assert world.pods == 3
    world.suspend_or_resume(True)
    world._settle()
    assert world.pods == 0
    assert world.workload is not None
    assert not is_active(world.workload)
    world.evict_what_is_left_aside()
    world._settle()
    assert not is_true(world.workload, "QuotaReserved")
    world.administrate(True)
    world.admit(4)
    world._settle()
    assert (world.pods, is_active(world.workload)) == (0, False)
    world.suspend_or_resume(False)
    world._settle()
    assert is_active(world.workload)
    assert condition(world.workload, "Admitted")
