"""The Python API: submit jobs from notebooks and pipelines, follow them and change them. docs/jobs.md shows it.

It calls the operations that the command line calls, and raises the errors that it prints (`elasticctl.api.errors`).
What operations report, such as the plan of a submit, is printed on stderr here too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import typing
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, Unpack

from elasticctl.api.errors import JobFailedError, UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl.api.text import did_you_mean, quote
from elasticctl.cluster.audit_log import name_client
from elasticctl.cluster.base import LogLine, Manifest
from elasticctl.operations import lifecycle
from elasticctl.operations.logs import LogFilter, read_logs
from elasticctl.operations.observer import SILENT
from elasticctl.operations.scale import ScaleRequest, scale
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.operations.target import Target, reach
from elasticctl.terminal import Terminal, name_place
from elasticctl_protocol import variables

POLL_EVERY_S = 1.0


class JobOptions(TypedDict, total=False):
    """Options of `elasticctl submit`, with times in seconds or as `"12h"` and sizes as `"16GiB"`."""

    gpus: int
    gpu_type: str
    gpus_per_node: int
    workers: int
    min_gpus: int
    max_gpus: int
    min_workers: int
    max_workers: int
    finish_by: str
    budget: float | str
    prefer: Literal["cost", "time"]
    work: int | str
    zones: str
    priority: int
    queue: str
    name: str
    image: str
    service_account: str
    env: Mapping[str, str]
    env_file: str
    setup: str
    secrets: Sequence[str]
    mounts: Sequence[str]
    workspace: str | os.PathLike[str]
    no_workspace: bool
    launcher: bool
    workspace_limit: int | str
    storage: str
    spot: bool
    backoff_limit: int
    deadline: int | str
    ttl: int | str
    hang_timeout: int | str
    on_nan: Literal["warn", "stop", "rollback"]
    restart_policy: Literal["OnFailure", "ExitCode", "Always", "Never"]
    cpus: int | float | str
    memory: str
    shm: str
    node_selector: Mapping[str, str]
    pools: str
    pool_wait: int | str
    tolerations: Sequence[str]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def submit(
    script: str | os.PathLike[str] | Sequence[str],
    args: Sequence[object] = (),
    *,
    context: str = "",
    namespace: str = "",
    template: str = "default",
    **options: Unpack[JobOptions],
) -> Job:
    """Submit a script with its arguments, or a command (a list of words), and return the job; see `elasticctl submit`.

    Project files are not read, so that a pipeline contains everything it runs. Raises UsageError for invalid options,
    including more ranks than this machine has GPUs, and ClusterError if the job cannot be created.
    """
    from elasticctl.operations.submit.create import ManifestChanges, create, plan_command
    from elasticctl.operations.submit.training_command import TrainingCommand, of_words

    target = _reach(context, namespace)
    words, flags = tuple(map(str, args)), read_options(options)
    if isinstance(script, str | os.PathLike):
        command = TrainingCommand(os.fspath(script), words)
    else:
        command = of_words([*map(str, script), *words], starts_ranks=flags.launcher)
    draft = plan_command(command, flags, target.context, ManifestChanges(), template=template, observer=target.observer)
    if draft.doubt:
        raise UsageError(draft.doubt)
    return Job(create(target, draft), target)


def read_options(options: Mapping[str, Any]) -> JobFlags:
    """The flags of `submit` for these options, whose values are parsed like typed ones. Raises UsageError."""
    hints = typing.get_type_hints(JobFlags, include_extras=True)
    read: dict[str, Any] = {}
    for name, value in options.items():
        if name not in hints:
            raise UsageError(f"submit has no option {quote(name)}{did_you_mean(name, hints)}")
        if value is None:
            continue
        hint = hints[name]
        kind, *parsers = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        parse = parsers[0] if parsers else None
        try:
            read[name] = _read(value, kind, parse)
        except (TypeError, ValueError) as e:
            raise UsageError(f"{name}: {e}") from e
    return JobFlags(**read)


def _read(value: Any, kind: Any, parse: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            raise TypeError(f"{quote(value)} must be in a list")
        items = [f"{key}={item}" for key, item in value.items()] if isinstance(value, Mapping) else value
        return tuple(parse(str(item)) for item in items)
    if isinstance(value, bool) or kind is bool:
        if kind is not bool or not isinstance(value, bool):
            raise TypeError(
                f"{quote(value)} must be {'True or False' if kind is bool else 'a value, not True or False'}"
            )
        return value
    if parse is not None:
        return parse(str(value))
    return kind(os.fspath(value) if isinstance(value, os.PathLike) else value)


class Job:
    """A job, and never another one that gets its name later. Each method queries the cluster.

    `await job` waits for its end without blocking the event loop; `asyncio.to_thread` does that for any method.
    Every method may raise ClusterError, and NotFoundError once the job is deleted.
    """

    def __init__(self, manifest: Manifest, target: Target) -> None:
        self._found, self._target = manifest, target
        self.name: str = manifest["metadata"]["name"]
        self.namespace: str = manifest["metadata"].get("namespace") or target.namespace
        self.context = target.context.name

    @classmethod
    def get(cls, name: str, *, context: str = "", namespace: str = "") -> Job:
        """Find a job by its name or, as on the command line, a prefix of it. Raises NotFoundError."""
        target = _reach(context, namespace)
        return cls(target.find(name), target)

    @classmethod
    def list(cls, *, context: str = "", namespace: str = "") -> Sequence[Job]:
        """Return the jobs of a namespace, oldest first."""
        target = _reach(context, namespace)
        return [cls(manifest, target) for manifest in target.cluster.list_jobs(target.namespace)]

    def __repr__(self) -> str:
        return f"Job({self.name!r}, context={self.context!r}, namespace={self.namespace!r})"

    def __await__(self) -> Generator[Any, None, JobStatus]:
        return self._done().__await__()

    async def _done(self) -> JobStatus:
        while True:
            status = await asyncio.to_thread(self.status)
            if status.phase.terminal:
                return status
            await asyncio.sleep(POLL_EVERY_S)

    def manifest(self) -> Manifest:
        """Return the ElasticJob object as Kubernetes JSON."""
        return self._target.reread(self._found)

    def status(self) -> JobStatus:
        """Return the present status: phase, workers, progress and metrics, checkpoint, interruptions."""
        return ElasticJob.from_manifest(self.manifest()).status

    def wait(self, *, timeout_s: float | None = None, running: bool = False, check: bool = False) -> JobStatus:
        """Wait until the job has ended (`running`: or enough workers run), and return its status.

        `timeout_s` is in seconds. Raises TimeoutError and, with `check`, JobFailedError unless it succeeded or runs.
        """
        quiet = dataclasses.replace(self._target, observer=SILENT)
        job = lifecycle.wait(quiet, self._found, timeout_s=timeout_s, running=running, every_s=POLL_EVERY_S)
        status = job.status
        if running and status.phase is Phase.RUNNING:
            return status
        if not status.phase.terminal:
            raise TimeoutError(f"{self.name} is still {status.phase.value} after {timeout_s:g} s; it keeps running")
        if check and status.phase is not Phase.SUCCEEDED:
            why = ": ".join(part for part in (status.reason, status.message) if part)
            raise JobFailedError(f"{self.name} has ended ({status.phase.value}){f': {why}' if why else ''}")
        return status

    def logs(
        self, *, follow: bool = False, workers: Sequence[str | int] = (), tail: int | None = None
    ) -> Iterator[LogLine]:
        """Yield the output of all workers, or of some by name or number; `tail`: only the last lines of each.

        With `follow`, it continues until the job has ended.
        """
        lines = LogFilter(follow=follow, worker=tuple(map(str, workers)), tail=tail)
        return read_logs(self._target, self.manifest(), lines)

    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """Read all reported metrics from the storage, in chronological order, as rows for `pandas.DataFrame`.

        A row has `step`, `at` (seconds since the epoch) and numbers, which may be NaN or infinite. Raises
        JobStorageError if this machine cannot read the storage.
        """
        from elasticctl.operations.metrics import StoredMetrics

        rows = StoredMetrics(ElasticJob.from_manifest(self.manifest())).read_new()
        return [
            {name: float(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows
        ]

    def scale(self, workers: int) -> None:
        """Change the number of workers. Raises UsageError outside of its bounds, ConflictError once it has ended."""
        scale(self._target, self._found, ScaleRequest(to=workers))

    def suspend(self) -> None:
        """Stop the workers after a last checkpoint, until `resume`. Raises ConflictError once the job has ended."""
        lifecycle.suspend(self._target, self._found)

    def resume(self) -> None:
        """Continue from the last checkpoint. Raises ConflictError once the job has ended or moved."""
        lifecycle.resume(self._target, self._found)

    def cancel(self) -> None:
        """Stop the job permanently; its status, logs and checkpoints stay. Raises ConflictError once it has ended."""
        lifecycle.cancel(self._target, self._found)

    def delete(self) -> None:
        """Delete the job, its workers and its logs, even while it runs; its checkpoints stay."""
        lifecycle.delete(self._target, self._found)


def _reach(context: str, namespace: str) -> Target:
    name_place(context, namespace)
    target = reach(context or os.environ.get(variables.CONTEXT, ""), namespace, Terminal())
    name_client(target.cluster, "Python API")
    return dataclasses.replace(target, context=dataclasses.replace(target.context, namespace=target.namespace))
