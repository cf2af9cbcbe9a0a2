"""Machines in use, and where the time of training goes: in words, and over time, from `status.usage` and its history.

`now` is in seconds since the epoch. The history keeps about a hundred moments, however long the job runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from elasticctl.api.observed.history import MAX_POINTS, least_point, reports_steps, rounded
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl.api.text import plural, span
from elasticctl.api.usage import JobUsage, UsageHistory, WorkerUsage
from elasticctl_protocol.reports import GpuUsage, StepShares

IDLE_S = 600.0
"""A GPU that has done nothing for this long is reported: loading data or a checkpoint takes less, as a rule."""
STALE_S = 60.0
"""What was measured longer ago is shown with its age: launchers measure every 10 s."""
SPREAD = 10.0
"""GPUs that are used less evenly than this, in percent, are shown by the least and the most."""
MOST_IDLE = 3
GIB, MB = 1 << 30, 1e6
USES = ("CPU", "Memory", "GPU", "GPU memory", "Power", "Temp", "Network")
"""What `uses` has."""
_COLUMNS = tuple(each.name for each in fields(GpuUsage))


def total_usage(usage: JobUsage) -> WorkerUsage:
    """The total usage of all known workers, with the GPUs of all in one list.

    Totals of processors and memory are left out, as several workers may share a machine.
    """

    def total(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    workers = usage.workers
    columns = (tuple(value for each in workers for value in _column(each.gpus, name)) for name in _COLUMNS)
    return WorkerUsage(
        at=max((each.at for each in workers if each.at is not None), default=None),
        cpus_used=total(each.cpus_used for each in workers),
        memory_bytes=sum(each.memory_bytes or 0 for each in workers) or None,
        received_bytes_per_s=total(each.received_bytes_per_s for each in workers),
        sent_bytes_per_s=total(each.sent_bytes_per_s for each in workers),
        gpus=GpuUsage(*columns),
    )


def _column(gpus: GpuUsage, name: str) -> list[float | None]:
    """The column with one value per GPU, whatever a launcher has sent."""
    values: Sequence[float | None] = getattr(gpus, name)
    return [*values, *[None] * gpus.count][: gpus.count]


def cpu_text(used: WorkerUsage) -> str:
    """`3.1 of 8`, in processors."""
    return "" if used.cpus_used is None else f"{used.cpus_used:.1f}{_of(used.cpus)}"


def memory_text(used: WorkerUsage) -> str:
    """`12.3 of 64 GiB`."""
    whole = used.memory_total_bytes
    if used.memory_bytes is None:
        return ""
    return f"{used.memory_bytes / GIB:.1f}{_of(whole / GIB if whole else None)} GiB"


def network_text(used: WorkerUsage) -> str:
    """`12.0 in, 3.4 out MB/s`."""
    rates = [used.received_bytes_per_s, used.sent_bytes_per_s]
    if None in rates:
        return ""
    received, sent = (f"{(rate or 0.0) / MB:,.1f}" for rate in rates)
    return f"{received} in, {sent} out MB/s"


def gpu_text(gpus: GpuUsage) -> str:
    """`97%` of one GPU, `8 x 93%` of several, `8 x 81% (12-99)` where they differ."""
    known = [percent for percent in gpus.percent if percent is not None]
    number = f"{gpus.count} x " if gpus.count > 1 else ""
    if not known:
        return f"{number}?" if gpus.count else ""
    low, high = min(known), max(known)
    apart = f" ({low:.0f}-{high:.0f})" if high - low > SPREAD else ""
    return f"{number}{sum(known) / len(known):.0f}%{apart}"


def gpu_memory_text(gpus: GpuUsage) -> str:
    """`61.2 of 80 GiB`, of the fullest GPU."""
    pairs = zip(_column(gpus, "memory_bytes"), _column(gpus, "memory_total_bytes"), strict=True)
    known = [(used, whole) for used, whole in pairs if used is not None]
    if not known:
        return ""
    used, whole = max(known, key=lambda pair: pair[0] / (pair[1] or pair[0] or 1.0))
    return f"{used / GIB:.1f}{_of(whole / GIB if whole else None)} GiB"


def power_text(gpus: GpuUsage) -> str:
    """`4,980 W` in all."""
    known = [power for power in gpus.power_w if power is not None]
    return f"{sum(known):,.0f} W" if known else ""


def temperature_text(gpus: GpuUsage) -> str:
    """`71 C`, of the hottest."""
    known = [degrees for degrees in gpus.temperature_c if degrees is not None]
    return f"{max(known):.0f} C" if known else ""


def uses(used: WorkerUsage) -> tuple[str, ...]:
    """Short texts of what is in use, in the order of `USES`; empty where unknown."""
    gpus = used.gpus
    on_gpus = (gpu_text(gpus), gpu_memory_text(gpus), power_text(gpus), temperature_text(gpus))
    return cpu_text(used), memory_text(used), *on_gpus, network_text(used)


def single_gpus(gpus: GpuUsage) -> list[GpuUsage]:
    """The usage of each GPU on its own."""
    columns = [_column(gpus, name) for name in _COLUMNS]
    return [GpuUsage(*((value,) for value in values)) for values in zip(*columns, strict=True)]


def usage_note(job: ElasticJob, worker: WorkerUsage, now: float) -> str:
    """A note about a worker: idle GPUs, missing GPUs, or old values."""
    idle = "; ".join(each.text.replace(f" of {each.worker}", "") for each in idle_gpus([worker], job.name))
    absent = worker.no_gpus if hardware(job).gpus_per_worker else ""
    old_s = 0.0 if worker.at is None else now - worker.at
    old = f"measured {span(old_s)} ago" if old_s > STALE_S else ""
    return "; ".join(part for part in (idle, absent, old) if part)


def unshown_text(usage: JobUsage) -> str:
    """A note that the status keeps only some of the workers; empty if it has all of them."""
    more = usage.measured - len(usage.workers)
    return f"{plural(more, 'worker')} that use their machines more are not shown" if more > 0 else ""


def _of(whole: float | None) -> str:
    return "" if whole is None else f" of {whole:,.1f}".removesuffix(".0")


def usage_text(usage: JobUsage | None) -> str:
    """The total usage of all workers in one line: `GPU 8 x 93%, 61.2 of 80 GiB, 4,980 W; CPU 12.1; memory ...`."""
    if usage is None or not usage.workers:
        return ""
    used = total_usage(usage)
    gpus = ", ".join(filter(None, (gpu_text(used.gpus), gpu_memory_text(used.gpus), power_text(used.gpus))))
    parts = [(f"GPU {gpus}" if gpus else ""), f"CPU {cpu_text(used)}", f"memory {memory_text(used)}"]
    least = f"the {len(usage.workers)} least used workers: " if usage.measured > len(usage.workers) else ""
    return least + "; ".join(part for part in parts if part and not part.endswith(" "))


@dataclass(frozen=True, slots=True)
class IdleGpus:
    """The idle GPUs of a worker that has `of` GPUs, and for how long the one that worked last has been idle."""

    worker: str
    numbers: tuple[int, ...]
    of: int
    idle_s: float

    @property
    def text(self) -> str:
        """`GPU 3 of worker-1 idle for 12m00s`, `all 8 GPUs of worker-1 idle for 12m00s`."""
        which = "GPUs " + ", ".join(map(str, self.numbers)) if len(self.numbers) > 1 else f"GPU {self.numbers[0]}"
        if len(self.numbers) == self.of:
            which = f"all {self.of} GPUs" if self.of > 1 else "the GPU"
        return f"{which} of {self.worker} idle for {span(self.idle_s)}"


def idle_gpus(workers: Iterable[WorkerUsage], job: str) -> list[IdleGpus]:
    """The GPUs that have been idle for `IDLE_S`, by worker."""
    found = []
    for worker in workers:
        idle = {number: idle_s for number, idle_s in enumerate(worker.gpus.idle_s) if (idle_s or 0.0) >= IDLE_S}
        if idle:
            least = min(idle_s or 0.0 for idle_s in idle.values())
            found.append(IdleGpus(worker.worker.removeprefix(f"{job}-"), tuple(idle), worker.gpus.count, least))
    return found


def idle_text(usage: JobUsage | None, job: str) -> str:
    """The idle GPUs in one line; empty if there are none."""
    idle = idle_gpus(usage.workers, job) if usage is not None else []
    more = [f"and GPUs of {plural(len(idle) - MOST_IDLE, 'more worker')}"] if len(idle) > MOST_IDLE else []
    return "; ".join([*(each.text for each in idle[:MOST_IDLE]), *more])


PARTS = ("Data", "Compute", "All-reduce", "Save")
"""What `part_texts` has."""
_SOON = "not known yet"
_UNKNOWN = "unknown: only scripts that use the training library report it"


def mean_times(workers: Iterable[WorkerUsage]) -> StepShares:
    """The mean over all workers that report; a part that one of them does not know is unknown."""
    reported = [worker.step_times for worker in workers if worker.step_times.is_known]

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    data, reduced, saved = (
        mean([times.data for times in reported]),
        mean([times.all_reduce for times in reported]),
        mean([times.save for times in reported]),
    )
    apart = sum(share for share in (data, reduced, saved) if share is not None)
    return StepShares(data, max(0.0, 1.0 - apart) if reported else None, reduced, saved)


def part_texts(times: StepShares) -> tuple[str, ...]:
    """`12%` and so on, in the order of `PARTS`; empty where unknown."""
    return tuple("" if share is None else f"{100 * share:.0f}%" for share in times.shares)


def times_text(times: StepShares) -> str:
    """`data 12%, compute 70%, all-reduce 15%, save 3%`; parts that are not measured separately are named together."""
    named = dict(zip(PARTS, part_texts(times), strict=True))
    apart = [name.lower() for name, text in named.items() if not text]
    if "compute" in apart:
        return ""
    rest = " with ".join(["compute", " and ".join(apart)]) if apart else "compute"
    return ", ".join(f"{rest if name == 'Compute' else name.lower()} {text}" for name, text in named.items() if text)


def step_times_text(status: JobStatus) -> str:
    """The same over all workers of a job, or why it is unknown; empty before anything has been measured."""
    if status.usage is None or not status.usage.workers:
        return ""
    text = times_text(mean_times(status.usage.workers))
    return text or (_SOON if reports_steps(status) else _UNKNOWN)


def add_usage(history: UsageHistory, usage: JobUsage | None) -> UsageHistory:
    """Return the history with one more moment, or the same one if nothing newer has been measured.

    Beyond `MAX_POINTS`, the moment whose neighbours are closest together is removed, so that the others stay evenly
    spread. The first and the last always stay.
    """
    at = None if usage is None else total_usage(usage).at
    if usage is None or at is None:
        return history
    since = at if history.since is None else history.since
    at_s = round(at - since, 1)
    if history.at_s and at_s <= history.at_s[-1]:
        return history
    before, measured = len(history.at_s), _together(usage)
    columns = {
        name: (*fitted(history.columns.get(name, ()), before), measured.get(name))
        for name in dict.fromkeys([*history.columns, *(name for name, value in measured.items() if value is not None)])
    }
    longer = UsageHistory(since, (*history.at_s, at_s), columns)
    return longer if len(longer.at_s) <= MAX_POINTS else _without(longer, least_point(longer.at_s))


def fitted(column: tuple[float | None, ...], length: int) -> tuple[float | None, ...]:
    """The column with one value per moment; a shorter one began later."""
    return ((None,) * length + column)[len(column) :]


def _together(usage: JobUsage) -> dict[str, float | None]:
    """The total usage of all workers, by the column's name in JSON."""
    total, times = total_usage(usage), mean_times(usage.workers)
    percent = [value for value in total.gpus.percent if value is not None]
    found = {
        "cpusUsed": total.cpus_used,
        "memoryBytes": total.memory_bytes,
        "gpuPercent": sum(percent) / len(percent) if percent else None,
        "gpuMemoryBytes": _sum(total.gpus.memory_bytes),
        "powerW": _sum(total.gpus.power_w),
        "receivedBytesPerS": total.received_bytes_per_s,
        "sentBytesPerS": total.sent_bytes_per_s,
        "data": times.data,
        "compute": times.compute,
        "allReduce": times.all_reduce,
        "save": times.save,
    }
    return {name: None if value is None else rounded(value) for name, value in found.items()}


def _sum(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _without(history: UsageHistory, point: int) -> UsageHistory:
    def cut(column: tuple[float | None, ...]) -> tuple[float | None, ...]:
        return column[:point] + column[point + 1 :]

    at_s = history.at_s[:point] + history.at_s[point + 1 :]
    return UsageHistory(history.since, at_s, {name: cut(column) for name, column in history.columns.items()})
