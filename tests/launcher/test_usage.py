"""What a worker uses of its machine: of this process, of tables as kernels write them, and with a fake GPU driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from elasticctl_launcher import usage
from elasticctl_launcher.usage import (
    KEEP_S,
    Gpu,
    Gpus,
    MachineUse,
    StepTimeShares,
    UsageWatch,
    describe_machine,
    read_machine,
)
from elasticctl_protocol.reports import StepShares, StepSums, UsageReport
from elasticctl_protocol.requests import WIRE
from tests.support.launcher_lab import JOB_UID, KEY, Lab
from tests.support.waiting import wait_until

BUSY_CHILD = "import sys; held = bytearray(200 << 20); print('.', flush=True)\nwhile True: held[7] += 1; held[7] = 0"


def test_cpu_and_memory_of_a_child_process_are_included() -> None:
    before, began = read_machine(os.getpid(), alone=False), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", BUSY_CHILD], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()

            def used() -> float:
                now = read_machine(os.getpid(), alone=False)
                assert before is not None
                assert now is not None
                assert now.memory_bytes - before.memory_bytes > 180 << 20
                return now.cpu_s - before.cpu_s

            wait_until(lambda: used() > 0.5)
            assert used() < (time.monotonic() - began + 1) * (os.cpu_count() or 1)
        finally:
            child.kill()
    assert before is not None
    assert before.received_bytes is None  # the interfaces are the whole machine's
    assert before.cpus >= 1
    assert (before.memory_total_bytes or 0) > before.memory_bytes > 0


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    (proc / "net").mkdir(parents=True)
    (proc / "net/dev").write_text(
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
        "    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0\n"
        "  eth0: 5000 1 0 0 0 0 0 0 7000 1 0 0 0 0 0 0\n"
        " net1:100 1 0 0 0 0 0 0 200 1 0 0 0 0 0 0\n"
    )
    (proc / "meminfo").write_text("MemTotal:       16000000 kB\nMemFree: 1 kB\n")
    return proc


def test_in_a_container_limits_and_network_are_those_of_the_container(proc: Path) -> None:
    group = proc.parent / "v2"
    group.mkdir()
    (group / "memory.current").write_text("5000000\n")
    (group / "memory.max").write_text("8000000\n")
    (group / "memory.stat").write_text("anon 3000000\ninactive_file 1500000\n")
    (group / "cpu.max").write_text("50000 100000\n")
    found = read_machine(os.getpid(), alone=True, cgroup=group, proc=proc)
    assert found is not None
    assert (found.memory_bytes, found.memory_total_bytes, found.cpus) == (3_500_000, 8_000_000, 0.5)
    assert (found.received_bytes, found.sent_bytes) == (5100, 7200)


def test_a_v1_control_group_without_limits_reports_those_of_the_machine(proc: Path) -> None:
    group = proc.parent / "v1"
    (group / "memory").mkdir(parents=True)
    (group / "cpu").mkdir()
    (group / "memory/memory.usage_in_bytes").write_text("5000000\n")
    (group / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (group / "memory/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 1000000\n")
    (group / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu/cpu.cfs_period_us").write_text("100000\n")
    found = read_machine(os.getpid(), alone=True, cgroup=group, proc=proc)
    assert found is not None
    assert (found.memory_bytes, found.memory_total_bytes) == (4_000_000, 16_000_000 * 1024)
    assert found.cpus == len(os.sched_getaffinity(0))


def test_values_that_the_system_does_not_report_are_none(tmp_path: Path) -> None:
    found = read_machine(os.getpid(), alone=True, cgroup=tmp_path, proc=tmp_path)
    assert found is not None
    assert (found.memory_total_bytes, found.received_bytes, found.sent_bytes) == (None, None, None)
    assert read_machine(2**22 + 1, alone=True) is None


def test_rates_are_per_second_between_two_measurements_and_never_negative() -> None:
    before = MachineUse(10.0, 8.0, 1000, 2000, 100, 500)
    assert describe_machine(before, MachineUse(30.0, 8.0, 1100, 2000, 2100, 400), 10.0) == UsageReport(
        cpus_used=2.0,
        cpus=8.0,
        memory_bytes=1100,
        memory_total_bytes=2000,
        received_bytes_per_s=200,
        sent_bytes_per_s=0,
    )
    alone = describe_machine(before, MachineUse(5.0, 8.0, 1100, None), 10.0)
    assert alone == UsageReport(cpus_used=0.0, cpus=8.0, memory_bytes=1100)


def test_shares_cover_all_ranks_since_the_last_call() -> None:
    times = StepTimeShares()
    assert times.shares() == StepShares()
    times.add(1, 0, StepSums(wall=10.0, data=1.0, all_reduce=2.0, save=1.0))
    assert times.shares() == StepShares(data=0.1, all_reduce=0.2, save=0.1, compute=0.6)
    times.add(1, 0, StepSums(wall=20.0, data=6.0, all_reduce=2.0, save=1.0))
    times.add(1, 1, StepSums(wall=10.0, data=0.0, all_reduce=0.0, save=1.0))
    assert times.shares() == StepShares(data=0.25, all_reduce=0.0, save=0.05, compute=0.7)


def test_a_part_that_one_rank_does_not_report_is_unknown() -> None:
    times = StepTimeShares()
    times.add(1, 0, StepSums(wall=10.0, data=1.0, all_reduce=2.0, save=0.0))
    times.add(1, 1, StepSums(wall=10.0, data=1.0, save=0.0))
    assert times.shares() == StepShares(data=0.1, save=0.0, compute=0.9)


def test_sums_that_restart_count_from_zero() -> None:
    times = StepTimeShares()
    times.add(1, 0, StepSums(wall=100.0, data=90.0))
    times.shares()
    times.add(1, 0, StepSums(wall=4.0, data=1.0))
    assert times.shares().data == 0.25
    times.add(2, 0, StepSums(wall=50.0, data=10.0))
    assert times.shares().data == 0.2


def test_the_last_shares_are_reported_again_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(usage.time, "monotonic", lambda: now[0])
    times = StepTimeShares()
    times.add(1, 0, StepSums(wall=10.0, data=1.0))
    first = times.shares()
    now[0] += KEEP_S - 1
    assert times.shares() == first
    now[0] += 2
    assert times.shares() == StepShares()


@pytest.mark.parametrize(
    "sums", [{}, {"wall": "x"}, {"wall": -1.0}, {"wall": float("nan")}, {"wall": True}, {"wall": 1e300}]
)
def test_invalid_times_are_ignored(sums: dict[str, object]) -> None:
    times = StepTimeShares()
    times.add(1, 0, WIRE.decode(StepSums, sums))
    times.add(1, 5, StepSums(wall=0.0, data=3.0))
    assert times.shares() == StepShares()


BUSY_GPU = Gpu(97.0, 60 << 30, 80 << 30, 612.5, 71.0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with four GPUs; `uses` is how busy each is, and `silent` what they do not report."""
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


