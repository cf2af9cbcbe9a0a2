"""Contexts on disk: where jobs run, and the defaults of each place.

They are in one file, `config.yaml`, in $ELASTICCTL_HOME or the platform's folder for user configuration. It holds no
secrets, but is mode 0600 because it names clusters and buckets. It is written atomically.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticctl.api.errors import ConfigError, NotFoundError, SpecError, UsageError
from elasticctl.api.text import did_you_mean, join_or, quote
from elasticctl_protocol import variables
from elasticctl_protocol.codec import camel

if TYPE_CHECKING:
    from elasticctl.api.yamltext import YamlDocument

LOCAL = "local"
KUBERNETES = "kubernetes"
"""A cluster of no known provider: no spot labels, no instance types."""
PROVIDERS = (LOCAL, "aws", "gcp", KUBERNETES)
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_CURRENT, _CONTEXTS = "currentContext", "contexts"


@dataclass(frozen=True, slots=True)
class Context:
    """A place to run jobs. `storage` is a URL prefix; `gpus_per_node` 0 means the smallest node with that GPU type.

    `pools` is the order of pools that jobs ask in, as it is typed; `pool_wait_s` 0 means the default.
    `notify_url_from` refers to the webhook's URL for notifications (`elasticctl.api.notifications`); it is not the URL.
    """

    name: str
    provider: str
    kube_context: str = ""
    namespace: str = "default"
    storage: str = ""
    image: str = ""
    service_account: str = ""
    gpu_type: str = ""
    gpus_per_node: int = 0
    notify_url_from: str = ""
    pools: str = ""
    pool_wait_s: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """All contexts, including the built-in `local`, and the one used if none is named."""

    current: str = LOCAL
    contexts: tuple[Context, ...] = (Context(LOCAL, LOCAL),)

    def context(self, name: str = "") -> Context:
        """The context named `name`, or the current one; NotFoundError if there is none."""
        wanted = name or self.current
        for context in self.contexts:
            if context.name == wanted:
                return context
        near = did_you_mean(wanted, (context.name for context in self.contexts))
        raise NotFoundError(f"no context {quote(wanted)}{near}. FIX: see `elasticctl config get-contexts`")

    def using(self, name: str) -> Config:
        """A copy with another current context; NotFoundError if it does not exist."""
        return dataclasses.replace(self, current=self.context(name).name)

    def having(self, context: Context) -> Config:
        """A copy with a context added or replaced; ConfigError if `local` would stop being local."""
        if (context.name == LOCAL) != (context.provider == LOCAL):
            raise ConfigError(f"the context {LOCAL} and the provider {LOCAL} belong together")
        others = [kept for kept in self.contexts if kept.name != context.name]
        return dataclasses.replace(self, contexts=tuple(sorted((*others, context), key=lambda kept: kept.name)))

    def without(self, name: str) -> Config:
        """A copy without a context; if it was the current one, `local` becomes current."""
        gone = self.context(name).name
        if gone == LOCAL:
            raise ConfigError(f"the context {LOCAL} is built in and cannot be deleted")
        kept = tuple(context for context in self.contexts if context.name != gone)
        return Config(LOCAL if self.current == gone else self.current, kept)


def check_namespace(name: str) -> str:
    """Return `name` if it is a valid namespace; UsageError otherwise."""
    if not _NAMESPACE.fullmatch(name):
        raise UsageError(f"{quote(name)} is not a namespace. FIX: use lower-case letters, digits and '-', 63 at most")
    return name


def config_folder() -> Path:
    """The user's configuration folder; it need not exist."""
    home = os.environ.get(variables.HOME)
    if home:
        return Path(os.path.expanduser(home))
    import platformdirs

    return platformdirs.user_config_path("elasticctl")


def contexts_file() -> Path:
    """The contexts file of this user."""
    return config_folder() / "config.yaml"


def templates_folder() -> Path:
    """The folder of this user's own job templates."""
    return config_folder() / "templates"


def user_config() -> Config:
    """The contexts of this user. Raises ConfigError."""
    return load_config(contexts_file())


