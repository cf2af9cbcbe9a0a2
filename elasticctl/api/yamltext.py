"""YAML text <-> JSON data, with the line of every field.

Built on PyYAML's events rather than its loader, because a user's file has to be read so that every complaint names a
line, a key given twice is an error, and aliases cannot blow a small file up into gigabytes. Scalars mean what they
mean to kubectl (YAML 1.1 booleans and integers, YAML 1.2 floats), except that dates and sexagesimals stay text.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from elasticctl.api.errors import SpecError
from elasticctl.api.text import shown

TAG = "tag:yaml.org,2002:"
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {
    form: value
    for word, value in (("true", True), ("yes", True), ("on", True), ("false", False), ("no", False), ("off", False))
    for form in (word, word.capitalize(), word.upper())
}
_INT = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_MAX_INT = 2**63


def scalar(text: str, *, plain: bool, tag: str | None = None) -> Any:
    """The value of a scalar node; ValueError for an unknown tag or a number out of range."""
    if tag in (None, "!"):
        return resolve(text) if plain and tag is None else text
    if tag == f"{TAG}str":
        return text
    value = resolve(text)
    kinds = {"null": type(None), "bool": bool, "int": int, "float": float}
    kind = kinds.get(tag.removeprefix(TAG)) if tag is not None else None
    if kind is float and type(value) is int:
        return float(value)
    if kind is None or type(value) is not kind:
        raise ValueError(f"the tag {shown(tag or '')} does not fit {shown(text)}")
    return value


def resolve(text: str) -> Any:
    """The value of a plain scalar; ValueError for a number that JSON or 64 bits cannot hold."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.match(text) and not text.endswith("_"):
        return _integer(text)
    if _FLOAT.match(text):
        number = float(text)
        if math.isfinite(number):
            return number
        raise ValueError(f"{shown(text)} is out of range")
    if _NOT_FINITE.match(text):
        raise ValueError(f"{shown(text)} is no number here; put it in quotes if it is text")
    return text


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    if len(digits) > 70:
        raise ValueError(f"{shown(text)} is out of range")
    number = int(digits, 8 if re.match("0[0-7]", digits) else 0)
    if not -_MAX_INT <= sign * number < _MAX_INT:
        raise ValueError(f"{shown(text)} is out of range")
    return sign * number


FieldPath = tuple[str | int, ...]

MAX_SIZE_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_NODES = 200_000

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MERGE = object()


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
            text += f"[{shown(part)}]"
    return text


def parse_yaml(text: str | bytes, source: str = "") -> YamlDocument:
    """Read one YAML (or JSON) document.

    Raises SpecError with the line when it is not UTF-8, not YAML, larger than MAX_SIZE_BYTES, nested deeper than
    MAX_DEPTH, more than MAX_NODES nodes after expanding aliases, or holds several documents, a key twice, a key that
    is not text, a number that JSON or 64 bits cannot hold, or a tag of a language's own.
    """
    decoded = _decoded(text, source)
    builder = _Builder(source)
    try:
        for event in yaml.parse(decoded, Loader=_LOADER):
            builder.add(event)
    except yaml.MarkedYAMLError as e:
        mark: Any = e.problem_mark or e.context_mark
        problem = ", ".join(part for part in (e.context, e.problem) if part)
        # At the end of the text the mark is one line past it.
        line = min(mark.line + 1, max(1, len(decoded.splitlines()))) if mark else None
        raise SpecError(f"not YAML: {problem}", line=line, source=source) from e
    except (yaml.YAMLError, UnicodeEncodeError) as e:
        raise SpecError("not YAML: it holds a character that no text file should", source=source) from e
    return YamlDocument(builder.data, builder.lines, source)


