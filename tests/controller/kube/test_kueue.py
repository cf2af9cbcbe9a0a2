"""The controller's process and a queue of Kueue's; the test plays Kueue's part."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ClusterError, ConflictError, NotFoundError
from elasticctl.api.spec import PRIORITY_CLASS_LABEL, QUEUE_LABEL, ElasticJob
from elasticctl.api.status import Phase
from elasticctl_controller.core.sharing.kueue import SUSPENDED_BY_OWNER, build_workload
from elasticctl_controller.kube.kueue import RECHECK_S, KueueObjects
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.pruning import prune_flavor, prune_workload
from tests.support.control import ControlApi
from tests.support.controller.kueue import admission, queued, stored
from tests.support.controller.replica import Replica
from tests.support.controller.rights import allowed, asked
from tests.support.controller.shared_nodes import GPU, add_node, jobs, pods, run_pods, status
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

KUEUE = "/apis/kueue.x-k8s.io/v1beta1"
WORKLOADS = f"{KUEUE}/namespaces/a/workloads"
AUTOMATIC = {"minReplicas": 2, "maxReplicas": 4, "sharing": {"automatic": True}}
STAMP = "2026-01-01T00:00:00Z"


def submit(control: ControlApi, name: str = "job", workers: int = 2, **spec: Any) -> None:
    job = shell_job(name, "true", workers, namespace="a", container=GPU, **{"suspend": True, **spec})
    job["metadata"]["labels"] = {QUEUE_LABEL: "team"}
    control.put(f"{jobs('a')}/{name}", job)


def spec(control: ControlApi, name: str = "job") -> dict[str, Any]:
    found: dict[str, Any] = control.objects[f"{jobs('a')}/{name}"]["spec"]
    return found


def change(control: ControlApi, name: str = "job", **fields: Any) -> None:
    """What an owner does to a job's spec."""
    with control.changed:
        stored_ = control.objects[f"{jobs('a')}/{name}"]
        spec_ = {**stored_["spec"], **fields}
        control.put(f"{jobs('a')}/{name}", {**stored_, "metadata": dict(stored_["metadata"]), "spec": spec_})


def workloads(control: ControlApi) -> dict[str, Manifest]:
    """All Workloads by name; in the tests with one job its own comes first, and then those for single workers."""
    with control.changed:
        found = [item for path, item in control.objects.items() if path.startswith(f"{WORKLOADS}/")]
    return dict(sorted((item["metadata"]["name"], item) for item in found))


def workload(control: ControlApi) -> Manifest | None:
    return next(iter(workloads(control).values()), None)


def say(control: ControlApi, reason: str = "Preempted", of: str = "", **conditions: bool) -> None:
    """Set conditions of the job's Workload, or of that for worker `of`; with quota an admission, as Kueue does."""
    with control.changed:
        found = next(item for name, item in workloads(control).items() if name.endswith(f"-{of}" if of else ""))
        by_type = {item["type"]: item for item in found.get("status", {}).get("conditions", [])}
        for name, value in conditions.items():
            new = {"type": name, "status": str(value), "reason": reason, "message": f"{name}!"}
            by_type[name] = {**new, "lastTransitionTime": STAMP}
        status_ = {**found.get("status", {}), "conditions": list(by_type.values())}
        if conditions.get("QuotaReserved"):
            status_["admission"] = admission(gpu="spot")
        path = f"{WORKLOADS}/{found['metadata']['name']}"
        control.put(path, {**found, "metadata": dict(found["metadata"]), "status": status_})


def admit(control: ControlApi) -> None:
    say(control, QuotaReserved=True, Admitted=True, Evicted=False)


def held(control: ControlApi, of: str = "") -> dict[str, str]:
    """The conditions of the job's Workload, or of that for worker `of`."""
    found = next((item for name, item in workloads(control).items() if name.endswith(f"-{of}" if of else "")), {})
    return {item["type"]: item["status"] for item in found.get("status", {}).get("conditions", [])}


def trains(control: ControlApi, workers: int) -> bool:
    run_pods(control, "a", "n1")
    found = status(control, "a", "job")
    return found.phase is Phase.RUNNING and found.active == workers == len(control.names(pods("a")))


def waits(control: ControlApi, words: str) -> bool:
    found = status(control, "a", "job")
    return found.phase is Phase.SUSPENDED and found.reason == "NotAdmitted" and words in found.message


