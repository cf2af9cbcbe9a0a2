"""YAML text <-> JSON data, with the line of every field.

PyYAML parses and composes; the line of a field is that of its node's mark. This module adds that a duplicate key is
an error, every error names a line, and no small file can expand to gigabytes through its aliases. Scalars are read as
by kubectl (YAML 1.1 booleans and integers, YAML 1.2 floats), except that dates and sexagesimals stay text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from elasticctl.api.errors import SpecError
from elasticctl.api.text import quote

FieldPath = tuple[str | int, ...]

MAX_SIZE_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_NODES = 200_000
_MAX_INT = 2**63

_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT = f"{_TAG}null", f"{_TAG}bool", f"{_TAG}int", f"{_TAG}float"
_STR, _MERGE = f"{_TAG}str", f"{_TAG}merge"
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_BOOLS = {form: word in _TRUE for word in _TRUE + _FALSE for form in (word, word.capitalize(), word.upper())}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's parser and composer, with the plain scalars of kubectl instead of its own."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as in the base class


for _tag, _pattern, _first in (
    (_NULL, r"(~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    (_BOOL, rf"({'|'.join(_BOOLS)})\Z", list("tTyYoOfFnN")),
    (_INT, r"[-+]?(0b[01_]*[01]|0x[\da-fA-F_]*[\da-fA-F]|0o?[0-7_]*[0-7]|0|[1-9]([\d_]*\d)?)\Z", list("-+0123456789")),
    (_FLOAT, r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z", list("-+.0123456789")),
    (_FLOAT, r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z", list("-+.")),
    (_MERGE, r"<<\Z", ["<"]),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern, re.ASCII), _first)


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One YAML document as JSON data; `lines` maps a field's path to its 1-based line in `source`."""

    data: Any
    lines: Mapping[FieldPath, int]
    source: str = ""

    def line(self, path: FieldPath) -> int | None:
        """The line of a field, or of the nearest one around it; None when nothing is known."""
        return next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)


def format_path(path: Iterable[str | int]) -> str:
    """("spec", "containers", 0, "a b") -> `spec.containers[0]["a b"]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w/-]+", part, re.ASCII):
            text += f".{part}" if text else part
        else:
            text += f"[{quote(part)}]"
    return text


def parse_yaml(text: str | bytes, source: str = "") -> YamlDocument:
    """Read one YAML (or JSON) document.

    Raises SpecError with the line when it is not UTF-8, not YAML, larger than MAX_SIZE_BYTES, nested deeper than
    MAX_DEPTH, more than MAX_NODES nodes after expanding aliases, or holds several documents, a key twice, a key that
    is not text, a number that JSON or 64 bits cannot hold, or a tag of a language's own.
    """
    decoded = _decode(text, source)
    builder = _Builder(source)
    try:
        builder.check_events(decoded)
        node = yaml.compose(decoded, Loader=_Loader)
    except yaml.MarkedYAMLError as e:
        mark: Any = e.problem_mark or e.context_mark
        problem = ", ".join(part for part in (e.context, e.problem) if part)
        # At the end of the text the mark is one line past it.
        line = min(mark.line + 1, max(1, len(decoded.splitlines()))) if mark else None
        raise SpecError(f"not YAML: {problem}", line=line, source=source) from e
    except (yaml.YAMLError, UnicodeEncodeError) as e:
        raise SpecError("not YAML: it contains a character that YAML does not allow", source=source) from e
    data = None if node is None else builder.build(node, ())
    return YamlDocument(data, builder.lines, source)


def dump_yaml(data: Any) -> str:
    """Write JSON data as YAML that `parse_yaml`, kubectl and any YAML 1.1 reader read back as the same data."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1 << 30
    )
    return text


def resolve(text: str) -> Any:
    """The value of a plain scalar; ValueError for a number that JSON or 64 bits cannot hold."""
    return _construct(_implicit_tag(text), text)


def _implicit_tag(text: str) -> str:
    for tag, pattern in _Loader.yaml_implicit_resolvers.get(text[:1], ()):
        if pattern.match(text):
            return str(tag)
    return _STR


