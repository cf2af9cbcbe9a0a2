"""Where a job's notifications go: a reference to a webhook's URL, which is a secret and appears in no manifest.

A key for signatures may follow the URL, on a line of its own.

secret:KEY    the key of the secret `elasticctl-notify` in the job's namespace; `KEY` alone means the same
file:PATH     a file with the URL; only on the local cluster
env:NAME      an environment variable of the supervisor; only on the local cluster
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote

SECRET = "elasticctl-notify"  # noqa: S105 - the name of one
"""The name of the only Secret that the controller may read, in any namespace."""
KINDS = ("secret", "file", "env")
_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Reference:
    """`kind` is one of `KINDS`, and `name` the key, the path or the variable."""

    kind: str
    name: str

    @property
    def local_only(self) -> bool:
        """True if it works only on the local cluster."""
        return self.kind != "secret"

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def parse_reference(text: str) -> Reference:
    """Read a reference. Raises UsageError, whose message does not repeat what may be the secret."""
    kind, separator, name = text.partition(":")
    if name.startswith("//") and kind != "file":
        raise UsageError(
            f"this looks like the webhook's URL, which is a secret. FIX: store it (`elasticctl secret set {SECRET}"
            f" KEY`, or kubectl create secret generic {SECRET}) and give its KEY instead"
        )
    if not separator:
        kind, name = "secret", text
    good = {"secret": _KEY.fullmatch(name), "file": name.startswith("/"), "env": _VARIABLE.fullmatch(name)}
    if kind not in good:
        raise UsageError(f"notifications can go to secret:KEY, file:PATH or env:NAME, not to {quote(kind)}:…")
    if not good[kind]:
        forms = {"secret": "a key of a secret", "file": "an absolute path", "env": "the name of a variable"}
        raise UsageError(f"{quote(name)} is not {forms[kind]}. FIX: use secret:KEY, file:PATH or env:NAME")
    return Reference(kind, name)
