"""`dashboard`: the jobs of a context as a page in a browser."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from elasticctl.api.errors import UsageError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.place import Where, locate
from elasticctl.terminal import say
from elasticctl_protocol import variables

MAX_PORT = 65_535
NO_STORAGES = "the dashboard in the cluster has no credentials for jobs' storages, and uses no others"
_REDIRECT = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={}">\n'

app = new_app()


@dataclass(frozen=True, slots=True)
class TeamOptions:
    """Options of the shared dashboard in a pod, which `elasticctl install --dashboard` starts."""

    in_cluster: Annotated[
        bool,
        typer.Option(
            "--in-cluster", help="Serve a team from a pod: each person logs in and has only their own permissions."
        ),
    ] = False
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="With --in-cluster: let people change jobs, with their own permissions."),
    ] = False
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="With --in-cluster: a proxy logs people in and sends ID tokens."),
    ] = False


@verb(app, "dashboard")
def dashboard(
    *,
    all_namespaces: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="Show the jobs of all namespaces.")
    ] = False,
    port: Annotated[int, options.count("Listen on this port; 0 selects a free one.", low=0)] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser, if there is a display.")] = True,
    team: TeamOptions,
    where: Where,
) -> None:
    """Show jobs, their curves, workers, interruptions and cost on a live page in a browser.

    The page is served on this machine's loopback interface until Ctrl-C. The printed link works once, for you alone.

    \b
      elasticctl dashboard
      elasticctl dashboard --context prod --no-open
    """
    if port > MAX_PORT:
        raise UsageError(f"--port {port}: ports go up to {MAX_PORT}")
    if team.in_cluster:
        _serve_team(team, port)
        return
    if team.allow_changes or team.behind_proxy:
        raise UsageError("--allow-changes and --behind-proxy are for a shared dashboard. FIX: add --in-cluster")
    _serve_user(where, port, all_namespaces=all_namespaces, browser=browser)


def _serve_user(where: Where, port: int, *, all_namespaces: bool, browser: bool) -> None:
    """Serve the dashboard to this user alone, until Ctrl-C."""
    import asyncio

    from elasticctl.cluster import connect, worker_access_of
    from elasticctl.cluster.audit_log import name_client
    from elasticctl.dashboard.server import HOST, Dashboard, serve
    from elasticctl.dashboard.user_api import Scope

    context, namespace = locate(where)
    cluster = connect(context, starts=False)
    name_client(cluster, "dashboard")
    place = Scope(cluster, context, None if all_namespaces else namespace, lambda: worker_access_of(context))

    with _private_folder() as folder:
        address = ""

        def let_in() -> None:
            say(f"a browser has connected; link for another one: {address}{page.gate.issue()}")

        def ready(chosen: int) -> None:
            nonlocal address
            address = f"http://{HOST}:{chosen}"
            say(f"dashboard of context {context.name}: {address}{page.gate.issue()}")
            say("The link works once. Ctrl-C stops the dashboard; jobs keep running.")
            if browser and _has_screen():
                _open(folder, address + page.gate.issue())

        async def run() -> None:
            await serve(page.app(), HOST, port, ready, lambda: page.api.watching)

        page = Dashboard(place, let_in)
        asyncio.run(run())
    say("the dashboard has stopped")


def _serve_team(team: TeamOptions, port: int) -> None:
    """Serve the shared dashboard until SIGTERM."""
    import asyncio

    from elasticctl.cluster.kube.user import log_in
    from elasticctl.dashboard.in_cluster import AccessRules, ClusterDashboard
    from elasticctl.dashboard.server import serve
    from elasticctl.kubeapi.connection import in_pod

    if not in_pod():
        raise UsageError("--in-cluster is for a pod. FIX: elasticctl install --dashboard IMAGE starts one")
    os.environ[variables.CLOSED_STORAGES] = NO_STORAGES
    rules = AccessRules(allow_changes=team.allow_changes, behind_proxy=team.behind_proxy)
    page = ClusterDashboard(log_in, rules)

    async def run() -> None:
        await serve(page.app(), "", port, lambda chosen: say(f"the dashboard listens on port {chosen}"))

    asyncio.run(run())
    say("the dashboard has stopped")


def _has_screen() -> bool:
    """True if a browser could open a window; otherwise `webbrowser` would start a text browser in the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder that only this user can read, which exists while the dashboard runs."""
    with tempfile.TemporaryDirectory(prefix="elasticctl-dashboard-") as folder:
        yield Path(folder)


def _open(folder: Path, url: str) -> None:
    """Open the link in a browser through a file, as other users of this machine can read command lines."""
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(_REDIRECT.format(url), encoding="utf-8")
    webbrowser.open(page.as_uri())
