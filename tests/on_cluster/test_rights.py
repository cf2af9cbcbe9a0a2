"""The controller's roles against the audit log of a real API server: nothing is refused, and no right is for nothing.

Each part of what it does is brought about until the log has all that the part's role allows: also what is rare, such as
removing what a job of the same name has left.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, ElasticctlError, ForbiddenError, NotFoundError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import ANNOTATION_NOTIFY, API_VERSION, LABEL_JOB, QUEUE_LABEL, ElasticJob
from elasticctl.api.status import ConditionType
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.cluster.kube.install import Installer, path_of
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from elasticctl.kubeapi.features import Feature
from elasticctl.kubeapi.installation import OF_THE_CLUSTER, is_for_all
from elasticctl_controller.core.manifests import build_token_secret
from tests.on_cluster.audit import Audit, need_audit_log
from tests.on_cluster.commands import kubectl
from tests.on_cluster.installing import manifests
from tests.on_cluster.kueue import GROUP as KUEUE
from tests.on_cluster.kueue import kueue, set_quota
from tests.on_cluster.patient import PatientConnection
from tests.on_cluster.trainer import IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.controller.rights import Right, bound_roles, leader_role, rights_of
from tests.support.jobs import shell_job
from tests.support.rights_table import roles

QUIET = "trap 'exit 0' TERM; while :; do sleep 0.2; done"
QUEUE = "rights"
STATUS_PATCH = ("elastic.pytorch.org", "elasticjobs/status", "patch")
NEVER_CALLED = {("elastic.pytorch.org", "elasticjobs/finalizers", "update")}
"""Asked for by an admission plugin (OwnerReferencesPermissionEnforcement), and not by requests."""


@dataclass(slots=True)
class Life:
    """What happens to jobs in `namespace`, while a controller of these features is watched."""

    api: Connection
    namespace: str
    audit: Audit
    cluster: KubeCluster = field(init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.cluster = KubeCluster(self.api)

    def used(self, *rights: Right) -> None:
        """Wait until all these rights have been used."""
        try:
            wait_until(lambda: set(rights) <= self.audit.read())
        except AssertionError:
            assert sorted(set(rights) - self.audit.used) == []

    def create(self, name: str, workers: int = 1, *, script: str = QUIET, **given: Any) -> None:
        """A job whose workers do little; `labels` and `annotations` are the job's, `pod` is more of its pods' spec."""
        metadata = {part: given.pop(part) for part in ("labels", "annotations") if part in given}
        pod = given.pop("pod", {})
        container = {"image": IMAGE, "resources": given.pop("resources", {"requests": {"cpu": "100m"}})}
        container |= {"volumeMounts": given.pop("volumeMounts", [])}
        job = shell_job(name, script, workers, namespace=self.namespace, container=container, grace_s=1, **given)
        job["metadata"] |= metadata
        job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"] |= pod
        self.cluster.create_job(job)

    def has(self, name: str) -> ElasticJob:
        """The job as it is now."""
        return ElasticJob.from_manifest(self.cluster.get_job(self.namespace, name))

    def waits_for(self, name: str) -> str:
        """What the job's workers wait for, as its condition says."""
        found = self.has(name).status.condition(ConditionType.WORKERS_WAITING)
        return f"{found.reason}: {found.message}" if found is not None and found.status == "True" else ""

    def stir(self, name: str) -> set[Right]:
        """Change the job's spec, and then its annotations some times; the rights that have been used."""
        for number in range(10):
            changed = {"spec": {"policy": {"stragglerSeconds": next(self._numbers)}}} if number == 0 else {}
            note = {"metadata": {"annotations": {"test.elasticctl.dev/note": str(next(self._numbers))}}}
            self.cluster.patch_job(self.namespace, name, {**note, **changed})
        return self.audit.read()

    def pods(self, name: str) -> list[Manifest]:
        """The pods of a job, which may be gone itself."""
        selector = {"labelSelector": f"{LABEL_JOB}={name}"}
        found: list[Manifest] = self.api.request("GET", resource_path("v1", self.namespace, "pods"), None, selector)[
            "items"
        ]
        return found

    def patch(self, name: str, spec: Manifest) -> None:
        """Change a job."""
        self.cluster.patch_job(self.namespace, name, {"spec": spec})

    def delete(self, name: str) -> None:
        """Delete a job, and wait until it is gone with its pods."""
        self.cluster.delete_job(self.namespace, name)
        wait_until(lambda: not self.pods(name))

    def come_again(self, name: str, left: dict[str, str], **given: Any) -> None:
        """Create a job twice: what the first has `left` (group and plural -> name) is in the way of the second."""
        paths = {key: self._path(key, called) for key, called in left.items()}
        self.create(name, **given)
        for path in paths.values():
            wait_until(lambda path=path: self._exists(path))  # type: ignore[misc]
            self._hold(path, ["test.elasticctl.dev/held"])
        self.delete(name)
        self.create(name, **given)
        for key, path in paths.items():
            group, _, plural = key.rpartition("/")
            self.used(*((group.partition("/")[0], plural, verb) for verb in ("create", "get", "delete")))
            self._hold(path, None)
        for path in paths.values():
            wait_until(lambda path=path: self._exists(path))  # type: ignore[misc]
        wait_until(lambda: self.pods(name))

    def _path(self, key: str, name: str) -> str:
        group, _, plural = key.rpartition("/")
        return resource_path(group or "v1", self.namespace, plural, name)

    def _exists(self, path: str) -> bool:
        with suppress(NotFoundError):
            return "deletionTimestamp" not in self.api.request("GET", path)["metadata"]
        return False

    def _hold(self, path: str, finalizers: list[str] | None) -> None:
        self.api.request("PATCH", path, {"metadata": {"finalizers": finalizers}}, content_type=MERGE_PATCH)


