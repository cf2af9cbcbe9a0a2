"""Damages checkpoints in every way: for tests that nothing reads what is not whole, and that all readers agree.

`damage_objects` changes bytes, names and JSON values. Half of the time it *seals* what it has changed: it makes the
checksums right again, from the tensor files over the share documents to the journal, so that only what checks the
content itself can notice.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from elasticctl_store.checkpoints import entries, tensor_files
from elasticctl_store.errors import DamagedError, MissingError, StorageError
from elasticctl_store.storage.base import PAGE_KEYS, is_key

Objects = dict[str, bytes]

RAW = "<raw>"
"""Stands in JSON data for text that is put there as it is."""
_RAW_TEXTS = ("NaN", "Infinity", "-Infinity", "1e999", "1, 2", '1, "key": 2', "[" * 50_000 + "]" * 50_000, "[" * 400)
_WORDS = (
    "",
    "a",
    "model/embedding",
    "$rank/x",
    "$rank/rng",
    "$tensor",
    "nan",
    "float3",
    "float32",
    "uint8",
    "complex64",
)
_NUMBERS = (0, 1, -1, 2, 3, 7, 64, 1 << 31, 1 << 47, 1 << 62, 1 << 63, 1 << 64, 10**40, -(1 << 63), 0.5, 1e300, True)


class MemoryStorage:
    """A `Storage` that can only be read: objects in memory, errors like those of a folder."""

    url = "memory://objects"

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        raise StorageError("nothing may be written here")

    def get(self, key: str) -> bytes:
        if not is_key(key):
            raise StorageError(f"{key!r} is not a key")
        if key not in self._objects:
            raise MissingError(f"{key} is not there")
        return self._objects[key]

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        data = self.get(key)[start : start + len(into)]
        into[: len(data)] = data
        if len(data) < len(into):
            raise DamagedError(f"{key} ends at byte {start + len(data)}")

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        return sorted(key for key in self._objects if key.startswith(prefix) and key > after)[:PAGE_KEYS]

    def delete(self, keys: Sequence[str]) -> None:
        raise StorageError("nothing may be deleted here")

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        raise StorageError("nothing may be deleted here")


def damage_objects(whole: Objects, rng: random.Random) -> Objects:
    """A copy of the objects with up to three kinds of damage."""
    objects = dict(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((_flip, _cut, _remove, _rename, _replace, _edit_header, *[_edit_json] * 6))(objects, rng)
    if rng.random() < 0.7:
        seal(objects)
    return objects


def seal(objects: Objects) -> None:
    """Make checksums, sizes and digests right, as far as what is there can be understood at all."""
    for key in sorted(objects):
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error):
            if key.endswith(".json") and key.startswith(entries.DATA):
                document = json.loads(objects[key])
                before = json.dumps(document)
                for ref in (document["tensors"], *entries.base_files_of(document)):
                    file = objects[ref["key"]]
                    ref |= {"size_bytes": len(file), "checksum": entries.checksum([file])}
                for base in document.get("bases", ()):
                    if "patches" in base:
                        base["checksum"] = entries.checksum([_patched(objects, base)])
                if json.dumps(document) != before:
                    objects[key] = json.dumps(document).encode()
    for key in sorted(objects):
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if key.startswith(entries.JOURNAL):
                body = json.loads(objects[key])
                for ref in body.get("shares", ()):
                    with suppress(KeyError, TypeError):
                        data = objects[ref["key"]]
                        ref |= {"size_bytes": len(data), "checksum": entries.checksum([data])}
                objects[key] = sign(body)


def _patched(objects: Objects, base: dict[str, Any]) -> bytes:
    """A base file with all its patches, as far as they can be understood."""
    content = bytearray(objects[base["file"]["key"]])
    for patch in base["patches"]:
        newer = objects[patch["file"]["key"]]
        for number, text, at in patch["rows"]:
            _, dtype, _, shape, start = base["pieces"][number]
            row_bytes = shape[-1] * tensor_files.DTYPES[dtype].item_bytes
            bitmap = zlib.decompress(base64.b64decode(text))
            for index, row in enumerate(row for row in range(8 * len(bitmap)) if bitmap[row // 8] >> row % 8 & 1):
                to, of = start + row * row_bytes, at + index * row_bytes
                content[to : to + row_bytes] = newer[of : of + row_bytes]
    return bytes(content)


def seal_document(data: bytes) -> bytes:
    """A share document with the right seal; other data as it is."""
    body, found, _ = data.rpartition(b', "sha256": "')
    return body + b', "sha256": "%s"}' % hashlib.sha256(body).hexdigest().encode() if found else data


def sign(body: dict[str, Any]) -> bytes:
    """A journal entry with its digest."""

    def canonical(fields: dict[str, Any]) -> bytes:
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    body = {name: value for name, value in body.items() if name != "sha256"}
    return canonical({**body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})


def _flip(objects: Objects, rng: random.Random) -> None:
    key = rng.choice(sorted(objects))
    data = bytearray(objects[key])
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    objects[key] = bytes(data)


def _cut(objects: Objects, rng: random.Random) -> None:
    key = rng.choice(sorted(objects))
    data = objects[key]
    objects[key] = rng.choice((data[: rng.randrange(len(data) + 1)], data + bytes(rng.randrange(1, 70)), b""))


def _remove(objects: Objects, rng: random.Random) -> None:
    if len(objects) > 1:
        del objects[rng.choice(sorted(objects))]


def _rename(objects: Objects, rng: random.Random) -> None:
    key = rng.choice(sorted(objects))
    data = objects.pop(key)
    objects[rng.choice((f"{key}x", f"x{key}", key.replace("0", "1", 1), rng.choice(sorted(objects) or [key])))] = data


def _replace(objects: Objects, rng: random.Random) -> None:
    """One object takes another one's place, perhaps one of another step or rank; or the two change places."""
    one, other = rng.choice(sorted(objects)), rng.choice(sorted(objects))
    if rng.random() < 0.5:
        objects[one], objects[other] = objects[other], objects[one]
    else:
        objects[one] = objects[other]


