"""Training on machines that Karpenter brings and takes; its cloud is the lab."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.status import GroupGeneration, JobStatus
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection
from tests.on_cluster.commands import kubectl, lab
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.trainer import TRAIN, Trainer
from tests.on_cluster.waiting import wait_until

CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
POOL = "/apis/karpenter.sh/v1/nodepools/default"
STAYS = "karpenter.sh/do-not-disrupt"
CAPACITY = "karpenter.sh/capacity-type"
NOTICE_S = 30


GPUS = {"g4dn.xlarge": 1, "g4dn.12xlarge": 4}
"""The machines on sale, by their numbers of GPUs."""


def submit(
    job: Trainer,
    *,
    machine: str = "g4dn.xlarge",
    annotations: Mapping[str, str] | None = None,
    grace_s: int = 10,
    **spec: Any,
) -> None:
    """Create a job of two workers, each of which fills such a machine, of which there is none; it trains until it is
    deleted."""
    script = [str(TRAIN), "--epochs", "100000", "--step-delay-s", "0.1"]
    pod = {
        "metadata": {"annotations": annotations or {}},
        "spec": {
            "nodeSelector": {"node.kubernetes.io/instance-type": machine},
            "terminationGracePeriodSeconds": grace_s,
        },
    }
    job.submit_script(script, 2, limits={"nvidia.com/gpu": GPUS[machine]}, pod=pod, **spec)


@pytest.fixture(scope="module")
def trainer(api: Connection, karpenter: None, replicas: Replicas) -> Iterator[Trainer]:
    """A job of which the user lets Karpenter move no worker."""
    found = Trainer(api, "grows")
    found.delete()
    submit(found, annotations={STAYS: "true"})
    yield found
    found.delete()


def nodes_of(trainer: Trainer) -> dict[str, str]:
    """Worker -> its node, of those that are not on their way out."""
    uids = trainer.uids()
    return {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in trainer.pods()
        if pod["metadata"]["name"] in uids and "nodeName" in pod["spec"]
    }


def node_claims(api: Connection) -> list[Manifest]:
    found: list[Manifest] = api.request("GET", CLAIMS)["items"]
    return found


def offer(api: Connection, *capacities: str) -> None:
    """Have Karpenter bring machines of these kinds only."""
    template = api.request("GET", POOL)["spec"]["template"]["spec"]
    others = [one for one in template["requirements"] if one["key"] != CAPACITY]
    wanted = [*others, {"key": CAPACITY, "operator": "In", "values": list(capacities)}]
    changed = {"spec": {"template": {"spec": {"requirements": wanted}}}}
    api.request("PATCH", POOL, changed, content_type=MERGE_PATCH)


def capacities_of(trainer: Trainer, api: Connection) -> list[str]:
    """The kinds of machines that its workers are on."""
    kinds = {item["metadata"]["name"]: item["metadata"]["labels"].get(CAPACITY, "") for item in nodes_in(api)}
    return sorted(kinds.get(node, "") for node in nodes_of(trainer).values())


def steps_redone(status: JobStatus) -> int:
    """How many steps its groups have made again."""
    pairs = itertools.pairwise(status.generations)
    known = ((old.last_step or 0, new.resumed_step) for old, new in pairs)
    return sum(max(0, last - resumed) for last, resumed in known if resumed is not None)  # a report may be lost


def nodes_in(api: Connection) -> list[Manifest]:
    found: list[Manifest] = api.request("GET", "/api/v1/nodes")["items"]
    return found


def test_a_job_gets_the_nodes_that_it_lacks_and_trains(trainer: Trainer, api: Connection) -> None:
    began = time.monotonic()
    trainer.wait_training(2)
    print(f"two nodes and the first step: {time.monotonic() - began:.1f} s")
    nodes = nodes_of(trainer)
    assert len(set(nodes.values())) == 2
    assert set(nodes.values()) == {claim["status"]["nodeName"] for claim in node_claims(api)}
    assert trainer.job().status.interruptions == ()


@pytest.fixture(scope="module")
def drifted(trainer: Trainer, api: Connection) -> dict[str, str]:
    """From now on, the nodes are not what their pool would make; the workers that are on them, and their uids."""
    trainer.wait_training(2)
    uids = trainer.uids()
    changed = {"spec": {"template": {"metadata": {"labels": {"example.com/image": "2"}}}}}
    api.request("PATCH", POOL, changed, content_type=MERGE_PATCH)
    wait_until(lambda: all(map(is_drifted, node_claims(api))), every_s=0.5)
    return uids


def is_drifted(claim: Manifest) -> bool:
    return any(item["type"] == "Drifted" and item["status"] == "True" for item in claim["status"]["conditions"])


def blocked(api: Connection) -> str:
    """Why Karpenter may not take nodes away, in its own words."""
    params = {"fieldSelector": "reason=DisruptionBlocked"}
    return json.dumps(api.request("GET", "/api/v1/events", None, params)["items"])


def test_a_reclaim_with_notice_costs_no_step_and_moves_no_other_worker(
    trainer: Trainer, drifted: dict[str, str]
) -> None:
    trainer.wait_training(2)
    before, uids = nodes_of(trainer), trainer.uids()
    name = f"{trainer.name}-worker-1"
    reclaiming = threading.Thread(target=lab, args=("reclaim", before[name], "--notice", str(NOTICE_S)))
    trainer.disturbed(reclaiming.start, 2)
    reclaiming.join()
    after = nodes_of(trainer)
    assert before[name] not in after.values()
    assert len(set(after.values())) == 2
    stays = f"{trainer.name}-worker-0"  # on a node that has drifted all this time
    assert (trainer.uids()[stays], after[stays]) == (uids[stays], before[stays])
    lost = trainer.ends_of({name: uids[name]})
    assert [item.steps_redone for item in lost] == [0], lost
    print(f"{lost[0].recovery_s} s from the loss to the next step")


@pytest.fixture(scope="module")
def jobs(trainer: Trainer, api: Connection) -> Iterator[dict[str, GroupGeneration]]:
    """Two jobs, one with an order of pools, that have trained on demand until spot machines are on sale, too: the group
    of each until then, by the job's name."""
    trainer.wait_training(2)
    offer(api, "on-demand")
    # A machine that another worker has left, and that Karpenter has not yet ended, may be a spot machine.
    used = set(nodes_of(trainer).values())
    wait_until(lambda: {item["status"].get("nodeName") for item in node_claims(api)} <= used, every_s=0.5)
    orders, moves = Trainer(api, "orders"), Trainer(api, "moves")
    orders.delete()
    moves.delete()
    order = [{"capacity": "spot"}, {"capacity": "onDemand"}]
    try:
        submit(orders, pools={"order": order, "waitSeconds": 30, "retrySeconds": 15})
        # Its workers do not fit on the machines that those of `orders` leave, to which Karpenter would move them
        # otherwise. It evicts with no notice but the grace period.
        submit(moves, machine="g4dn.12xlarge", grace_s=120)
        wait_until(lambda: (waits := orders.job().status.pools) is not None and waits.then == "onDemand")
        groups = {job.name: job.wait_training(2).status.generations[-1] for job in (orders, moves)}
        for job in (orders, moves):
            assert capacities_of(job, api) == ["on-demand"] * 2
        offer(api, "spot", "on-demand")
        yield groups
    finally:
        orders.delete()
        moves.delete()