@pytest.fixture
def controller(control: ControlApi, tmp_path: Path) -> Iterator[Replica]:
    """A controller in a cluster with Kueue and one flavor, `spot`."""
    control.served.add(KUEUE)
    flavor = {"nodeLabels": {"capacity": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
    control.put(f"{KUEUE}/resourceflavors/spot", {"metadata": {"name": "spot"}, "spec": flavor})
    add_node(control, "n1", 8)
    with Replica(control, tmp_path, "only") as replica:
        wait_until(replica.leads)
        yield replica
        assert replica.end(signal.SIGTERM) == 0
        assert "error" not in replica.log.read_text()


def test_a_job_waits_starts_where_it_was_admitted_gives_way_and_comes_back(
    control: ControlApi, controller: Replica
) -> None:
    submit(control, workers=4, **AUTOMATIC)
    wait_until(lambda: workload(control))
    wait_until(lambda: waits(control, "waits to be admitted to Kueue's queue team"))
    assert control.names(pods("a")) == []
    [wanted] = (workload(control) or {})["spec"]["podSets"]
    assert wanted["count"] == 2

    admit(control)  # two of the four
    wait_until(lambda: trains(control, 2))
    wait_until(lambda: len(workloads(control)) == 3)  # one for each of the others
    assert spec(control)["suspend"] is False
    pod = control.objects[f"{pods('a')}/job-worker-0"]["spec"]
    assert pod["nodeSelector"] == {"capacity": "spot"}
    assert {"key": "spot", "operator": "Exists"} in pod["tolerations"]
    assert "nodeSelector" not in spec(control)["replicaSpecs"]["Worker"]["template"]["spec"]
    wait_until(lambda: held(control).get("PodsReady") == "True")

    say(control, of="3", QuotaReserved=True, Admitted=True)
    wait_until(lambda: trains(control, 3))
    wait_until(lambda: held(control, of="3").get("PodsReady") == "True")
    say(control, of="3", Evicted=True)
    wait_until(lambda: sum("deletionTimestamp" in control.objects[f"{pods('a')}/{n}"]["metadata"]
                           for n in control.names(pods("a"))) == 1)  # fmt: skip
    assert held(control, of="3")["QuotaReserved"] == "True"
    wait_until(lambda: trains(control, 2) and held(control, of="3")["QuotaReserved"] == "False")
    assert (held(control)["QuotaReserved"], spec(control)["suspend"]) == ("True", False)

    say(control, Evicted=True)
    wait_until(lambda: all("deletionTimestamp" in control.objects[f"{pods('a')}/{n}"]["metadata"]
                           for n in control.names(pods("a"))))  # fmt: skip
    wait_until(lambda: waits(control, "gives back its quota in Kueue's queue team: Evicted!"))
    wait_until(lambda: spec(control)["suspend"])
    assert held(control)["QuotaReserved"] == "True", "its workers have until now to commit a step"
    run_pods(control, "a", "n1")  # they end
    wait_until(lambda: held(control)["QuotaReserved"] == "False")
    assert held(control) | {"PodsReady": ""} == {
        "QuotaReserved": "False", "Admitted": "False", "Evicted": "True", "Requeued": "True", "PodsReady": "",
    }  # fmt: skip
    assert "admission" not in (workload(control) or {})["status"]
    assert len(workloads(control)) == 1
    wait_until(lambda: waits(control, "waits to be admitted"))

    admit(control)
    wait_until(lambda: trains(control, 2))
    assert status(control, "a", "job").failures == 0
    change(control, cancel=True)
    wait_until(lambda: held(control).get("Finished") == "True")


def test_nothing_is_written_at_rest(control: ControlApi, controller: Replica) -> None:
    submit(control)
    wait_until(lambda: workload(control))
    admit(control)
    wait_until(lambda: trains(control, 2) and held(control).get("PodsReady") == "True")
    submit(control, "other")
    wait_until(lambda: "waits to be admitted" in status(control, "a", "other").message)

    def writes() -> list[str]:
        said = [f"{r.method} {r.path}" for r in list(control.requests) if r.method != "GET"]
        return [line for line in said if "/leases/" not in line and "/events" not in line]

    passes = "elasticctl_reconcile_seconds_count"

    def count() -> float:
        page = controller.get(controller.metrics_port, "/metrics")[1]
        return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(passes))

    began = count()
    before = writes()
    add_node(control, "n2", 8)  # all jobs are looked at again, and each of them once more on its own account
    for name in ("job", "other"):
        item = control.objects[f"{jobs('a')}/{name}"]
        control.put(
            f"{jobs('a')}/{name}", {**item, "metadata": {**item["metadata"], "labels": {QUEUE_LABEL: "team", "x": "y"}}}
        )
    wait_until(lambda: count() >= began + 2)
    assert writes() == before


def test_an_owner_who_suspends_a_job_leaves_its_quota_to_others(control: ControlApi, controller: Replica) -> None:
    submit(control)
    wait_until(lambda: workload(control))
    admit(control)
    wait_until(lambda: trains(control, 2))
    change(control, suspend=True)
    wait_until(lambda: (workload(control) or {})["spec"].get("active") is False)
    say(control, "Deactivated", Evicted=True)
    wait_until(lambda: run_pods(control, "a", "n1") or held(control)["QuotaReserved"] == "False")
    assert held(control)["Requeued"] == "False"
    wait_until(lambda: status(control, "a", "job").reason == "Suspended")
    assert control.names(pods("a")) == []
    change(control, suspend=False)
    wait_until(lambda: (workload(control) or {})["spec"]["active"] is True)
    assert SUSPENDED_BY_OWNER not in (workload(control) or {})["metadata"]["annotations"]
    wait_until(lambda: waits(control, "waits to be admitted") and spec(control)["suspend"])
    assert control.names(pods("a")) == []
    admit(control)
    wait_until(lambda: trains(control, 2))


def test_what_a_job_asks_for_follows_it_while_it_waits_and_while_it_runs(
    control: ControlApi, controller: Replica
) -> None:
    submit(control, maxReplicas=8)
    wait_until(lambda: workload(control))

    def scale(workers: int) -> None:
        replicas = spec(control)["replicaSpecs"]["Worker"]
        change(control, replicaSpecs={"Worker": {**replicas, "replicas": workers}})

    scale(3)
    wait_until(lambda: (workload(control) or {})["spec"]["podSets"][0]["count"] == 3)
    admit(control)
    wait_until(lambda: trains(control, 3))
    scale(2)
    wait_until(lambda: trains(control, 2))
    scale(5)
    wait_until(lambda: trains(control, 3) and len(workloads(control)) == 3)
    assert (workload(control) or {})["spec"]["podSets"][0]["count"] == 3
    say(control, of="4", QuotaReserved=True, Admitted=True)
    wait_until(lambda: trains(control, 4))
    scale(3)
    wait_until(lambda: trains(control, 3) and len(workloads(control)) == 1)


def test_what_kueue_refuses_is_an_event_of_the_job(control: ControlApi, controller: Replica) -> None:
    job = shell_job("job", "true", namespace="a", container=GPU, suspend=True)
    job["metadata"]["labels"] = {QUEUE_LABEL: "team", PRIORITY_CLASS_LABEL: "high"}
    control.put(f"{jobs('a')}/job", job)

    assert "high" in wait_until(lambda: control.told("FailedQueueing"))[0]
    assert workload(control) is None
    control.put(f"{KUEUE}/workloadpriorityclasses/high", {"metadata": {"name": "high"}, "value": 7})
    wait_until(lambda: workload(control))
    wanted = (workload(control) or {})["spec"]
    assert (wanted["priority"], wanted["priorityClassName"]) == (7, "high")


def test_without_kueue_a_job_reports_that_and_obeys_suspend(control: ControlApi, tmp_path: Path) -> None:
    with Replica(control, tmp_path, "only") as replica:
        add_node(control, "n1", 8)
        submit(control)
        wait_until(lambda: waits(control, "waits for Kueue, which is not installed"))
        assert control.names(pods("a")) == []
        change(control, suspend=False)  # by another integration
        wait_until(lambda: trains(control, 2))
        assert control.asked("GET", KUEUE) == 1  # once, and then after a while
        assert replica.end() == 0


class Objects:
    """Kueue's objects by hand, and what was called for."""

    def __init__(self, control: ControlApi) -> None:
        self.now, self.keys = 0.0, list[str]()
        api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
        self.kueue = KueueObjects(api, self.keys.append, lambda: self.now)


@pytest.fixture
def objects(control: ControlApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    monkeypatch.setattr("elasticctl_controller.kube.kueue.FIRST_LIST_S", 600.0)
    found = Objects(control)
    yield found
    found.kueue.stop()


def test_the_version_is_looked_up_and_missing_ones_again_later(control: ControlApi, objects: Objects) -> None:
    assert objects.kueue.version() == ""
    control.served.add("/apis/kueue.x-k8s.io/v1beta2")
    assert objects.kueue.version() == ""
    objects.now += RECHECK_S
    assert objects.kueue.version() == "v1beta2"
    assert objects.kueue.api_version == "kueue.x-k8s.io/v1beta2"
    assert len(objects.kueue.reflectors) == 2


def test_a_write_is_seen_immediately_and_changes_that_very_workload(control: ControlApi, objects: Objects) -> None:
    control.served.add(KUEUE)
    assert objects.kueue.version() == "v1beta1"
    control.silent = True  # no watch will say so
    ours = build_workload(queued(namespace="a"), objects.kueue.api_version, None)
    name = ours["metadata"]["name"]
    objects.kueue.create(ours)
    found = objects.kueue.workload("a", name)
    assert found is not None
    assert objects.keys == ["a/digits"]
    with pytest.raises(ConflictError):
        objects.kueue.create(ours)
    objects.kueue.patch_status(found, {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
                                       "status": {"conditions": []}})  # fmt: skip
    with pytest.raises(ConflictError):  # it has changed since
        objects.kueue.patch_status(found, {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}})
    newer = objects.kueue.workload("a", name)
    assert newer is not None
    another = {**newer, "metadata": {**newer["metadata"], "uid": "its successor"}}
    with pytest.raises(ConflictError):
        objects.kueue.patch(another, {"spec": {"active": False}})
    objects.kueue.delete(another)
    assert control.names(WORKLOADS) == [name]
    objects.kueue.delete(newer)
    assert (control.names(WORKLOADS), objects.kueue.workload("a", name)) == ([], None)
    objects.kueue.delete(newer)
    with pytest.raises(ConflictError, match="is gone"):
        objects.kueue.patch(newer, {"spec": {"active": False}})


def test_nothing_is_decided_before_all_is_listed(
    control: ControlApi, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticctl_controller.kube.kueue.FIRST_LIST_S", 0.0)
    control.served.add(KUEUE)
    control.fail("GET", "/resourceflavors", 403)
    with pytest.raises(ClusterError, match="not listed yet"):
        objects.kueue.version()

    def listed() -> bool:
        try:
            return objects.kueue.version() == "v1beta1"
        except ClusterError:
            return False

    wait_until(listed)


def test_priorities_are_read_of_both_kinds_of_classes(control: ControlApi, objects: Objects) -> None:
    control.served.add(KUEUE)
    objects.kueue.version()
    control.put("/apis/scheduling.k8s.io/v1/priorityclasses/high", {"metadata": {"name": "high"}, "value": 9})
    assert objects.kueue.priority("high", of_pods=True) == 9
    with pytest.raises(NotFoundError):
        objects.kueue.priority("high", of_pods=False)


def test_the_fields_of_kueues_objects_that_are_read_are_kept() -> None:
    found = prune_workload(stored(queued(), "Admitted", resourceRequests=[{"name": "workers"}]))
    assert found["spec"]["podSets"] == [{"name": "workers", "count": 3}]
    assert set(found["status"]) == {"conditions"}
    flavor = {"metadata": {"name": "f", "managedFields": []}, "spec": {"nodeLabels": {"a": "b"}, "topologyName": "t"}}
    assert prune_flavor(flavor) == {"metadata": {"name": "f"}, "spec": {"nodeLabels": {"a": "b"}}}
    assert prune_workload({})["spec"] == {"podSets": []}


def test_a_job_remembers_by_which_admission_it_was_started() -> None:
    manifest = shell_job("job", "true")
    manifest["metadata"]["annotations"] = {"elastic.pytorch.org/admitted": "uid"}
    assert ElasticJob.from_manifest(manifest).admitted == "uid"


def test_the_role_is_what_is_asked_for(control: ControlApi, objects: Objects) -> None:
    """Of Kueue's objects, and of jobs, in one life of each."""
    control.served.add(KUEUE)
    objects.kueue.version()
    wait_until(lambda: control.watches >= 2)
    ours = build_workload(queued(namespace="a"), objects.kueue.api_version, None)
    objects.kueue.create(ours)
    found = objects.kueue.workload("a", ours["metadata"]["name"])
    assert found is not None
    objects.kueue.patch(found, {"spec": {"active": False}})
    objects.kueue.patch_status(found, {"status": {}})
    objects.kueue.delete(found)
    for of_pods in (True, False):
        with pytest.raises(NotFoundError):
            objects.kueue.priority("high", of_pods=of_pods)
    taken = {right for request in list(control.requests) if (right := asked(request))}
    groups = ("kueue.x-k8s.io", "scheduling.k8s.io")
    assert taken == {right for right in allowed() if right[0] in groups and right[1] != "podgroups"}
