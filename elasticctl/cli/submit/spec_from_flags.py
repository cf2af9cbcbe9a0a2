"""Turns the flags of `submit` into a JobSpec: the number of workers, their hardware, and their command."""

from __future__ import annotations

import dataclasses
import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.errors import UsageError
from elasticctl.api.goal import ON_DEMAND, PoolOrder, capacity_of
from elasticctl.api.gpu_types import GpuType, gpu_type, place
from elasticctl.api.observed.plan_text import goal_words
from elasticctl.api.podtemplate import (
    SETUP_VARIABLE,
    START_FROM_VARIABLE,
    STORAGE_VARIABLE,
    WORKSPACE_FROM_VARIABLE,
    WORKSPACE_VARIABLE,
)
from elasticctl.api.spec import MAX_WORKERS, QUEUE_LABEL, JobSpec, OnNan
from elasticctl.api.text import join_and, plural, plural_are, quote
from elasticctl.cli.framework.options import SCHEMES, Assignment, check_near_url
from elasticctl.cli.submit.flags.job_flags import JobFlags
from elasticctl.cli.submit.flags.pod_flags import read_env_file, user_label
from elasticctl.cli.submit.goals import goal_of, order_of
from elasticctl.settings.contexts import KUBERNETES, LOCAL, Context

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MAX_NAME = 51
"""Characters of a job's name: those of its workers and their Services are longer, and may have 63."""
_MAX_MADE_NAME = 40
_OWN_VARIABLES = {
    STORAGE_VARIABLE: "give --storage URL",
    START_FROM_VARIABLE: "use elasticctl rerun JOB --from-checkpoint STEP",
    WORKSPACE_VARIABLE: "give --workspace DIR",
    WORKSPACE_FROM_VARIABLE: "give --workspace DIR",
}


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


def job_spec(request: JobFlags, context: Context, size: JobSize, command: tuple[str, ...]) -> JobSpec:
    """The job; the caller fills in its name, storage and working folder."""
    kind = _gpu_kind(request, context)
    order = order_of(request, context)
    spot = request.spot if order is None else any(capacity_of(pool) != ON_DEMAND for pool in order.order)
    placement = place(context.provider, kind, size.gpus_per_worker, spot=spot)
    image = request.image or context.image
    _check_references(request, context)
    own_labels, local = dict(request.labels), context.provider == LOCAL
    env = _environment(request)
    if local and request.queue:
        raise UsageError("--queue is for clusters with Kueue; `elasticctl local sharing on` shares this machine")
    if not local and not image:  # on this machine, a job runs in elasticctl's own environment
        raise needed_error("--image", context)
    return JobSpec(
        name=request.name,
        namespace=context.namespace,
        command=command,
        workers=size.workers,
        min_workers=size.min_workers,
        max_workers=size.max_workers,
        automatic=size.automatic,
        goal=goal_of(request, spot=request.spot),
        pools=order.as_spec() if order is not None else {},
        priority=request.priority,
        labels={**user_label(), **own_labels, **({QUEUE_LABEL: request.queue} if request.queue else {})},
        pod_labels=own_labels,
        annotations=dict(request.annotations),
        node_selector={} if local else dict(request.node_selector),
        cpus="" if local else request.cpus,
        memory="" if local else request.memory,
        shm="" if local else request.shm,
        suspend=bool(request.queue),
        ranks_per_worker=size.ranks_per_worker,
        launcher=request.launcher,
        gpus_per_worker=size.gpus_per_worker,
        gpu_type=kind.name if kind else "",
        spot=spot,
        provider=context.provider,
        image=image,
        service_account=request.service_account or context.service_account,
        env=env,
        secrets=tuple(dict.fromkeys(ref.name for ref in request.secrets if not ref.key)),
        secret_env={ref.variable: (ref.name, ref.key) for ref in request.secrets if ref.key},
        mounts={mount.claim: mount.path for mount in request.mounts},
        node_terms=placement.terms,
        tolerations=() if local else (*placement.tolerations, *(one.to_manifest() for one in request.tolerations)),
        restart_policy=request.restart_policy,
        backoff_limit=request.backoff_limit,
        deadline_s=request.deadline,
        ttl_s=request.ttl,
        hang_timeout_s=request.hang_timeout,
        on_nan=request.on_nan,
    )


