"""Jobs whose workers have been measured."""

from __future__ import annotations

from typing import Any

from tests.support.job_samples import at, job

GIB = 1 << 30
BUSY: dict[str, Any] = {
    "worker": "digits-worker-0",
    "at": at(58),
    "cpusUsed": 12.34,
    "cpus": 64,
    "memoryBytes": 61 * GIB,
    "memoryTotalBytes": 256 * GIB,
    "receivedBytesPerS": 12_000_000,
    "sentBytesPerS": 3_400_000,
    "gpus": {
        "percent": [97, 93],
        "memoryBytes": [61 * GIB, 60 * GIB],
        "memoryTotalBytes": [80 * GIB, 80 * GIB],
        "powerW": [612.5, 600],
        "temperatureC": [71, 69],
        "idleS": [0, 0],
    },
}
IDLE: dict[str, Any] = {
    **BUSY,
    "worker": "digits-worker-1",
    "gpus": {**BUSY["gpus"], "percent": [95, 0], "powerW": [600, None], "idleS": [0, 725]},
}
TIMED: dict[str, Any] = {**BUSY, "stepTimes": {"data": 0.12, "compute": 0.7, "allReduce": 0.15, "save": 0.03}}
BARE: dict[str, Any] = {"worker": "digits-worker-2", "at": at(-60), "noGpus": "NVML: Driver Not Loaded"}


HISTORY: dict[str, Any] = {
    "since": at(-600),
    "atS": [0, 10, 20, 300, 310, 320],
    "columns": {
        "cpusUsed": [1, 3, 3.5, 2, 3, 3.25],
        "memoryBytes": [GIB, 2 * GIB, 2 * GIB, GIB, 2 * GIB, 2.5 * GIB],
        "gpuPercent": [0, 90, 95, 0, 93, 94],
        "data": [0.5, 0.1, 0.1, 0.12],
        "compute": [0.9, 0.7, 0.7, 0.7],
        "allReduce": [None, 0.15, 0.15, 0.15],
        "save": [0, 0.03, 0.03, 0.03],
    },
}
"""Twice half a minute with a pause between them."""


def sample(*workers: dict[str, Any], gpus: int = 0) -> dict[str, Any]:
    found = job(usage={"measured": len(workers), "workers": list(workers)})
    container = found["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}
    return found