def always(life: Life) -> None:
    """Workers come and go, a job is forgotten after its time, and one comes again under the name of another."""
    volume = {"name": "conf", "configMap": {"name": "is-not-there"}}
    life.create("mounts", pod={"volumes": [volume]}, volumeMounts=[{"name": "conf", "mountPath": "/conf"}])
    left = {"networking.k8s.io/v1/networkpolicies": "again-workers", "services": "again-workers"}
    life.come_again("again", {**left, "policy/v1/poddisruptionbudgets": "again-workers"}, workers=3, minReplicas=1)
    life.patch("again", {"minReplicas": 2})
    life.used(("policy", "poddisruptionbudgets", "patch"), ("", "secrets", "create"))
    life.create("over", script="true", ttlSecondsAfterFinished=1)
    life.used(("elastic.pytorch.org", "elasticjobs", "delete"), ("elastic.pytorch.org", "elasticjobs/status", "update"))
    # Its Secret is there, with a token that is none: that is changed.
    life.create("held", suspend=True)
    wait_until(lambda: life.has("held").status.token is not None)
    secret = build_token_secret(life.has("held"), "none", "none")
    life.api.request("POST", resource_path("v1", life.namespace, "secrets"), secret)
    life.patch("held", {"suspend": False})
    life.used(("", "secrets", "update"))
    life.patch("held", {"cancel": True})
    life.patch("again", {"cancel": True})
    life.used(("", "pods", "delete"), ("", "events", "create"))
    # Two messages in a row that cannot be delivered are one event, counted twice.
    life.create("noticed", annotations={ANNOTATION_NOTIFY: "slack"}, minReplicas=1)
    wait_until(lambda: life.has("noticed").status.phase == "Running")
    for pod in life.pods("noticed"):
        life.api.request("DELETE", resource_path("v1", life.namespace, "pods", pod["metadata"]["name"]))
    wait_until(lambda: len(life.has("noticed").status.interruptions) > 0)
    wait_until(lambda: life.has("noticed").status.phase == "Running")
    life.used(("", "events", "create"))
    # Somebody else changes the job whenever its status is written.
    wait_until(lambda: STATUS_PATCH in life.stir("noticed"))
    life.patch("noticed", {"cancel": True})
    life.used(("", "events", "patch"))
    # Only events say what a node cannot mount.
    life.used(("", "events", "list"))
    wait_until(lambda: "is-not-there" in life.waits_for("mounts"))
    life.patch("mounts", {"cancel": True})


def notifications(life: Life) -> None:
    """`always` has a job whose webhook is looked for, in the one Secret that may be read."""
    life.used(("", "secrets", "get"))


def limits(life: Life) -> None:
    """The project spends money, which is counted in the status of its quota."""
    quota = {"apiVersion": API_VERSION, "kind": "ElasticQuota", "metadata": {"name": life.namespace}}
    life.api.request(
        "POST", resource_path(API_VERSION, None, "elasticquotas"), {**quota, "spec": {"allowed": {"usdPerDay": 5}}}
    )
    life.used(("elastic.pytorch.org", "elasticquotas/status", "patch"))


def nodes(life: Life) -> None:
    """They are watched from the beginning."""
    life.used(("", "nodes", "watch"))


