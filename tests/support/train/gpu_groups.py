"""Process groups as those of NCCL look, for machines without GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class OnGpus:
    """A process group as one of NCCL looks, that says what it is told to do."""

    def __init__(self, name: str, told: list[str], failed: str = "SUCCESS") -> None:
        self._name, self.tell, self.failed = name, told.append, failed

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return self._name

    def _group_start(self) -> None:
        self.tell("start")

    def abort(self) -> None:
        self.tell("abort")

    def _group_end(self) -> None:
        self.tell("end")

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.failed)
