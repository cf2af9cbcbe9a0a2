"""The manifests of workers: what TorchElastic's users had, our rendezvous, and nothing secret."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ANNOTATION_POOL, ElasticJob, Policy
from elasticctl_controller.core.goal.placement import ask_for_pool, avoid_nodes, prefer_node
from elasticctl_controller.core.manifests import TOKEN_FILE, build_pod, build_service, token_secret_name
from elasticctl_protocol.variables import OnNan
from tests.support.controller.samples import a_job
from tests.support.jobs import made

ENDPOINT = "http://elasticctl-controller.elasticctl:8080"
TEMPLATE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"labels": {"team": "vision", "job-name": "mine"}, "annotations": {"a": "b"}, "name": "x"},
    "spec": {
        "containers": [
            {"name": "sidecar", "image": "fluentd", "args": ["-q"]},
            {
                "name": "elasticjob-worker",
                "image": "trainer",
                "args": ["train.py", "--epochs=3"],
                "env": [{"name": "LEVEL", "value": "1"}, {"name": "ELASTICCTL_JOB", "value": "forged"}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
        ],
        "nodeSelector": {"gpu": "t4"},
        "restartPolicy": "Always",
        "volumes": [{"name": "data", "emptyDir": {}}],
    },
}


def built(job: ElasticJob) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The pod, its worker container, its sidecar."""
    pod = build_pod(job, 1, ENDPOINT)
    sidecar, worker = pod["spec"]["containers"]
    return pod, worker, sidecar


def test_a_pod_may_wish_for_a_node_beside_what_its_template_wishes():
    wish = {"weight": 5, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}
    affinity = {
        "podAffinity": {"x": 1},
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish], "y": 2},
    }
    pod = build_pod(a_job(template={"spec": {"containers": [{}], "affinity": affinity}}), 0, ENDPOINT)
    found = prefer_node(pod, "node-7")["spec"]["affinity"]
    assert (found["podAffinity"], found["nodeAffinity"]["y"]) == ({"x": 1}, 2)
    assert found["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == [
        wish,
        {
            "weight": 100,
            "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]},
        },
    ]
    assert pod["spec"]["affinity"] == affinity
    bare = prefer_node(build_pod(a_job(), 0, ENDPOINT), "node-7")
    assert list(bare["spec"]["affinity"]) == ["nodeAffinity"]


