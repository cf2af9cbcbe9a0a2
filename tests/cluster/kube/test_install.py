"""Installing, upgrading and uninstalling, over real HTTP; that a real cluster takes it is shown in tests/cluster."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import ClusterError
from elasticctl.api.yamltext import parse_yaml
from elasticctl.cluster.kube import install
from elasticctl.cluster.kube.install import Installer, path_of, pod_troubles, rollout
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection
from elasticctl.kubeapi.features import ALL, Feature
from tests.support.cli import Run
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job
from tests.support.kube import WriteKubeconfig
from tests.support.waiting import wait_until

KEY = "/api/v1/namespaces/elasticctl-system/secrets/elasticctl-rendezvous-key"
DEPLOYMENT = "/apis/apps/v1/namespaces/elasticctl-system/deployments/elasticctl-controller"
DASHBOARD = "/apis/apps/v1/namespaces/elasticctl-system/deployments/elasticctl-dashboard"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/elasticctl-controller"
JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs"
READY = {"observedGeneration": 9, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}


@pytest.fixture
def lab(run: Run, private_home: Path, kubeconfig: WriteKubeconfig, api: FakeApi) -> Run:
    """`lab(...)` is `elasticctl install --context lab ...`."""
    kubeconfig(api.url)
    assert run("config", "import").code == 0
    return lambda *words: run("install", "--context", "lab", *words)


def installed(lab: Run) -> None:
    assert lab("--image", "r.example/c:1", "--no-wait").code == 0


def test_objects_are_applied_in_order_and_again_without_changes(lab: Run, api: FakeApi) -> None:
    done = lab("--image", "r.example/c:1", "--no-wait")
    assert (done.code, done.out) == (0, "")
    lines = done.err.splitlines()
    assert lines[0] == "CustomResourceDefinition elasticjobs.elastic.pytorch.org: created"
    assert lines[1] == "Namespace elasticctl-system: created"
    assert lines[-2:] == ["Secret elasticctl-rendezvous-key: created", "Deployment elasticctl-controller: created"]
    key = api.objects[KEY]["stringData"]["key"]
    assert len(bytes.fromhex(key)) == 32
    patches = [request for request in api.requests if request.method == "PATCH"]
    assert all(request.params == {"fieldManager": "elasticctl", "force": "true"} for request in patches)
    again = lab("--no-wait").err.splitlines()
    assert again.pop(-2) == "Secret elasticctl-rendezvous-key: kept"
    assert {line.rpartition(": ")[2] for line in again} == {"unchanged"}
    assert installation.image_of(api.objects[DEPLOYMENT]) == "r.example/c:1"
    assert "Deployment elasticctl-controller: updated" in lab("--image", "r.example/c:2", "--no-wait").err
    assert api.objects[KEY]["stringData"]["key"] == key


def test_the_first_time_needs_an_image(lab: Run, api: FakeApi) -> None:
    done = lab()
    assert (done.code, done.err.startswith("error: --image is needed the first time")) == (2, True)
    assert api.objects == {}


def test_a_dry_run_prints_what_kubectl_could_apply(lab: Run, api: FakeApi) -> None:
    done = lab("--dry-run", "--image", "r.example/c:1", "--replicas", "3", "-n", "ml-system")
    assert done.code == 0
    assert api.requests == []
    found = [parse_yaml(part, "").data for part in done.out.split("\n---\n")]
    by_kind = {item["kind"]: item for item in found}
    assert list(by_kind)[:2] == ["CustomResourceDefinition", "Namespace"]
    spec = by_kind["Deployment"]["spec"]
    assert (spec["replicas"], installation.image_of(by_kind["Deployment"])) == (3, "r.example/c:1")
    args = spec["template"]["spec"]["containers"][0]["args"]
    assert "--rendezvous-url=http://elasticctl-rendezvous.ml-system.svc:7777" in args
    assert by_kind["ClusterRoleBinding"]["subjects"][0]["namespace"] == "ml-system"
    assert "elasticctl-system" not in done.out


def test_an_image_that_is_named_by_a_tag_is_pointed_out(
    lab: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("elasticctl.cli.verbs.set_up.install.hint", said.append)
    assert lab("--image", "r.example/c:1", "--no-wait").code == 0
    assert [line for line in said if "r.example/c:1 is named by a tag" in line]
    said.clear()
    by_digest = f"r.example/c@sha256:{'0' * 64}"
    assert lab("--image", by_digest, "--no-wait").code == 0
    assert installation.image_of(api.objects[DEPLOYMENT]) == by_digest
    assert not [line for line in said if "tag" in line]


def test_this_machine_needs_none(run: Run, private_home: Path) -> None:
    done = run("install")
    assert (done.code, done.err[:46]) == (2, "error: the local cluster needs no installation")


def test_install_waits_until_all_replicas_run_the_new_state(
    lab: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "POLL_S", 0.02)

    def roll_out() -> None:
        wait_until(lambda: DEPLOYMENT in api.objects)
        api.put(DEPLOYMENT, {**api.objects[DEPLOYMENT], "status": {**READY, "availableReplicas": 1}})
        wait_until(lambda: len([r for r in api.requests if r.path == DEPLOYMENT]) > 8)
        api.put(DEPLOYMENT, {**api.objects[DEPLOYMENT], "status": READY})

    thread = threading.Thread(target=roll_out)
    thread.start()
    done = lab("--image", "i")
    thread.join()
    assert done.code == 0
    assert "waiting: 1 of 2 replicas are ready" in done.err
    assert done.err.endswith("the controller runs\n")


def test_the_reason_why_it_does_not_run_is_reported(connection: Connection, api: FakeApi) -> None:
    said: list[str] = []
    installer = Installer(connection, said.append)
    installer.apply(installation.manifests(image="none"))
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling\nimage"}
    pod = {"metadata": {"name": "c-1", "labels": {installation.LABEL: installation.LABEL_VALUE}}}
    pod["status"] = {"containerStatuses": [{"state": {"waiting": waiting}}]}  # type: ignore[dict-item]
    api.put("/api/v1/namespaces/elasticctl-system/pods/c-1", pod)
    with pytest.raises(ClusterError, match="not running after 0 s: c-1: ImagePullBackOff: Back-off pulling image"):
        installer.await_available(installation.NAMESPACE, 0.0)


def test_a_cluster_without_admission_policies_gets_none(lab: Run, api: FakeApi) -> None:
    known = "/apis/admissionregistration.k8s.io/"
    api.refuse = lambda r: (404, b"404 page not found", {}) if r.path.startswith(known) else None
    done = lab("--image", "i", "--no-wait")
    assert done.code == 0
    assert "ValidatingAdmissionPolicy elasticctl-limits: left out, as this cluster has no admission" in done.err
    assert DEPLOYMENT in api.objects


def test_uninstalling_refuses_while_jobs_live(lab: Run, api: FakeApi) -> None:
    installed(lab)
    for name, phase in (("lives", "Running"), ("over", "Succeeded")):
        api.put(f"{JOBS}/{name}", {**shell_job(name, "true"), "status": {"phase": phase}})
    refused = lab("--uninstall", "--yes")
    assert (refused.code, refused.out) == (3, "")
    assert refused.err == "error: 1 job would end: default/lives. FIX: cancel them first, or add --force\n"
    asked = lab("--uninstall", "--force")
    assert (asked.code, asked.err.endswith("add --yes to confirm\n")) == (2, True)
    shown = lab("--uninstall", "--dry-run")
    assert shown.code == 0
    assert "CustomResourceDefinition elasticjobs.elastic.pytorch.org\n" in shown.out
    assert "with them 2 jobs, 1 of them not finished; checkpoints stay" in shown.err
    assert DEPLOYMENT in api.objects
    done = lab("--uninstall", "--force", "--yes")
    assert done.code == 0
    assert {path for path in api.objects if not path.startswith(JOBS)} == set()
    deletions = [request.path for request in api.requests if request.method == "DELETE"]
    assert deletions[0].endswith("customresourcedefinitions/elasticjobs.elastic.pytorch.org")
    assert deletions[-1] == "/api/v1/namespaces/elasticctl-system"
    assert lab("--uninstall", "--yes").err == "elasticctl is not installed there\n"


def test_a_namespace_that_was_there_before_stays_as_it_is(lab: Run, api: FakeApi) -> None:
    path = "/api/v1/namespaces/shared"
    before = api.put(path, {"metadata": {"name": "shared"}})["metadata"]["resourceVersion"]
    assert "Namespace shared: left as it is" in lab("--image", "i", "--no-wait", "-n", "shared").err
    api.put(LEASE.format("shared"), installation.lease("shared"))  # as the controller makes it
    assert lab("--uninstall", "--yes", "-n", "shared").code == 0
    assert api.objects[path]["metadata"]["resourceVersion"] == before
    assert list(api.objects) == [path]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "the cluster has not handled it yet"),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 1}, "1 of 2 replicas are up to date"),
        ({**READY, "replicas": 3}, "2 of 2 replicas are up to date"),
        ({**READY, "availableReplicas": 0}, "0 of 2 replicas are ready"),
        (READY, ""),
    ],
)
def test_a_rollout(status: dict[str, Any], said: str) -> None:
    assert rollout({"metadata": {"generation": 2}, "spec": {"replicas": 2}, "status": status}) == said


def test_troubles_of_a_pod() -> None:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]
    ended = {"state": {"running": {}}, "lastState": {"terminated": {"reason": "Error"}}}
    found = pod_troubles({"status": {"conditions": conditions, "containerStatuses": [ended]}})
    assert list(found) == ["Unschedulable: 0/2 nodes", "Error"]
    assert list(pod_troubles({})) == []


def test_sharing_is_unchanged_by_default(lab: Run, api: FakeApi) -> None:
    def sharing() -> list[str]:
        return installation.sharing_of(api.objects[DEPLOYMENT])

    installed(lab)
    assert sharing() == []
    assert lab("--sharing", "--capacity", "t4=64", "--capacity", "a100=8", "--no-wait").code == 0
    assert sharing() == ["--sharing", "--capacity=a100=8", "--capacity=t4=64"]
    assert lab("--no-wait").code == 0
    assert len(sharing()) == 3
    assert lab("--sharing", "--no-wait").code == 0
    assert len(sharing()) == 3, "what was said of capacity stands"
    assert lab("--capacity", "t4=0", "--capacity", "l4=2", "--no-wait").code == 0
    assert sharing() == ["--sharing", "--capacity=a100=8", "--capacity=l4=2"]
    assert lab("--no-sharing", "--no-wait").code == 0
    assert sharing() == []


def test_the_hosts_of_webhooks_are_unchanged_by_default(lab: Run, api: FakeApi) -> None:
    def hosts() -> list[str]:
        return installation.webhooks_of(api.objects[DEPLOYMENT])

    installed(lab)
    assert hosts() == []
    assert lab("--webhook-to", "*.slack.com", "--webhook-to", "10.1.0.0/16", "--no-wait").code == 0
    assert lab("--sharing", "--no-wait").code == 0
    assert hosts() == ["--webhook-to=*.slack.com", "--webhook-to=10.1.0.0/16"]
    assert lab("--webhook-to", "any", "--no-wait").code == 0
    assert hosts() == []
    assert lab("--webhook-to", "10.0.0.0/33", "--no-wait").code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--capacity", "t4=4"), "error: --capacity is for a cluster that shares. FIX: add --sharing\n"),
        (
            ("--no-sharing", "--capacity", "t4=4"),
            "error: --capacity is for a cluster that shares. FIX: add --sharing\n",
        ),
        (("--sharing", "--capacity", "t5=4"), "error: --capacity t5=4: KIND=N is needed"),
        (("--sharing", "--capacity", "t4=many"), "error: --capacity t4=many: KIND=N is needed"),
    ],
)
def test_capacities_are_checked(lab: Run, words: tuple[str, ...], said: str) -> None:
    done = lab("--image", "i", "--no-wait", *words)
    assert (done.code, done.err.startswith(said)) == (2, True), done.err


def test_every_object_has_a_place_and_our_label() -> None:
    for item in installation.manifests():
        assert path_of(item).endswith(item["metadata"]["name"])
        if item["kind"] != "CustomResourceDefinition":
            assert item["metadata"]["labels"][installation.LABEL] == installation.LABEL_VALUE


@pytest.mark.parametrize(
    "objects",
    [installation.manifests(), installation.dashboard_manifests("elasticctl-system")],
    ids=["controller", "dashboard"],
)
def test_the_pods_fit_the_restricted_profile(objects: list[installation.Manifest]) -> None:
    spec = next(item for item in objects if item["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_the_controllers_options_are_those_of_its_command(tmp_path: Path) -> None:
    from elasticctl_controller.kube.flags import parse_flags as parse_flags

    spec = next(item for item in installation.manifests() if item["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    flags = parse_flags([*container["args"], *installation.sharing_flags({"t4": 8})])
    assert (flags.sharing, flags.capacity) == (True, {"t4": 8})
    assert parse_flags(container["args"]).sharing is False
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"rendezvous": flags.rendezvous_port, "metrics": flags.metrics_port, "health": flags.health_port}
    assert str(flags.token_key_file.parent) == container["volumeMounts"][0]["mountPath"]


def roles(api: FakeApi) -> list[str]:
    """The roles that are there for features, and where."""
    start = "/apis/rbac.authorization.k8s.io/v1/"
    found = (path.removeprefix(start) for path in api.objects if path.startswith(start) and "bindings" not in path)
    return sorted(path for path in found if "/elasticctl-controller-" in path)


def test_a_feature_comes_and_goes_with_its_rights(lab: Run, api: FakeApi) -> None:
    installed(lab)
    base = ["clusterroles/elasticctl-controller-limits", "clusterroles/elasticctl-controller-nodes"]
    assert roles(api) == base
    assert lab("--feature", "kueue", "--feature", "notifications", "--no-wait").code == 0
    assert roles(api) == sorted(
        [*base, *(f"clusterroles/elasticctl-controller-{f}" for f in ("kueue", "notifications"))]
    )
    assert lab("--no-wait").code == 0
    assert len(roles(api)) == 4, "what was asked for stays"
    done = lab("--no-feature", "kueue", "--no-feature", "notifications", "--no-wait")
    assert "ClusterRole elasticctl-controller-kueue: removed" in done.err
    assert roles(api) == base
    assert not [path for path in api.objects if "kueue" in path]
    retired = lab("--feature", "pod-groups", "--no-wait")
    assert (retired.code, "no longer supported. FIX: use Kueue" in retired.err) == (2, True)
    refused = lab("--feature", "cue", "--no-wait")
    assert (refused.code, 'there is no feature "cue". FIX: name one of nodes,' in refused.err) == (2, True)


def test_an_installation_from_before_features_keeps_them_all(lab: Run, api: FakeApi) -> None:
    installed(lab)
    deployment = api.objects[DEPLOYMENT]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [arg for arg in container["args"] if not arg.startswith("--features=")]
    assert lab("--no-wait").code == 0
    assert installation.features_of(api.objects[DEPLOYMENT]) == ALL
    assert len(roles(api)) == len(Feature)


def test_an_installation_for_one_namespace_leaves_the_rest_of_the_cluster_alone(lab: Run, api: FakeApi) -> None:
    api.put("/api/v1/namespaces/ml", {"metadata": {"name": "ml"}})
    assert lab("--namespace-only", "-n", "ml", "--image", "i", "--no-wait", "--feature", "gangs").code == 0
    assert roles(api) == ["namespaces/ml/roles/elasticctl-controller-gangs"]
    assert "/apis/rbac.authorization.k8s.io/v1/clusterroles/elasticctl-controller" not in api.objects
    assert "/api/v1/namespaces/elasticctl-system" not in api.objects
    again = lab("--namespace-only", "-n", "ml", "--no-wait")
    assert {line.rpartition(": ")[2] for line in again.err.splitlines()} == {"unchanged", "kept"}
    api.put("/apis/elastic.pytorch.org/v1alpha1/namespaces/ml/elasticjobs/lives", shell_job("lives", "true"))
    refused = lab("--namespace-only", "-n", "ml", "--uninstall", "--yes")
    assert "1 job would be left without a controller: " in refused.err
    done = lab("--namespace-only", "-n", "ml", "--uninstall", "--yes", "--force")
    assert (done.code, "jobs and their definition stay" in done.err) == (0, True)
    left = [path for path in api.objects if "/namespaces/ml/" in path]
    assert left == ["/apis/elastic.pytorch.org/v1alpha1/namespaces/ml/elasticjobs/lives"]
    assert [path for path in api.objects if "customresourcedefinitions" in path]


def forbid(api: FakeApi, *parts: str) -> None:
    """Refuse all requests whose path begins with one of these."""
    said = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": 'User "jo" cannot do it'}
    api.refuse = lambda r: (403, said, {}) if r.path.startswith(parts) else None


def test_cluster_scoped_objects_are_left_to_an_administrator(lab: Run, api: FakeApi) -> None:
    """That of a namespace continues without the right if the definition exists, and fails with a message if not."""
    words = ("--namespace-only", "-n", "ml", "--image", "i", "--no-wait", "--feature", "nodes")
    cluster = ("/apis/apiextensions", "/apis/admissionregistration", "/apis/rbac.authorization.k8s.io/v1/clusterrole")
    forbid(api, *cluster, "/apis/apps/v1/deployments")
    refused = lab(*words)
    assert refused.code != 0
    assert "FIX: have an administrator of the cluster run this command once" in refused.err
    assert [path for path in api.objects if "/namespaces/ml/" in path] == []
    api.refuse = lambda request: None
    assert lab(*words).code == 0
    for path in [path for path in api.objects if "/namespaces/ml/" in path]:
        api.remove(path)
    forbid(api, *cluster, "/apis/apps/v1/deployments")
    served = [{"name": plural} for plural in ("elasticjobs", "elasticquotas")]
    api.put("/apis/elastic.pytorch.org/v1alpha1", {"resources": served})
    done = lab(*words)
    assert done.code == 0, done.err
    assert "ClusterRole elasticctl-controller-nodes-ml: left to an administrator of the cluster" in done.err
    assert "Next: have an administrator of the cluster run this command once" in done.err
    assert "/apis/apps/v1/namespaces/ml/deployments/elasticctl-controller" in api.objects


def test_two_controllers_never_run_the_same_jobs(lab: Run, api: FakeApi) -> None:
    ml = ("--namespace-only", "-n", "ml", "--image", "i", "--no-wait")
    assert lab(*ml).code == 0
    assert lab("--namespace-only", "-n", "vision", "--image", "i", "--no-wait").code == 0
    for words, said in (
        (("--image", "i", "--no-wait"), "a controller in ml already runs the jobs that this one would run"),
        (("--uninstall", "--yes"), "a controller in ml already runs the jobs that this one would run"),
        (("-n", "ml", "--no-wait"), "the controller in ml is for ml alone. FIX: add --namespace-only"),
        (("-n", "ml", "--uninstall", "--yes"), "the controller in ml is for ml alone. FIX: add --namespace-only"),
    ):
        refused = lab(*words)
        assert (refused.code, said in refused.err) == (3, True), refused.err
    for namespace in ("ml", "vision"):
        assert lab("--namespace-only", "-n", namespace, "--uninstall", "--yes").code == 0
    installed(lab)
    assert "a controller in elasticctl-system already runs the jobs that this one would run" in lab(*ml).err


def test_cluster_wide_options_are_refused_for_one_namespace(lab: Run) -> None:
    one = ("--namespace-only", "-n", "ml", "--image", "i", "--no-wait")
    for words, said in (
        (("--sharing",), "--sharing divides a whole cluster"),
        (("--feature", "limits"), "FIX: add --feature nodes"),
    ):
        refused = lab(*one, *words)
        assert (refused.code, said in refused.err) == (2, True), refused.err


def test_the_dashboard_is_installed_and_removed_on_request(lab: Run, api: FakeApi) -> None:
    installed(lab)
    assert DASHBOARD not in api.objects
    done = lab("--dashboard", "r.example/e:1", "--dashboard-changes", "--dashboard-proxy", "--no-wait")
    assert done.code == 0
    (container,) = api.objects[DASHBOARD]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "r.example/e:1"
    assert container["args"] == ["--in-cluster", "--port=8080", "--allow-changes", "--behind-proxy"]
    assert installation.image_of(api.objects[DEPLOYMENT]) == "r.example/c:1"
    assert lab("--no-wait").code == 0
    assert DASHBOARD in api.objects, "an upgrade of the controller leaves it as it is"
    assert lab("--dashboard", "r.example/e:2", "--no-wait").code == 0
    (container,) = api.objects[DASHBOARD]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--in-cluster", "--port=8080"], "read-only, unless it is asked for"
    assert "Deployment elasticctl-dashboard: removed" in lab("--no-dashboard", "--no-wait").err
    assert not [path for path in api.objects if "elasticctl-dashboard" in path]
    assert DEPLOYMENT in api.objects


def test_the_dashboard_goes_with_the_rest(lab: Run, api: FakeApi) -> None:
    assert lab("--image", "i", "--dashboard", "e", "--no-wait").code == 0
    assert lab("--uninstall", "--yes").code == 0
    assert api.objects == {}


@pytest.mark.parametrize("words", [("--dashboard-changes",), ("--dashboard", "e", "--no-dashboard")])
def test_options_of_the_dashboard_that_make_no_sense(lab: Run, words: tuple[str, ...]) -> None:
    assert lab("--image", "i", "--no-wait", *words).code == 2


def test_the_dashboard_has_no_rights_and_no_token() -> None:
    objects = installation.dashboard_manifests("ml")
    assert {item["kind"] for item in objects} == {"ServiceAccount", "Service", "NetworkPolicy", "Deployment"}
    assert {item["metadata"]["namespace"] for item in objects} == {"ml"}
    account, pod = objects[0], objects[-1]["spec"]["template"]["spec"]
    assert (account["automountServiceAccountToken"], pod["automountServiceAccountToken"]) == (False, False)
    assert [next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]] == ["configMap", "emptyDir"]
    bound = {subject["name"] for item in installation.manifests(features=ALL) for subject in item.get("subjects", ())}
    assert installation.DASHBOARD not in bound


def test_the_dashboards_pod_does_not_count_as_a_controller() -> None:
    """The rendezvous, the budget and the policy of the controller choose pods by label."""
    labels = installation.dashboard_manifests("ml")[-1]["spec"]["template"]["metadata"]["labels"]
    assert labels[installation.LABEL] != installation.LABEL_VALUE
