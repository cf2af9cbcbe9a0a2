"""`ElasticQuota`: what a project, which is a namespace, is guaranteed of each kind of slots, and may have at most.

A kind is a GPU type of `elasticctl.catalog`, `gpu` for GPUs of a type that is not known, or `cpu` for the processors
that stand in for GPUs on the local cluster. Pure; no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticctl.catalog import GPU_TYPES
from elasticctl.codec import Manifest
from elasticctl.errors import SpecError
from elasticctl.spec import API_VERSION
from elasticctl.wording import did_you_mean, listed, shown

KIND = "ElasticQuota"
PLURAL = "elasticquotas"
GPU, CPU = "gpu", "cpu"
POOLS = (*GPU_TYPES, GPU, CPU)
CPU_SLOTS = "elasticctl.dev/cpu-slots"
"""What a node offers that has processors to share."""
HELD = "held"
"""In the status of a node, beside what is allocatable there: what pods that are no workers hold of it, by resource."""
MAX_SLOTS = 1_000_000
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1_000.0


@dataclass(frozen=True, slots=True)
class Quota:
    """One project's part, in slots by kind: guaranteed (missing: 0) and at most (missing: no limit).

    `weight` is its share, beside the other projects', of what nobody is guaranteed or uses.
    """

    project: str
    weight: float = 1.0
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Quota:
        """Read an ElasticQuota object of any content; never raises."""
        spec = _mapping(manifest.get("spec"))
        weight = spec.get("weight")
        usable = isinstance(weight, int | float) and not isinstance(weight, bool) and MIN_WEIGHT <= weight <= MAX_WEIGHT
        return cls(
            project=str(_mapping(manifest.get("metadata")).get("name", "")),
            weight=float(weight) if usable and weight is not None else 1.0,
            guaranteed=_slots(spec.get("guaranteed")),
            limit=_slots(spec.get("limit")),
        )

    def to_manifest(self) -> Manifest:
        """The object as it is stored."""
        spec = {"weight": self.weight, "guaranteed": dict(self.guaranteed), "limit": dict(self.limit)}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.project}, "spec": spec}


def check_quota(manifest: object) -> Quota:
    """Refuse what cannot be stored as an ElasticQuota; SpecError names the field, the value and what would do."""
    if not isinstance(manifest, Mapping):
        raise SpecError(f"an {KIND} is a mapping, not {type(manifest).__name__}")
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(name) != wanted:
            raise SpecError(f"must be {wanted!r}, not {shown(manifest.get(name))}", path=name)
    spec = _mapping(manifest.get("spec"))
    weight = spec.get("weight", 1)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise SpecError(f"must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {shown(weight)}", path="spec.weight")
    for part in ("guaranteed", "limit"):
        _check_slots(spec.get(part, {}), f"spec.{part}")
    quota = Quota.from_manifest(manifest)
    for pool, slots in quota.guaranteed.items():
        if slots > quota.limit.get(pool, math.inf):
            raise SpecError(
                f"{slots} {pool} are guaranteed, and the limit is {quota.limit[pool]}", path=f"spec.guaranteed.{pool}"
            )
    return quota


def _check_slots(given: object, path: str) -> None:
    if not isinstance(given, Mapping):
        raise SpecError(f"must be a mapping of kinds to numbers, not {shown(given)}", path=path)
    for pool, slots in given.items():
        if pool not in POOLS:
            near = did_you_mean(str(pool), POOLS)
            raise SpecError(f"{shown(pool)} is not {listed(POOLS)}{near}", path=path)
        if not isinstance(slots, int) or isinstance(slots, bool) or not 0 <= slots <= MAX_SLOTS:
            raise SpecError(f"must be a whole number from 0 to {MAX_SLOTS}, not {shown(slots)}", path=f"{path}.{pool}")


def _slots(given: object) -> dict[str, int]:
    items = _mapping(given).items()
    return {str(k): v for k, v in items if isinstance(v, int) and not isinstance(v, bool) and v >= 0}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
