"""Where jobs run: one small Protocol (`base`), Kubernetes (`kube`) and this machine (`local`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticctl.cluster.base import Cluster, SecretStore
from elasticctl.settings.contexts import LOCAL, Context

if TYPE_CHECKING:
    from elasticctl.cluster.worker_access import WorkerAccess


def connect(context: Context, *, starts: bool = True) -> Cluster:
    """Return the cluster of a context, without connecting to it yet; what changes there is recorded (`audit_log`).

    `starts`: the local cluster is started on the first request if it is not running.

    Raises what `kubeapi.connection.connect` raises.
    """
    # Imported on use: a client that is not needed costs no time.
    from elasticctl.cluster.audit_log import AuditLog, login_name, recorded

    if context.provider == LOCAL:
        from elasticctl.cluster.local.client import LocalCluster

        return recorded(LocalCluster(starts=starts), AuditLog(context.name, login_name))
    from elasticctl.cluster.kube.client import KubeCluster

    cluster = KubeCluster.from_context(context)
    return recorded(cluster, AuditLog(context.name, lambda: cluster.user() or login_name()), cluster.publish)


def secrets_of(context: Context) -> SecretStore:
    """Return the secrets of a context, without connecting to it yet. Raises what `connect` raises."""
    from elasticctl.cluster.audit_log import AuditLog, RecordedSecrets, login_name

    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.cluster.local.secrets import Secrets

        return RecordedSecrets(Secrets(local_paths()), AuditLog(context.name, login_name))
    from elasticctl.cluster.kube.client import KubeSecrets, user_of
    from elasticctl.kubeapi.connection import connect as connect_to

    api = connect_to(context.kube_context)
    return RecordedSecrets(KubeSecrets(api), AuditLog(context.name, lambda: user_of(api) or login_name()))


def worker_access_of(context: Context) -> WorkerAccess:
    """Return access to a context's workers, without connecting to it yet. Raises what `connect` raises."""
    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.cluster.local.worker_access import LocalWorkerAccess

        return LocalWorkerAccess(local_paths())
    from elasticctl.cluster.kube.worker_access import KubeWorkerAccess
    from elasticctl.kubeapi.connection import connect as connect_to

    return KubeWorkerAccess(connect_to(context.kube_context))
