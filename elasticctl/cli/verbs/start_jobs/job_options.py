"""The options of `submit` and `sweep` for a new job: what each field of `JobFlags` is on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from elasticctl.cli.framework.completion import complete_gpu_type
from elasticctl.cli.framework.options import described, flag

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
"""The fields of `JobFlags` under the headings by which `submit --help` and `sweep --help` list them."""

GOAL_OPTIONS: Mapping[str, Any] = {
    "finish_by": described("Finish by this time: 36h, 18:00, 'Fri 18:00'.", "TIME"),
    "budget": described("The most to spend, in US dollars.", "USD"),
    "prefer": described("As cheap as possible (the default), or as early as possible.", "<cost|time>"),
}
"""The fields of `ChangedGoal`."""
JOB_OPTIONS: Mapping[str, Any] = {
    **GOAL_OPTIONS,
    "work": described(
        "With --finish-by or --budget: the expected training time at the largest size, until it is measured.", "TIME"
    ),
    "zones": described(
        "With --finish-by or --budget: use spot machines in one of these zones at a time.", "ZONE,ZONE..."
    ),
    "gpus": described("The total number of GPUs.", "N"),
    "gpu_type": typer.Option(
        metavar="TYPE",
        help="The type of GPU: t4, v100, a10g, l4, a100 or h100.",
        show_default=False,
        autocompletion=complete_gpu_type,
    ),
    "gpus_per_node": described("GPUs per worker, which runs one rank on each.", "N"),
    "workers": described("The number of workers, 1 by default; without --gpus, they run on CPUs.", "N"),
    "min_gpus": described("Keep training with as few as N GPUs.", "N"),
    "max_gpus": described("Never use more than N GPUs.", "N"),
    "min_workers": described("Keep training with as few as N workers; 1 by default.", "N"),
    "max_workers": described("Never use more than N workers.", "N"),
    "spot": flag("Use spot or on-demand capacity.", "--spot/--on-demand"),
    "priority": typer.Option(
        "--priority", metavar="N", help="From -1000 to 1000: jobs of higher priority get shared GPUs first."
    ),
    "queue": described("The Kueue queue that admits the job.", "NAME"),
    "name": described("The job's name; by default derived from the script's.", "NAME"),
    "launcher": flag(
        "Run the command once: it starts the workers' ranks itself, like mpirun and horovodrun.", "--launcher"
    ),
    "image": described("The container image; not used by the local cluster.", "IMAGE"),
    "service_account": described("The Kubernetes service account of the workers.", "NAME"),
    "env": typer.Option("--env", metavar="NAME=VALUE", help="An environment variable for the script."),
    "env_file": described("Variables from a file of lines NAME=VALUE; --env takes precedence.", "FILE"),
    "setup": described(
        "Run this before the ranks start, once per machine: 'pip install -r requirements.txt'.", "COMMAND"
    ),
    "secrets": typer.Option(
        "--secret", metavar="NAME[:KEY[=VARIABLE]]", help="A secret's keys as variables, or one of them."
    ),
    "mounts": typer.Option("--mount", metavar="CLAIM:/PATH", help="Mount a PersistentVolumeClaim, on Kubernetes."),
    "workspace": described("The folder to upload; the script's own by default.", "DIR"),
    "no_workspace": flag("Upload no files: the script is already where the job runs.", "--no-workspace"),
    "workspace_limit": typer.Option(
        "--workspace-limit",
        metavar="SIZE",
        help="The largest workspace to upload; 100MB by default.",
        show_default=False,
    ),
    "storage": described("Where to keep state: a folder, s3://… or gs://…; by default a new location.", "URL"),
    "cpus": described("CPUs of each worker.", "N"),
    "memory": described("Memory of each worker: 32Gi.", "SIZE"),
    "shm": described("Shared memory of each worker; by default up to the memory limit.", "SIZE"),
    "node_selector": typer.Option("--node-selector", metavar="KEY=VALUE", help="Use only nodes with this label."),
    "pools": described(
        "Ask for machines in these pools, best first: spot/us-east-1a,spot,on-demand; none: ignore the context's.",
        "POOL,POOL...",
    ),
    "pool_wait": described("With --pools: ask in the next one after waiting this long; 10m by default.", "TIME"),
    "tolerations": typer.Option("--toleration", metavar="KEY[=VALUE][:EFFECT]", help="Tolerate nodes with this taint."),
    "labels": typer.Option("--label", metavar="KEY=VALUE", help="A label of the job, to select it by."),
    "annotations": typer.Option("--annotation", metavar="KEY=VALUE", help="An annotation of the job."),
    "backoff_limit": typer.Option(metavar="N", help="The number of script failures to tolerate.", show_default=True),
    "deadline": described("Fail the job if it takes longer than this: 90m, 12h.", "TIME"),
    "ttl": described("Delete the job this long after its end: 1h, 7d.", "TIME"),
    "hang_timeout": described(
        "Restart if nothing has moved for this long; by default the job's own pace decides; 0s means never.", "TIME"
    ),
    "on_nan": typer.Option(
        "--on-nan",
        help="What to do if the loss is NaN or infinite: continue, fail the job, or go back and skip batches.",
    ),
    "restart_policy": typer.Option(
        "--restart-policy", help="Which failures of the script its ranks are restarted after."
    ),
}
