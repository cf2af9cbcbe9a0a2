"""Checkpoints as a table, and as data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.text import size_text, span
from elasticctl.cli.framework.output import Table

if TYPE_CHECKING:
    from elasticctl_store.checkpoints.entries import Commit
    from elasticctl_store.checkpoints.verify import CheckedCommit

_COLUMNS = ("STEP", "EPOCH", "AGE", "SIZE", "RANKS", "STATE")
_WIDE = ("NUMBER", "GENERATION", "METRICS")


def checkpoints_table(found: Sequence[CheckedCommit], now: float, *, wide: bool = False) -> Table:
    """One row per checkpoint. `now` is in seconds since the epoch."""
    rows = []
    for finding in found:
        commit, state = finding.commit, f"damaged: {finding.damage}" if finding.damage else "whole"
        if commit is not None and commit.not_finite:
            state = f"{state}, but not finite: {_first(commit.not_finite)}"
        if commit is None:
            rows.append(("", "", "", "", "", *(("", "", "") if wide else ()), state))
            continue
        more = (str(commit.number), str(commit.generation), _metrics(commit)) if wide else ()
        ranks = str(len(commit.shares))
        what = (str(commit.step), str(commit.epoch), span(now - commit.at), size_text(commit.size_bytes), ranks)
        rows.append((*what, *more, state))
    return Table((*_COLUMNS[:-1], *(_WIDE if wide else ()), _COLUMNS[-1]), rows, wraps=True)


def checkpoint_data(finding: CheckedCommit) -> dict[str, Any]:
    """A checkpoint for programs."""
    state = {"whole": not finding.damage, **({"damage": finding.damage} if finding.damage else {})}
    commit = finding.commit
    if commit is None:
        return {"position": finding.position, **state}
    return {
        "position": finding.position,
        "step": commit.step,
        "epoch": commit.epoch,
        "at": to_rfc3339(commit.at),
        "sizeBytes": commit.size_bytes,
        "worldSize": len(commit.shares),
        "number": commit.number,
        "generation": commit.generation,
        "metrics": dict(commit.metrics),
        **({"notFinite": list(commit.not_finite)} if commit.not_finite else {}),
        "objects": [{"key": ref.key, "sizeBytes": ref.size_bytes, "checksum": ref.checksum} for ref in commit.shares],
        **state,
    }


def _first(names: Sequence[str]) -> str:
    """`model/0.weight and 3 more`."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _metrics(commit: Commit) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(commit.metrics.items()))
