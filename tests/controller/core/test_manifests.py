"""What the controller creates for a job: pods, with safe defaults, and what the job owns besides them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticctl.api.objects import selects
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ANNOTATION_POOL, ElasticJob, Policy
from elasticctl.api.status import JobStatus, TokenStatus
from elasticctl_controller.core.goal.placement import ask_for_pool, avoid_nodes, prefer_node
from elasticctl_controller.core.group.worker_tokens import derive_peer_key, derive_token
from elasticctl_controller.core.manifests import (
    TOKEN_FILE,
    build_budget,
    build_group_service,
    build_network_policy,
    build_pod,
    build_service,
    build_token_secret,
    harden,
    token_secret_name,
)
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


def test_a_preferred_node_is_added_to_the_preferences_of_the_template():
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
    ("grace_s", "policy", "name", "value"),
    [
        *((given, Policy(), "GRACE_S", value) for given, value in ((120, "120"), (0, "0"), (None, "30"), ("x", "30"))),
        (True, Policy(), "GRACE_S", "30"),
        (30, Policy(), "HANG_TIMEOUT_S", None),
        (30, Policy(hang_timeout_seconds=0), "HANG_TIMEOUT_S", "0"),
        (30, Policy(hang_timeout_seconds=90.5), "HANG_TIMEOUT_S", "90.5"),
        (30, Policy(on_nan=OnNan.WARN), "ON_NAN", None),
        (30, Policy(on_nan=OnNan.STOP), "ON_NAN", "stop"),
    ],
)
def test_a_worker_learns_its_policy(grace_s: object, policy: Policy, name: str, value: str | None):
    template = {**TEMPLATE, "spec": {**TEMPLATE["spec"], "terminationGracePeriodSeconds": grace_s}}
    _, worker, _ = built(a_job(template=template, policy=policy))
    assert {item["name"]: item.get("value") for item in worker["env"]}.get(f"ELASTICCTL_{name}") == value


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


def test_a_pod_avoids_nodes_that_are_taken_away_with_any_template():
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
    """As one does that was submitted for them alone, with any template; and for machines of a zone."""
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


def test_a_pool_overrides_the_template() -> None:
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


@pytest.mark.parametrize(("low", "desired", "kept"), [(1, 3, 1), (2, 3, 2), (3, 3, 2), (1, 1, 0), (0, 0, 0)])
def test_a_drain_leaves_the_minimum_and_is_never_blocked_forever(low: int, desired: int, kept: int) -> None:
    budget = build_budget(a_job(min=low, desired=desired))
    assert budget["spec"]["minAvailable"] == kept
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "a probe that fails blocks no drain"
    assert budget["spec"]["selector"] == {"matchLabels": {"group-name": "elastic.pytorch.org", "job-name": "digits"}}
    assert budget["metadata"]["ownerReferences"][0]["uid"] == "job-uid-1"


def test_workers_are_found_by_name_through_one_service_of_the_job() -> None:
    service, pod = build_group_service(a_job()), build_pod(a_job(), 2, "http://x")
    assert service["metadata"]["name"] == pod["spec"]["subdomain"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["metadata"]["ownerReferences"][0]["uid"] == "job-uid-1"


def test_only_the_jobs_own_workers_reach_its_workers() -> None:
    """The job's labels override those of its template, in what is protected and in who is let in."""
    mine, other = (
        a_job(name=name, template={"metadata": {"labels": {"job-name": "mine"}}}) for name in ("mine", "other")
    )
    policy = build_network_policy(mine)
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    assert set(peer) == {"podSelector"}  # and so of this namespace
    labels = {job.name: build_pod(job, 0, "http://x")["metadata"]["labels"] for job in (mine, other)}
    for selector in (policy["spec"]["podSelector"], peer["podSelector"]):
        assert selects(selector, labels["mine"])
        assert not selects(selector, labels["other"])
        assert not selects(selector, {})
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["metadata"]["ownerReferences"][0]["uid"] == mine.uid


