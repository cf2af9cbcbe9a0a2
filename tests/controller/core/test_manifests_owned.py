"""What a job owns besides its pods."""

from __future__ import annotations

import pytest

from elasticctl.api.objects import selects
from elasticctl.api.status import JobStatus, TokenStatus
from elasticctl_controller.core.group.worker_tokens import derive_peer_key, derive_token
from elasticctl_controller.core.manifests import (
    build_budget,
    build_group_service,
    build_network_policy,
    build_pod,
    build_token_secret,
)
from tests.support.controller.samples import a_job


@pytest.mark.parametrize(("low", "desired", "kept"), [(1, 3, 1), (2, 3, 2), (3, 3, 2), (1, 1, 0), (0, 0, 0)])
def test_a_drain_leaves_the_minimum_and_is_never_held_up_for_ever(low: int, desired: int, kept: int) -> None:
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
    """Whatever labels a template claims: those of the job win, in what is protected and in who is let in."""
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
    """A job whose workers an older controller has made goes on with what they have."""
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
