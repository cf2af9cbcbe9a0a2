"""`secret`: values for `submit --secret`, read from a file, a pipe or a prompt, and never printed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.api.text import plural, quote, span
from elasticctl.cli.framework.command import add_group, new_app, verb
from elasticctl.cli.framework.output import Table, emit, hint, print_data, print_table
from elasticctl.cli.framework.place import Where, locate
from elasticctl.cluster import secrets_of
from elasticctl.cluster.base import SecretInfo, check_secret_name
from elasticctl.terminal import say

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

app = new_app()
secret = add_group(
    app, "secret", "Manage passwords and tokens for jobs; jobs refer to them by name, and their values are never shown."
)


@verb(secret, "set")
def set_secret(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    keys: Annotated[tuple[str, ...], typer.Argument(metavar="KEY...")] = (),
    env_file: Annotated[
        str, typer.Option("--from-env-file", metavar="FILE", show_default=False, help="Lines of KEY=VALUE; - is stdin.")
    ] = "",
    where: Where,
) -> None:
    """Store values under NAME: prompt for those of the KEYs, or read that of a single KEY from a pipe. Other keys stay.

    \b
      elasticctl secret set hub HF_TOKEN
      elasticctl secret set hub HF_TOKEN < token.txt
      elasticctl secret set s3 --from-env-file keys.env
    """
    context, namespace = locate(where)
    check_secret_name(name)  # before a value is typed
    for key in keys:
        _check_key(key)
    if bool(keys) == bool(env_file):
        raise UsageError("no keys given. FIX: name the keys, or give --from-env-file FILE")
    values = _ask_values(keys) if keys else _from_file(env_file)
    secrets_of(context).merge(namespace, name, values)
    say(f"secret {name}: {plural(len(values), 'key')} set ({', '.join(values)})")
    hint(f"Next: give it to a job: elasticctl submit --secret {name} SCRIPT")


@verb(secret, "list")
def list_secrets(
    *,
    output: Annotated[
        Literal["table", "json", "yaml", "name"], typer.Option("-o", "--output", help="Output format.")
    ] = "table",
    where: Where,
) -> None:
    """List secrets and their keys, without values; on a cluster, only those that were set with elasticctl."""
    context, namespace = locate(where)
    found = secrets_of(context).list(namespace)
    if output in ("json", "yaml"):
        print_data("SecretList", {"secrets": [_as_data(one) for one in found]}, output)
    elif output == "name":
        for one in found:
            emit(one.name)
    elif found:
        now = time.time()
        ages = ["" if one.made_at is None else span(now - one.made_at) for one in found]
        rows = [(one.name, ", ".join(one.keys), age) for one, age in zip(found, ages, strict=True)]
        print_table(Table(("NAME", "KEYS", "AGE"), rows))
    else:
        say(f"no secrets in namespace {namespace}. Next: elasticctl secret set NAME KEY")


@verb(secret, "delete")
def delete(*, names: Annotated[tuple[str, ...], typer.Argument(metavar="NAME...")], where: Where) -> None:
    """Delete secrets; jobs that refer to them can start no more workers. Running workers keep their values."""
    context, namespace = locate(where)
    kept = secrets_of(context)
    for name in names:
        try:
            kept.delete(namespace, name)
        except NotFoundError as e:
            missing = f"there is no secret {quote(name)} in namespace {quote(namespace)}"
            raise NotFoundError(f"{missing}. FIX: see `elasticctl secret list`") from e
        say(f"secret {name}: deleted")


def _ask_values(keys: Sequence[str]) -> Mapping[str, str]:
    """The values of keys: typed without echo, or a whole pipe for a single key."""
    if sys.stdin.isatty():
        import getpass

        return {key: _check_value(key, getpass.getpass(f"{key}: ")) for key in keys}
    if len(keys) > 1:
        raise UsageError("a pipe holds the value of one key. FIX: give several with --from-env-file -")
    value = _text(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
    return {keys[0]: _check_value(keys[0], value)}


def _from_file(path: str) -> Mapping[str, str]:
    """Read lines of KEY=VALUE; a value may be in quotes, and `export` may precede the key."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    values: dict[str, str] = {}
    for number, line in enumerate(_text(data, path).splitlines(), 1):
        stripped = line.strip().removeprefix("export ").strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, separator, value = stripped.partition("=")
        if not separator or not _VARIABLE.fullmatch(key):
            raise UsageError(f"{path}:{number}: not of the form KEY=VALUE, KEY being letters, digits and _")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        values[key] = _check_value(key, value[1:-1] if quoted else value)
    if not values:
        raise UsageError(f"{path} has no line of KEY=VALUE")
    return values


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not UTF-8 text") from None  # its message would show what is in it


def _check_key(key: str) -> None:
    if "=" in key:
        raise UsageError("a value on the command line can be read by anyone who can run ps. FIX: give the key alone")
    if not _VARIABLE.fullmatch(key):
        raise UsageError(f"{quote(key)} cannot be the name of a variable: use letters, digits and _")


def _check_value(key: str, value: str) -> str:
    if not value or "\0" in value:
        empty = f"the value of {key} is empty. FIX: type it at the prompt, or pipe it in"
        raise UsageError(f"the value of {key} contains a NUL byte" if value else empty)
    return value


def _as_data(one: SecretInfo) -> dict[str, object]:
    from elasticctl.api.codec import to_rfc3339

    at = {} if one.made_at is None else {"at": to_rfc3339(one.made_at)}
    return {"name": one.name, "keys": list(one.keys), **at}
