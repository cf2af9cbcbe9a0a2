"""Quotas over real HTTP, as every cluster keeps them; a real API server's word on them is asked in tests/cluster."""

from __future__ import annotations

import pytest

from elasticctl.api.errors import NotFoundError
from elasticctl.api.quota import Quota
from elasticctl.cluster.kube.client import KubeCluster
from tests.support.cluster_contract import ClusterContract
from tests.support.fakeapi import FakeApi

PATH = "/apis/elastic.pytorch.org/v1alpha1/elasticquotas"


class TestQuotas:
    """The part of the contract that is about quotas."""

    test_kept = ClusterContract.test_a_quota_is_kept_in_place_of_the_one_before
    test_refused = ClusterContract.test_a_quota_that_cannot_be_one_is_refused


def test_a_cluster_that_knows_no_quotas_has_none(cluster: KubeCluster, api: FakeApi) -> None:
    api.refuse = lambda request: (404, b"404 page not found", {}) if request.path.startswith(PATH) else None
    assert cluster.list_quotas() == []
    with pytest.raises(NotFoundError, match="elasticctl install"):
        cluster.put_quota(Quota("a", guaranteed={"t4": 1}).to_manifest())
