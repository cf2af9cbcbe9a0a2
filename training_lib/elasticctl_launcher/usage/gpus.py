"""The GPUs of this worker, as NVIDIA's management library (NVML) reports them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MOST_GPUS = 32


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. A value is None if the GPU does not report it (a MIG slice reports no utilization)."""

    percent: float | None
    memory_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    temperature_c: float | None


class Gpus:
    """The GPUs that this worker may use. `absent` says why there are none; it is empty if there are some."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.absent = ""
        self._handles: Sequence[Any] = ()
        self._nvml: ModuleType | None = None
        try:
            import pynvml
        except ImportError:
            self.absent = "nvidia-ml-py is not installed with the workers, so GPUs are not measured"
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = _visible(pynvml, environ.get("CUDA_VISIBLE_DEVICES"))[:MOST_GPUS]
        except pynvml.NVMLError as error:
            self.absent = f"NVML: {error}"
            return
        if not self._handles:
            self.absent = "no GPU is visible"

    def read(self) -> list[Gpu]:
        """Measure all of them."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: Any) -> Gpu:
        nvml: Any = self._nvml

        def ask(question: Callable[[], Any]) -> Any:
            try:
                return question()
            except nvml.NVMLError:
                return None

        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        power_mw = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return Gpu(
            percent=ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        )


def _visible(nvml: ModuleType, chosen: str | None) -> list[Any]:
    """The devices in CUDA_VISIBLE_DEVICES, up to the first invalid entry; all devices if it is not set.

    Entries are numbers or UUIDs. A container shows only its own devices to NVML.
    """
    if chosen is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    found = []
    for word in filter(None, (word.strip() for word in chosen.split(","))):
        try:
            by_number = word.isdecimal()
            found.append(
                nvml.nvmlDeviceGetHandleByIndex(int(word)) if by_number else nvml.nvmlDeviceGetHandleByUUID(word)
            )
        except nvml.NVMLError:
            break
    return found
