"""Searches a workspace for credentials, so that none leaves this machine with the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elasticctl.api.errors import UsageError
from elasticctl.api.text import join_and, quote
from elasticctl.cli.framework.output import say
from elasticctl.cli.submit.upload.credential_rules import by_content, by_name
from elasticctl.cli.submit.upload.ignore_rules import OWN_RULES

_OVERLAP_BYTES = 4096
"""More than any credential is long that is searched for."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SHOWN, _NAMED = 20, 3


@dataclass(frozen=True, slots=True)
class Finding:
    """A file of a workspace that seems to contain a credential; `line` counts from 1, None: its name suggests it."""

    path: str
    what: str
    line: int | None = None

    def __str__(self) -> str:
        where = quote(self.path) if self.line is None else f"{quote(self.path)}, line {self.line}"
        return f"{where}: looks like {self.what}"


class ContentScan:
    """Searches the content of one file that comes in chunks, of any size; the first of each kind counts."""

    def __init__(self, path: str) -> None:
        self._path, self._tail, self._lines_before, self._wide = path, b"", 0, False
        self._found: dict[str, Finding] = {}
        self._started = False

    def feed(self, chunk: bytes) -> None:
        """Search the next chunk."""
        if not self._started:
            self._started, self._wide = True, chunk.startswith(_UTF16)
        if self._wide:
            # Latin letters of UTF-16, as some editors write it.
            chunk = chunk.removeprefix(_UTF16[0]).removeprefix(_UTF16[1]).replace(b"\0", b"")
        window = self._tail + chunk
        for start, what in by_content(window):
            line = self._lines_before + window.count(b"\n", 0, start) + 1
            self._found.setdefault(what, Finding(self._path, what, line))
        cut = max(0, len(window) - _OVERLAP_BYTES)
        self._lines_before += window.count(b"\n", 0, cut)
        self._tail = window[cut:]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings so far, in the order of their lines."""
        return tuple(sorted(self._found.values(), key=lambda finding: finding.line or 0))


def refuse_credentials(folder: str, findings: Sequence[Finding]) -> None:
    """Raise UsageError with the findings, if there are any."""
    if not findings:
        return
    for finding in findings[:_SHOWN]:
        say(str(finding))
    if len(findings) > _SHOWN:
        say(f"... and {len(findings) - _SHOWN} more like these")
    paths = list(dict.fromkeys(finding.path for finding in findings))
    more = [f"{len(paths) - _NAMED} more"] if len(paths) > _NAMED else []
    named, rule = join_and([*map(quote, paths[:_NAMED]), *more]), rule_of(paths[0])
    look = "file looks" if len(paths) == 1 else "files look"
    raise UsageError(
        f"nothing was sent: {len(paths)} {look} like credentials in {folder}: {named}. FIX: leave each out with a line"
        f" in {OWN_RULES}, such as {rule} (`elasticctl secret set` gives a job its secrets), or send it anyway"
        f" with a line that names it: !{rule}"
    )


def findings_by_name(path: str) -> tuple[Finding, ...]:
    """The finding from the name of a file."""
    what = by_name(path)
    return (Finding(path, what),) if what else ()


def rule_of(path: str) -> str:
    """The gitignore rule that matches this path and no other."""
    escaped = re.sub(r"([\\*?\[\]])", r"\\\1", path)
    return "/" + re.sub(r"\s(?=\s*$)", r"[\g<0>]", escaped)  # else it would be trimmed at the end
