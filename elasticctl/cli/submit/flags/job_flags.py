"""The flags of `submit`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from elasticctl.api.spec import DEFAULT_BACKOFF_LIMIT, MAX_PRIORITY, OnNan, RestartPolicy
from elasticctl.api.text import quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.contexts import complete_gpu_type
from elasticctl.cli.framework.options import Assignment, Mount, SecretRef
from elasticctl.cli.submit.flags.pod_flags import PodFlags

WORKSPACE_LIMIT_BYTES = 100_000_000
"""Code is smaller; data, which is larger, has better ways to a cluster."""
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Size": (
        "workers", "gpus", "gpus_per_node", "gpu_type", "min_workers", "min_gpus", "max_workers", "max_gpus", "spot",
        "priority", "queue",
    ),
    "Deadline and budget": ("finish_by", "budget", "prefer", "work", "zones"),
    "Script, files and storage": (
        "name", "workspace", "no_workspace", "workspace_limit", "env", "env_file", "secrets", "mounts", "storage",
        "image", "setup", "launcher",
    ),
    "Nodes and labels": (
        "cpus", "memory", "shm", "node_selector", "pools", "pool_wait", "tolerations", "service_account", "labels",
        "annotations",
    ),
    "Time limits and retries": ("backoff_limit", "restart_policy", "deadline", "hang_timeout", "on_nan", "ttl"),
}  # fmt: skip
"""The fields of `JobFlags` by the headings under which the help of `submit` and `sweep` lists them."""


def _priority(text: str) -> int:
    """-1000 to 1000."""
    if not re.fullmatch(r"-?[0-9]{1,4}", text) or abs(int(text)) > MAX_PRIORITY:
        raise typer.BadParameter(f"{quote(text)} is not a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}.")
    return int(text)


@dataclass(frozen=True, slots=True)
class JobFlags(PodFlags):
    """The values of the flags of `submit`; None or empty: not given. Times are in seconds."""

    gpus: Annotated[int | None, options.count("The total number of GPUs.", low=0)] = None
    gpu_type: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="The type of GPU: t4, v100, a10g, l4, a100 or h100.",
            show_default=False,
            autocompletion=complete_gpu_type,
        ),
    ] = ""
    gpus_per_node: Annotated[int | None, options.count("GPUs per worker, which runs one rank on each.")] = None
    workers: Annotated[
        int | None, options.count("The number of workers, 1 by default; without --gpus, they run on CPUs.")
    ] = None
    min_gpus: Annotated[int | None, options.count("Keep training with as few as N GPUs.")] = None
    max_gpus: Annotated[int | None, options.count("Never use more than N GPUs.")] = None
    min_workers: Annotated[int | None, options.count("Keep training with as few as N workers; 1 by default.")] = None
    max_workers: Annotated[int | None, options.count("Never use more than N workers.")] = None
    priority: Annotated[
        int,
        typer.Option(
            "--priority",
            parser=_priority,
            metavar="N",
            help="From -1000 to 1000: jobs of higher priority get shared GPUs first.",
        ),
    ] = 0
    queue: Annotated[str, options.text("The Kueue queue that admits the job.")] = ""
    name: Annotated[str, options.text("The job's name; by default derived from the script's.")] = ""
    launcher: Annotated[
        bool,
        typer.Option(
            "--launcher", help="Run the command once: it starts the workers' ranks itself, like mpirun and horovodrun."
        ),
    ] = False
    image: Annotated[str, options.text("The container image; not used by the local cluster.", "IMAGE")] = ""
    service_account: Annotated[str, options.text("The Kubernetes service account of the workers.")] = ""
    env: Annotated[
        tuple[Assignment, ...], options.assignments("--env", "NAME=VALUE", "An environment variable for the script.")
    ] = ()
    secrets: Annotated[
        tuple[SecretRef, ...],
        typer.Option(
            "--secret",
            parser=options.secret_ref,
            metavar="NAME[:KEY[=VARIABLE]]",
            help="A secret's keys as variables, or one of them.",
        ),
    ] = ()
    mounts: Annotated[
        tuple[Mount, ...],
        typer.Option(
            "--mount", parser=options.mount, metavar="CLAIM:/PATH", help="Mount a PersistentVolumeClaim, on Kubernetes."
        ),
    ] = ()
    workspace: Annotated[str, options.text("The folder to upload; the script's own by default.", "DIR")] = ""
    no_workspace: Annotated[
        bool, typer.Option("--no-workspace", help="Upload no files: the script is already where the job runs.")
    ] = False
    workspace_limit: Annotated[
        int,
        typer.Option(
            "--workspace-limit",
            parser=options.size,
            metavar="SIZE",
            show_default=False,
            help="The largest workspace to upload; 100MB by default.",
        ),
    ] = WORKSPACE_LIMIT_BYTES
    storage: Annotated[
        str, options.text("Where to keep state: a folder, s3://… or gs://…; by default a new location.", "URL")
    ] = ""
    spot: Annotated[bool, typer.Option("--spot/--on-demand", help="Use spot or on-demand capacity.")] = True
    backoff_limit: Annotated[int, options.count("The number of script failures to tolerate.", low=0, default=True)] = (
        DEFAULT_BACKOFF_LIMIT
    )
    deadline: Annotated[int | None, options.time("Fail the job if it takes longer than this: 90m, 12h.", low_s=1)] = (
        None
    )
    ttl: Annotated[int | None, options.time("Delete the job this long after its end: 1h, 7d.")] = None
    hang_timeout: Annotated[
        int | None,
        options.time(
            "Restart if nothing has moved for this long; by default the job's own pace decides; 0s means never."
        ),
    ] = None
    on_nan: Annotated[
        OnNan,
        typer.Option(
            "--on-nan",
            help="What to do if the loss is NaN or infinite: continue, fail the job, or go back and skip batches.",
        ),
    ] = OnNan.WARN
    restart_policy: Annotated[
        RestartPolicy,
        typer.Option("--restart-policy", help="Which failures of the script its ranks are restarted after."),
    ] = RestartPolicy.ON_FAILURE
