"""The values that a job's scripts have reported, as objects in its storage, next to its logs: keys and format.

    logs/<job uid>/<worker>/<start>-<pod uid>/metrics-000000000001.jsonl.gz     the rows from number 1 on

An object is JSON lines, `{"step": 120, "at": 1767225600.5, "loss": 0.21}`, compressed as a series of gzip members:
`zcat` and `pandas.read_json(path, lines=True)` read it. Values that are not finite are "NaN", "Infinity" or
"-Infinity".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from elasticctl_store.errors import DamagedError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.stored_logs import Incarnation, StoredLine, decompress, job_folder

_KEY = re.compile(r"(.*/)metrics-\d{12}\.jsonl\.gz", re.ASCII)

Row = dict[str, Any]


def key(incarnation: Incarnation, first: int) -> str:
    """Return the key of the object whose first row has the number `first`."""
    return f"{incarnation.folder}metrics-{first:012d}.jsonl.gz"


def encode(rows: Iterable[StoredLine]) -> bytes:
    """Return rows as text, one line each."""
    return "".join(f"{row.text}\n" for row in rows).encode()


def keys_of(storage: Storage, job_uid: str) -> Iterator[tuple[str, str]]:
    """Yield (folder of the incarnation, key) of a job's objects, in order of folder and number. Raises StorageError."""
    for name in all_keys(storage, job_folder(job_uid)):
        found = _KEY.fullmatch(name)
        if found is not None:
            yield found[1], name


def decode(data: bytes) -> list[Row]:
    """Return the rows of an object. Raises DamagedError if it is not in this format."""
    try:
        found = json.loads(b"[" + b",".join(decompress(data).splitlines()) + b"]")
    except (ValueError, RecursionError) as e:
        raise DamagedError(f"not metrics of this version: {e}") from e
    return [row for row in found if isinstance(row, dict) and _is_row(row)]


def _is_row(row: Row) -> bool:
    step, at = row.get("step"), row.get("at")
    return type(step) is int and isinstance(at, int | float) and not isinstance(at, bool) and math.isfinite(at)
