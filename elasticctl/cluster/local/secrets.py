"""The local cluster's secrets: files that only their user can read, in place of Kubernetes' Secrets.

<state>/secrets/<namespace>/<name>.json     key -> value, mode 0600

Jobs refer to them by name (`envFrom`, `secretKeyRef`). Their values go into the environment of a starting worker and
into no other file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elasticctl.api.errors import ClusterError, NotFoundError
from elasticctl.api.objects import check_label
from elasticctl.api.text import quote
from elasticctl.cluster.base import SecretInfo, check_secret_name, is_secret_name
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.private_paths import make_private, storage_error

SUFFIX = ".json"
MAX_BYTES = 1 << 20
"""Kubernetes' limit for a Secret."""


class Secrets:
    """`elasticctl.cluster.base.SecretStore` in files. Every method may raise ClusterError."""

    def __init__(self, paths: LocalPaths) -> None:
        self._paths = paths

    def read(self, namespace: str, name: str) -> Mapping[str, str] | None:
        """Return the values of a secret by key; None when there is none."""
        if not is_secret_name(name):
            return None
        path = self._paths.secrets / namespace / f"{name}{SUFFIX}"
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as e:
            raise storage_error(f"read the secret {path}", e) from e
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ClusterError(f"the secret {path} is damaged. FIX: delete it and set it again")
        return found

    def merge(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """Set these keys and keep the others."""
        self.write(namespace, name, {**(self.read(namespace, name) or {}), **values})

    def write(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """Replace the whole secret; durable when this returns."""
        path = self._file(namespace, name)
        text = json.dumps(dict(values)).encode()
        if len(text) > MAX_BYTES:
            raise ClusterError(f"the secret {name} has more than {MAX_BYTES} bytes, the limit for a Secret")
        for folder in (self._paths.state, self._paths.secrets, path.parent):
            make_private(folder)
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
                try:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as e:
            raise storage_error(f"write the secret {path}", e) from e

    def delete(self, namespace: str, name: str) -> None:
        """Delete a secret; NotFoundError when there is none."""
        path = self._file(namespace, name)
        try:
            path.unlink()
        except FileNotFoundError as e:
            raise NotFoundError(f"there is no secret {quote(name)} in namespace {quote(namespace)}") from e
        except OSError as e:
            raise storage_error(f"delete the secret {path}", e) from e

    def list(self, namespace: str) -> list[SecretInfo]:
        """Return the secrets of a namespace, by name."""
        found = []
        for path in sorted((self._paths.secrets / namespace).glob(f"*{SUFFIX}")):
            values = self.read(namespace, path.stem)
            with suppress(FileNotFoundError):  # deleted in the meantime
                found.append(SecretInfo(path.stem, tuple(sorted(values or {})), path.stat().st_mtime))
        return found

    def _file(self, namespace: str, name: str) -> Path:
        check_label(namespace, "namespace", 63)
        check_secret_name(name)
        return self._paths.secrets / namespace / f"{name}{SUFFIX}"