@pytest.mark.parametrize("token", [None, TokenStatus(3)])
def test_the_pod_mounts_the_secret_that_is_made(token: TokenStatus | None) -> None:
    """A job whose workers were created by an older controller continues with what they have."""
    job = a_job(template={"spec": {"containers": [{"name": "elasticjob-worker"}]}}, status=JobStatus(token=token))
    secret = build_token_secret(job, "t", "p")
    (volume,) = build_pod(job, 0, "http://x")["spec"]["volumes"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert [item["key"] for item in volume["secret"]["items"]] == list(secret["stringData"])


def test_tokens_are_of_one_job_and_one_key() -> None:
    pairs = [(key, uid) for key in (b"a" * 32, b"b" * 32) for uid in ("one", "two")]
    made = {derive_token(key, uid, number) for key, uid in pairs for number in range(3)}
    assert len(made | {derive_peer_key(key, uid) for key, uid in pairs}) == 16
    assert derive_token(b"a" * 32, "one") == derive_token(b"a" * 32, "one")


def hardened(worker: dict[str, Any] | None = None, **spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's spec and its worker."""
    containers = [{"name": "elasticjob-worker", "image": "trainer", **(worker or {})}]
    pod = harden({"metadata": {"name": "p"}, "spec": {"containers": containers, **spec}})
    return pod["spec"], pod["spec"]["containers"][0]


def test_a_bare_pod_fits_the_restricted_profile() -> None:
    spec, worker = hardened()
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert worker["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert spec["automountServiceAccountToken"] is False


def test_there_is_room_to_write_and_to_share() -> None:
    spec, worker = hardened({"resources": {"limits": {"memory": "8Gi"}}})
    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    assert volumes[mounts["/tmp"]] == {}
    assert volumes[mounts["/dev/shm"]] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {item["name"]: item["value"] for item in worker["env"]} == {"HOME": "/tmp", "USER": "elasticjob"}


def test_lost_nodes_are_left_soon() -> None:
    spec, _ = hardened(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}])
    assert [(item["key"], item.get("tolerationSeconds")) for item in spec["tolerations"]] == [
        ("nvidia.com/gpu", None),
        ("node.kubernetes.io/not-ready", 10),
        ("node.kubernetes.io/unreachable", 10),
    ]


def test_a_lost_answer_of_the_name_server_delays_no_rank() -> None:
    spec, _ = hardened()
    assert spec["dnsConfig"] == {"options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "3"}]}
    assert hardened(dnsConfig={})[0]["dnsConfig"] == {}


def test_settings_of_the_template_stay() -> None:
    own = {"readOnlyRootFilesystem": False, "privileged": True}
    spec, worker = hardened(
        {
            "securityContext": own,
            "env": [{"name": "HOME", "value": "/home/me"}],
            "volumeMounts": [{"name": "mine", "mountPath": "/tmp/"}, {"name": "shm", "mountPath": "/dev/shm"}],
        },
        securityContext={"runAsUser": 0, "seccompProfile": {"type": "Unconfined"}},
        automountServiceAccountToken=True,
        tolerations=[{"operator": "Exists"}],
        volumes=[{"name": "mine", "emptyDir": {}}],
    )
    assert spec["securityContext"] == {"runAsUser": 0, "seccompProfile": {"type": "Unconfined"}}
    assert worker["securityContext"] == own
    assert worker["env"] == [{"name": "HOME", "value": "/home/me"}, {"name": "USER", "value": "elasticjob"}]
    assert [mount["name"] for mount in worker["volumeMounts"]] == ["mine", "shm"]
    assert (spec["automountServiceAccountToken"], spec["tolerations"]) == (True, [{"operator": "Exists"}])
    assert spec["volumes"] == [{"name": "mine", "emptyDir": {}}]


def test_a_user_chosen_by_a_container_is_chosen() -> None:
    spec, worker = hardened({"securityContext": {"runAsUser": 5}})
    assert "runAsUser" not in spec["securityContext"]
    assert worker["securityContext"]["runAsUser"] == 5


def test_a_user_chosen_by_one_container_leaves_the_others_theirs() -> None:
    images_user = {"name": "images-user", "securityContext": {"runAsNonRoot": True}}
    root = {"name": "root", "securityContext": {"runAsUser": 0}}
    pod = harden(
        {
            "spec": {
                "containers": [{"name": "elasticjob-worker", "securityContext": {"runAsGroup": 7}}, images_user],
                "initContainers": [{"name": "first"}, root],
            }
        }
    )
    keys = ("runAsNonRoot", "runAsUser", "runAsGroup")
    users = {
        item["name"]: tuple(item["securityContext"].get(key) for key in keys)
        for item in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]
    }
    assert users == {
        "elasticjob-worker": (True, 1000, 7),
        "images-user": (True, None, None),
        "first": (True, 1000, 1000),
        "root": (None, 0, None),
    }
    assert pod["spec"]["securityContext"] == {"fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    assert harden(pod) == pod


def test_a_group_chosen_for_the_pod_applies_to_all_containers() -> None:
    sidecar = {"name": "sidecar", "securityContext": {"runAsUser": 65534}}
    pod = harden(
        {
            "spec": {
                "containers": [{"name": "elasticjob-worker"}, sidecar],
                "securityContext": {"runAsGroup": 7, "fsGroup": 8},
            }
        }
    )
    assert (pod["spec"]["securityContext"]["runAsGroup"], pod["spec"]["securityContext"]["fsGroup"]) == (7, 8)
    worker = pod["spec"]["containers"][0]["securityContext"]
    assert (worker["runAsUser"], worker.get("runAsGroup")) == (1000, None)


def test_helpers_are_held_to_it_too() -> None:
    sidecar = {"name": "sidecar"}
    pod = harden({"spec": {"containers": [sidecar, {"name": "elasticjob-worker"}], "initContainers": [{"name": "i"}]}})
    first, worker = pod["spec"]["containers"]
    assert all(
        item["securityContext"]["readOnlyRootFilesystem"] for item in [first, worker, *pod["spec"]["initContainers"]]
    )
    assert {mount["mountPath"] for mount in first["volumeMounts"]} == {"/tmp"}
    assert {mount["mountPath"] for mount in worker["volumeMounts"]} == {"/tmp", "/dev/shm"}
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["elasticctl-scratch", "elasticctl-shm"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "spec",
                    "containers",
                    "env",
                    "name",
                    "tolerations",
                    "volumes",
                    "key",
                    "securityContext",
                    "runAsUser",
                    "resources",
                    "limits",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {
            "spec": st.dictionaries(
                st.sampled_from(["containers", "initContainers", "tolerations", "volumes", "securityContext"]), JSON
            )
        }
    )
)
@example({"spec": {"tolerations": [{"key": []}], "containers": [{"env": [{"name": {}}]}]}})
@settings(max_examples=60)
def test_a_template_of_any_content_is_taken_and_left_unchanged(pod: dict[str, Any]) -> None:
    before = copy.deepcopy(pod)
    once = harden(pod)
    assert pod == before
    assert harden(once) == once
