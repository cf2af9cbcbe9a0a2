"""Somebody who has logged in to a cluster with a token, and what the cluster lets them do: nobody else's rights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from elasticctl.api.errors import CredentialsError
from elasticctl.cluster.base import Cluster
from elasticctl.cluster.inside import Inside
from elasticctl.cluster.kube.client import KubeCluster, ask_user
from elasticctl.cluster.kube.inside import KubeInside
from elasticctl.cluster.ledger import Ledger, recorded
from elasticctl.kubeapi.connection import connect_as

NAME = "cluster"
"""What this cluster is called where it is the only one."""


@dataclass(frozen=True, slots=True)
class Person:
    """`user` is the name by which the API server knows them; `close` ends their connections."""

    user: str
    cluster: Cluster
    inside: Inside
    close: Callable[[], None]


def log_in(token: str, on_refused: Callable[[], None]) -> Person:
    """Find out who shows a token. What they change is recorded with their name, on the object and on stdout. Blocks.

    `on_refused` is called once the server accepts the token no longer. Raises CredentialsError where it does not now,
    and other ClusterErrors.
    """
    connection = connect_as(token, on_refused)
    user = ask_user(connection)
    if not user:
        raise CredentialsError("the cluster does not say whose token this is. FIX: log in with another one")
    kube = KubeCluster(connection)
    ledger = Ledger(NAME, lambda: user, "dashboard", write=_print)
    return Person(user, recorded(kube, ledger, kube.publish), KubeInside(connection), connection.close)


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()
