"""The capacity of this machine: its GPUs and CPU slots, and whether projects share them."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from elasticctl.api.codec import from_json, to_json
from elasticctl.api.errors import SpecError
from elasticctl.api.podtemplate import GPU_RESOURCE, hardware
from elasticctl.api.quota import CPU_SLOTS, MAX_SLOTS
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import quote
from elasticctl.cluster.base import Manifest

SHARING_NAME = "local"
"""The one object of its kind in the store."""
SHARING_KIND = "LocalSharing"
SETTLE_S = 10.0
"""How long a job that was resized is left alone. On one machine a group re-forms within seconds."""


@dataclass(frozen=True, slots=True)
class LocalSharing:
    """`cpu_slots`: how many ranks without GPUs may run at the same time, over all jobs; None: one for each processor.

    They are offered when the machine has no GPUs, or when a number is given.
    """

    on: bool = False
    cpu_slots: int | None = None

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any] | None) -> LocalSharing:
        """Parse the stored object; sharing is off when there is none."""
        return from_json(cls, (manifest or {}).get("spec"))

    def to_manifest(self) -> Manifest:
        """Return the object as it is stored."""
        return {"kind": SHARING_KIND, "metadata": {"name": SHARING_NAME}, "spec": to_json(self)}

    def slots(self, gpus: int, processors: int) -> int:
        """Return how many CPU slots there are to share; 0 while sharing is off."""
        if not self.on:
            return 0
        if self.cpu_slots is None:
            return 0 if gpus else processors
        return self.cpu_slots


def check_sharing(body: Mapping[str, Any]) -> LocalSharing:
    """Parse a client's request to change the sharing. Raises SpecError."""
    if not isinstance(body.get("on"), bool):
        raise SpecError(f"must be true or false, not {quote(body.get('on'))}", path="on")
    slots = body.get("cpuSlots")
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= MAX_SLOTS):
        raise SpecError(f"must be a whole number from 1 to {MAX_SLOTS}, not {quote(slots)}", path="cpuSlots")
    return from_json(LocalSharing, body)


def build_node(name: str, gpus: int, cpu_slots: int) -> Manifest:
    """Return this machine as a node, with its capacity to share."""
    allocatable = {GPU_RESOURCE: str(gpus), CPU_SLOTS: str(cpu_slots)}
    return {"metadata": {"name": name}, "status": {"allocatable": allocatable}}


def cpu_slots_of(pod: Mapping[str, Any]) -> int:
    """Return how many CPU slots a worker takes: one for each rank, none if it has GPUs."""
    found = hardware(ElasticJob(template=pod))
    return 0 if found.gpus_per_worker else found.ranks_per_worker


NVIDIA_SMI_TIMEOUT_S = 20.0
VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"

_GPU_ID = re.compile(r"[0-9]+|(GPU|MIG)-\S+")
_GPU_LINE = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)")

log = logging.getLogger(__name__)


def discover_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs to assign to workers, in the format of CUDA_VISIBLE_DEVICES.

    A CUDA_VISIBLE_DEVICES in `environ` is the user's own choice. It is read as CUDA reads it: up to the first word that
    is not a device, so -1 means none. Otherwise these are the GPUs that `nvidia-smi -L` lists, none if the program is
    missing or does not answer.
    """
    if VISIBLE_GPUS_VARIABLE in environ:
        words = (word.strip() for word in environ[VISIBLE_GPUS_VARIABLE].split(","))
        return tuple(dict.fromkeys(takewhile(_GPU_ID.fullmatch, words)))
    try:
        found = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.TimeoutExpired) as e:
        log.warning("no GPUs are used: nvidia-smi did not answer (%s)", e)
        return ()
    if found.returncode != 0:
        log.warning("no GPUs are used: nvidia-smi failed: %s", (found.stderr or found.stdout).strip())
        return ()
    return parse_gpu_list(found.stdout)


def parse_gpu_list(text: str) -> tuple[str, ...]:
    """Parse the UUIDs of the GPUs from the output of `nvidia-smi -L`."""
    return tuple(match[1] for line in text.splitlines() if (match := _GPU_LINE.match(line)))


def choose_gpus(all_gpus: Iterable[str], taken: Iterable[str], wanted: int) -> tuple[str, ...] | None:
    """Choose `wanted` free GPUs; None when there are too few."""
    held = set(taken)
    free = [gpu for gpu in all_gpus if gpu not in held]
    return tuple(free[:wanted]) if len(free) >= wanted else None
