"""Run controllers beside the cluster with the service account of an installed one: its rights and its priority."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.replicas import SYSTEM
from elasticctl.cluster.kube.install import Installer
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection, resource_path
from elasticctl.kubeapi.features import ALL

TOKEN_FOR = "2h"
FLOW_SCHEMAS = ("elasticctl-leader", "elasticctl-controller")


def install_rights(api: Connection) -> None:
    """Apply everything that `install` applies, except the controller itself."""
    left_out = ("Deployment", "PodDisruptionBudget")
    found = [item for item in installation.manifests(features=ALL) if item["kind"] not in left_out]
    Installer(api, lambda line: None).apply(found)


def as_account(account: str, namespace: str, folder: Path) -> str:
    """Write a kubeconfig for that service account; return its path."""
    made = ["kubectl", "-n", namespace, "create", "token", account, "--duration", TOKEN_FOR]
    token = subprocess.run(made, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    seen = ["kubectl", "config", "view", "--raw", "--minify", "-o", "json"]
    config = json.loads(subprocess.run(seen, check=True, capture_output=True, text=True, timeout=60).stdout)
    config["users"] = [{"name": account, "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = account
    path = folder / f"{account}.kubeconfig"
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return str(path)


def controller(folder: Path) -> str:
    """Return the kubeconfig of the controller's own account."""
    return as_account(installation.ACCOUNT, SYSTEM, folder)


def without_priority(api: Connection) -> None:
    """Queue the controller's requests with those of all other service accounts."""
    for name in FLOW_SCHEMAS:
        api.request("DELETE", resource_path("flowcontrol.apiserver.k8s.io/v1", None, "flowschemas", name))
