"""How this machine is shared between projects: switched on or not, and which slots there are. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import from_json, to_json
from elasticctl.api.errors import SpecError
from elasticctl.api.podtemplate import GPU_RESOURCE, hardware
from elasticctl.api.quota import CPU_SLOTS, MAX_SLOTS
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import shown
from elasticctl.cluster.base import Manifest

NAME = "local"
"""The one object of its kind in the store."""
KIND = "LocalSharing"
SETTLE_S = 10.0
"""A job that was resized is left alone for so long; short, for on one machine a group re-forms within seconds."""


@dataclass(frozen=True, slots=True)
class LocalSharing:
    """`cpu_slots`: how many ranks without GPUs may run at once, of all jobs; None: as many as there are processors.

    They are offered where the machine has no GPUs, or where a number was said.
    """

    on: bool = False
    cpu_slots: int | None = None

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any] | None) -> LocalSharing:
        """Read what the store holds; off when it holds nothing."""
        return from_json(cls, (manifest or {}).get("spec"))

    def to_manifest(self) -> Manifest:
        """The object as it is stored."""
        return {"kind": KIND, "metadata": {"name": NAME}, "spec": to_json(self)}

    def slots(self, gpus: int, processors: int) -> int:
        """How many CPU slots there are to share; 0 while sharing is off."""
        if not self.on:
            return 0
        if self.cpu_slots is None:
            return 0 if gpus else processors
        return self.cpu_slots


def check_sharing(body: Mapping[str, Any]) -> LocalSharing:
    """Read what a client asks for; SpecError for anything else."""
    if not isinstance(body.get("on"), bool):
        raise SpecError(f"must be true or false, not {shown(body.get('on'))}", path="on")
    slots = body.get("cpuSlots")
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= MAX_SLOTS):
        raise SpecError(f"must be a whole number from 1 to {MAX_SLOTS}, not {shown(slots)}", path="cpuSlots")
    return from_json(LocalSharing, body)


def node(name: str, gpus: int, cpu_slots: int) -> Manifest:
    """This machine as a node: what there is to share on it."""
    allocatable = {GPU_RESOURCE: str(gpus), CPU_SLOTS: str(cpu_slots)}
    return {"metadata": {"name": name}, "status": {"allocatable": allocatable}}


def cpu_slots_of(pod: Mapping[str, Any]) -> int:
    """How many CPU slots a worker takes: one for each of its ranks, none where it has GPUs."""
    found = hardware(ElasticJob(template=pod))
    return 0 if found.gpus_per_worker else found.ranks_per_worker
