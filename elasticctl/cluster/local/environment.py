"""The environment of a worker: a short list of what this machine needs, never all that some shell happened to have."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from elasticctl.cluster.local.gpus import VISIBLE
from elasticctl.cluster.local.paths import HOME_VARIABLE, POD_UID_VARIABLE

TERMINATION_LOG = "ELASTICCTL_TERMINATION_LOG"

_PASSED_ON = frozenset(
    {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PATH", "LD_LIBRARY_PATH", HOME_VARIABLE}
)


def base_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a worker's env starts from; its container's own env goes over it.

    PATH begins with this Python's folder, so that `python` and `elasticctl-launch` are the ones elasticctl runs with.
    """
    base = {name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith("LC_")}
    base["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    base["PYTHONUNBUFFERED"] = "1"
    return base


def token_file(pod_dir: Path) -> Path:
    """Where the worker finds its bearer token for the rendezvous service."""
    return pod_dir / "token"


def termination_log(pod_dir: Path) -> Path:
    """Where the worker may leave a message about its end, as in a Kubernetes container."""
    return pod_dir / "termination-log"


def pinned_environment(pod_dir: Path, uid: str, gpus: tuple[str, ...]) -> dict[str, str]:
    """What is so whatever the container's env says: paths into the pod's folder, its identity, its GPUs."""
    return {
        POD_UID_VARIABLE: uid,
        "ELASTICCTL_RDZV_TOKEN_FILE": str(token_file(pod_dir)),
        TERMINATION_LOG: str(termination_log(pod_dir)),
        VISIBLE: ",".join(gpus),
    }