def dump_yaml(data: Any) -> str:
    """Write JSON data as YAML that `parse`, kubectl and any YAML 1.1 reader read back as the same data."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1 << 30
    )
    return text


def _decoded(text: str | bytes, source: str) -> str:
    size_bytes = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "replace"))
    if size_bytes > MAX_SIZE_BYTES:
        raise SpecError(f"{size_bytes} bytes are too many; the limit is {MAX_SIZE_BYTES}", source=source)
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = text.count(b"\n", 0, e.start) + 1
        raise SpecError("not UTF-8 text; save the file as UTF-8", line=line, source=source) from e


@dataclass(slots=True)
class _Frame:
    """A mapping or sequence under construction."""

    value: dict[str, Any] | list[Any]
    path: FieldPath
    anchor: str | None
    first_node: int
    key: Any = None
    merges: list[dict[str, Any]] = field(default_factory=list)


class _Builder:
    """Turns a stream of YAML events into data, without recursion."""

    def __init__(self, source: str) -> None:
        self.data: Any = None
        self.lines: dict[FieldPath, int] = {}
        self._source = source
        self._line = 1
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._nodes = 0
        self._documents = 0

    def add(self, event: yaml.Event) -> None:
        mark: Any = event.start_mark  # Any: the stubs allow None, which a parsed event never has
        self._line = mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._refuse("a second document starts here; one file holds one")
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event.anchor)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._open(event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._close()

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        plain = not event.style
        frame = self._stack[-1] if self._stack else None
        if frame is not None and isinstance(frame.value, dict) and frame.key is None:
            self._key(frame, event.value, plain)
            return
        path = self._place()
        try:
            value = scalar(event.value, plain=plain, tag=event.tag)
        except ValueError as e:
            self._refuse(str(e), path)
        self._remember(event.anchor, value, 1)
        self._put(value)

    def _key(self, frame: _Frame, text: str, plain: bool) -> None:
        if plain and text == "<<":
            frame.key = _MERGE
            return
        if plain and not isinstance(resolve(text), str):
            self._refuse(f"the key {shown(text)} is not text; put it in quotes", frame.path)
        path = (*frame.path, text)
        if text in frame.value:
            self._refuse(f"given twice, first in line {self.lines[path]}", path)
        frame.key = text
        self.lines[path] = self._line

    def _alias(self, anchor: str | None) -> None:
        path = self._place()
        if anchor is None or anchor not in self._anchors:
            self._refuse(f"the alias *{anchor} stands for nothing before it", path)
        value, nodes = self._anchors[anchor]
        self._count(nodes, path)
        self._put(copy.deepcopy(value))

    def _open(self, event: yaml.MappingStartEvent | yaml.SequenceStartEvent) -> None:
        path = self._place()
        mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", f"{TAG}{'map' if mapping else 'seq'}"):
            self._refuse(f"the tag {shown(event.tag)} is not supported", path)
        if len(self._stack) >= MAX_DEPTH:
            self._refuse(f"nested deeper than {MAX_DEPTH} levels", path[:8])
        self._stack.append(_Frame({} if mapping else [], path, event.anchor, self._nodes))

    def _close(self) -> None:
        frame = self._stack.pop()
        if isinstance(frame.value, dict):
            for merged in frame.merges:
                for key, value in merged.items():
                    frame.value.setdefault(key, value)
        self._remember(frame.anchor, frame.value, self._nodes - frame.first_node + 1)
        self._put(frame.value)

    def _place(self) -> FieldPath:
        """The path of the value that starts now; notes its line."""
        if not self._stack:
            path: FieldPath = ()
        else:
            frame = self._stack[-1]
            if isinstance(frame.value, list):
                path = (*frame.path, len(frame.value))
            elif frame.key is None:
                self._refuse("a key must be plain text", frame.path)
            else:
                path = (*frame.path, "<<" if frame.key is _MERGE else frame.key)
        self.lines.setdefault(path, self._line)
        self._count(1, path)
        return path

    def _put(self, value: Any) -> None:
        if not self._stack:
            self.data = value
            return
        frame = self._stack[-1]
        if isinstance(frame.value, list):
            frame.value.append(value)
            return
        key, frame.key = frame.key, None
        if key is not _MERGE:
            frame.value[key] = value
            return
        sources = value if isinstance(value, list) else [value]
        if not all(isinstance(item, dict) for item in sources):
            self._refuse("<< takes a mapping or a list of mappings", frame.path)
        frame.merges.extend(sources)

    def _remember(self, anchor: str | None, value: Any, nodes: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = (value, nodes)

    def _count(self, nodes: int, path: FieldPath) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self._refuse(f"more than {MAX_NODES} values, counting each alias as what it stands for", path)

    def _refuse(self, message: str, path: FieldPath = ()) -> NoReturn:
        raise SpecError(message, path=format_path(path), line=self._line, source=self._source)


class _Dumper(_DUMPER):  # type: ignore[misc, valid-type]
    """Quotes every text that some reader would take for a number, a boolean, a null or a date."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _is_ambiguous(text: str) -> bool:
    try:
        return not isinstance(resolve(text), str)
    except ValueError:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{TAG}str", text, style='"' if _is_ambiguous(text) else None)


_Dumper.add_representer(str, _represent_str)
