"""A cluster whose jobs run in an image."""

from __future__ import annotations

import copy
import os

from elasticctl.cluster.base import Manifest
from elasticctl.cluster.kube.client import KubeCluster

IMAGE = os.environ.get("ELASTICCTL_TEST_IMAGE", "lab/base:dev")


class ClusterOfImages(KubeCluster):
    """Gives each container an image: the contract's jobs, which run anywhere, name none."""

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        manifest = copy.deepcopy(manifest)
        for container in manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]:
            container.setdefault("image", IMAGE)
        return super().create_job(manifest, dry_run=dry_run)
