"""GPUs by NVML's own binding: its functions are put in the place of the real ones, which need a driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from elasticctl_launcher.usage.machine import Gpu, Gpus
from elasticctl_launcher.usage.measure_usage import UsageWatch
from elasticctl_protocol.reports import StepShares

BUSY = Gpu(97.0, 60 << 30, 80 << 30, 612.5, 71.0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with four GPUs; `uses` is how busy each is, and `silent` what they refuse to tell."""
    state: dict[str, Any] = {"uses": [97, 0, 50, 100], "silent": set()}

    def answer(name: str, value: Any) -> None:
        def question(*args: Any) -> Any:
            if name in state["silent"]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value(*args) if callable(value) else value

        monkeypatch.setattr(pynvml, name, question)

    def by_index(index: int) -> int:
        if index >= len(state["uses"]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def by_uuid(uuid: str) -> int:
        return by_index(["GPU-a", "GPU-b", "GPU-c", "GPU-d"].index(uuid) if uuid.startswith("GPU-") else 99)

    answer("nvmlInit", None)
    answer("nvmlDeviceGetCount", lambda: len(state["uses"]))
    answer("nvmlDeviceGetHandleByIndex", by_index)
    answer("nvmlDeviceGetHandleByUUID", by_uuid)
    answer("nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=state["uses"][handle]))
    answer("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=60 << 30, total=80 << 30))
    answer("nvmlDeviceGetPowerUsage", 612_500)
    answer("nvmlDeviceGetTemperature", 71)
    return state


def test_all_that_a_gpu_tells(driver: dict[str, Any]) -> None:
    gpus = Gpus({})
    assert gpus.absent == ""
    assert gpus.read()[0] == BUSY
    driver["silent"] = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"}
    assert gpus.read()[0] == Gpu(None, 60 << 30, 80 << 30, None, 71.0)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("chosen", "uses"), [("2,0", [50, 97]), ("GPU-d", [100]), ("1,9,2", [0]), (" 0 , 1", [97, 0]), ("3,none", [100])]
)
def test_only_the_workers_own_gpus_are_looked_at(chosen: str, uses: list[float]) -> None:
    assert [gpu.percent for gpu in Gpus({"CUDA_VISIBLE_DEVICES": chosen}).read()] == uses


def test_absent_gpus_are_said_to_be_absent(driver: dict[str, Any]) -> None:
    assert Gpus({"CUDA_VISIBLE_DEVICES": ""}).absent == "no GPU is visible"
    driver["silent"] = {"nvmlInit"}
    gpus = Gpus({})
    assert (gpus.absent, gpus.read()) == ("NVML: Not Supported", [])


def test_without_a_driver_the_library_itself_says_so() -> None:
    """The real one, on a machine like that of the tests."""
    found = Gpus({"CUDA_VISIBLE_DEVICES": ""})
    assert found.absent
    assert found.read() == []


def test_a_gpu_that_does_nothing_is_timed_until_it_works_again() -> None:
    watch = UsageWatch(lambda report: None, StepShares, alone=False)

    def idle_s(now_s: float, *uses: float | None) -> list[float | None]:
        gpus = [Gpu(percent, None, None, None, None) for percent in uses]
        found = watch.describe_gpus(gpus, now_s)
        assert found is not None
        return [*found.idle_s]

    assert idle_s(0, 99, 0, None) == [0, 0, 0]
    assert idle_s(10, 99, 2, None) == [0, 10, 0]
    assert idle_s(20, 0, 4, None) == [0, 20, 0]
    assert idle_s(30, 3, 50, None) == [10, 0, 0]
    assert idle_s(40, 3, 0, None) == [20, 0, 0]
    assert watch.describe_gpus([], 50) is None
