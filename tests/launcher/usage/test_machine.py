"""What a worker uses, as the system tells it: of this very process, and in tables as kernels write them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticctl_launcher.usage.machine import MachineUse, read_machine
from elasticctl_launcher.usage.measure_usage import describe_machine
from elasticctl_protocol.reports import UsageReport
from tests.support.waiting import wait_until

BUSY = "import sys; held = bytearray(200 << 20); print('.', flush=True)\nwhile True: held[7] += 1; held[7] = 0"


def test_a_busy_child_counts_with_its_memory_and_its_processor() -> None:
    before, began = read_machine(os.getpid(), alone=False), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
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


def test_a_container_of_its_own_tells_its_memory_its_share_of_processors_and_its_network(proc: Path) -> None:
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


def test_a_control_group_of_version_1_without_limits_has_those_of_the_machine(proc: Path) -> None:
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


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    found = read_machine(os.getpid(), alone=True, cgroup=tmp_path, proc=tmp_path)
    assert found is not None
    assert (found.memory_total_bytes, found.received_bytes, found.sent_bytes) == (None, None, None)
    assert read_machine(2**22 + 1, alone=True) is None


def test_rates_are_over_the_time_between_two_looks_and_never_negative() -> None:
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
