"""Format lists of names in messages."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 4


def counted(what: str, names: Sequence[str]) -> str:
    """Return how many names are `what`, and the first of them; "" if there are none."""
    verb = "is" if len(names) == 1 else "are"
    return f"{len(names)} {verb} {what}: {listed(names)}" if names else ""


def listed(names: Sequence[str]) -> str:
    """Return the first of these names."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, …"
