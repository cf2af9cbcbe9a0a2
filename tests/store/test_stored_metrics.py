"""Metrics in a storage: next to the logs, as JSON lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from elasticctl_store import storage, stored_logs, stored_metrics
from elasticctl_store.errors import DamagedError
from elasticctl_store.stored_logs import Incarnation, StoredLine

LIFE = Incarnation("uid", "train-worker-0", 1_767_225_600.0, "pod")


def test_objects_are_json_lines_next_to_the_log(tmp_path: Path) -> None:
    kept = storage.open(f"file://{tmp_path}")
    kept.put(LIFE.key(1), [stored_logs.compress(stored_logs.encode([StoredLine(1, 5.0, 0, "hello")]))])
    texts = ['{"step": 1, "at": 5.5, "loss": 0.5}', '{"step": 2, "at": 6.5, "loss": "NaN"}']
    parts = [
        stored_logs.compress(stored_metrics.encode([StoredLine(n, 0.0, 0, text)])) for n, text in enumerate(texts, 1)
    ]
    kept.put(stored_metrics.key(LIFE, 1), parts)

    ((folder, key),) = stored_metrics.keys_of(kept, "uid")
    assert folder == LIFE.folder
    assert gzip.decompress((tmp_path / key).read_bytes()).decode().splitlines() == texts
    assert stored_metrics.decode(kept.get(key)) == [json.loads(text) for text in texts]
    (log,) = stored_logs.find(kept, "uid")
    assert [line.text for line in log.lines()] == ["hello"]
    stored_logs.delete(kept, "uid")
    assert list(stored_metrics.keys_of(kept, "uid")) == []


@pytest.mark.parametrize("text", [b"no json\n", b"[" * 100_000 + b"\n"])
def test_invalid_objects_are_refused(text: bytes) -> None:
    with pytest.raises(DamagedError):
        stored_metrics.decode(stored_logs.compress(text))


def test_rows_without_a_step_are_left_out() -> None:
    rows = b'{"loss": 1}\n5\n{"step": true, "at": 1}\n{"step": 3, "at": 1}\n'
    assert stored_metrics.decode(stored_logs.compress(rows)) == [{"step": 3, "at": 1}]
