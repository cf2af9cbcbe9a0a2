"""`dashboard`: the jobs of a context as a page in a browser."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elasticctl.api.errors import UsageError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import say
from elasticctl.cli.framework.target import locate

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest

MAX_PORT = 65_535
_REDIRECT = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={}">\n'

app = new_app()


@verb(app, "dashboard")
def dashboard(
    *,
    all_namespaces: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="The jobs of every namespace.")
    ] = False,
    port: Annotated[int, options.count("Listen on this port; 0 takes a free one.", low=0)] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser, where there is a screen.")] = True,
    where: Where,
) -> None:
    """Show jobs, their curves, workers, interruptions and cost as a page in a browser, live.

    It is served on this machine's loopback until Ctrl-C. The printed link works once and is yours alone.

    \b
      elasticctl dashboard
      elasticctl dashboard --context prod --no-open
    """
    if port > MAX_PORT:
        raise UsageError(f"--port {port}: ports go up to {MAX_PORT}")
    import asyncio

    from elasticctl.cli.verbs.inspect.compare import compared
    from elasticctl.cluster import connect, inside_of
    from elasticctl.cluster.ledger import name_client
    from elasticctl.dashboard.server import HOST, Dashboard, Scope, serve

    context, namespace = locate(where)
    cluster = connect(context, starts=False)
    name_client(cluster, "dashboard")
    place = Scope(cluster, context.name, None if all_namespaces else namespace, lambda: inside_of(context))

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
            await serve(page, port, ready)

        page = Dashboard(place, patch_to_scale, compared, let_in)
        asyncio.run(run())
    say("the dashboard has stopped")


def patch_to_scale(manifest: Manifest, workers: int) -> dict[str, Any]:
    """What `elasticctl scale --to` does."""
    from elasticctl.cli.verbs.run.scale import ScaleFlags, scale_patch

    return scale_patch(manifest, [], ScaleFlags(to=workers))


def _has_screen() -> bool:
    """Could a browser's window be seen? Without one, `webbrowser` would take the terminal for a text browser."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder that nobody else can read, as long as the dashboard runs."""
    with tempfile.TemporaryDirectory(prefix="elasticctl-dashboard-") as folder:
        yield Path(folder)


def _open(folder: Path, url: str) -> None:
    """Open a browser by way of a file: other users of this machine can read a command line, and so its link."""
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(_REDIRECT.format(url), encoding="utf-8")
    webbrowser.open(page.as_uri())
