"""Is this machine ready for jobs of the local cluster?"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elasticctl.api.errors import ClusterError
from elasticctl.api.text import counted, span
from elasticctl.cluster.local.gpus import discover
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.supervisor import supervisor_info
from elasticctl.doctor.check import Check, Outcome

LOW_BYTES = 1 << 30
"""Less free space than this is told of: one checkpoint of a model of some size."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the launcher keeps a node's last snapshot


def machine_checks(paths: LocalPaths) -> Iterator[Check]:
    """Look at this machine, one check after the other; starts nothing."""
    yield _torch()
    yield _supervisor(paths)
    gpus = discover(os.environ)
    yield Check("GPUs", Outcome.OK, counted(len(gpus), "GPU") if gpus else "none: jobs run on CPUs")
    yield _space("disk", paths.state, "the jobs' logs and, unless told otherwise, their checkpoints")
    yield _space("memory", SHARED_MEMORY, "the last snapshot, for ranks that start again")


def _torch() -> Check:
    try:
        return Check("torch", Outcome.OK, f"PyTorch {version('torch')}")
    except PackageNotFoundError:
        says = "PyTorch is not installed beside elasticctl, which is where the local cluster's workers run"
        return Check("torch", Outcome.FAILED, says, "pip install 'elasticctl[train]'")


def _supervisor(paths: LocalPaths) -> Check:
    try:
        info = supervisor_info(paths)
    except ClusterError as e:
        return Check("supervisor", Outcome.FAILED, str(e), f"its log is {paths.supervisor_log}")
    if info is None:
        return Check("supervisor", Outcome.OK, "not running; it starts with the next job")
    return Check("supervisor", Outcome.OK, f"running for {span(time.time() - info.started_at)}, pid {info.pid}")


def _space(name: str, folder: Path, holds: str) -> Check:
    """How much room there is where `folder` is, or will be."""
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    if there is None:
        return Check(name, Outcome.SKIPPED, f"there is no {folder}")
    free = shutil.disk_usage(there).free
    says = f"{free / 1e9:.1f} GB free in {there}"
    if free < LOW_BYTES:
        return Check(name, Outcome.WARNING, f"{says}, which holds {holds}", "make room")
    return Check(name, Outcome.OK, says)
