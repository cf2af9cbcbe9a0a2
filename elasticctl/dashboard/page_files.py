"""The page's files, and the headers of every answer: the page may run its own scripts and load nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from aiohttp import web

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = (
    "index.html",
    "style.css",
    "icon.svg",
    "ansi.js",
    "app.js",
    "charts.js",
    "compare.js",
    "curves.js",
    "dialogs.js",
    "dom.js",
    "feed.js",
    "format.js",
    "job.js",
    "list.js",
    "login.js",
    "logs.js",
    "machines.js",
    "plan.js",
    "projects.js",
    "route.js",
    "series.js",
    "stacks.js",
    "svg.js",
    "team.js",
    "usage.js",
    "vendor/uPlot.esm.js",
    "vendor/uPlot.min.css",
)

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Server": "elasticctl",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file and its content type."""

    content: bytes
    content_type: str


def assets() -> dict[str, Asset]:
    """Path relative to the page -> file; the page itself is "". No other file can be requested."""
    folder = resources.files("elasticctl.dashboard").joinpath("page")
    found = {}
    for name in _FILES:
        kind = _TYPES[name.rpartition(".")[2]]
        found["" if name == "index.html" else name] = Asset(folder.joinpath(name).read_bytes(), kind)
    return found


def file_routes(base: str) -> list[web.RouteDef]:
    """The page and its files below `base`."""
    files = assets()

    async def send(request: web.Request) -> web.Response:
        asset = files.get(request.match_info["file"])
        if asset is None:
            raise web.HTTPNotFound
        return web.Response(body=asset.content, headers={"Content-Type": asset.content_type})

    return [web.get(base + "{file:.*}", send)]


async def harden(_: web.Request, response: web.StreamResponse) -> None:
    """Add the headers; a handler of `on_response_prepare`."""
    response.headers.update(_HEADERS)