def test_a_value_that_a_gpu_does_not_report_is_none(driver: dict[str, Any]) -> None:
    gpus = Gpus({})
    assert gpus.absent == ""
    assert gpus.read()[0] == BUSY_GPU
    driver["silent"] = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"}
    assert gpus.read()[0] == Gpu(None, 60 << 30, 80 << 30, None, 71.0)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("chosen", "uses"), [("2,0", [50, 97]), ("GPU-d", [100]), ("1,9,2", [0]), (" 0 , 1", [97, 0]), ("3,none", [100])]
)
def test_only_visible_devices_are_measured(chosen: str, uses: list[float]) -> None:
    assert [gpu.percent for gpu in Gpus({"CUDA_VISIBLE_DEVICES": chosen}).read()] == uses


def test_the_reason_for_absent_gpus_is_reported(driver: dict[str, Any]) -> None:
    assert Gpus({"CUDA_VISIBLE_DEVICES": ""}).absent == "no GPU is visible"
    driver["silent"] = {"nvmlInit"}
    gpus = Gpus({})
    assert (gpus.absent, gpus.read()) == ("NVML: Not Supported", [])


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    """With the real library, on a machine like that of the tests."""
    found = Gpus({"CUDA_VISIBLE_DEVICES": ""})
    assert found.absent
    assert found.read() == []


def test_idle_time_of_a_gpu_ends_when_it_is_used() -> None:
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


def test_each_worker_reports_its_usage(pair: Lab) -> None:
    def measured() -> int:
        usage = pair.site.service.view(KEY, JOB_UID).usage
        return usage.measured if usage is not None else 0

    wait_until(lambda: measured() == 2)
    usage = pair.site.service.view(KEY, JOB_UID).usage
    assert usage is not None
    assert {worker.worker for worker in usage.workers} == {"a-0", "a-1"}
    for worker in usage.workers:
        assert (worker.memory_bytes or 0) > 10_000_000  # a launcher and a rank, both Python
        assert worker.cpus_used is not None
        assert worker.received_bytes_per_s is None  # all workers share this machine
        assert worker.no_gpus or worker.gpus.count
