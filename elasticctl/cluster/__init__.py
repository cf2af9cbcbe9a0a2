"""Where jobs run: one small Protocol (`base`), Kubernetes (`kube`) and this machine (`local`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticctl.cluster.base import Cluster, SecretStore
from elasticctl.settings.contexts import LOCAL, Context

if TYPE_CHECKING:
    from elasticctl.cluster.inside import Inside


def connect(context: Context, *, starts: bool = True) -> Cluster:
    """Return the cluster of a context, without connecting to it yet; what changes there is recorded (`ledger`).

    `starts`: the local cluster is started on the first request if it is not running.

    Raises what `kubeapi.connection.connect` raises.
    """
    # Imported on use, so that nobody pays for a client that is not needed.
    from elasticctl.cluster.ledger import Ledger, login_name, recorded

    if context.provider == LOCAL:
        from elasticctl.cluster.local.client import LocalCluster

        return recorded(LocalCluster(starts=starts), Ledger(context.name, login_name))
    from elasticctl.cluster.kube.client import KubeCluster

    cluster = KubeCluster.from_context(context)
    return recorded(cluster, Ledger(context.name, lambda: cluster.user() or login_name()), cluster.publish)


def secrets_of(context: Context) -> SecretStore:
    """Return the secrets of a context, without connecting to it yet. Raises what `connect` raises."""
    from elasticctl.cluster.ledger import Ledger, RecordedSecrets, login_name

    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.cluster.local.secrets import Secrets

        return RecordedSecrets(Secrets(local_paths()), Ledger(context.name, login_name))
    from elasticctl.cluster.kube.client import KubeSecrets, user_of
    from elasticctl.kubeapi.connection import connect as connect_to

    api = connect_to(context.kube_context)
    return RecordedSecrets(KubeSecrets(api), Ledger(context.name, lambda: user_of(api) or login_name()))


def inside_of(context: Context) -> Inside:
    """Return the inside of a context's workers, without connecting to it yet. Raises what `connect` raises."""
    if context.provider == LOCAL:
        from elasticctl.cluster.local.inside import LocalInside
        from elasticctl.cluster.local.paths import local_paths

        return LocalInside(local_paths())
    from elasticctl.cluster.kube.inside import KubeInside
    from elasticctl.kubeapi.connection import connect as connect_to

    return KubeInside(connect_to(context.kube_context))
