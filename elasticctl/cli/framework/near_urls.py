"""Misspelt storage URLs, which would otherwise be taken for the names of folders."""

from __future__ import annotations

import re

from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote

SCHEMES = ("file", "s3", "gs")
_NEAR_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(:/*)|(s3|gs)(//+)")


def check_near_url(given: str) -> None:
    """Raise UsageError for a misspelt URL, which would be taken for the name of a folder.

    `s3:/bucket`, `gs:x`, `S3://bucket`, `file:/path`, `s3//bucket`, `s3:///prefix`.
    """
    near = _NEAR_URL.match(given)
    if near is None:
        return
    scheme, marks, rest = near[1] or near[3], near[2] or near[4], given[near.end() :]
    slashes = ("://", ":///") if scheme == "file" and rest.startswith("localhost/") else (":///",)
    if scheme in SCHEMES and marks in (slashes if scheme == "file" else ("://",)):
        return
    if scheme.lower() in SCHEMES:
        fix = f"{scheme.lower()}://{'/' if scheme.lower() == 'file' else ''}{rest or 'bucket'}"
    elif marks.startswith("://"):
        return  # a kind of storage that is not known; whoever opens it says which are
    else:
        fix = f"a folder, or a URL such as s3://bucket/prefix; ./{given} is a folder of that name"
    raise UsageError(f"{quote(given)} is not the URL of a storage. FIX: give {fix}")