def gangs(life: Life) -> None:
    """The minimum of a job changes while its pods wait: no node has their GPUs."""
    life.create("gang", 3, minReplicas=3, maxReplicas=3, pod={"nodeSelector": {"there": "are-none"}})
    life.used(("scheduling.k8s.io", "podgroups", "create"))
    wait_until(lambda: len(life.pods("gang")) == 3)
    life.patch("gang", {"minReplicas": 2})
    life.used(*(("scheduling.k8s.io", "podgroups", verb) for verb in ("get", "patch")))
    life.delete("gang")


def queueing(life: Life) -> None:
    """A job is admitted, grows by a worker with a Workload of its own, and is suspended; another one waits."""
    labels = {QUEUE_LABEL: QUEUE}
    with kueue(life.api, {QUEUE: life.namespace}), priority_classes(life.api):
        set_quota(life.api, QUEUE, 2)
        resources = {"limits": {GPU_RESOURCE: "1"}}  # which no node needs to have: the pods are there, and wait
        grows = {"sharing": {"automatic": True}, "minReplicas": 1, "maxReplicas": 2}
        life.create(
            "queued", 2, labels={**labels, f"{KUEUE}/priority-class": QUEUE}, suspend=True, resources=resources, **grows
        )
        wait_until(lambda: len(life.pods("queued")) == 2)
        waits = {"resources": resources, "pod": {"priorityClassName": QUEUE}}
        life.create("waits", labels=labels, suspend=True, **waits)
        life.used((KUEUE, "workloadpriorityclasses", "get"), ("scheduling.k8s.io", "priorityclasses", "get"))
        life.patch("queued", {"suspend": True})
        verbs = ("watch", "create", "patch", "delete")
        life.used(*((KUEUE, "workloads", verb) for verb in verbs), (KUEUE, "workloads/status", "patch"))
        life.used(("elastic.pytorch.org", "elasticjobs", "patch"))
        life.delete("waits")
        life.delete("queued")


@contextmanager
def priority_classes(api: Connection) -> Iterator[None]:
    """One of pods and one of Kueue's Workloads."""
    classes = {"scheduling.k8s.io/v1": "PriorityClass", f"{KUEUE}/v1beta1": "WorkloadPriorityClass"}
    paths = {resource_path(version, None, f"{kind.lower()}es"): (version, kind) for version, kind in classes.items()}
    for path, (version, kind) in paths.items():
        api.request("POST", path, {"apiVersion": version, "kind": kind, "metadata": {"name": QUEUE}, "value": 7})
    try:
        wait_until(lambda: accepts_pods_of_class(api))
        yield
    finally:
        for path in paths:
            api.request("DELETE", f"{path}/{QUEUE}")


