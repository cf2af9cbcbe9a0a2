"""The admission policies, evaluated by a real API server: the same verdicts as ours, about the same jobs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress

import pytest

from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import API_VERSION, PLURAL, ElasticJob
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.kube.install import Installer
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection, resource_path
from elasticctl_controller.core.manifests import build_token_secret
from tests.on_cluster.commands import kubectl
from tests.support.limits import ALLOWED, CASES, LimitCase, job_of
from tests.support.waiting import wait_until

PROJECT, QUOTAS = "limited", resource_path(API_VERSION, None, "elasticquotas")
USER = f"system:serviceaccount:{installation.NAMESPACE}:elasticctl-controller"
LIMITED = [case for case in CASES if case.allowed]


def jobs(name: str = "", namespace: str = PROJECT) -> str:
    return resource_path(API_VERSION, namespace, PLURAL, name)


def refusal(api: Connection, manifest: Manifest) -> str:
    """What the server says of a job, which it does not keep; "" if it takes it."""
    job = copy.deepcopy(manifest)
    job["metadata"]["namespace"] = PROJECT
    try:
        api.request("POST", jobs(), job, {"dryRun": "All"})
    except ElasticctlError as e:
        return str(e)
    return ""


@pytest.fixture(scope="module")
def limited(api: Connection, crd: None) -> Iterator[Connection]:
    """A project with limits, and the policies in force."""
    wanted = installation.manifests(image="lab/controller:dev")
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "CustomResourceDefinition")
    Installer(api, print).apply([item for item in wanted if item["kind"] in kinds])
    with suppress(ElasticctlError):
        api.request("POST", "/api/v1/namespaces", {"metadata": {"name": PROJECT}})
    quota = {"apiVersion": API_VERSION, "kind": "ElasticQuota", "metadata": {"name": PROJECT}}
    with suppress(NotFoundError):
        api.request("DELETE", f"{QUOTAS}/{PROJECT}")
    api.request("POST", QUOTAS, {**quota, "spec": {"allowed": ALLOWED}})
    wait_until(lambda: "its image" in refusal(api, job_of("probe", image="evil.example/x")))
    yield api
    api.request("DELETE", f"{QUOTAS}/{PROJECT}")


@pytest.mark.parametrize("case", LIMITED, ids=lambda case: case.name)
def test_the_server_refuses_what_we_do(limited: Connection, case: LimitCase) -> None:
    said = refusal(limited, case.job)
    assert case.breach in said
    assert bool(said) == bool(case.breach), said


def test_other_changes_of_a_job_from_before_go_through(limited: Connection) -> None:
    name, before = "before", job_of("before", image="evil.example/x", sharing={"priority": 90})
    with suppress(NotFoundError):
        limited.request("DELETE", jobs(name))
    limited.request("DELETE", f"{QUOTAS}/{PROJECT}")

    def stored() -> bool:
        with suppress(ElasticctlError):
            job = copy.deepcopy(before)
            job["metadata"]["namespace"] = PROJECT
            limited.request("POST", jobs(), job)
            return True
        return False

    try:
        wait_until(stored)
    finally:
        quota = {"apiVersion": API_VERSION, "kind": "ElasticQuota", "metadata": {"name": PROJECT}}
        limited.request("POST", QUOTAS, {**quota, "spec": {"allowed": ALLOWED}})
    wait_until(lambda: "its image" in refusal(limited, job_of("probe", image="evil.example/x")))
    patch = {"spec": {"suspend": True}}
    merge = "application/merge-patch+json"
    limited.request("PATCH", jobs(name), patch, content_type=merge)
    with pytest.raises(ElasticctlError, match="its priority is 91"):
        limited.request("PATCH", jobs(name), {"spec": {"sharing": {"priority": 91}}}, content_type=merge)
    limited.request("PATCH", jobs(name), {"spec": {"sharing": {"priority": 9}}}, content_type=merge)
    limited.request("DELETE", jobs(name))


def test_the_controller_writes_tokens_of_jobs_and_no_other_secret(limited: Connection) -> None:
    """As an administrator the test may say that it is the controller, with rights that the policies do not give."""

    def write(secret: Manifest, verb: str) -> str:
        words = [verb, "--as", USER, "--as-group", "system:masters", "--dry-run=server", "-f", "-", "-o", "name"]
        return kubectl(*words, given=json.dumps(secret))

    with suppress(NotFoundError):
        limited.request("DELETE", jobs("owner"))
    job = copy.deepcopy(job_of("owner"))
    job["metadata"]["namespace"] = PROJECT
    owner = ElasticJob.from_manifest(limited.request("POST", jobs(), job))
    token = build_token_secret(owner, "t", "p")
    name = token["metadata"]["name"]
    loose = copy.deepcopy(token)
    del loose["metadata"]["ownerReferences"]
    renamed = copy.deepcopy(token)
    renamed["metadata"]["name"] = "elasticctl-notify"
    assert write(token, "create") == f"secret/{name}\n"
    for wrong in (loose, renamed):
        with pytest.raises(AssertionError, match="creates the tokens of jobs and no other Secret"):
            write(wrong, "create")
    kubectl("apply", "-f", "-", given=json.dumps(token))
    assert write(token, "replace") == f"secret/{name}\n"
    loose["metadata"]["name"] = token["metadata"]["name"] = f"{name}0"  # somebody else's, by a name that ours may have
    kubectl("apply", "-f", "-", given=json.dumps(loose))
    with pytest.raises(AssertionError, match="changes the tokens of jobs and no other Secret"):
        write(token, "replace")
