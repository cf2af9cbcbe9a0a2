"""`local`: the cluster that is built into elasticctl."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Literal

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.text import plural, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import add_group, new_app, verb
from elasticctl.cli.framework.output import Table, hint, print_data, print_table
from elasticctl.terminal import say

app = new_app()
local = add_group(
    app, "local", "Manage the built-in local cluster: jobs are processes on your machine, and no cloud is needed."
)


@verb(local, "status")
def local_status(
    output: Annotated[
        Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format.")
    ] = "table",
) -> None:
    """Show whether the supervisor runs (it starts by itself when needed), and its resources."""
    from elasticctl.cluster.local.paths import local_paths
    from elasticctl.cluster.local.supervisor_client import supervisor_info

    paths = local_paths()
    info = supervisor_info(paths)
    if output != "table":
        found = {"running": info is not None, "stateDir": str(paths.state)}
        if info is not None:
            found |= {"pid": info.pid, "version": info.version, "gpus": list(info.gpus)}
        print_data("LocalStatus", found, output)
        return
    rows = [("State", str(paths.state)), ("Log", str(paths.supervisor_log))]
    if info is None:
        rows.insert(0, ("Supervisor", "not running; it starts with the next job"))
    else:
        rows.insert(0, ("Supervisor", f"running for {span(time.time() - info.started_at)}, pid {info.pid}"))
        rows.append(("GPUs", str(len(info.gpus)) if info.gpus else "none: jobs run on CPUs"))
    print_table(Table(("FIELD", "VALUE"), rows, wraps=True, facts=True))
    hint("Next: see its jobs: elasticctl list --context local")


@verb(local, "down")
def local_down(
    delete_jobs: Annotated[
        bool, typer.Option("--delete-jobs", help="Delete the jobs too; their checkpoints stay.")
    ] = False,
    yes: options.Yes = False,
) -> None:
    """Stop the workers and the supervisor; jobs continue from their checkpoints when it next starts."""
    from elasticctl.cluster.audit_log import record_locally
    from elasticctl.cluster.local.paths import local_paths
    from elasticctl.cluster.local.supervisor_client import shut_down

    if delete_jobs and not yes:
        if not sys.stdin.isatty():
            raise UsageError("--delete-jobs deletes every job of the local cluster. FIX: add --yes to confirm")
        typer.confirm("Delete every job of the local cluster?", abort=True, err=True)
    stopped = shut_down(local_paths(), keep_jobs=not delete_jobs, say=say)
    if delete_jobs:
        record_locally("delete all jobs", "cluster", "local")
    gone = "; its jobs are deleted" if delete_jobs else ""
    say(("the local cluster is down" if stopped else "the local cluster is not running") + gone)


@verb(local, "sharing")
def local_sharing(
    state: Annotated[Literal["on", "off"] | None, typer.Argument(metavar="on|off")] = None,
    cpu_slots: Annotated[int | None, options.count("How many ranks without GPUs may run at the same time.")] = None,
) -> None:
    """Share this machine between projects by quotas and priorities, or stop; without on or off, show the state.

    The slots are its GPUs. Without GPUs, or with --cpu-slots, they are CPUs: a rank takes one.

    \b
      elasticctl local sharing on --cpu-slots 4
      elasticctl local sharing off
    """
    from elasticctl.cluster.audit_log import record_locally
    from elasticctl.cluster.local.capacity import LocalSharing
    from elasticctl.cluster.local.client import LocalCluster

    if cpu_slots is not None and state != "on":
        raise UsageError("--cpu-slots goes with `on`: elasticctl local sharing on --cpu-slots N")
    cluster = LocalCluster()
    if state is None:
        found = cluster.sharing()
    else:
        found = cluster.set_sharing(LocalSharing(state == "on", cpu_slots))
        record_locally("set sharing", "sharing", "local", now=state)
    slots = "" if found.cpu_slots is None else f", {plural(found.cpu_slots, 'CPU slot')}"
    say(f"sharing is {'on' if found.on else 'off'}{slots if found.on else ''}")
    if found.on:
        hint("Next: give a project its quota: elasticctl quota set PROJECT --guaranteed cpu=2")
