"""Input that is almost right: a valid document with a few of its parts changed, and bytes that are close to one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.support.anything import JSON

Path = tuple[str | int, ...]
_GONE = object()
"""Takes the place of a part that is left out."""
_DEEP = b"[" * 20_000
"""Deeper than any reader goes."""


def changed(document: Any) -> st.SearchStrategy[Any]:
    """A JSON document with up to three of its parts replaced by anything, or left out."""
    places = st.sampled_from(list(_paths(document)))
    edits = st.lists(st.tuples(places, JSON | st.just(_GONE)), min_size=1, max_size=3)
    return edits.map(lambda edits: _edit(document, edits))


def changed_bytes(*documents: bytes) -> st.SearchStrategy[bytes]:
    """Bytes of one of the documents with a stretch replaced; or any bytes at all."""
    cuts = st.tuples(st.sampled_from(documents), st.floats(0, 1), st.integers(0, 40), st.binary(max_size=20))
    return cuts.map(_splice) | st.binary(max_size=60) | st.just(_DEEP)


def as_json(document: Any) -> bytes:
    """As another program may write it: NaN, lone surrogates and numbers beyond a float are all there."""
    return json.dumps(document).encode()


def _splice(cut: tuple[bytes, float, int, bytes]) -> bytes:
    document, place, length, new = cut
    at = int(place * len(document))
    return document[:at] + new + document[at + length :]


def _paths(document: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    items = enumerate(document) if isinstance(document, list) else ()
    for key, value in document.items() if isinstance(document, dict) else items:
        yield from _paths(value, (*path, key))


def _edit(document: Any, edits: list[tuple[Path, Any]]) -> Any:
    found = copy.deepcopy(document)
    for path, value in edits:
        if not path:
            found = None if value is _GONE else value
            continue
        inside = found
        try:
            for key in path[:-1]:
                inside = inside[key]
            if isinstance(inside, dict) != isinstance(path[-1], str):
                continue  # an earlier edit has put something else here
            if value is _GONE:
                del inside[path[-1]]
            else:
                inside[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier edit has taken it away
    return found