def accepts_pods_of_class(api: Connection) -> bool:
    """Whether the API server, which refuses pods of a class that it does not know, has heard of the new one."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": QUEUE},
        "spec": {"priorityClassName": QUEUE, "containers": [{"name": "main", "image": IMAGE}]},
    }
    try:
        api.request("POST", resource_path("v1", "default", "pods"), pod, {"dryRun": "All"})
    except ForbiddenError:
        return False
    return True


PARTS: dict[Feature, Callable[[Life], None]] = {
    Feature.NODES: nodes,
    Feature.LIMITS: limits,
    Feature.GANGS: gangs,
    Feature.NOTIFICATIONS: notifications,
    Feature.KUEUE: queueing,
}
"""Kueue comes last: while it is installed, new pods lose the field by which they are of a gang."""


@pytest.fixture(scope="module")
def surroundings(api: Connection, crd: None) -> Iterator[set[Feature]]:
    """What features need of the cluster; yields those for which it is there."""
    need_audit_log()
    names = ("rights-all", "rights-one", "rights-bare")
    with ExitStack() as stack:
        for name in names:
            with suppress(ConflictError):
                api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
            stack.callback(lambda name=name: api.request("DELETE", f"/api/v1/namespaces/{name}"))
        there = set(Feature)
        try:
            served = api.request("GET", "/apis/scheduling.k8s.io/v1beta1").get("resources", ())
        except NotFoundError:
            served = ()
        yield there if any(item["name"] == "podgroups" for item in served) else there - {Feature.GANGS}


@pytest.mark.parametrize(
    ("jobs_in", "confined", "asked_for"),
    [("rights-bare", True, ()), ("rights-one", True, tuple(Feature)), ("rights-all", False, tuple(Feature))],
    ids=["namespace, no feature", "namespace, all features", "cluster, all features"],
)
def test_no_call_is_refused_and_no_right_unused(
    surroundings: set[Feature], api: Connection, jobs_in: str, confined: bool, asked_for: tuple[Feature, ...]
) -> None:
    features = [feature for feature in PARTS if feature in surroundings.intersection(asked_for)]
    home = jobs_in if confined else installation.NAMESPACE
    wanted = manifests(namespace=home, replicas=1, features=features, confined=confined)
    installer = Installer(api, print)
    audit = Audit(f"system:serviceaccount:{home}:{installation.ACCOUNT}")
    life = Life(api, jobs_in, audit)
    with suppress(NotFoundError):  # of other tests, whose controllers know how to make one
        api.request("DELETE", path_of(installation.lease(home)))
    try:
        installer.apply(wanted)
        installer.await_available(home, 480)
        always(life)
        for feature in features:
            PARTS[feature](life)
        audit.read()  # what is asked while the rights are taken out does not count
    finally:
        notify_of_all_jobs(home)
        clean(life, installer, wanted, confined)
    allowed = {right for role in bound_roles(wanted) for right in rights_of(role)}
    leading = rights_of(leader_role(wanted))
    assert audit.refused == []
    assert sorted(audit.used - allowed - leading) == []
    unused = (allowed | leading) - audit.used - NEVER_CALLED
    assert sorted(right for right in unused if not is_streamed(right, audit.used)) == []
    if confined and not features:
        assert audit.namespaces == {home}


def is_streamed(right: Right, used: set[Right]) -> bool:
    """Whether this is the right to list what this server streams as a watch."""
    group, resource, verb = right
    return verb == "list" and (group, resource, "watch") in used


def notify_of_all_jobs(home: str) -> None:
    """Print what the controller has logged: pytest shows it with a test that fails."""
    print(kubectl("logs", "-n", home, f"deployment/{installation.DEPLOYMENT}", "--tail", "80"))


def clean(life: Life, installer: Installer, wanted: list[Manifest], confined: bool) -> None:
    """Take out the jobs, then the controller, and leave the definitions."""
    for job in life.cluster.list_jobs(life.namespace):
        with suppress(ElasticctlError):
            life.delete(job["metadata"]["name"])
    with suppress(NotFoundError):
        life.api.request("DELETE", resource_path(API_VERSION, None, "elasticquotas", life.namespace))
    found = installer.inspect(wanted, confined=life.namespace if confined else "").objects
    kept = ("CustomResourceDefinition", "Namespace")
    installer.remove(tuple(item for item in found if item["kind"] not in kept))


def test_an_administrator_of_the_namespace_can_upgrade(
    surroundings: set[Feature], api: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user with the role `admin` in the namespace alone changes what is in it, and gets a list of the rest."""
    namespace = "rights-bare"
    installer = Installer(api, print)
    wanted = manifests(namespace=namespace, replicas=0, features=[], confined=True)
    installer.apply(wanted)
    kubectl("create", "serviceaccount", "boss", "-n", namespace)
    kubectl(
        "create", "rolebinding", "boss", "-n", namespace, "--clusterrole=admin", f"--serviceaccount={namespace}:boss"
    )
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": kubectl("create", "token", "boss", "-n", namespace).strip()}
    (tmp_path / "boss").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "boss"))
    boss = Installer(PatientConnection(), print)
    try:
        newer = manifests(namespace=namespace, replicas=0, features=[], confined=True, flags=["--node-grace-s=2"])
        left = boss.apply(newer, confined=True)
    finally:
        monkeypatch.undo()
        installer.remove(tuple(item for item in wanted if not is_for_all(item)))
    assert {item["kind"] for item in left} == {item["kind"] for item in wanted if is_for_all(item)}
    with pytest.raises(ForbiddenError):
        boss.apply(manifests(namespace=installation.NAMESPACE))


def test_what_is_no_namespaces_is_known(surroundings: set[Feature]) -> None:
    """`OF_THE_CLUSTER`, which says what a Role cannot give, is what the API server says."""
    named = {(group, resource.partition("/")[0]) for role in roles() for group, resource, _ in rights_of(role)}
    for namespaced in ("true", "false"):
        lines = kubectl("api-resources", f"--namespaced={namespaced}", "-o", "name").split()
        found = {(group, resource) for resource, _, group in (line.partition(".") for line in lines)}
        ours = {resource for group, resource in named if (group, resource) in found}
        assert ours.isdisjoint(OF_THE_CLUSTER) if namespaced == "true" else ours <= OF_THE_CLUSTER
