"""Job templates, and how one turns a JobSpec into an ElasticJob manifest (Jinja2, sandboxed).

Templates ship as package data, lie in the user's own folder, or are named by a path.

A value never meets the YAML parser. While the template renders, each value that it would print is set aside and a
token is printed in its place; the text is then read as YAML, and the tokens in the resulting data are replaced by the
values. So no name, argument or variable can add structure or change its type, wherever a template prints it; and a list
or a mapping can be inserted as a whole.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox

from elasticctl.api import validation
from elasticctl.api.errors import SpecError, TemplateError
from elasticctl.api.spec import JobSpec, Manifest
from elasticctl.api.text import did_you_mean, quote
from elasticctl.api.yamltext import YamlDocument, parse_yaml

SUFFIX = ".yaml.j2"
DEFAULT = "default"
MAX_SIZE_BYTES = 256 * 1024
MAX_STEPS = 100_000
MAX_OUTPUT_CHARS = 1 << 20

# Private-use characters: legal in YAML, without any meaning to it, and without upper case.
_OPEN, _CLOSE = "\ue000", "\ue001"


@dataclass(frozen=True, slots=True)
class Template:
    """A job template's text; `path` is None if it is shipped."""

    name: str
    text: str
    path: Path | None = None


def available_templates(folder: Path) -> list[Template]:
    """The shipped templates and the user's in `folder`, by name; the user's hide shipped ones of the same name."""
    found = {name: _read_shipped(name) for name in shipped_template_names()}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        found[path.name.removesuffix(SUFFIX)] = _read_template(path)
    return [found[name] for name in sorted(found)]


def find_template(name: str, folder: Path) -> Template:
    """The template named `name`: the user's in `folder`, a shipped one, or the file at that path.

    Raises TemplateError if there is none or it cannot be read.
    """
    if "/" in name or name.endswith(SUFFIX):
        return _read_template(Path(name).expanduser())
    own = folder / f"{name}{SUFFIX}"
    if own.is_file():
        return _read_template(own)
    shipped = shipped_template_names()
    if name in shipped:
        return _read_shipped(name)
    known = [*shipped, *(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))]
    raise TemplateError(
        f"no job template {quote(name)}{did_you_mean(name, known)}. FIX: see `elasticctl template list`"
    )


def shipped_template_names() -> list[str]:
    """Names of the templates that come with elasticctl."""
    names = (entry.name for entry in resources.files("job_templates").iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


def _read_shipped(name: str) -> Template:
    return Template(name, resources.files("job_templates").joinpath(f"{name}{SUFFIX}").read_text("utf-8"))


def _read_template(path: Path) -> Template:
    name = path.name.removesuffix(SUFFIX)
    try:
        if path.stat().st_size > MAX_SIZE_BYTES:
            raise TemplateError(f"the template {path} is larger than {MAX_SIZE_BYTES} bytes")
        return Template(name, path.read_text("utf-8"), path)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise TemplateError(f"cannot read the template {path}: {reason}") from e


def render_manifest(spec: JobSpec, template: Template) -> Manifest:
    """Render and check a manifest.

    Raises TemplateError with the template's line if the template is wrong, and SpecError with the field if a value in
    the result is.
    """
    values = _Values(template.text, repr(spec))
    text = _render_text(template, spec, values)
    source = f"template {template.name}, as rendered"
    document = parse_yaml(text, source)
    try:
        filled = YamlDocument(values.fill(document.data), document.lines, source)
    except TemplateError as e:
        raise TemplateError(_where(template, None) + str(e)) from e
    validation.validate_manifest(filled)
    manifest: Manifest = filled.data
    return manifest


class _Values:
    """The values set aside during one rendering, and their tokens."""

    def __init__(self, *seed: str) -> None:
        # A value cannot hold a token of this rendering: it would have to contain its own digest.
        digest = hashlib.sha256("\0".join(seed).encode("utf-8", "surrogatepass")).digest()
        self._mark = f"{_OPEN}{int.from_bytes(digest[:16], 'big')}{_OPEN}"
        self._token = re.compile(f"{self._mark}(\\d+){_CLOSE}")
        self._kept: list[Any] = []

    def set_aside(self, value: Any) -> str:
        """Set a value aside and return its token; Jinja calls this for everything that a template prints."""
        self._kept.append(_plain(value))
        return f"{self._mark}{len(self._kept) - 1}{_CLOSE}"

    def fill(self, data: Any) -> Any:
        """`data` with each token replaced: by the value itself where it stands alone, by its text elsewhere."""
        if isinstance(data, dict):
            return {self._text(key): self.fill(value) for key, value in data.items()}
        if isinstance(data, list):
            return [self.fill(item) for item in data]
        if not isinstance(data, str):
            return data
        alone = self._token.fullmatch(data)
        return self.fill(self._kept[int(alone[1])]) if alone else self._text(data)

    def _text(self, text: str) -> str:
        return self._token.sub(lambda token: self._inline(self._kept[int(token[1])]), text)

    def _inline(self, value: Any) -> str:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, bool | int | float):
            return str(value).lower() if isinstance(value, bool) else str(value)
        kind = "nothing" if value is None else "a list" if isinstance(value, list) else "a mapping"
        raise TemplateError(f"{kind} ({quote(value)}) cannot stand inside a text or as a key")


def _plain(value: Any) -> Any:
    """`value` as JSON data; TemplateError if it is not."""
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises: the environment's undefined values are strict
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str):
        return _unicode(str(value))
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {_unicode(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TemplateError(f"a template can print text, finite numbers, lists and mappings, not {type(value).__name__}")


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise SpecError(f"the value {quote(text)} is not Unicode text; a manifest can hold nothing else") from e
    return text


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """No files, no private attributes, and a limit on loops and calls, so that every template ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0
        self.filters["bounded"] = self._bounded

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._step()
        return super().call(*args, **kwargs)

    def _bounded(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateError(f"more than {MAX_STEPS} loop turns and calls")


def _render_text(template: Template, spec: JobSpec, values: _Values) -> str:
    """The template's text with tokens for values."""
    environment = _Sandbox(undefined=jinja2.StrictUndefined, finalize=values.set_aside, keep_trailing_newline=True)
    environment.filters["literal"] = escape_expansion
    try:
        tree = environment.parse(template.text)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "bounded", [], [], None, None, lineno=loop.lineno)
        text = ""
        for piece in environment.from_string(tree).generate(job=spec):
            text += piece
            if len(text) > MAX_OUTPUT_CHARS:
                raise TemplateError(f"it renders to more than {MAX_OUTPUT_CHARS} characters")
    except SpecError:
        raise
    except jinja2.TemplateSyntaxError as e:
        raise TemplateError(_where(template, e.lineno) + (e.message or "syntax error")) from e
    except Exception as e:
        # A template is code by others: it can raise anything.
        message = "no files can be included" if isinstance(e, TypeError) and "no loader" in str(e) else str(e)
        raise TemplateError(_where(template, _line(e.__traceback__)) + message) from e
    return text


def escape_expansion(text: str) -> str:
    """Escape `text` so that Kubernetes, which expands $(NAME) in args and variables, passes on exactly `text`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _where(template: Template, line: int | None) -> str:
    return f"template {template.path or template.name}{f':{line}' if line else ''}: "


def _line(traceback: TracebackType | None) -> int | None:
    """The template's line that an exception passed through; Jinja maps its code's lines back."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
