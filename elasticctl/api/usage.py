"""`status.usage`: how the workers of a job use their machines, as last measured by their launchers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest

from elasticctl.api.codec import Timestamp
from elasticctl_protocol.reports import GpuUsage, StepShares

MOST_WORKERS = 64
"""The most workers in a status, which must stay small: those whose GPUs, or processors, are used least. A reader of
machine usage looks for idle machines."""


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """One worker at the moment `at`. `no_gpus` is why there are none; None: unknown.

    `cpus_used` of `cpus` were busy on average since the moment before; rates are over the same time.
    """

    worker: str = ""
    at: Timestamp | None = None
    cpus_used: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    received_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None
    gpus: GpuUsage = GpuUsage()
    no_gpus: str = ""
    step_times: StepShares = StepShares()

    @property
    def at_work(self) -> float:
        """The load in percent, by which busy workers differ from idle ones: of its least used GPU, or of its CPUs."""
        known = [percent for percent in self.gpus.percent if percent is not None]
        if known:
            return min(known)
        return 100 * (self.cpus_used or 0.0) / (self.cpus or 1.0)


@dataclass(frozen=True, slots=True)
class JobUsage:
    """The workers that have been measured: all `measured` of them, or as many as a status keeps, in order."""

    measured: int = 0
    workers: tuple[WorkerUsage, ...] = ()

    @classmethod
    def of(cls, workers: Iterable[WorkerUsage]) -> JobUsage:
        """The usage that a status keeps of these workers, which are in order."""
        found = tuple(workers)
        if len(found) <= MOST_WORKERS:
            return cls(len(found), found)
        kept = sorted(nsmallest(MOST_WORKERS, range(len(found)), key=lambda index: found[index].at_work))
        return cls(len(found), tuple(found[index] for index in kept))


@dataclass(frozen=True, slots=True)
class UsageHistory:
    """What all workers used together over time, as columns: `at_s` is seconds after `since`. None: not known then."""

    since: Timestamp | None = None
    at_s: tuple[float, ...] = ()
    columns: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