def test_the_pod_is_the_jobs_and_looks_like_torchelastics():
    pod, _, _ = built(a_job(template=TEMPLATE, namespace="ml"))
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert pod["metadata"] == {
        "name": "digits-worker-1",
        "namespace": "ml",
        "labels": {
            "team": "vision",
            "group-name": "elastic.pytorch.org",
            "job-name": "digits",
            "replica-type": "worker",
            "replica-index": "1",
        },
        "annotations": {"a": "b"},
        "ownerReferences": [
            {
                "apiVersion": "elastic.pytorch.org/v1alpha1",
                "kind": "ElasticJob",
                "name": "digits",
                "uid": "job-uid-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    spec = pod["spec"]
    assert (spec["restartPolicy"], spec["hostname"], spec["subdomain"]) == (
        "Never",
        "digits-worker-1",
        "digits-workers",
    )
    assert spec["nodeSelector"] == {"gpu": "t4"}
    read = Pod.from_manifest(pod)
    assert (read.name, read.index, read.owner_uid) == ("digits-worker-1", 1, "job-uid-1")


def test_the_worker_and_only_it_learns_who_it_is():
    pod, worker, sidecar = built(a_job(template=TEMPLATE, namespace="ml"))
    env = {item["name"]: item.get("value") or item["valueFrom"]["fieldRef"]["fieldPath"] for item in worker["env"]}
    assert env == {
        "ELASTICCTL_JOB": "digits",
        "ELASTICCTL_JOB_UID": "job-uid-1",
        "ELASTICCTL_NAMESPACE": "ml",
        "ELASTICCTL_WORKER": "digits-worker-1",
        "ELASTICCTL_WORKER_INDEX": "1",
        "ELASTICCTL_POD_UID": "metadata.uid",
        "ELASTICCTL_POD_IP": "status.podIP",
        "ELASTICCTL_RDZV_ENDPOINT": ENDPOINT,
        "ELASTICCTL_RDZV_TOKEN_FILE": TOKEN_FILE,
        "ELASTICCTL_MIN_WORKERS": "1",
        "ELASTICCTL_MAX_WORKERS": "4",
        "ELASTICCTL_GRACE_S": "30",
        "LEVEL": "1",
    }
    assert len(worker["env"]) == len(env)
    assert worker["args"] == ["train.py", "--epochs=3"]
    assert sidecar == TEMPLATE["spec"]["containers"][0]
    assert [mount["mountPath"] for mount in worker["volumeMounts"]] == ["/var/run/secrets/elasticctl", "/data"]
    assert (
        pod["spec"]["volumes"][0]["secret"]["secretName"] == token_secret_name(a_job()) == "digits-rendezvous-job-uid-"
    )


@pytest.mark.parametrize(
    ("grace_s", "policy", "name", "told"),
    [
        *((given, Policy(), "GRACE_S", told) for given, told in ((120, "120"), (0, "0"), (None, "30"), ("x", "30"))),
        (True, Policy(), "GRACE_S", "30"),
        (30, Policy(), "HANG_TIMEOUT_S", None),
        (30, Policy(hang_timeout_seconds=0), "HANG_TIMEOUT_S", "0"),
        (30, Policy(hang_timeout_seconds=90.5), "HANG_TIMEOUT_S", "90.5"),
        (30, Policy(on_nan=OnNan.WARN), "ON_NAN", None),
        (30, Policy(on_nan=OnNan.STOP), "ON_NAN", "stop"),
    ],
)
def test_a_worker_learns_its_policy(grace_s: object, policy: Policy, name: str, told: str | None):
    template = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "terminationGracePeriodSeconds": grace_s}}
    _, worker, _ = built(a_job(template=template, policy=policy))
    assert {item["name"]: item.get("value") for item in worker["env"]}.get(f"ELASTICCTL_{name}") == told


def test_a_job_with_its_own_rendezvous_gets_torchelastics_arguments_and_nothing_else():
    pod, worker, sidecar = built(a_job(template=TEMPLATE, uid="0123456789ab", rdzv_endpoint="etcd:2379", min=0))
    assert worker["args"] == [
        "--rdzv_backend=etcd",
        "--rdzv_endpoint=etcd:2379",
        "--rdzv_id=digits-01234567",
        "--nnodes=1:4",
        "train.py",
        "--epochs=3",
    ]
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("digits-worker-1", "digits-worker-1")
    assert worker["env"] == TEMPLATE["spec"]["containers"][1]["env"]
    assert pod["spec"]["volumes"] == TEMPLATE["spec"]["volumes"]
    assert sidecar == TEMPLATE["spec"]["containers"][0]


def test_without_a_container_of_that_name_the_first_is_the_worker():
    template = {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}
    first, second = build_pod(a_job(template=template), 0, ENDPOINT)["spec"]["containers"]
    assert "env" in first
    assert second == {"name": "b"}


def test_the_template_itself_is_not_touched():
    before = copy.deepcopy(TEMPLATE)
    built(a_job(template=TEMPLATE))
    assert before == TEMPLATE


def test_the_service_is_headless_and_selects_one_worker():
    service = build_service(a_job(), 2)
    assert service["metadata"]["name"] == "digits-worker-2"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == service["metadata"]["labels"]
    assert service["metadata"]["ownerReferences"][0]["uid"] == "job-uid-1"


def test_names_that_are_none_are_handed_on():
    container = {"name": "elasticjob-worker", "env": [{"name": ["a"]}], "volumeMounts": [{"name": {"b": 1}}]}
    template = {"spec": {"containers": [container], "volumes": [{"name": ["c"]}]}}
    spec = build_pod(a_job(template=template), 0, ENDPOINT)["spec"]
    assert spec["volumes"][1:] == template["spec"]["volumes"]
    assert spec["containers"][0]["env"][-1] == {"name": ["a"]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["spec", "metadata", "containers", "name", "env", "args", "labels"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(
    template=st.dictionaries(st.sampled_from(["spec", "metadata", "x"]), json_values),
    endpoint=st.sampled_from(["", "e"]),
)
def test_no_template_raises(template, endpoint):
    pod = build_pod(a_job(template=template, rdzv_endpoint=endpoint), 3, ENDPOINT)
    assert Pod.from_manifest(pod).index == 3


def test_a_pod_stays_away_from_nodes_that_are_taken_away_whatever_its_template_asks_for():
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, {}, term]}}
    affinity = {"nodeAffinity": required}
    template = {"spec": {"containers": [{}], "affinity": affinity}}
    for job, terms in ((a_job(template=template), 2), (a_job(), 1)):
        spec = avoid_nodes(build_pod(job, 0, ENDPOINT), ("node-1", "node-2"))["spec"]
        found = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert len(found) == terms
        for each in found:
            assert each["matchFields"] == [
                {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("node-1", "node-2")
            ], "the API server takes one value for each field"
            assert each["matchExpressions"][-1]["values"] == ["node-1", "node-2"]
        assert terms == 1 or found[0]["matchExpressions"][0] == term["matchExpressions"][0]


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_a_worker_asks_for_the_machines_of_its_pool(provider: str) -> None:
    """As one does that was submitted for them alone, whatever its template says; and for those of a zone."""
    pods = {spot: build_pod(made(provider, "t4", spot), 0, ENDPOINT) for spot in (True, False)}
    for spot, pool in ((True, "spot"), (False, "onDemand")):
        for template in pods.values():
            asked = ask_for_pool(template, pool)
            assert asked["spec"]["affinity"] == pods[spot]["spec"]["affinity"]
            assert asked["metadata"]["annotations"][ANNOTATION_POOL] == pool
    zoned = ask_for_pool(pods[True], "spot/zone-b")["spec"]["affinity"]["nodeAffinity"]
    for term in zoned["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]:
        assert term["matchExpressions"][-1] == {
            "key": "topology.kubernetes.io/zone",
            "operator": "In",
            "values": ["zone-b"],
        }
    plain = build_pod(a_job(), 0, ENDPOINT)
    assert ask_for_pool(plain, "spot")["spec"] == plain["spec"]


def terms_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """What a pod requires of nodes: label -> values, of each term."""
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    expressions = [term["matchExpressions"] for term in required["nodeSelectorTerms"]]
    assert all(
        one["operator"] == ("In" if one.get("values") else "DoesNotExist") for each in expressions for one in each
    )
    return [{one["key"]: one.get("values", []) for one in each} for each in expressions]


TYPE, ZONE = "node.kubernetes.io/instance-type", "topology.kubernetes.io/zone"


def test_what_a_pool_says_takes_the_place_of_what_the_template_says() -> None:
    pod = build_pod(made("aws", "t4", True), 0, ENDPOINT)
    for term in terms_of(ask_for_pool(pod, "onDemand:g5.xlarge/zone-b", insist=True)):
        assert (term[TYPE], term[ZONE]) == (["g5.xlarge"], ["zone-b"])
        assert ["SPOT"] not in term.values()
        assert ["spot"] not in term.values()
    spot = terms_of(ask_for_pool(pod, ":g5.xlarge", insist=True))
    assert [term[TYPE] for term in spot] == [["g5.xlarge"]] * 2
    assert {"eks.amazonaws.com/capacityType": ["SPOT"], TYPE: ["g5.xlarge"]} in spot, "of the template's capacity"
    gke = build_pod(made("gcp", "t4", True), 0, ENDPOINT)
    (other,) = terms_of(ask_for_pool(gke, "spot:g2-standard-8", insist=True))
    assert other["cloud.google.com/gke-accelerator"] == ["nvidia-l4"]
    (same,) = terms_of(ask_for_pool(gke, "spot:n1-standard-8", insist=True))
    assert same["cloud.google.com/gke-accelerator"] == ["nvidia-tesla-t4"], "that can be attached to any n1"


def test_a_capacity_that_the_template_does_not_name_is_asked_for_by_any_label_of_it() -> None:
    pod = build_pod(a_job(), 0, ENDPOINT)
    aws, karpenter, gke = "eks.amazonaws.com/capacityType", "karpenter.sh/capacity-type", "cloud.google.com/gke-spot"
    spot = terms_of(ask_for_pool(pod, "spot/zone-a", insist=True))
    assert spot == [
        {ZONE: ["zone-a"], gke: ["true"]},
        {ZONE: ["zone-a"], karpenter: ["spot"]},
        {ZONE: ["zone-a"], aws: ["SPOT"]},
    ]
    on_demand = terms_of(ask_for_pool(pod, "onDemand", insist=True))
    assert {karpenter: ["on-demand", "reserved"]} in on_demand
    assert {aws: [], karpenter: [], gke: []} in on_demand, "GKE marks spot machines only"
    assert terms_of(ask_for_pool(pod, "/zone-a", insist=True)) == [{ZONE: ["zone-a"]}]
    selected = {**pod, "spec": {**pod["spec"], "nodeSelector": {karpenter: "spot", ZONE: "zone-b", "mine": "1"}}}
    asked = ask_for_pool(selected, "onDemand/zone-a", insist=True)
    assert asked["spec"]["nodeSelector"] == {karpenter: "on-demand", ZONE: "zone-a", "mine": "1"}
    assert "affinity" not in asked["spec"]
