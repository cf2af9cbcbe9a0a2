"""The GPUs of this machine, and who has which."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterable, Mapping
from itertools import takewhile

NVIDIA_SMI_TIMEOUT_S = 20.0
VISIBLE = "CUDA_VISIBLE_DEVICES"

_CHOSEN = re.compile(r"[0-9]+|(GPU|MIG)-\S+")
_DEVICE = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)")

log = logging.getLogger(__name__)


def discover(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs that may be handed out, in the form CUDA_VISIBLE_DEVICES takes.

    A CUDA_VISIBLE_DEVICES in `environ` is the user's own choice, and read as CUDA reads it: up to the first word that
    is no device, so that -1 means none. Otherwise all that `nvidia-smi -L` lists, none where there is no such program
    or it does not answer.
    """
    if VISIBLE in environ:
        words = (word.strip() for word in environ[VISIBLE].split(","))
        return tuple(dict.fromkeys(takewhile(_CHOSEN.fullmatch, words)))
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
    return listed(found.stdout)


def listed(text: str) -> tuple[str, ...]:
    """Read the UUIDs of the GPUs from the output of `nvidia-smi -L`."""
    return tuple(match[1] for line in text.splitlines() if (match := _DEVICE.match(line)))


def choose(all_gpus: Iterable[str], taken: Iterable[str], wanted: int) -> tuple[str, ...] | None:
    """Choose `wanted` GPUs that nobody has; None when too few are free."""
    held = set(taken)
    free = [gpu for gpu in all_gpus if gpu not in held]
    return tuple(free[:wanted]) if len(free) >= wanted else None
