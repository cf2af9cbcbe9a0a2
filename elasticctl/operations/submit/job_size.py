"""The size of a job: what `--gpus 16 --gpu-type t4` means in workers, and in ranks of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from elasticctl.api.errors import UsageError
from elasticctl.api.gpu_types import GpuType, gpu_type
from elasticctl.api.spec import MAX_WORKERS
from elasticctl.api.text import plural, plural_are
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.settings.contexts import KUBERNETES, LOCAL, Context

_MOST_FOR_GOAL = 8
"""The most workers for a goal if the user gives no maximum."""


@dataclass(frozen=True, slots=True)
class JobSize:
    """The number of workers and the hardware of each; `note` is a remark to print once.

    `automatic`: the number is chosen between the bounds, and `workers` is the largest.
    """

    workers: int
    min_workers: int
    max_workers: int | None
    gpus_per_worker: int
    ranks_per_worker: int
    note: str = ""
    automatic: bool = False


def size_of(flags: JobFlags, context: Context, machine_gpus: int) -> JobSize:
    """Turn GPUs and workers into a size; `machine_gpus` counts for the local context only.

    Bounds without a number between them mean that the size is automatic. Raises UsageError for numbers that contradict
    each other, the machine or the catalog.
    """
    if flags.has_goal:
        flags = _with_bounds(flags, context, machine_gpus)
    automatic = _is_automatic(flags)
    if automatic:
        flags = dataclasses.replace(flags, gpus=flags.max_gpus, workers=flags.max_workers)
    each = _gpus_per_worker(flags, context, machine_gpus)
    workers = _workers(flags.gpus, "--gpus", flags.workers, each) or 1
    low = _workers(flags.min_gpus, "--min-gpus", flags.min_workers, each)
    high = _workers(flags.max_gpus, "--max-gpus", flags.max_workers, each)
    _check_order(low, workers, high)
    if automatic and context.provider == LOCAL and each and machine_gpus >= (low or 1) * each:
        workers = high = min(workers, machine_gpus // each)
    slots = int(flags.cpus) if flags.launcher and flags.cpus.isdecimal() else 1
    size = JobSize(workers, low or 1, high, each, each or max(slots, 1), automatic=automatic)
    if context.provider != LOCAL or each == 0 or workers * each <= machine_gpus:
        return size
    if machine_gpus:
        wanted, has = plural_are((low or 1 if automatic else workers) * each, "GPU"), plural(machine_gpus, "GPU")
        flag = "--min-gpus" if automatic else "--gpus"
        raise UsageError(f"{wanted} wanted, but this machine has {has}. FIX: give {flag} {machine_gpus}")
    note = f"this machine has no GPU: the job runs on {plural(workers * each, 'CPU rank')} instead"
    return dataclasses.replace(size, gpus_per_worker=0, note=note)


def _with_bounds(flags: JobFlags, context: Context, machine_gpus: int) -> JobFlags:
    """With a goal, a given number is the upper bound; without a number, there is a default one."""
    gpus, workers = flags.max_gpus or flags.gpus, flags.max_workers or flags.workers
    if gpus is None and workers is None:
        if context.provider == LOCAL:
            gpus, workers = (machine_gpus, None) if machine_gpus else (None, _MOST_FOR_GOAL // 2)
        elif gpu_of(flags, context) is not None or context.gpus_per_node:
            gpus = _MOST_FOR_GOAL * _gpus_per_worker(dataclasses.replace(flags, gpus=1), context, machine_gpus)
        else:
            workers = _MOST_FOR_GOAL
    low = 1 if flags.min_workers is None and flags.min_gpus is None else flags.min_workers
    return dataclasses.replace(flags, gpus=None, workers=None, max_gpus=gpus, max_workers=workers, min_workers=low)


def _is_automatic(flags: JobFlags) -> bool:
    low = flags.min_gpus is not None or flags.min_workers is not None
    high = flags.max_gpus is not None or flags.max_workers is not None
    return low and high and flags.gpus is None and flags.workers is None


def doubt_of(size: JobSize, flags: JobFlags) -> str:
    """Why a size is probably a mistake: several ranks would share the CPUs of a machine without the wanted GPUs."""
    ranks = size.workers * size.ranks_per_worker
    if not size.note or ranks == 1 or not (flags.gpus or flags.min_gpus or flags.max_gpus):
        return ""
    return (
        f"this machine has no GPU, and {ranks} ranks would share its CPUs. FIX: choose a cluster with --context,"
        f" or give --workers {size.workers} without GPUs for CPU ranks"
    )


def gpu_of(flags: JobFlags, context: Context) -> GpuType | None:
    """The type of GPU that the job runs on; None without GPUs, or if no type is given."""
    name = flags.gpu_type or context.gpu_type
    return gpu_type(name) if name and flags.gpus != 0 else None


def _gpus_per_worker(flags: JobFlags, context: Context, machine_gpus: int) -> int:
    kind = gpu_of(flags, context)
    asked = flags.gpus_per_node
    if flags.gpus and flags.workers and asked is None:
        if flags.gpus % flags.workers:
            raise UsageError(f"--gpus {flags.gpus} cannot be shared evenly by --workers {flags.workers}")
        return flags.gpus // flags.workers
    if asked is not None:
        return asked
    if flags.gpus == 0 or (flags.gpus is None and flags.workers is not None and kind is None):
        return 0
    if context.provider == LOCAL:
        return 1 if flags.gpus or kind or machine_gpus else 0
    if context.provider == KUBERNETES:
        return context.gpus_per_node or 1 if flags.gpus else 0
    if kind is None:
        if flags.gpus:
            raise UsageError(f"--gpu-type is needed with --gpus in context {context.name}")
        return 0
    return context.gpus_per_node or min(kind.nodes(context.provider), default=1)


def _workers(gpus: int | None, flag: str, workers: int | None, each: int) -> int | None:
    """The number of workers, as given or from the number of GPUs. Raises UsageError if they disagree."""
    if gpus is None or (gpus == 0 and each == 0):
        return workers
    if each == 0 or gpus % each:
        has = plural(each, "GPU") if each else "no GPUs"
        raise UsageError(
            f"{flag} {gpus}: each worker has {has}" + (f", so it must be a multiple of {each}" if each else "")
        )
    if workers is not None and workers * each != gpus:
        raise UsageError(
            f"{flag} {gpus} and {plural(workers, 'worker')} with {plural(each, 'GPU')} each"
            " disagree. FIX: leave one out"
        )
    return gpus // each


def _check_order(low: int | None, workers: int, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        raise UsageError(
            f"the minimum of {low} workers is more than the maximum of {high}. FIX: lower one or raise the other"
        )
    if low is not None and workers < low:
        raise UsageError(
            f"{plural_are(workers, 'worker')} fewer than the minimum of {low}. FIX: ask for more, or lower the minimum"
        )
    if high is not None and workers > high:
        raise UsageError(
            f"{plural_are(workers, 'worker')} more than the maximum of {high}. FIX: ask for fewer, or raise the maximum"
        )
    if max(workers, high or 0) > MAX_WORKERS:
        raise UsageError(f"{max(workers, high or 0)} workers are more than elasticctl can manage, {MAX_WORKERS}")
