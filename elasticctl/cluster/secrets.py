"""Secrets by their names, whichever place keeps them: what `elasticctl secret` does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from elasticctl.api.errors import UsageError
from elasticctl.api.text import shown

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,200}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Known:
    """A secret without its values; `made_at` in seconds since the epoch, None where that is not known."""

    name: str
    keys: tuple[str, ...]
    made_at: float | None


def is_name(name: str) -> bool:
    """Can a secret be called so? As a DNS name, which is what Kubernetes asks for."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raise UsageError for what no secret can be called."""
    if not is_name(name):
        raise UsageError(f"{shown(name)} is no name of a secret: use lower-case letters, digits, '-' and '.'")


class SecretStore(Protocol):
    """The secrets of one place. Every method may raise ClusterError; none shows a value."""

    def merge(self, namespace: str, name: str, values: Mapping[str, str]) -> None:
        """Set these keys; other keys of the secret stay. Makes it where there is none."""

    def delete(self, namespace: str, name: str) -> None:
        """Remove it; NotFoundError when it is not there."""

    def list(self, namespace: str) -> list[Known]:
        """Those that `merge` has made or changed, by name."""
