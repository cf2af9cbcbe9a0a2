"""The embedded cluster keeps the contract of `Cluster`."""

from __future__ import annotations

import pytest

from elasticctl.cluster.base import Cluster
from elasticctl.cluster.local.client import LocalCluster
from tests.support.cluster_contract import ClusterContract


@pytest.mark.usefixtures("forked_supervisor")
class TestLocalCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, local_cluster: LocalCluster) -> Cluster:
        return local_cluster