def _environment(request: JobFlags) -> dict[str, str]:
    """The job's variables, of the file, the command line and the set-up. Raises UsageError."""
    env = {**(read_env_file(request.env_file) if request.env_file else {}), **dict(request.env)}
    _check_variables(env)
    return {**env, SETUP_VARIABLE: request.setup} if request.setup else env


def needed_error(flag: str, context: Context) -> UsageError:
    """The error for an option that neither the command line nor the context gives."""
    return UsageError(
        f"{flag} is needed in context {context.name}. FIX: add it, or set it with `elasticctl config set-context`"
    )


def size_of(request: JobFlags, context: Context, machine_gpus: int) -> JobSize:
    """Turn GPUs and workers into a size; `machine_gpus` counts for the local context only.

    Bounds without a number between them mean that the size is automatic. Raises UsageError for numbers that contradict
    each other, the machine or the catalog.
    """
    if request.has_goal:
        request = _with_bounds(request, context, machine_gpus)
    automatic = _is_automatic(request)
    if automatic:
        request = dataclasses.replace(request, gpus=request.max_gpus, workers=request.max_workers)
    each = _gpus_per_worker(request, context, machine_gpus)
    workers = _workers(request.gpus, "--gpus", request.workers, each) or 1
    low = _workers(request.min_gpus, "--min-gpus", request.min_workers, each)
    high = _workers(request.max_gpus, "--max-gpus", request.max_workers, each)
    _check(low, workers, high)
    if automatic and context.provider == LOCAL and each and machine_gpus >= (low or 1) * each:
        workers = high = min(workers, machine_gpus // each)
    slots = int(request.cpus) if request.launcher and request.cpus.isdecimal() else 1
    size = JobSize(workers, low or 1, high, each, each or max(slots, 1), automatic=automatic)
    if context.provider != LOCAL or each == 0 or workers * each <= machine_gpus:
        return size
    if machine_gpus:
        wanted, has = plural_are((low or 1 if automatic else workers) * each, "GPU"), plural(machine_gpus, "GPU")
        flag = "--min-gpus" if automatic else "--gpus"
        raise UsageError(f"{wanted} wanted, but this machine has {has}. FIX: give {flag} {machine_gpus}")
    note = f"this machine has no GPU: the job runs on {plural(workers * each, 'CPU rank')} instead"
    return dataclasses.replace(size, gpus_per_worker=0, note=note)


GOAL_MOST = 8
"""The most workers for a goal where nobody has said how many there may be."""


def _with_bounds(request: JobFlags, context: Context, machine_gpus: int) -> JobFlags:
    """With a goal, a given number is the upper bound; without a number, there is a default one."""
    gpus, workers = request.max_gpus or request.gpus, request.max_workers or request.workers
    if gpus is None and workers is None:
        if context.provider == LOCAL:
            gpus, workers = (machine_gpus, None) if machine_gpus else (None, GOAL_MOST // 2)
        elif _gpu_kind(request, context) is not None or context.gpus_per_node:
            gpus = GOAL_MOST * _gpus_per_worker(dataclasses.replace(request, gpus=1), context, machine_gpus)
        else:
            workers = GOAL_MOST
    low = 1 if request.min_workers is None and request.min_gpus is None else request.min_workers
    return dataclasses.replace(request, gpus=None, workers=None, max_gpus=gpus, max_workers=workers, min_workers=low)


LAUNCHER_NOTE = (
    "the command runs once, on the first worker, and starts what the others run: it handles checkpoints, hangs and"
    " lost ranks itself"
)


def check_launcher(request: JobFlags) -> None:
    """Raise UsageError for options about ranks in the launcher role, where elasticctl starts none."""
    asked = {
        "--hang-timeout": request.hang_timeout is not None,
        "--on-nan": request.on_nan is not OnNan.WARN,
        "a deadline or a budget to plan for": request.has_goal,
    }
    refused = [what for what, is_asked in asked.items() if is_asked]
    if refused:
        raise UsageError(
            f"--launcher: your program starts the ranks, and elasticctl does not see their steps, so"
            f" {join_and(refused)} cannot be used. FIX: leave {'it' if len(refused) == 1 else 'them'} out"
        )


def with_asked(request: JobFlags, options: Mapping[str, Any], env: tuple[tuple[str, str], ...]) -> JobFlags:
    """The flags, with those of a translated command line where no others were given."""
    blank = JobFlags()
    sizes = request.gpus is not None or request.workers is not None
    asked = {
        name: value
        for name, value in options.items()
        if getattr(request, name) == getattr(blank, name) and not (sizes and name in ("workers", "gpus_per_node"))
    }
    return dataclasses.replace(request, **asked, env=(*(Assignment(*pair) for pair in env), *request.env))


def doubt_of(size: JobSize, request: JobFlags) -> str:
    """Why a size is probably a mistake: several ranks would share the CPUs of a machine without the wanted GPUs."""
    ranks = size.workers * size.ranks_per_worker
    if not size.note or ranks == 1 or not (request.gpus or request.min_gpus or request.max_gpus):
        return ""
    return (
        f"this machine has no GPU, and {ranks} ranks would share its CPUs. FIX: choose a cluster with --context,"
        f" or give --workers {size.workers} without GPUs for CPU ranks"
    )


def _is_automatic(request: JobFlags) -> bool:
    low = request.min_gpus is not None or request.min_workers is not None
    high = request.max_gpus is not None or request.max_workers is not None
    return low and high and request.gpus is None and request.workers is None


def name_from(script: str) -> str:
    """A job name derived from a script's: `My_Train.py` -> `my-train`, `entraîné.py` -> `entraine`."""
    stem = script.replace("\\", "/").rstrip("/").rpartition("/")[2].partition(".")[0].lower()
    stem = "".join(char for char in unicodedata.normalize("NFKD", stem) if not unicodedata.combining(char))
    made = re.sub(r"[^a-z0-9]+", "-", stem)[:_MAX_MADE_NAME]
    return re.sub(r"^[^a-z]+|-+$", "", made) or "job"


def check_name(name: str) -> str:
    """Return `name` if it is a valid job name. Raises UsageError otherwise."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise UsageError(
            f"--name {quote(name)}: a name is lower-case letters, digits and '-', starts with a letter, does not end"
            f" with '-', and has {MAX_NAME} characters at most"
        )
    return name


def storage_url(given: str, working_dir: str) -> str:
    """A storage URL, or a path turned into one. Raises UsageError for an unknown scheme."""
    scheme, separator, rest = given.partition("://")
    check_near_url(given)
    if not separator:
        from pathlib import Path

        # Shells leave the tilde of --storage=~/runs alone.
        return Path(working_dir, os.path.expanduser(given)).resolve().as_uri()
    check_public(given)
    if scheme not in SCHEMES or not rest:
        raise UsageError(
            f"--storage {quote(given)}: give a folder, file:///path, s3://bucket/prefix or gs://bucket/prefix"
        )
    return given


def check_public(url: str) -> None:
    """Raise UsageError, without the URL, for a storage URL with credentials."""
    place = url.partition("://")[2]
    host = place.partition("/")[0]
    if "@" in host or (":" in host and "@" in place):  # a secret access key may have slashes
        raise UsageError(
            "--storage: the URL has something before an '@', and would be stored as written. FIX:"
            " pass credentials through"
            " the environment (elasticctl secret)"
        )


def child_url(url: str, name: str) -> str:
    """The URL of `name` below another URL, with its options (`?endpoint=…`)."""
    place, choices = split_url(url)
    return f"{place.rstrip('/')}/{name}{choices}"


def split_url(url: str) -> tuple[str, str]:
    """A storage URL without its options, and the options with their `?`; a folder has none."""
    place, mark, choices = (url, "", "") if url.startswith("file:") else url.partition("?")
    return place, mark + choices


def plan_summary(spec: JobSpec, context: Context) -> str:
    """The plan in one line: what will run where, and where its state is stored."""
    each = plural(spec.ranks_per_worker, "CPU rank")
    if spec.gpus_per_worker:
        each = plural(spec.gpus_per_worker, f"{spec.gpu_type} GPU".strip())
    bounds = f"{spec.min_workers} to {'any number' if spec.max_workers is None else spec.max_workers}"
    market = "" if context.provider in (LOCAL, KUBERNETES) else (", spot" if spec.spot else ", on demand")
    order = PoolOrder.from_spec(spec.pools)
    market = f", {order.words}" if order is not None else market
    size = f"{plural(spec.workers, 'worker')} with {each} each ({bounds})"
    if spec.goal:
        market = ""
        size = f"{bounds} workers with {each} each, as its goal needs them ({goal_words(spec.goal)})"
    elif spec.automatic:
        size = f"{bounds} workers with {each} each, as many as fit"
    rank = f", priority {spec.priority}" if spec.priority else ""
    return f"{spec.name}: {size}{rank}, context {context.name}{market}, state in {spec.storage}"


def _gpu_kind(request: JobFlags, context: Context) -> GpuType | None:
    name = request.gpu_type or context.gpu_type
    return gpu_type(name) if name and request.gpus != 0 else None


def _gpus_per_worker(request: JobFlags, context: Context, machine_gpus: int) -> int:
    kind = _gpu_kind(request, context)
    asked = request.gpus_per_node
    if request.gpus and request.workers and asked is None:
        if request.gpus % request.workers:
            raise UsageError(f"--gpus {request.gpus} cannot be shared evenly by --workers {request.workers}")
        return request.gpus // request.workers
    if asked is not None:
        return asked
    if request.gpus == 0 or (request.gpus is None and request.workers is not None and kind is None):
        return 0
    if context.provider == LOCAL:
        return 1 if request.gpus or kind or machine_gpus else 0
    if context.provider == KUBERNETES:
        return context.gpus_per_node or 1 if request.gpus else 0
    if kind is None:
        if request.gpus:
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


def unused_note(request: JobFlags, context: Context) -> str:
    """A note about flags without a meaning on this machine; "" for none, and for clusters."""
    flags: dict[str, object] = {
        "--cpus": request.cpus and not request.launcher,
        "--memory": request.memory,
        "--shm": request.shm,
    }
    flags |= {"--pools": request.pools}
    flags |= {"--node-selector": request.node_selector, "--toleration": request.tolerations}
    unused = [name for name, value in flags.items() if value]
    if context.provider != LOCAL or not unused:
        return ""
    return f"{join_and(unused)}: not used on this machine, whose workers share all of it"


def _check_references(request: JobFlags, context: Context) -> None:
    """Refuse duplicate variables, claims and paths, and volumes on this machine, which has none."""
    if request.mounts and context.provider == LOCAL:
        raise UsageError("--mount is for clusters: on this machine a job sees every folder where it is")
    variables = [name for name, _ in request.env] + [ref.variable for ref in request.secrets if ref.key]
    for flag, names in (
        ("--secret", variables if request.secrets else []),
        ("--mount", [mount.claim for mount in request.mounts]),
        ("--mount", [mount.path for mount in request.mounts]),
    ):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{flag}: {quote(twice)} is given twice")


def _check_variables(env: Mapping[str, str]) -> None:
    """Refuse variables that options set: the two values could contradict each other."""
    for name, fix in _OWN_VARIABLES.items():
        if name in env:
            raise UsageError(f"--env {name}: elasticctl sets this variable itself. FIX: {fix}")


def _check(low: int | None, workers: int, high: int | None) -> None:
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
