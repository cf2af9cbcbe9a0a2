"""YAML in and out: kubectl's reading, a line for each complaint, bounded work."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import SpecError
from elasticctl.api.yamltext import MAX_SIZE_BYTES, dump_yaml, format_path, parse_yaml

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
TRICKY = st.sampled_from(
    ["yes", "off", "~", "null", "1e3", "0644", "0o14", "1_0", "1:30", "2024-01-01", "=", "<<", "", ".nan"]
)
SCALARS: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT | TRICKY
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | TRICKY, inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
@settings(max_examples=100)
def test_a_dumped_document_is_parsed_back(data: Any) -> None:
    assert parse_yaml(dump_yaml(data)).data == data


@given(st.dictionaries(TEXT | TRICKY, TEXT | TRICKY | st.booleans() | st.integers(-100, 100), max_size=5))
@settings(max_examples=50)
def test_other_readers_read_the_same(data: dict[str, Any]) -> None:
    assert yaml.safe_load(dump_yaml(data)) == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("Off", False),
        ("y", "y"),
        ("0644", 0o644),
        ("0x1F", 31),
        ("1_000", 1000),
        ("1e3", 1000.0),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("! 1", 1),
        ("!!float 1", 1.0),
        ("~", None),
    ],
)
def test_scalars_mean_what_they_mean_to_kubectl(text: str, value: Any) -> None:
    found = parse_yaml(text).data
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f:3: a: given twice, first in line 1"),
        ("a:\n  - [", "f:2: not YAML: "),
        ("---\na: 1\n---\nb: 2", "f:3: a second document"),
        ("a: !!python/object:os.system x", 'f:1: a: the tag "tag:yaml.org,2002:python/object:os.system"'),
        ("a: !thing {b: 1}", 'f:1: a: the tag "!thing" is not supported'),
        ("a:\n  1: x", 'f:2: a: the key "1" is not text. FIX: put it in quotes'),
        ("{[a]: 1}", "f:1: a key must be plain text"),
        ("a: .inf", 'f:1: a: ".inf" is not a finite number'),
        ("a: 9223372036854775808", "f:1: a: "),
        ("a: 1e999", "f:1: a: "),
        ("a: &a [*a]", "f:1: a[0][0][0][0][0][0][0]: nested deeper than 64 levels"),
        ("<<: 3", "f:1: << takes a mapping"),
        ("[" * 200 + "]" * 200, "f:1: nested deeper than 64 levels"),
        (b"a: 1\nb: \xff", "f:2: not UTF-8 text"),
        ("a: \x00", "f: not YAML"),
        ("a" * (MAX_SIZE_BYTES + 1), "f: 1048577 bytes are too many"),
    ],
)
def test_each_wrong_text_has_its_line(text: str | bytes, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, "f")
    assert str(caught.value).startswith(message)


def test_anchors_aliases_and_merges() -> None:
    text = "base: &b {x: 1, y: 2}\none: *b\ntwo:\n  y: 3\n  <<: *b\nthree: {<<: [*b, {z: 4}]}\n"
    assert parse_yaml(text).data == {
        "base": {"x": 1, "y": 2},
        "one": {"x": 1, "y": 2},
        "two": {"y": 3, "x": 1},
        "three": {"x": 1, "y": 2, "z": 4},
    }


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(SpecError, match="more than 200000 values"):  # of 10 ** 11
        parse_yaml("\n".join(["a0: &a0 x", *levels]))


def test_a_document_that_would_crash_the_composer_is_refused() -> None:
    """By us, or by PyYAML's scanner: from 6.0.4 on it has a limit of its own, and reads ahead."""
    with pytest.raises(SpecError, match=r"nested deeper|maximum nesting depth"):
        parse_yaml("[" * 500_000 + "]" * 500_000)


def test_a_chain_of_aliases_is_as_deep_as_what_it_stands_for() -> None:
    chain = "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 500))
    with pytest.raises(SpecError, match="nested deeper"):
        parse_yaml(f"a0: &a0 x\n{chain}")


def test_lines_of_fields_and_of_what_is_around_missing_ones() -> None:
    document = parse_yaml("a:\n  b:\n    - x\n    - c: 1\n")
    assert document.line(("a", "b", 1, "c")) == 4
    assert document.line(("a", "b", 1, "missing", "deeper")) == 4
    assert document.line(("missing",)) == 1


def test_paths_read_like_code() -> None:
    assert format_path(("spec", "containers", 0, "env", "a b", "x.y")) == 'spec.containers[0].env["a b"]["x.y"]'
