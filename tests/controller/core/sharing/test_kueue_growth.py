"""Workers above a job's minimum, each a Workload of its own: each case, and jobs that share a small Kueue."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import ElasticJob, PodPhase, Sharing
from elasticctl.api.status import JobStatus, Phase, WorkerStatus
from elasticctl_controller.core.sharing.kueue import (
    KueueStep,
    build_finish,
    build_pods_ready,
    build_release,
    build_update,
    build_workload,
    condition,
    is_true,
    judge_admission,
)
from elasticctl_controller.core.sharing.kueue_growth import build_extra, judge_end, judge_growth, list_extras, number_of
from elasticctl_controller.kube.pruning import prune_workload
from tests.support.controller.kueue import API_VERSION, UID, queued, stored

NOW = 1_767_229_200.0
AUTOMATIC = Sharing(automatic=True)
ADMITTED = ("QuotaReserved", "Admitted")
EVENTS = 10


def elastic(least: int = 1, most: int = 4, **fields: Any) -> ElasticJob:
    given = {"suspend": False, "admitted": UID, "min": least, "desired": most, "max": most, "sharing": AUTOMATIC}
    return queued(**{**given, **fields})


def extra(job: ElasticJob, number: int, *holds: str, base: Manifest | None = None) -> Manifest:
    """The Workload of a worker above the minimum; of its conditions those named hold."""
    item = build_extra(job, base or stored(job, *ADMITTED), number, API_VERSION)
    item["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": "9"}
    return {**item, "status": {"conditions": [{"type": name, "status": "True"} for name in holds]}}


def numbers(job: ElasticJob, workloads: tuple[Manifest, ...]) -> list[int]:
    return [number_of(job, one) for one in workloads]


def test_the_minimum_is_one_workload_and_each_worker_above_it_one_of_lower_priority() -> None:
    job = elastic(2, 4, priority_class="high")
    base = stored(job, *ADMITTED)
    assert base["spec"]["podSets"][0]["count"] == 2
    base["spec"]["priority"] = 100
    third, fourth = (build_extra(job, base, number, API_VERSION) for number in (3, 4))
    assert third["metadata"]["name"] == f"{base['metadata']['name']}-3"
    assert third["metadata"]["ownerReferences"] == base["metadata"]["ownerReferences"]
    assert third["spec"]["queueName"] == "team"
    assert third["spec"]["podSets"] == [{**base["spec"]["podSets"][0], "count": 1}]
    assert third["spec"]["priority"] == 100 - 1_000_000_000 - 6  # workers of two GPUs each
    assert fourth["spec"]["priority"] == third["spec"]["priority"] - 2
    assert "priorityClassName" not in third["spec"]
    base["spec"]["priority"] = -(2**31) + 1
    assert build_extra(job, base, 3, API_VERSION)["spec"]["priority"] == -(2**31)


def test_it_asks_for_as_many_more_as_it_has() -> None:
    job = elastic(2, 100)
    base = stored(job, *ADMITTED)
    assert judge_growth(job, base, [], 2).create == (3, 4)
    four = [extra(job, 3, *ADMITTED), extra(job, 4, *ADMITTED)]
    assert judge_growth(job, base, four, 4).create == (5, 6, 7, 8)
    assert judge_growth(job, base, [*four, extra(job, 6)], 4).create == (5, 7, 8)
    assert judge_growth(elastic(2, 5), stored(elastic(2, 5), *ADMITTED), four, 4).create == (5,)
    assert judge_growth(elastic(2, 2), base, [], 2).create == ()


def test_it_runs_those_that_are_admitted() -> None:
    job = elastic()
    base = stored(job, *ADMITTED)
    given = [extra(job, 2, *ADMITTED), extra(job, 3, "QuotaReserved"), extra(job, 4, *ADMITTED)]
    assert judge_growth(job, base, given, 1).workers == 3
    given[0] = extra(job, 2, *ADMITTED, "Evicted")
    assert judge_growth(job, base, given, 3).workers == 2


def test_quota_is_released_once_its_worker_is_gone() -> None:
    job = elastic()
    base = stored(job, *ADMITTED)
    given = [extra(job, 2, *ADMITTED), extra(job, 3, *ADMITTED, "Evicted"), extra(job, 4, *ADMITTED, "Evicted")]
    found = {pods: numbers(job, judge_growth(job, base, given, pods).release) for pods in (5, 4, 3, 2, 1)}
    assert found == {5: [], 4: [], 3: [3], 2: [3, 4], 1: [3, 4]}
    assert judge_growth(job, base, given, 2).delete == ()


def test_what_is_no_longer_wanted_is_deleted_and_keeps_its_quota_until_its_worker_is_gone() -> None:
    job = elastic()
    base = stored(job, *ADMITTED)
    given = [extra(job, 2, *ADMITTED), extra(job, 3, *ADMITTED), extra(job, 4)]
    smaller = replace(job, desired=1)
    found = {pods: numbers(job, judge_growth(smaller, base, given, pods).delete) for pods in (3, 2, 1)}
    assert found == {3: [4], 2: [4, 3], 1: [4, 3, 2]}
    assert judge_growth(smaller, base, given, 3).workers == 1
    given[2]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert judge_growth(smaller, base, given, 3).delete == ()


def test_what_was_asked_for_with_another_admission_or_for_other_pods_is_asked_for_again() -> None:
    job = elastic()
    base = stored(job, *ADMITTED)
    another = stored(job, *ADMITTED)
    another["metadata"]["uid"] = "another"
    old = extra(job, 2, base=another)
    found = judge_growth(job, base, [old], 1)
    assert (numbers(job, found.delete), found.create, found.workers) == ([2], (), 1)
    moved = replace(job, template={"spec": {"nodeSelector": {"zone": "b"}}})
    assert numbers(job, judge_growth(moved, base, [extra(job, 2, *ADMITTED)], 1).delete) == [2]
    closed = extra(job, 2, "Finished")
    assert numbers(job, judge_growth(job, base, [closed], 1).delete) == [2]


def test_the_workload_of_a_worker_that_runs_is_marked_ready() -> None:
    workers = tuple(
        WorkerStatus(name=f"w{index}", uid=f"u{index}", index=index, phase=PodPhase.RUNNING) for index in range(2)
    )
    job = elastic(status=JobStatus(phase=Phase.RUNNING, workers=workers))
    base = stored(job, *ADMITTED)
    given = [extra(job, 2, *ADMITTED), extra(job, 3, *ADMITTED)]
    assert numbers(job, judge_growth(job, base, given, 3).ready) == [2]
    given[0] = extra(job, 2, *ADMITTED, "PodsReady")
    assert judge_growth(job, base, given, 3).ready == ()


def test_a_job_that_does_not_run_asks_for_nothing_more() -> None:
    job = elastic()
    given = [extra(job, 2, *ADMITTED), extra(job, 3)]
    assert numbers(job, judge_end(job, given, 1).delete) == [3]
    assert numbers(job, judge_end(job, given, 0).delete) == [2, 3]
    over = replace(job, status=JobStatus(phase=Phase.SUCCEEDED))
    assert numbers(job, judge_end(over, given, 3).delete) == [2, 3]


def test_a_job_of_fixed_size_that_is_scaled_up_asks_for_the_difference() -> None:
    job = elastic(1, 5, sharing=Sharing())
    base = stored(replace(job, desired=3), *ADMITTED)
    assert base["spec"]["podSets"][0]["count"] == 3
    assert judge_growth(job, base, [], 3).create == (4, 5)


def test_a_job_from_before_this_keeps_what_it_was_admitted_with_and_grows() -> None:
    """Then all workers were one Workload, and Kueue could admit fewer."""
    job = elastic(2, 6)
    base = stored(job, *ADMITTED, admission={"podSetAssignments": [{"name": "workers", "count": 3}]})
    base["spec"]["podSets"][0] |= {"count": 6, "minCount": 2}
    base["metadata"]["annotations"] = {
        name: f"{value.partition('.')[0]}.other" for name, value in base["metadata"]["annotations"].items()
    }
    assert judge_admission(job, base, 3).workers == 3
    assert judge_growth(job, base, [], 3).create == (4, 5, 6)


def test_only_its_own_workloads_are_its() -> None:
    job = elastic()
    other = extra(job, 2)
    other["metadata"]["ownerReferences"] = [{"uid": "another"}]
    assert list_extras(job, [stored(job), extra(job, 3), other, {"metadata": {}}]) == [extra(job, 3)]
    unreadable = extra(job, 2)
    unreadable["metadata"]["name"] += "x"
    assert list_extras(job, [unreadable]) == []


@dataclass
class Runs:
    """A job, its Workloads by name and its pods, which end a moment after they were asked to."""

    job: ElasticJob
    workloads: dict[str, Manifest] = field(default_factory=dict)
    pods: int = 0
    wanted: int = 0


class Kueue:
    """Queues in a cohort, each with its own quota in GPUs, as Kueue decides with the preemption of docs/sharing.md.

    `reclaims_any`: `reclaimWithinCohort` is `Any`, and not `LowerPriority`.

    Of the queues' first ones, those are tried first that borrow nothing. What does not fit preempts lower priorities of
    its own queue, and of what other queues have borrowed workers above minima, or anything if it borrows nothing, or
    else lets the next of its queue try.
    """

    def __init__(self, quota: dict[str, int], reclaims_any: bool) -> None:
        self.reclaims_any = reclaims_any
        self.quota, self.jobs, self.names = quota, dict[str, Runs](), itertools.count(1)

    def all(self) -> Iterator[Manifest]:
        for one in self.jobs.values():
            yield from one.workloads.values()

    def admit(self) -> None:
        pending, kept = [one for one in self.all() if not holds(one) and one["spec"].get("active", True)], 0
        while pending:
            heads = {
                queue: min((one for one in pending if queue_of(one) == queue), key=rank, default=None)
                for queue in self.quota
            }
            one = min(
                (head for head in heads.values() if head is not None), key=lambda one: (self.borrows(one), rank(one))
            )
            pending.remove(one)
            if size(one) <= self.free() - kept:
                set_conditions(one, QuotaReserved=True, Admitted=True, Evicted=False)
                one["status"]["admission"] = {"podSetAssignments": [{"name": "workers"}]}
                one["admitted"] = next(self.names)
            elif size(one) <= self.free() + self.going() - kept or self.preempt(one):
                kept += size(one)
                pending = [other for other in pending if queue_of(other) != queue_of(one)]  # its queue waits for it

    def preempt(self, wanted: Manifest) -> bool:
        """Evict what has to make room for it; False if that cannot be."""
        queue, reclaims = queue_of(wanted), not self.borrows(wanted)
        room, chosen = self.free() + self.going(), list[Manifest]()
        there = [one for one in self.all() if holds(one) and not is_true(one, "Evicted")]
        for one in sorted(there, key=lambda one: (queue_of(one) == queue, priority(one), -one["admitted"])):
            given = sum(size(item) for item in chosen if queue_of(item) == queue_of(one))
            lower = priority(one) < priority(wanted)
            if queue_of(one) == queue:
                may = lower
            else:
                over = self.used(queue_of(one)) - given > self.quota[queue_of(one)]
                below = priority(one) < min(0, priority(wanted))
                may = over and (below or (reclaims and (lower or self.reclaims_any)))
            if may and room < size(wanted):
                chosen.append(one)
                room += size(one)
        if room < size(wanted):
            return False
        for one in chosen:
            set_conditions(one, Evicted=True)
        return True

    def going(self) -> int:
        """What will be free once the workers that have to go are gone."""
        return sum(size(one) for one in self.all() if holds(one) and is_true(one, "Evicted"))

    def borrows(self, one: Manifest) -> bool:
        return self.used(queue_of(one)) + size(one) > self.quota[queue_of(one)]

    def used(self, queue: str) -> int:
        return sum(size(one) for one in self.all() if holds(one) and queue_of(one) == queue)

    def free(self) -> int:
        return sum(self.quota.values()) - sum(size(one) for one in self.all() if holds(one))


def holds(workload: Manifest) -> bool:
    return is_true(workload, "QuotaReserved")


def queue_of(workload: Manifest) -> str:
    return str(workload["spec"]["queueName"])


def rank(workload: Manifest) -> tuple[int, int]:
    """Its place in its queue: the lowest comes first."""
    return (-priority(workload), workload["order"])


def priority(workload: Manifest) -> int:
    return int(workload["spec"].get("priority") or 0)


def size(workload: Manifest) -> int:
    return int(workload["spec"]["podSets"][0]["count"])


def set_conditions(workload: Manifest, **conditions: bool) -> None:
    found = {item["type"]: item for item in workload["status"].get("conditions", ())}
    for name, value in conditions.items():
        found[name] = {"type": name, "status": str(value), "reason": "Preempted", "message": "m"}
    workload["status"]["conditions"] = list(found.values())


def merge(item: Any, patch: Any) -> Any:
    """As a server applies a merge patch."""
    if not isinstance(item, dict) or not isinstance(patch, dict):
        return patch
    found = {**item, **{key: merge(item.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in found.items() if value is not None}


class KueueScenario:
    """Three jobs in two queues of one cohort; owners and administrators do as they like.

    In some scenarios administrators also deactivate, activate and delete Workloads, under workers that run.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kueue = Kueue({"a": self.random.randint(1, 5), "b": self.random.randint(1, 5)}, seed % 4 == 0)
        self.made = 0
        self.unruly = seed % 4 == 1
        self.asleep = set[str]()  # jobs whose owners want it so, and have seen them run

    def step(self) -> None:
        events = [self.submit] * 3 + [self.end, self.scale, self.suspend_or_resume, self.change_quota]
        events += [self.administrate, self.delete_workload] * self.unruly
        self.random.choice(events)()
        for _ in range(self.random.randint(1, 4)):
            self.random.choice([self.kueue.admit, self.look, self.follow])()
            self.check()

    def submit(self) -> None:
        if len(self.kueue.jobs) < 3:
            self.made += 1
            least = self.random.randint(1, 3)
            fields = {"name": f"j{self.made}", "uid": f"{self.made:08}-uid", "queue": self.random.choice("ab")}
            job = elastic(least, least + self.random.randint(0, 4), suspend=True, admitted="", **fields)
            sharing = Sharing(automatic=self.random.random() < 0.8)
            self.kueue.jobs[job.name] = Runs(replace(job, sharing=sharing))

    def any_job(self) -> Runs | None:
        return self.random.choice(list(self.kueue.jobs.values())) if self.kueue.jobs else None

    def end(self) -> None:
        """A job succeeds, or is deleted with all that it owns."""
        one = self.any_job()
        if one is not None:
            del self.kueue.jobs[one.job.name]

    def scale(self) -> None:
        one = self.any_job()
        if one is not None:
            one.job = replace(one.job, desired=self.random.randint(one.job.min, one.job.max))

    def suspend_or_resume(self) -> None:
        one = self.any_job()
        if one is not None:
            if one.job.suspend:
                self.asleep.discard(one.job.name)
            elif one.job.admitted:
                self.asleep.add(one.job.name)
            one.job = replace(one.job, suspend=not one.job.suspend)

    def change_quota(self) -> None:
        self.kueue.quota[self.random.choice("ab")] = self.random.randint(1, 5)

    def administrate(self) -> None:
        """Deactivate a Workload, which Kueue evicts then, or activate it."""
        there = list(self.kueue.all())
        if there:
            one = self.random.choice(there)
            one["spec"]["active"] = not one["spec"].get("active", True)
            if holds(one) and not one["spec"]["active"]:
                set_conditions(one, Evicted=True)

    def delete_workload(self) -> None:
        one = self.any_job()
        if one is not None and one.workloads:
            del one.workloads[self.random.choice(sorted(one.workloads))]

    def look(self) -> bool:
        """A pass over each job; True if anything was written."""
        changed = [self.pass_over(one) for one in self.kueue.jobs.values()]
        return any(changed)

    def pass_over(self, one: Runs) -> bool:
        name = build_workload(one.job, API_VERSION, None)["metadata"]["name"]
        cached = {key: self.cached(item) for key, item in one.workloads.items()}
        base = cached.get(name)
        verdict = judge_admission(one.job, base, one.pods)
        extras = list_extras(one.job, cached.values())
        if verdict.workers is None or base is None:
            growth, one.wanted = judge_end(one.job, extras, one.pods), 0
        else:
            growth = judge_growth(one.job, base, extras, one.pods)
            one.wanted = 0 if one.job.suspend else min(one.job.desired, growth.workers)
        one.pods = max(one.pods, one.wanted)
        if verdict.step is not None:
            self.take(one, verdict.step, name)
        for item in growth.release:
            self.patch(one, item, build_release(item, NOW))
        for item in growth.delete:
            del one.workloads[item["metadata"]["name"]]
        for number in growth.create:
            self.create(one, build_extra(one.job, base or {}, number, API_VERSION))
        return verdict.step is not None or growth.is_due

    def cached(self, item: Manifest) -> Manifest:
        return {**prune_workload(item), "metadata": item["metadata"]}

    def create(self, one: Runs, item: Manifest) -> None:
        order = next(self.kueue.names)
        item["metadata"] |= {"uid": f"w{order}", "resourceVersion": "1"}
        assert item["metadata"]["name"] not in one.workloads
        one.workloads[item["metadata"]["name"]] = {**item, "status": {}, "order": order}

    def patch(self, one: Runs, item: Manifest, patch: Manifest) -> None:
        name = item["metadata"]["name"]
        one.workloads[name] = merge(one.workloads[name], patch)

    def take(self, one: Runs, step: KueueStep, name: str) -> None:
        base = one.workloads.get(name, {})
        if step is KueueStep.START:
            one.job = replace(one.job, suspend=False, admitted=base["metadata"]["uid"])
        elif step is KueueStep.STOP:
            one.job = replace(one.job, suspend=True, admitted="")
        elif step is KueueStep.CREATE:
            self.create(one, build_workload(one.job, API_VERSION, None))
        elif step is KueueStep.DELETE:
            del one.workloads[name]
        elif step in (KueueStep.ACTIVATE, KueueStep.DEACTIVATE):
            left = "true" if step is KueueStep.DEACTIVATE else None
            patch = {
                "metadata": {"annotations": {"elastic.pytorch.org/left": left}},
                "spec": {"active": step is KueueStep.ACTIVATE},
            }
            self.patch(one, base, patch)
            if step is KueueStep.DEACTIVATE and holds(base):
                set_conditions(one.workloads[name], Evicted=True)
        else:
            built = build_workload(one.job, API_VERSION, None)
            patches = {
                KueueStep.UPDATE: lambda: build_update(built),
                KueueStep.RELEASE: lambda: build_release(base, NOW),
                KueueStep.READY: lambda: build_pods_ready(base, NOW),
                KueueStep.FINISH: lambda: build_finish(base, one.job, NOW),
            }
            self.patch(one, base, patches[step]())

    def follow(self) -> bool:
        """Workers that were asked to leave are gone; True if there were any."""
        going = [one for one in self.kueue.jobs.values() if one.pods > one.wanted]
        for one in going:
            one.pods = one.wanted
        return bool(going)

    def check(self) -> None:
        """No job has more pods than it holds quota for."""
        if not self.unruly:
            self.check_quota()

    def check_quota(self) -> None:
        for one in self.kueue.jobs.values():
            held = sum(size(item) for item in one.workloads.values() if holds(item))
            assert one.pods <= held

    def come_to_rest(self) -> None:
        for _ in range(100):
            before = [(condition(one, "Evicted"), holds(one)) for one in self.kueue.all()]
            self.kueue.admit()
            changed = before != [(condition(one, "Evicted"), holds(one)) for one in self.kueue.all()]
            looked, followed = self.look(), self.follow()
            self.check()
            if not (looked or followed or changed):
                return
        raise AssertionError("it does not come to rest")

    def check_at_rest(self) -> None:
        """No quota is idle that a job could use, and no worker above a minimum has what a minimum needs."""
        self.check_quota()
        for one in self.kueue.jobs.values():
            evicted = [item for item in one.workloads.values() if holds(item) and is_true(item, "Evicted")]
            assert evicted == [], "quota is kept for nothing"
            assert not (one.pods and one.job.suspend), "it was suspended by its owner"
            assert one.job.suspend or one.job.name not in self.asleep
        if self.unruly:
            return
        spare = dict.fromkeys(self.kueue.quota, 0)
        for one in self.kueue.jobs.values():
            least = size(next(iter(one.workloads.values()))) if one.workloads else 0
            spare[one.job.queue] += max(0, one.pods - least)
        free = self.kueue.free()
        for one in self.kueue.jobs.values():
            asleep = one.job.suspend and (one.job.admitted or not one.workloads)
            if asleep or one.pods >= one.job.desired:
                continue
            if one.pods:
                assert free <= 0, "an idle worker's quota"
            else:
                least = size(one.workloads[next(iter(one.workloads))])
                assert free + spare[one.job.queue] < least, "a minimum waits for what is above one"


@pytest.mark.seeds(100, search=1000)
def test_stories_of_three_jobs_in_two_queues(seed: int) -> None:
    scenario = KueueScenario(seed)
    for _ in range(EVENTS):
        scenario.step()
    if not scenario.kueue.reclaims_any:  # with `Any`, one worker may stop a job that borrows, again and again
        scenario.come_to_rest()
        scenario.check_at_rest()
