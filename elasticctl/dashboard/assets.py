"""The page's files, read once from the package: nothing but these can be asked for, whatever a path says."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

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
    "app.js",
    "charts.js",
    "course.js",
    "dialogs.js",
    "dom.js",
    "feed.js",
    "job.js",
    "list.js",
    "projects.js",
    "words.js",
    "vendor/uPlot.esm.js",
    "vendor/uPlot.min.css",
)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, and what it is."""

    content: bytes
    content_type: str


def assets() -> dict[str, Asset]:
    """Path below the page's own -> file; the page itself is ""."""
    folder = resources.files("elasticctl.dashboard").joinpath("page")
    found = {}
    for name in _FILES:
        kind = _TYPES[name.rpartition(".")[2]]
        found["" if name == "index.html" else name] = Asset(folder.joinpath(name).read_bytes(), kind)
    return found
