"""Metrics are read from a job's storage as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.api.errors import JobStorageError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.local.paths import local_paths
from elasticctl.operations import metrics as reading
from elasticctl.operations.metrics import StoredMetrics
from elasticctl_store.stored_logs import Incarnation
from tests.support.jobs import FOREVER, shell_job
from tests.support.stored import keeps_in, store_metrics


def job_with(folder: Path) -> ElasticJob:
    manifest = keeps_in(shell_job("train", FOREVER, 2), folder)
    manifest["metadata"]["uid"] = "uid"
    return ElasticJob.from_manifest(manifest)


def written(folder: Path, life: Incarnation, first: int, *rows: dict[str, object]) -> None:
    store_metrics(folder, life, first, rows)


def test_each_row_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Incarnation("uid", "train-0", 100.0, "a"), Incarnation("uid", "train-1", 200.0, "b")
    first, second, third = ({"step": step, "at": 100.0 * step, "loss": 0.5} for step in (1, 2, 3))
    written(tmp_path, one, 1, first)
    metrics = StoredMetrics(job_with(tmp_path))
    assert metrics.read_new() == [first]
    assert metrics.read_new() == []
    written(tmp_path, other, 1, third)
    written(tmp_path, one, 1, first, second)
    assert metrics.read_new() == [second, third]
    written(tmp_path, one, 3, {**first, "at": 300.5})
    assert metrics.read_new() == [{**first, "at": 300.5}]
    monkeypatch.setattr(reading, "QUIET_S", 50.0)
    written(tmp_path, other, 2, {**first, "at": 900.0})
    assert metrics.read_new() == [{**first, "at": 900.0}]
    written(tmp_path, one, 4, {**first, "at": 901.0})  # rank 0 speaks from elsewhere for long
    assert metrics.read_new() == []


def test_a_job_of_this_machine_that_has_stored_nothing_has_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICCTL_HOME", str(tmp_path))
    assert StoredMetrics(job_with(local_paths().storage / "plain-1234")).read_new() == []


def test_a_storage_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobStorageError, match="is not a folder on this machine"):
        StoredMetrics(job_with(tmp_path / "gone")).read_new()
