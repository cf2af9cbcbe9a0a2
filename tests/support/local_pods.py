"""Pods and log files as the local supervisor has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elasticctl.api.codec import to_rfc3339
from elasticctl.cluster.base import Manifest


def pod(**container: Any) -> Manifest:
    metadata = {"name": "job-worker-0", "namespace": "default", "uid": "u1", "labels": {"replica-index": "0"}}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "here", "containers": [{"name": "elasticjob-worker", **container}]},
    }


def write(folder: Path, uid: str, *lines: tuple[float, str]) -> None:
    with (folder / uid).open("a") as file:
        file.writelines(f"{to_rfc3339(at)} {text}\n" for at, text in lines)
