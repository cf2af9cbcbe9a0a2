"""The benchmark's storage on the library obstore does what ours does, as far as checkpoints use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from shutil import which

import pytest

from benchmarks import checkpoint
from benchmarks.checkpoints import trials
from benchmarks.checkpoints.base import BUCKET
from benchmarks.checkpoints.trials import Plan, Sink
from benchmarks.checkpoints.versity import PROGRAM, Versity
from elasticctl_store.errors import DamagedError
from elasticctl_store.storage import Storage
from tests.support.storage_contract import StorageContract

SERVERS = {"sink": lambda: Sink(128 << 20), PROGRAM: Versity}


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Sink | Versity]:
    if request.param == PROGRAM and which(PROGRAM) is None:
        pytest.skip(f"no {PROGRAM} on the PATH")
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def storage(server: Sink | Versity, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    pytest.importorskip("obstore")
    from benchmarks.checkpoints import obstore_storage

    for name, value in trials.environment(server.endpoint, "").items():
        monkeypatch.setenv(name, value)
    yield obstore_storage.connect(f"s3://{BUCKET}/place?endpoint={server.endpoint}&region=us-east-1")
    server.ask("drop", prefix=f"{BUCKET}/")


class TestObstore(StorageContract):
    def test_large_objects_go_up_in_parts_and_come_back_in_ranges(self, storage: Storage) -> None:
        data = os.urandom(1 << 20) * 40
        storage.put("large", [memoryview(data)])
        into = bytearray(len(data) - 3)
        storage.read_into("large", 3, memoryview(into))
        assert into == data[3:]
        with pytest.raises(DamagedError):
            storage.read_into("large", len(data), memoryview(bytearray(1)))


def test_a_trial_restores_what_was_saved(server: Sink | Versity) -> None:
    pytest.importorskip("obstore")
    found = trials.run_trial(Plan("obstore", 24_000_000, 1, 0, 1, 0.01, 0.0), server)
    assert (found.note, found.exact) == ("", True)
    assert found.sink_cpu_s_per_gb > 0


def test_contenders_that_only_the_sink_cleans_up_after_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    with pytest.raises(SystemExit):
        checkpoint.main(["--server", PROGRAM, "--contender", "boto3"])
    assert "not for boto3" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SystemExit):
        checkpoint.main(["--server", PROGRAM])
    assert f"--server {PROGRAM}: there is no such program on the PATH" in capsys.readouterr().err
