"""The storage that a job in a cluster names, opened with the credentials of the user who looks at the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from elasticctl.cluster.local.paths import local_paths
from elasticctl.settings.contexts import user_config
from elasticctl_protocol import variables
from elasticctl_store.errors import MissingError, StorageError
from elasticctl_store.storage import AT_A_TERMINAL, Patience, Storage
from elasticctl_store.storage.untrusted import check_endpoint, open_untrusted


def open_job_storage(url: str, patience: Patience = AT_A_TERMINAL, typed: str = "") -> Storage:
    """Open a storage URL from an object in a cluster, or from a file that someone else may have written.

    `typed` is a URL of the caller's command line. Its endpoint is trusted, and those that the caller's contexts and
    environment name. Raises StorageError for any other, and where storages are closed, and ConfigError for contexts
    that cannot be read.
    """
    _check_open()
    return open_untrusted(url, patience, lambda: _chosen(typed))


def check_storage_of_file(url: str) -> None:
    """Raise StorageError for a URL in a file of options that would send the caller's credentials to an unknown host."""
    check_endpoint(url, "file", lambda: _chosen(""))


def _chosen(typed: str) -> Iterator[str]:
    yield typed
    for context in user_config().contexts:
        yield context.storage


def open_storage_here(url: str) -> Storage:
    """Open a job's storage to read what its workers have left there, with little patience.

    Raises StorageError, and ConfigError for contexts that cannot be read.
    """
    _check_open()
    folder = Path(unquote(url[7:])) if url.startswith("file://") else None
    # A folder of the workers' machines does not exist on this one, and would look like an empty storage. The local
    # cluster's own is empty until a job writes there.
    if folder is not None and not folder.is_dir() and local_paths().storage not in folder.parents:
        raise MissingError(f"{url} is not a folder on this machine")
    return open_job_storage(url, Patience(tries=3, total_s=10.0, connect_s=5.0, silence_s=15.0))


def _check_open() -> None:
    closed = os.environ.get(variables.CLOSED_STORAGES, "")
    if closed:
        raise StorageError(closed)