def test_workers_that_karpenter_moves_to_cheaper_machines_lose_no_step(
    jobs: dict[str, GroupGeneration], api: Connection
) -> None:
    job, first = Trainer(api, "moves"), jobs["moves"]
    before = set(first.workers)
    wait_until(lambda: training_workers(job) - before, every_s=0.5)
    assert "spot" in capacities_of(job, api)
    kubectl("annotate", "pods", "-l", f"job-name={job.name}", f"{STAYS}=true", "--overwrite")  # one move is enough
    wait_until(lambda: before & {item.worker for item in job.job().status.interruptions})
    status = job.job().status
    assert steps_redone(status) == 0, status.generations
    groups = [item for item in status.generations if item.generation >= first.generation]
    assert min(len(item.workers) for item in groups) == 2, groups  # make before break
    assert set(job.starts().values()) == {1}  # no process was restarted


def training_workers(job: Trainer) -> set[str]:
    """The workers of the newest group, once it has made a step."""
    newest = job.job().status.generations[-1]
    return set(newest.workers) if newest.first_step_at is not None else set()


def test_workers_fall_back_to_on_demand_machines_and_go_back_when_there_are_spot_ones(
    jobs: dict[str, GroupGeneration], api: Connection
) -> None:
    job = Trainer(api, "orders")
    wait_until(lambda: capacities_of(job, api) == ["spot"] * 2, every_s=0.5)
    wait_until(lambda: training_workers(job) == set(nodes_of(job)), every_s=0.5)
    status = job.job().status
    assert status.interruptions == status.scalings == ()
    assert steps_redone(status) == 0
    formed = status.generations[-1].generation - jobs[job.name].generation
    assert formed <= 4, "a group for each that joins, and one without those that leave"


def test_karpenter_moves_no_worker_that_is_to_stay(trainer: Trainer, drifted: dict[str, str], api: Connection) -> None:
    """It gives a node one reason in two minutes, so the tests above run meanwhile."""
    trainer.wait_training(2)
    generation, uids = trainer.job().status.generation, trainer.uids()
    wait_until(lambda: STAYS in blocked(api), every_s=0.5)
    assert (trainer.job().status.generation, trainer.uids()) == (generation, uids)
    moved = {name for name, uid in drifted.items() if uid not in uids.values()}
    assert moved <= {f"{trainer.name}-worker-1"}, "only what was reclaimed"
    assert {item.worker for item in trainer.ends_of(drifted)} == moved