def _edit_header(objects: Objects, rng: random.Random) -> None:
    files = [key for key in sorted(objects) if key.endswith(".safetensors") and len(objects[key]) > 8]
    if not files:
        return
    key = rng.choice(files)
    data = objects[key]
    length = min(struct.unpack_from("<Q", data)[0], len(data) - 8)
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return
    text = edited(header, rng)
    text += b" " * max(0, length - len(text))
    prefix = rng.choice((len(text), length, 0, 1 << 63, rng.randrange(1 << 64)))
    objects[key] = struct.pack("<Q", prefix) + text + data[8 + length :]


def _edit_json(objects: Objects, rng: random.Random) -> None:
    documents = [key for key in sorted(objects) if key.endswith(".json")]
    if not documents:
        return
    key = rng.choice(documents)
    with suppress(ValueError, RecursionError):
        objects[key] = edited(json.loads(objects[key]), rng)


def edited(data: Any, rng: random.Random) -> bytes:
    """JSON data as text, with one value changed, removed, doubled or moved."""
    parent, at = rng.choice(list(_places({"": data})))
    if isinstance(parent, list) and rng.random() < 0.4:
        rng.choice((_double, _swap, _drop))(parent, at, rng)
    elif isinstance(parent, dict) and at and rng.random() < 0.1:
        del parent[at]
    elif type(parent[at]) is int and rng.random() < 0.5:
        parent[at] += rng.choice((-64, -8, -1, 1, 2, 8, 64))
    else:
        parent[at] = _nasty(rng)
    root = data if at != "" else parent[""]
    text = json.dumps(root)
    return text.replace(json.dumps(RAW), rng.choice(_RAW_TEXTS)).encode()


def _double(items: list[Any], at: int, rng: random.Random) -> None:
    items.insert(rng.randrange(len(items) + 1), items[at])


def _swap(items: list[Any], at: int, rng: random.Random) -> None:
    other = rng.randrange(len(items))
    items[at], items[other] = items[other], items[at]


def _drop(items: list[Any], at: int, rng: random.Random) -> None:
    del items[at]


def _nasty(rng: random.Random) -> Any:
    scalar = rng.choice((RAW, None, rng.choice(_WORDS), rng.choice(_NUMBERS), rng.choice(_NUMBERS)))
    tensor = {"$tensor": rng.choice(_WORDS), "dtype": rng.choice(_WORDS), "shape": [scalar]}
    marked = {rng.choice(("$map", "$tuple", "$counter", "$float", "$tensor", "$new")): rng.choice((scalar, [scalar]))}
    pairs = {"$map": [[scalar, 1], [rng.choice(_NUMBERS), tensor]]}
    deep: Any = scalar
    for _ in range(rng.choice((2, 90, 130, 300))):
        deep = rng.choice(([deep], {"a": deep}, {"$tuple": [deep]}))
    return rng.choice((scalar, scalar, scalar, [], {}, [scalar], {"a": scalar}, tensor, marked, pairs, deep))


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in JSON data, as what holds it and where."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for at, value in items:
        yield data, at
        yield from _places(value)
