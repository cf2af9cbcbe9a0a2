"""The allocator over a floor in memory, with real decisions: what it decides and remembers, which jobs it reports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elasticctl.api.codec import Manifest, Timestamp, from_json, to_json, to_rfc3339
from elasticctl.api.errors import UnreachableError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import Quota
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase, ShareStatus, WorkerStatus
from elasticctl_controller.core.sharing.claims import SharingRules
from elasticctl_controller.loop.allocator import UNDECIDED, Allocator, SharingSettings
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

NOW = 1_700_000_000.0


@dataclass
class Floor:
    """Jobs, nodes and quotas as they are set; `error` is raised in place of the next answer."""

    jobs: dict[str, Manifest] = field(default_factory=dict)
    slots: int = 4
    more_nodes: dict[str, int] = field(default_factory=dict)
    guarantees: dict[str, int] = field(default_factory=dict)
    error: Exception | None = None

    def all_jobs(self) -> list[Manifest]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return list(self.jobs.values())

    def healthy_nodes(self) -> list[Manifest]:
        nodes = {"node": self.slots, **self.more_nodes}
        return [
            {"metadata": {"name": name}, "status": {"allocatable": {GPU_RESOURCE: str(slots)}}}
            for name, slots in nodes.items()
        ]

    def quotas(self) -> list[Manifest]:
        return [Quota(name, guaranteed={"gpu": own}).to_manifest() for name, own in self.guarantees.items()]


class Bench:
    """An allocator that is asked by hand, and the jobs that it works for."""

    def __init__(self) -> None:
        self.floor, self.announced, self.now = Floor(), list[str](), NOW
        self.terms = SharingSettings(True, SharingRules(settle_s=0.0))
        self.allocator = self.another()

    def another(self) -> Allocator:
        """One that has just been started, and remembers nothing."""
        return Allocator(self.floor, lambda: self.terms, self.announced.append, lambda: self.now)

    def submit(
        self,
        name: str,
        project: str,
        least: int,
        most: int,
        *,
        automatic: bool = True,
        gpus: int = 1,
        priority: int = 0,
        **status: Any,
    ) -> None:
        limit = {"resources": {"limits": {GPU_RESOURCE: gpus}}}
        job = shell_job(
            name, "true", most, namespace=project, container=limit, minReplicas=least, maxReplicas=most,
            sharing={"automatic": automatic, "priority": priority},
        )  # fmt: skip
        job["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": to_rfc3339(self.now)}
        self.floor.jobs[f"{project}/{name}"] = {**job, "status": status}

    def job(self, key: str) -> ElasticJob:
        return ElasticJob.from_manifest(self.floor.jobs[key])

    def share(self, key: str) -> ShareStatus | None:
        found = self.allocator.allotment(self.job(key))
        return found.share if found else None

    def workers(self, key: str) -> int:
        share = self.share(key)
        assert share is not None
        return share.workers

    def carried_out(self) -> None:
        """Every job has the workers that it was given, all running, as its status says."""
        for key, manifest in self.floor.jobs.items():
            found = self.allocator.allotment(self.job(key))
            assert found is not None
            name = self.job(key).name
            leaving = {w.uid for w in self.job(key).status.workers} & found.leave
            kept = [w for w in self.job(key).status.workers if w.uid not in leaving][: found.share.workers]
            while len(kept) < found.share.workers:
                index = max((w.index for w in kept), default=-1) + 1
                start = Timestamp(self.now + index)
                kept.append(WorkerStatus(f"{name}-worker-{index}", f"{name}-{index}", index, "Running", "node", start))
            status = JobStatus(phase=Phase.RUNNING, share=found.share, workers=tuple(kept))
            manifest["status"] = to_json(status)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_switched_off_it_has_no_say(bench: Bench) -> None:
    bench.terms = SharingSettings(False)
    bench.submit("train", "a", 2, 4)
    assert bench.allocator.decide_now() is None
    assert (bench.share("a/train"), bench.announced) == (None, [])


def test_a_new_job_has_nothing_until_it_is_decided_about(bench: Bench) -> None:
    bench.submit("train", "a", 2, 4)
    before = bench.share("a/train")
    assert before is not None
    assert (before.workers, before.reason) == (0, UNDECIDED)
    bench.allocator.decide_now()
    assert bench.workers("a/train") == 4
    assert bench.announced == ["a/train"]


def test_unchanged_allotments_are_not_announced(bench: Bench) -> None:
    bench.submit("train", "a", 2, 4)
    bench.allocator.decide_now()
    bench.carried_out()
    bench.announced.clear()
    for later in (1.0, 100.0, 10_000.0):
        bench.now = NOW + later
        bench.allocator.decide_now()
    assert bench.announced == []
    share = bench.share("a/train")
    assert share is not None
    assert share.since == NOW


def test_the_words_of_a_share_that_stays_do_not_change_with_every_job_that_comes(bench: Bench) -> None:
    bench.floor.slots = 8
    for number in range(3):
        bench.submit(f"one-{number}", "a", 1, 1)
        bench.allocator.decide_now()
        bench.carried_out()
    bench.submit("big", "b", 2, 8)
    bench.allocator.decide_now()
    bench.carried_out()
    before = bench.share("b/big")
    bench.announced.clear()
    bench.submit("first", "c", 1, 8, automatic=False)
    for later in (1.0, 2.0, 60.0):
        bench.now = NOW + later
        bench.allocator.decide_now()
        assert bench.announced.count("b/big") == 0 or later > 30.0
    assert (bench.share("b/big").workers, bench.share("b/big").since) == (before.workers, before.since)


def test_jobs_that_have_workers_get_the_size_of_the_pool_now_and_then(bench: Bench) -> None:
    bench.submit("train", "a", 4, 4, automatic=False)
    bench.submit("later", "b", 4, 4, automatic=False)
    bench.allocator.decide_now()
    bench.carried_out()
    assert (bench.share("a/train").pool_slots, bench.share("b/later").pool_slots) == (4, 0)
    bench.announced.clear()
    for later, nodes, announced in ((1.0, {"other": 1}, 4), (2.0, {"other": 2}, 4), (60.0, {"other": 2}, 6)):
        bench.now, bench.floor.more_nodes = NOW + later, nodes
        bench.allocator.decide_now()
        assert bench.share("a/train").pool_slots == announced
    assert bench.announced.count("a/train") == 1
    assert bench.share("b/later").pool_slots == 0


def test_a_guarantee_is_met_by_those_who_borrow_the_youngest_first(bench: Bench) -> None:
    bench.floor.guarantees = {"a": 2, "b": 2}
    bench.submit("train", "a", 2, 4)
    bench.allocator.decide_now()
    bench.carried_out()
    assert bench.share("a/train").borrowed == 2
    bench.now += 100
    bench.submit("guest", "b", 2, 2, automatic=False)
    bench.announced.clear()
    bench.allocator.decide_now()
    assert sorted(bench.announced) == ["a/train", "b/guest"]
    found = bench.allocator.allotment(bench.job("a/train"))
    assert (found.share.workers, found.share.borrowed, found.share.since) == (2, 0, NOW + 100)
    assert "b/guest" in found.share.change
    assert found.leave == {"train-2", "train-3"}
    assert bench.workers("b/guest") == 2
    bench.carried_out()
    del bench.floor.jobs["b/guest"]
    bench.now += 100
    bench.allocator.decide_now()
    assert bench.workers("a/train") == 4


def test_a_worker_makes_room_for_one_that_needs_its_node_as_a_whole(bench: Bench) -> None:
    bench.floor.more_nodes["other"] = 4
    bench.submit("small", "a", 2, 2, automatic=False)
    bench.allocator.decide_now()
    bench.carried_out()
    bench.floor.jobs["a/small"]["status"]["workers"][1]["node"] = "other"
    bench.submit("whole", "a", 1, 1, automatic=False, gpus=4, priority=1)
    bench.allocator.decide_now()
    small, whole = (bench.allocator.allotment(bench.job(key)) for key in ("a/small", "a/whole"))
    assert (whole.share.workers, whole.nodes) == (1, ("node",))
    assert (small.share.workers, small.moves, small.nodes) == (2, frozenset({"small-0"}), ("other",))


def test_a_node_that_is_yet_to_come_is_no_place_to_send_a_worker_to(bench: Bench) -> None:
    bench.terms = SharingSettings(True, SharingRules(), {"gpu": 12})
    bench.submit("large", "a", 3, 3, automatic=False, gpus=4)
    bench.allocator.decide_now()
    found = bench.allocator.allotment(bench.job("a/large"))
    assert (found.share.workers, found.nodes) == (3, ("node", "", ""))


def test_the_next_allocator_continues_from_the_statuses(bench: Bench) -> None:
    bench.submit("first", "a", 3, 3, automatic=False)
    bench.allocator.decide_now()
    bench.carried_out()
    bench.submit("second", "b", 2, 2, automatic=False)
    bench.allocator.decide_now()
    waits = bench.share("b/second")
    assert (waits.workers, waits.reason) == (0, "WaitsForTurn")
    bench.floor.jobs["b/second"]["status"] = to_json(JobStatus(share=waits))
    given = bench.share("a/first")
    bench.now += 3600
    bench.allocator = bench.another()
    assert (bench.share("a/first"), bench.share("b/second")) == (given, waits), "also before it has decided anything"
    bench.allocator.decide_now()
    assert bench.share("a/first") == given
    assert bench.workers("b/second") == 0


def test_a_job_that_ran_before_sharing_was_switched_on_keeps_what_it_has(bench: Bench) -> None:
    bench.submit("old", "a", 1, 4, workers=[{"name": "old-worker-0", "uid": "u", "phase": "Running", "node": "node"}])
    assert bench.share("a/old") is None
    bench.floor.slots = 1
    bench.allocator.decide_now()
    assert bench.workers("a/old") == 1


def test_a_job_that_takes_nothing_of_what_is_shared_is_left_alone(bench: Bench) -> None:
    plain = shell_job("plain", "true", 2, namespace="a")
    plain["metadata"]["uid"] = "uid-plain"
    bench.floor.jobs["a/plain"] = plain
    assert bench.workers("a/plain") == 0
    bench.allocator.decide_now()
    assert bench.share("a/plain") is None
    assert bench.announced == ["a/plain"], "it was waiting to be decided about"


def test_a_new_job_of_an_old_name_is_another(bench: Bench) -> None:
    bench.submit("train", "a", 4, 4)
    bench.allocator.decide_now()
    bench.floor.jobs["a/train"]["metadata"]["uid"] = "another"
    assert bench.share("a/train").reason == UNDECIDED


def test_all_jobs_are_announced_when_sharing_is_switched_off(bench: Bench) -> None:
    bench.submit("train", "a", 2, 4)
    bench.allocator.decide_now()
    bench.announced.clear()
    bench.terms = replace(bench.terms, on=False)
    bench.allocator.decide_now()
    assert (bench.announced, bench.share("a/train")) == (["a/train"], None)


def test_what_is_given_is_what_will_be_read_back(bench: Bench) -> None:
    bench.now = NOW + 0.123_456_789
    bench.submit("train", "a", 2, 4)
    bench.allocator.decide_now()
    share = bench.share("a/train")
    assert from_json(ShareStatus, to_json(share)) == share


def test_the_thread_decides_when_something_changes_and_outlives_errors(bench: Bench) -> None:
    bench.allocator.start()
    try:
        bench.submit("train", "a", 2, 4)
        bench.floor.error = UnreachableError("no answer")
        bench.allocator.wake()
        wait_until(lambda: bench.announced == ["a/train"])
        assert bench.allocator.alive
    finally:
        bench.allocator.stop()
    assert not bench.allocator.alive
