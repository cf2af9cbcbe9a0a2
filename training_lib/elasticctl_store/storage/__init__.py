"""Open the storage of a URL."""

from __future__ import annotations

import importlib
from pathlib import Path
from urllib.parse import unquote

from elasticctl_store.errors import StorageError
from elasticctl_store.storage.base import Storage, all_keys, without_secrets
from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.storage.outages import AT_A_TERMINAL, Patience, Waits

__all__ = ["AT_A_TERMINAL", "Patience", "Storage", "Waits", "all_keys", "modules", "open"]

_CLOUDS = {"s3": "s3", "gs": "gcs"}
"""Scheme -> the module that implements it, which is also the name of its extra; imported on use."""


def open(url: str, patience: Patience = Patience(), waits: Waits | None = None) -> Storage:  # noqa: B008 - frozen
    """Return the storage that a URL names: `file:///path` or a plain path, `s3://bucket/prefix`, `gs://bucket/prefix`.

    Sends no request and creates nothing yet. `patience` bounds how long requests wait for a storage that is
    unavailable; by default there is no bound. `waits` records such waits. Raises StorageError for an invalid URL, an
    unknown scheme, or if the packages that the scheme needs are not installed.
    """
    scheme, separator, rest = url.partition("://")
    if not url:
        raise StorageError("the storage URL is empty. FIX: use a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    if not separator:
        return LocalStorage(_folder(url), patience, waits)
    if scheme in _CLOUDS:
        return _cloud(scheme, url, patience, waits or Waits())
    shown = without_secrets(url)
    if scheme != "file":
        raise StorageError(
            f"{shown}: {scheme}:// is not a supported storage. FIX: use a folder, file://, s3:// or gs://"
        )
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise StorageError(f"{shown}: a file URL needs three slashes and an absolute path: file:///path")
    return LocalStorage(_folder("/" + unquote(path)), patience, waits)


def _folder(path: str) -> Path:
    """Return the folder of a path. Raises StorageError for one that cannot be meant, or cannot exist."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme.lower() in (*_CLOUDS, "file"):
        start = f"{scheme.lower()}://" if scheme.lower() in _CLOUDS else "file:///"
        raise StorageError(f"{path!r} is not a URL. FIX: write {start}{rest.lstrip('/')}, or ./{path}")
    if "\0" in path:
        raise StorageError(f"{path!r} is not a folder: its name has a null character")
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise StorageError(f"{path!r} is not a folder: there is no such user. FIX: write the whole path") from e


def modules(url: str) -> list[str]:
    """Return the modules that `open` imports for a URL, so that they can be imported ahead: some take a second."""
    scheme, separator, _ = url.partition("://")
    return [f"{__name__}.{_CLOUDS[scheme]}"] if separator and scheme in _CLOUDS else []


def _cloud(scheme: str, url: str, patience: Patience, waits: Waits) -> Storage:
    extra = _CLOUDS[scheme]
    try:
        module = importlib.import_module(f"{__name__}.{extra}")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("elasticctl"):
            raise
        raise StorageError(f"{scheme}:// needs the package {e.name}. FIX: pip install 'elasticctl[{extra}]'") from e
    storage: Storage = module.connect(url, patience, waits)
    return storage
