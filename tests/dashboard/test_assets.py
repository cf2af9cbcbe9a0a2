"""The page's files: complete, and what comes from others as they published it."""

from __future__ import annotations

import gzip
import hashlib
import re
from importlib import resources

import pytest

from elasticctl.dashboard.page_files import assets

VENDORED = {
    "uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files of uPlot 1.6.32 as the npm registry has them."""


@pytest.mark.parametrize("name", VENDORED)
def test_third_party_files_are_unchanged(name: str) -> None:
    content = resources.files("elasticctl.dashboard").joinpath("page", "vendor", name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == VENDORED[name]


def test_the_page_is_light() -> None:
    """All of it, compressed, as over a slow line."""
    assert sum(len(gzip.compress(asset.content)) for asset in assets().values()) < 250_000


def test_every_file_that_the_page_names_is_there_and_no_other() -> None:
    found = assets()
    named = {""}
    for name, asset in found.items():
        if name.startswith("vendor/") or not asset.content_type.startswith("text/"):
            continue
        folder = name.rpartition("/")[0]
        words = re.findall(r"(?:src|href|from)(?:=| )\"([^\"#:]+\.\w+)\"", asset.content.decode())
        named |= {f"{folder}/{word}".lstrip("/").replace("./", "") for word in words}
    assert named == found.keys()
