"""`elasticctl install` on a real cluster: the controller as a Deployment, under its own rights and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.status import Phase
from elasticctl.cluster.kube.install import FIELD_MANAGER, Installer, path_of
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from tests.on_cluster.commands import elasticctl, kubectl
from tests.on_cluster.installing import manifests
from tests.on_cluster.replicas import prepare
from tests.on_cluster.trainer import Trainer
from tests.on_cluster.waiting import wait_until
from tests.support.controller.rights import bound_roles, leader_role

pytestmark = pytest.mark.each_release

USER = f"system:serviceaccount:{installation.NAMESPACE}:elasticctl-controller"
PODS = resource_path("v1", installation.NAMESPACE, "pods")
LEADER = "elasticctl.dev/leader"


@pytest.fixture(scope="module")
def installer(crd: None, api: Connection) -> Iterator[Installer]:
    """The controller in the cluster; afterwards the cluster is as other tests want it, with the definition alone."""
    said: list[str] = []
    made = Installer(api, said.append)
    # The namespace, which the tests have made, counts as one that an installation made: it goes with the rest.
    ours = {"metadata": {"labels": {installation.LABEL_MANAGER: FIELD_MANAGER}}}
    api.request(
        "PATCH", resource_path("v1", None, "namespaces", installation.NAMESPACE), ours, content_type=MERGE_PATCH
    )
    made.apply(manifests())
    made.await_available(installation.NAMESPACE, 480)
    assert not [line for line in said if "left out" in line]
    yield made
    found = made.inspect(manifests()).objects
    made.remove(found)
    wait_until(lambda: not _left(api, found))
    prepare(api)


def _left(api: Connection, objects: tuple[Manifest, ...]) -> list[str]:
    """Which of the objects are still there."""
    left = []
    for item in objects:
        try:
            api.request("GET", path_of(item))
        except NotFoundError:
            continue
        left.append(path_of(item))
    return left


def controllers(api: Connection) -> list[Manifest]:
    params = {"labelSelector": f"{installation.LABEL}={installation.LABEL_VALUE}"}
    pods: list[Manifest] = api.request("GET", PODS, None, params)["items"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def leaders(api: Connection) -> list[str]:
    return [pod["metadata"]["name"] for pod in controllers(api) if pod["metadata"]["labels"].get(LEADER) == "true"]


def test_a_second_time_changes_nothing(installer: Installer, api: Connection) -> None:
    said: list[str] = []
    Installer(api, said.append).apply(manifests())
    assert [line for line in said if not line.endswith((": unchanged", ": kept"))] == []


Right = tuple[str, str, str, tuple[str, ...]]
"""A group, a resource, a verb, and the names that it is limited to."""


def rights_of(user: str, namespace: str) -> set[Right]:
    """All that the API server says that somebody may do in a namespace."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    # Checking it first would take the right to read the definitions, which not everybody has who is asked about.
    answer = kubectl("create", "--validate=false", "--as", user, "-o", "json", "-f", "-", given=json.dumps(review))
    return rights(json.loads(answer)["status"]["resourceRules"])


def rights(rules: list[Manifest]) -> set[Right]:
    """Each right of the rules by itself."""
    return {
        (group, resource, verb, tuple(rule.get("resourceNames", ())))
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_controller_may_do_what_is_written_down_and_nothing_else(installer: Installer) -> None:
    anybody = rights_of(f"system:serviceaccount:{installation.NAMESPACE}:nobody", installation.NAMESPACE)
    written = {right for role in bound_roles(manifests()) for right in rights(role["rules"])}
    leading = rights(leader_role(manifests())["rules"])
    elsewhere, at_home = rights_of(USER, "default"), rights_of(USER, installation.NAMESPACE)
    assert elsewhere - anybody == written
    assert at_home - anybody == written | leading
    assert not any("*" in part for right in elsewhere | at_home for part in right[1:3])


def metrics_of(pod: str) -> str:
    return kubectl("get", "--raw", f"{PODS}/{pod}:8080/proxy/metrics")


@pytest.fixture(scope="module")
def trainer(installer: Installer, api: Connection) -> Iterator[Trainer]:
    """A job of two workers, which trains."""
    found = Trainer(api, "installed")
    found.delete()
    try:
        found.submit(2, epochs=100_000, step_delay_s=0.1)
        found.wait_training(2)
        yield found
    finally:
        found.delete()


def test_a_job_trains_under_it_and_outlives_its_leader(trainer: Trainer, api: Connection) -> None:
    (leader,) = wait_until(lambda: leaders(api))
    api.request("DELETE", f"{PODS}/{leader}", {"gracePeriodSeconds": 0})
    wait_until(lambda: leaders(api) not in ([], [leader]))
    trainer.disturbed(lambda: trainer.kill(1), 2)
    assert trainer.job().status.phase is Phase.RUNNING
    wait_until(lambda: "Deleted" in trainer.reasons())
    (leader,) = leaders(api)
    page = metrics_of(leader)
    assert 'elasticctl_api_requests_total{outcome="ok",verb="POST"}' in page
    assert 'outcome="403"' not in page


def test_it_is_taken_out_once_no_job_lives(
    installer: Installer, api: Connection, trainer: Trainer, cli_home: None
) -> None:
    found = installer.inspect(manifests())
    assert found.living == ("default/installed",)
    kinds = [item["kind"] for item in found.objects]
    assert (kinds[0], kinds[-1]) == ("CustomResourceDefinition", "Namespace")
    refused = elasticctl("install", "--uninstall", "--yes")
    assert refused.code != 0
    assert "1 job would end: default/installed" in refused.err
    assert len(_left(api, found.objects)) == len(found.objects)
    trainer.delete()
    done = elasticctl("install", "--uninstall", "--yes")
    assert done.code == 0, done
    wait_until(lambda: not _left(api, found.objects))
    assert "elasticctl is not installed there" in elasticctl("install", "--uninstall", "--yes").err
    prepare(api)  # for what is torn down after this
