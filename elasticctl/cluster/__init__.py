"""Where jobs run: one small Protocol (`base`), Kubernetes (`kube`) and this machine (`local`)."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from elasticctl.cluster.base import Cluster
from elasticctl.config import Context
from elasticctl.errors import ClusterError
from elasticctl.wording import shown

# provider -> module and class; imported on use, so that nobody pays for a client that is not needed
_CLUSTERS = {"local": ("elasticctl.cluster.local.client", "LocalCluster")}


def connect(context: Context) -> Cluster:
    """The cluster that a context stands for; ClusterError when this version has no client for its provider."""
    if context.provider not in _CLUSTERS:
        raise ClusterError(
            f"context {shown(context.name)}: this version of elasticctl cannot talk to {context.provider} clusters;"
            " `elasticctl submit --dry-run` prints a manifest that kubectl can apply"
        )
    module, name = _CLUSTERS[context.provider]
    return cast(Cluster, getattr(import_module(module), name)())