def load_config(path: Path) -> Config:
    """Read the contexts file; if there is none, only the built-in context exists.

    Raises ConfigError with file and line if it is not what `save_config` writes; the file is left unchanged.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Config()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    from elasticctl.api.yamltext import parse_yaml

    try:
        return _decode(parse_yaml(text, str(path)))
    except SpecError as e:
        raise ConfigError(f"{e}. FIX: correct the file, or move it away to start with the context {LOCAL} only") from e


def save_config(config: Config, path: Path) -> None:
    """Write the contexts file atomically, mode 0600 in a folder of mode 0700; ConfigError when that fails."""
    from elasticctl.api.yamltext import dump_yaml

    text = dump_yaml(encode_config(config))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}; the file is unchanged") from e


def encode_config(config: Config) -> dict[str, Any]:
    """The content of the contexts file, as data."""
    return {_CURRENT: config.current, _CONTEXTS: [_encode(context) for context in config.contexts]}


def write_atomically(path: Path, text: str) -> None:
    """Replace a file, mode 0600, or leave it unchanged; a symbolic link stays one. Raises OSError."""
    import tempfile  # most command lines only read

    path = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mkstemp's mode is 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _encode(context: Context) -> dict[str, Any]:
    """The fields that differ from their defaults, in camelCase."""
    encoded: dict[str, Any] = {}
    for field in dataclasses.fields(Context):
        value = getattr(context, field.name)
        if value != field.default:
            encoded[camel(field.name)] = value
    return encoded


def _decode(document: YamlDocument) -> Config:
    if document.data is None:
        return Config()
    top = _mapping(document, (), document.data, (_CURRENT, _CONTEXTS))
    entries = top.get(_CONTEXTS, [])
    if not isinstance(entries, list):
        raise _wrong(document, (_CONTEXTS,), f"must be a list, not {quote(entries)}")
    config = Config()
    names: set[str] = set()
    for index, entry in enumerate(entries):
        context = _decode_context(document, (_CONTEXTS, index), entry)
        if context.name in names:
            raise _wrong(document, (_CONTEXTS, index, "name"), f"two contexts are called {quote(context.name)}")
        names.add(context.name)
        config = config.having(context)
    current = top.get(_CURRENT, LOCAL)
    known = [context.name for context in config.contexts]
    if current not in known:
        raise _wrong(document, (_CURRENT,), f"no context {quote(current)}. FIX: use {join_or(known)}")
    return dataclasses.replace(config, current=current)


def _decode_context(document: YamlDocument, path: tuple[str | int, ...], entry: Any) -> Context:
    fields = {camel(field.name): field for field in dataclasses.fields(Context)}
    given = _mapping(document, path, entry, tuple(fields))
    for key, value in given.items():
        wanted = type(fields[key].default) if key not in ("name", "provider") else str
        if type(value) is not wanted:
            raise _wrong(
                document, (*path, key), f"must be {'a number' if wanted is int else 'text'}, not {quote(value)}"
            )
    for key in ("name", "provider"):
        if not given.get(key):
            raise _wrong(document, (*path, key), "required, but missing")
    context = Context(**{fields[key].name: value for key, value in given.items()})
    if context.provider not in PROVIDERS:
        near = did_you_mean(context.provider, PROVIDERS)
        raise _wrong(
            document, (*path, "provider"), f"must be {join_or(PROVIDERS)}, not {quote(context.provider)}{near}"
        )
    if (context.name == LOCAL) != (context.provider == LOCAL):
        raise _wrong(document, path, f"the context {LOCAL} and the provider {LOCAL} belong together")
    return context


def _mapping(
    document: YamlDocument, path: tuple[str | int, ...], value: Any, known: tuple[str, ...]
) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(document, path, f"must be a mapping, not {quote(value)}")
    for key in value:
        if key not in known:
            raise _wrong(document, (*path, key), f"unknown field{did_you_mean(key, known)}")
    return value


def _wrong(document: YamlDocument, path: tuple[str | int, ...], message: str) -> SpecError:
    from elasticctl.api.yamltext import format_path

    return SpecError(message, path=format_path(path), line=document.line(path), source=document.source)
