"""Checks that this machine is ready for jobs of the local cluster, and that a storage does what checkpoints rely on."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elasticctl.api.errors import ClusterError
from elasticctl.api.text import plural, span
from elasticctl.cluster.local.capacity import discover_gpus
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.supervisor_client import supervisor_info
from elasticctl.doctor import Check, CheckOutcome
from elasticctl_store import storage
from elasticctl_store.errors import ExistsError, StorageError
from elasticctl_store.storage import Patience, Storage

LOW_BYTES = 1 << 30
"""Less free space than this is a warning: about one checkpoint of a mid-sized model."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the launcher keeps a node's latest snapshot
PREFIX = "elasticctl-doctor"
PATIENCE_S = 10.0
_CONTENT = b"elasticctl doctor: this may be deleted"


def check_machine(paths: LocalPaths) -> Iterator[Check]:
    """Check this machine; starts nothing."""
    yield _check_torch()
    yield _check_supervisor(paths)
    gpus = discover_gpus(os.environ)
    yield Check("GPUs", CheckOutcome.OK, plural(len(gpus), "GPU") if gpus else "none: jobs run on CPUs")
    yield _check_free_space("disk", paths.state, "the jobs' logs and, by default, their checkpoints")
    yield _check_free_space("memory", SHARED_MEMORY, "the latest snapshot, for ranks that restart")


def _check_torch() -> Check:
    try:
        return Check("torch", CheckOutcome.OK, f"PyTorch {version('torch')}")
    except PackageNotFoundError:
        says = "PyTorch is not installed in elasticctl's environment, which the local cluster's workers use"
        return Check("torch", CheckOutcome.FAILED, says, "pip install 'elasticctl[train]'")


def _check_supervisor(paths: LocalPaths) -> Check:
    try:
        info = supervisor_info(paths)
    except ClusterError as e:
        return Check("supervisor", CheckOutcome.FAILED, str(e), f"see its log: {paths.supervisor_log}")
    if info is None:
        return Check("supervisor", CheckOutcome.OK, "not running; the next job starts it")
    return Check("supervisor", CheckOutcome.OK, f"running for {span(time.time() - info.started_at)}, pid {info.pid}")


def _check_free_space(name: str, folder: Path, holds: str) -> Check:
    """Check the free space where `folder` is or will be."""
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    if there is None:
        return Check(name, CheckOutcome.SKIPPED, f"{folder} does not exist")
    free = shutil.disk_usage(there).free
    says = f"{free / 1e9:.1f} GB free in {there}"
    if free < LOW_BYTES:
        return Check(name, CheckOutcome.WARNING, f"{says}, which holds {holds}", "free some space")
    return Check(name, CheckOutcome.OK, says)


def check_storage(url: str) -> Check:
    """Write, read, list and delete one object, and check that overwriting it can be refused.

    This uses the credentials of this machine; the workers' may differ. Raises nothing.
    """
    try:
        place = storage.open(url, Patience(total_s=PATIENCE_S))
        return _try_storage(place)
    except StorageError as e:
        return Check("storage", CheckOutcome.FAILED, str(e), "docs/storage.md")


def _try_storage(place: Storage) -> Check:
    key = f"{PREFIX}/{secrets.token_hex(8)}"
    began = time.monotonic()
    place.put(key, [_CONTENT], if_absent=True)
    try:
        broken = _find_fault(place, key)
    finally:
        place.delete([key])
    if broken:
        return Check("storage", CheckOutcome.FAILED, f"{place.url}: {broken}", "use another store for checkpoints")
    took_ms = 1000 * (time.monotonic() - began)
    says = f"{place.url}: writes, reads, lists, refuses to overwrite, deletes; {took_ms:.0f} ms"
    return Check("storage", CheckOutcome.OK, says)


def _find_fault(place: Storage, key: str) -> str:
    """What does not work; empty if everything does."""
    if place.get(key) != _CONTENT:
        return "what is read differs from what was written"
    if key not in place.list(key):
        return "a new object is not listed"
    try:
        place.put(key, [b"twice"], if_absent=True)
    except ExistsError:
        return ""
    return "it does not support conditional writes: two runs can overwrite each other's checkpoints"
