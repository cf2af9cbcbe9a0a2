"""A user who has logged in to a cluster with a token, and acts with exactly that user's rights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from elasticctl.api.errors import CredentialsError
from elasticctl.cluster.audit_log import AuditLog, recorded
from elasticctl.cluster.base import Cluster
from elasticctl.cluster.kube.client import KubeCluster, ask_user
from elasticctl.cluster.kube.worker_access import KubeWorkerAccess
from elasticctl.cluster.worker_access import WorkerAccess
from elasticctl.kubeapi.connection import connect_as

NAME = "cluster"
"""What this cluster is called where it is the only one."""


@dataclass(frozen=True, slots=True)
class User:
    """`name` is the name by which the API server knows them; `close` ends their connections."""

    name: str
    cluster: Cluster
    access: WorkerAccess
    close: Callable[[], None]


def log_in(token: str, on_refused: Callable[[], None]) -> User:
    """Find out whose token this is. The user's changes are recorded on the object and on stdout. Blocks.

    `on_refused` is called when the server no longer accepts the token. Raises CredentialsError if it does not accept it
    now, or another ClusterError.
    """
    connection = connect_as(token, on_refused)
    name = ask_user(connection)
    if not name:
        raise CredentialsError("the cluster does not say whose token this is. FIX: log in with another one")
    kube = KubeCluster(connection)
    log = AuditLog(NAME, lambda: name, "dashboard", write=_print)
    return User(name, recorded(kube, log, kube.publish), KubeWorkerAccess(connection), connection.close)


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()