def _construct(tag: str, text: str) -> Any:
    """The value of a scalar with this tag; ValueError for a number that is out of range."""
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return _BOOLS[text]
    if tag == _INT:
        return _integer(text)
    if tag == _FLOAT:
        if text[-1].isalpha():
            raise ValueError(f"{quote(text)} is not a finite number. FIX: quote it if it is text")
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{quote(text)} is out of range")
        return number
    return text


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    if len(digits) > 70:
        raise ValueError(f"{quote(text)} is out of range")
    number = int(digits, 8 if re.match("0[0-7]", digits) else 0)
    if not -_MAX_INT <= sign * number < _MAX_INT:
        raise ValueError(f"{quote(text)} is out of range")
    return sign * number


def _decode(text: str | bytes, source: str) -> str:
    size_bytes = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "replace"))
    if size_bytes > MAX_SIZE_BYTES:
        raise SpecError(f"{size_bytes} bytes are too many; the limit is {MAX_SIZE_BYTES}", source=source)
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = text.count(b"\n", 0, e.start) + 1
        raise SpecError("not UTF-8 text. FIX: save the file as UTF-8", line=line, source=source) from e


@dataclass(slots=True)
class _Builder:
    """Builds the data of one document from PyYAML's nodes, and notes the line of each field."""

    source: str
    lines: dict[FieldPath, int] = field(default_factory=dict)
    nodes: int = 0

    def check_events(self, text: str) -> None:
        """Refuse a second document, and nesting so deep that PyYAML's composer would crash the process."""
        depth = documents = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse("a second document starts here. FIX: put each in a file of its own", event)
            elif isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    self._refuse(f"nested deeper than {MAX_DEPTH} levels", event)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1

    def build(self, node: yaml.Node, path: FieldPath) -> Any:
        """The value of a node at `path`; an alias is the node that it stands for."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._refuse(f"more than {MAX_NODES} values, with each alias expanded", node, path)
        if len(path) > MAX_DEPTH:
            self._refuse(
                f"nested deeper than {MAX_DEPTH} levels, counting each alias as what it stands for", node, path[:8]
            )
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self._refuse(f"the tag {quote(node.tag)} is not supported", node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._mapping(node, path)

    def _mapping(self, node: yaml.Node, path: FieldPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[Any] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse("a key must be plain text", key, path)
            if key.tag == _MERGE:
                sources = self.build(value, (*path, "<<"))
                merged += sources if isinstance(sources, list) else [sources]
                if not all(isinstance(item, dict) for item in merged):
                    self._refuse("<< takes a mapping or a list of mappings", value, path)
                continue
            if key.tag != _STR:
                self._refuse(f"the key {quote(key.value)} is not text. FIX: put it in quotes", key, path)
            inner = (*path, key.value)
            if key.value in found:
                self._refuse(f"given twice, first in line {self.lines[inner]}", key, inner)
            self.lines[inner] = key.start_mark.line + 1
            found[key.value] = self.build(value, inner)
        for source in merged:
            for name, value in source.items():
                found.setdefault(name, value)
        return found

    def _scalar(self, node: yaml.ScalarNode, path: FieldPath) -> Any:
        try:
            implicit = _implicit_tag(node.value)
            if node.tag in (_STR, implicit):
                return _construct(node.tag, node.value)
            if (node.tag, implicit) == (_FLOAT, _INT):
                return float(_integer(node.value))
        except ValueError as e:
            self._refuse(str(e), node, path)
        self._refuse(f"the tag {quote(node.tag)} does not fit {quote(node.value)}", node, path)

    def _refuse(self, message: str, at: yaml.Event | yaml.Node, path: FieldPath = ()) -> NoReturn:
        mark: Any = at.start_mark  # Any: the stubs allow None, which what was parsed never has
        raise SpecError(message, path=format_path(path), line=mark.line + 1, source=self.source)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes every text that a reader could take for a number, a boolean, null or a date."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_STR, text, style=None if _implicit_tag(text) == _STR else '"')


_Dumper.add_representer(str, _represent_str)
