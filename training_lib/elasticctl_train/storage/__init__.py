"""Where checkpoints live, chosen by URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from elasticctl_train.errors import StorageError
from elasticctl_train.storage.base import Storage, all_keys

__all__ = ["Storage", "all_keys", "open"]


def open(url: str) -> Storage:
    """Return the storage a URL names: `file:///path` or a plain path. Touches nothing yet.

    Raises StorageError for a URL or scheme that is not known.
    """
    from elasticctl_train.storage.local import LocalStorage

    scheme, separator, rest = url.partition("://")
    if not url:
        raise StorageError("the storage URL is empty: give a folder, or file:///path")
    if not separator:
        return LocalStorage(Path(url).expanduser())
    if scheme != "file":
        raise StorageError(f"{url}: {scheme}:// is not a kind of storage this version knows; use file:///path")
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise StorageError(f"{url}: a file URL has three slashes and an absolute path: file:///path")
    return LocalStorage(Path("/" + unquote(path)))
