"""`doctor` on this machine, and over real HTTP on a cluster in every state."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.cli.verbs.set_up.install import show_check
from elasticctl.doctor import Check, CheckOutcome
from elasticctl.doctor.cluster import check_nodes, gpu_name
from elasticctl.terminal import console
from tests.support.cli import Run
from tests.support.fakeapi import FakeApi, Request
from tests.support.kube import WriteKubeconfig

DEPLOYMENT = "/apis/apps/v1/namespaces/elasticctl-system/deployments/elasticctl-controller"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/elasticctl-system/leases/elasticctl-controller"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/elasticjobs.elastic.pytorch.org"
API = "/apis/elastic.pytorch.org/v1alpha1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
FORBIDDEN = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": 'User "jo" cannot get it'}


@pytest.fixture
def cluster(run: Run, private_home: Path, kubeconfig: WriteKubeconfig, api: FakeApi, tmp_path: Path) -> FakeApi:
    """A cluster in which all is well, under the context `lab`."""
    kubeconfig(api.url)
    assert run("config", "import").code == 0
    storage = ("--storage", str(tmp_path / "state"))
    assert run("config", "set-context", "lab", "--namespace", "ml", "--provider", "aws", *storage).code == 0
    assert run("install", "--context", "lab", "--image", "r.example/c:1", "--no-wait").code == 0
    api.put(DEPLOYMENT, {**api.objects[DEPLOYMENT], "status": {"readyReplicas": 2}})
    api.put(LEASE, {"metadata": {}, "spec": {"holderIdentity": "pod-a", "renewTime": to_rfc3339(time.time())}})
    api.put("/api/v1/namespaces/ml", {"metadata": {"name": "ml"}})
    api.put("/api/v1/nodes/a", node("a"))
    api.put("/apis/apps/v1/namespaces/kube-system/daemonsets/cilium", {"metadata": {"name": "cilium"}})
    api.refuse = lambda request: answered(request)
    return api


def node(name: str, gpus: str = "4") -> dict[str, Any]:
    labels = {"node.kubernetes.io/instance-type": "g4dn.12xlarge", "eks.amazonaws.com/capacityType": "SPOT"}
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": conditions}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def answered(request: Request, denied: tuple[str, ...] = (), release: str = "34") -> Any:
    """What an API server answers that keeps no objects for it: its version, and reviews of rights."""
    if request.path == "/version":
        return 200, {"major": "1", "minor": release, "gitVersion": f"v1.{release}.1"}, {}
    if request.path == API:
        return 200, {"kind": "APIResourceList"}, {}
    if request.path == REVIEWS:
        asked = request.body["spec"]["resourceAttributes"]
        return 201, {"status": {"allowed": f"{asked['verb']} {asked['resource']}" not in denied}}, {}
    return None


def outcomes(run: Run, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = run("doctor", "--context", "lab", "-o", "json", *words)
    data = json.loads(done.out)
    assert (data["apiVersion"], data["kind"], data["context"]) == ("cli.elasticctl/v1", "Checkup", "lab")
    return done.code, {check["name"]: check for check in data["checks"]}


def test_this_machine(run: Run, private_home: Path) -> None:
    done = run("doctor")
    header, *rows = (line.split("\t") for line in done.out.splitlines())
    assert header == ["CHECK", "OUTCOME", "FOUND", "FIX"]
    found = {row[0]: row for row in rows}
    assert list(found) == ["torch", "supervisor", "GPUs", "disk", "memory", "storage"]
    assert found["supervisor"][1:] == ["ok", "not running; the next job starts it", "-"]
    assert found["storage"][2].startswith(f"file://{private_home}/local/storage: writes")
    assert done.code == 0


def test_a_storage_that_fails_makes_the_exit_code_one(run: Run, private_home: Path) -> None:
    done = run("doctor", "--storage", "/dev/null/state")
    assert done.code == 1
    assert "storage\tfailed\t" in done.out


def test_a_cluster_in_which_all_is_well(run: Run, cluster: FakeApi) -> None:
    cluster.requests.clear()
    code, found = outcomes(run)
    assert {check["outcome"] for check in found.values()} == {"ok"}, found
    assert code == 0
    assert "Kubernetes v1.34.1 at http://127.0.0.1" in found["cluster"]["says"]
    assert found["controller"]["says"] == "2 of 2 replicas ready, r.example/c:1; the leader is pod-a"
    assert found["rights"]["says"] == "all that elasticctl needs in ml"
    assert found["GPUs"]["says"] == "4 t4"
    assert {request.path for request in cluster.requests if request.method != "GET"} == {REVIEWS}


def test_a_cluster_that_does_not_answer_ends_the_checks(run: Run, cluster: FakeApi) -> None:
    cluster.refuse = lambda request: (503, {"kind": "Status", "code": 503, "message": "not now"}, {})
    code, found = outcomes(run)
    assert code == 1
    assert list(found) == ["cluster", "storage"]
    assert found["cluster"]["mend"] == "kubectl --context lab version"


def test_an_old_release_is_a_warning(run: Run, cluster: FakeApi) -> None:
    cluster.refuse = lambda request: answered(request, release="19+")
    code, found = outcomes(run)
    assert (code, found["cluster"]["outcome"]) == (0, "warning")


def test_a_definition_from_before_a_field_names_that_field(run: Run, cluster: FakeApi) -> None:
    definition = json.loads(json.dumps(cluster.objects[CRD]))
    fields = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del fields["suspend"]
    cluster.put(CRD, definition)
    code, found = outcomes(run)
    assert code == 1
    assert found["definition"]["says"] == "older than this elasticctl: spec.suspend missing"
    assert found["definition"]["mend"] == "elasticctl install --context lab"


def test_what_is_not_there(run: Run, cluster: FakeApi) -> None:
    for path in (CRD, DEPLOYMENT, "/api/v1/namespaces/ml"):
        cluster.remove(path)
    code, found = outcomes(run)
    assert code == 1
    assert {name for name, check in found.items() if check["outcome"] == "failed"} == {
        "definition",
        "controller",
        "namespace",
    }
    assert found["namespace"]["mend"] == "kubectl create namespace ml"


@pytest.mark.parametrize("spec", [{"holderIdentity": ""}, {"holderIdentity": "pod-a", "renewTime": to_rfc3339(1e9)}])
def test_a_controller_that_does_not_act(run: Run, cluster: FakeApi, spec: dict[str, str]) -> None:
    cluster.put(LEASE, {"metadata": {}, "spec": spec})
    code, found = outcomes(run)
    assert code == 1
    assert "none of them is the leader" in found["controller"]["says"]
    assert "kubectl logs -n elasticctl-system" in found["controller"]["mend"]


def test_the_controller_of_the_jobs_own_namespace_is_the_one_to_look_at(run: Run, cluster: FakeApi) -> None:
    for path in (DEPLOYMENT, LEASE):
        own = cluster.objects[path]
        cluster.put(path.replace("elasticctl-system", "ml"), {**own, "metadata": {}})
        cluster.remove(path)
    assert outcomes(run)[1]["controller"]["outcome"] == "ok"


def test_rights_are_listed_with_the_verbs_that_need_them(run: Run, cluster: FakeApi) -> None:
    cluster.refuse = lambda request: answered(request, denied=("delete pods",))
    code, found = outcomes(run)
    assert (code, found["rights"]["outcome"]) == (0, "warning")
    assert found["rights"]["says"] == "not allowed: delete pods (preempt)"
    cluster.refuse = lambda request: answered(request, denied=("create elasticjobs",))
    code, found = outcomes(run)
    assert (code, found["rights"]["outcome"]) == (1, "failed")


def test_missing_read_rights_are_no_failure(run: Run, cluster: FakeApi) -> None:
    hidden = ("/apis/apps/", "/apis/apiextensions", "/api/v1/nodes", "/api/v1/namespaces/ml")
    cluster.refuse = lambda request: (403, FORBIDDEN, {}) if request.path.startswith(hidden) else answered(request)
    code, found = outcomes(run)
    assert code == 0
    assert {name for name, check in found.items() if check["outcome"] == "skipped"} == {
        "controller",
        "namespace",
        "network",
        "nodes",
    }
    assert found["definition"]["outcome"] == "ok"


def test_a_context_without_storage_is_warned_of(run: Run, cluster: FakeApi) -> None:
    assert run("config", "set-context", "lab", "--storage", "").code == 0
    _, found = outcomes(run)
    assert found["storage"]["outcome"] == "warning"


def test_words_stay_in_their_column_and_a_fix_on_one_line() -> None:
    stream = io.StringIO()
    fix = "elasticctl config set-context prod --storage s3://bucket/jobs"
    show_check(console(stream, 50), Check("storage", CheckOutcome.WARNING, "none is set: every submit names one", fix))
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        "warning  storage     none is set: every submit",
        "                     names one",
        f"                     -> {fix}",
    ]


T4_SPOT = {"node.kubernetes.io/instance-type": "g4dn.12xlarge", "karpenter.sh/capacity-type": "spot"}
GKE_L4 = {"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-spot": "true"}


def plain_node(name: str, labels: dict[str, str] | None = None, gpus: int = 0, ready: str = "True") -> dict[str, Any]:
    offers = {"cpu": "8", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "status": {"allocatable": offers, "conditions": conditions},
    }


def checks(nodes: list[dict[str, Any]], provider: str) -> dict[str, Check]:
    return {check.name: check for check in check_nodes(nodes, provider)}


@pytest.mark.parametrize(
    ("labels", "name"),
    [(T4_SPOT, "t4"), (GKE_L4, "l4"), ({"node.kubernetes.io/instance-type": "m5.large"}, ""), ({}, "")],
)
def test_labels_name_the_gpu_type(labels: dict[str, str], name: str) -> None:
    assert gpu_name(plain_node("a", labels)) == name


def test_an_accelerator_that_the_catalog_does_not_know_keeps_its_name() -> None:
    assert gpu_name(plain_node("a", {"cloud.google.com/gke-accelerator": "nvidia-tomorrow"})) == "nvidia-tomorrow"


def test_gpus_are_counted_by_type() -> None:
    found = checks(
        [plain_node("a", T4_SPOT, 4), plain_node("b", T4_SPOT, 4), plain_node("c", {}, 2), plain_node("d")], "aws"
    )
    assert found["nodes"] == Check("nodes", CheckOutcome.OK, "4 nodes, all ready")
    assert (found["GPUs"].outcome, found["GPUs"].says) == (CheckOutcome.OK, "2 of an unknown type, 8 t4")
    assert (found["spot"].outcome, found["spot"].says) == (CheckOutcome.OK, "2 spot nodes")


def test_a_gpu_node_that_offers_none_lacks_the_device_plugin() -> None:
    found = checks([plain_node("a", GKE_L4), plain_node("b", GKE_L4, 1)], "gcp")["GPUs"]
    assert found.outcome is CheckOutcome.FAILED
    assert found.says == "1 node with GPUs offers none: a (no nvidia.com/gpu is allocatable)"
    assert "device plugin" in found.mend


def test_nodes_that_an_autoscaler_would_add_are_no_failure() -> None:
    found = checks([], "aws")
    assert [check.outcome for check in found.values()] == [CheckOutcome.WARNING] * 3
    assert "--on-demand" in found["spot"].mend


def test_nodes_that_are_not_ready_are_reported_and_do_not_count() -> None:
    found = checks([plain_node("a", T4_SPOT, 4, ready="Unknown"), plain_node("b")], "aws")
    assert (found["nodes"].outcome, found["nodes"].says) == (CheckOutcome.WARNING, "1 of 2 nodes ready")
    assert found["GPUs"].outcome is found["spot"].outcome is CheckOutcome.WARNING
    assert checks([plain_node("a", ready="False")], "aws")["nodes"].outcome is CheckOutcome.FAILED


def test_nothing_is_known_of_spot_nodes_on_any_other_cluster() -> None:
    assert checks([plain_node("a", T4_SPOT, 4)], "kubernetes")["spot"].outcome is CheckOutcome.SKIPPED
