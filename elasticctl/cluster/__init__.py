"""Where jobs run: one small Protocol (`base`), Kubernetes (`kube`) and this machine (`local`)."""

from __future__ import annotations

from elasticctl.cluster.base import Cluster, SecretStore
from elasticctl.settings.contexts import LOCAL, Context


def connect(context: Context, *, starts: bool = True) -> Cluster:
    """Return the cluster of a context, without connecting to it yet.

    `starts`: the local cluster is started on the first request if it is not running.

    Raises what `kubeapi.connection.connect` raises.
    """
    # Imported on use, so that nobody pays for a client that is not needed.
    if context.provider == LOCAL:
        from elasticctl.cluster.local.client import LocalCluster

        return LocalCluster(starts=starts)
    from elasticctl.cluster.kube.client import KubeCluster

    return KubeCluster.from_context(context)


def secrets_of(context: Context) -> SecretStore:
    """Return the secrets of a context, without connecting to it yet. Raises what `connect` raises."""
    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.cluster.local.secrets import Secrets

        return Secrets(local_paths())
    from elasticctl.cluster.kube.client import KubeSecrets
    from elasticctl.kubeapi.connection import connect as connect_to

    return KubeSecrets(connect_to(context.kube_context))
