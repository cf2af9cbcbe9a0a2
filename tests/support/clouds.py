"""Fixtures of the cloud storages: the servers, once a session; a gate and a prefix of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from elasticctl_store import storage as storages
from elasticctl_store.storage import Patience, Storage
from tests.support import servers
from tests.support.gate import Gate

QUICK = Patience(tries=10, first_pause_s=0.01, longest_pause_s=0.05, silence_s=120.0)
"""In no test for long, but for servers that get no processor."""


@dataclass(frozen=True, slots=True)
class Cloud:
    """A place of one test's own in a bucket behind a gate."""

    gate: Gate
    url: str
    opened: dict[Patience, Storage] = field(default_factory=dict)

    def open(self, patience: Patience = QUICK) -> Storage:
        """A client of it: the same for the same patience, because one for S3 takes a tenth of a second to make."""
        if patience not in self.opened:
            self.opened[patience] = storages.open(self.url, patience)
        return self.opened[patience]

    def name_endpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the environment name its endpoint, as users must do to read what jobs keep there."""
        variable = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}[self.gate.scheme]
        monkeypatch.setenv(variable, f"http://127.0.0.1:{self.gate.port}")


_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server_ports() -> Iterator[servers.Ports]:
    with servers.running() as ports:
        yield ports


@pytest.fixture
def aws_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, and no other settings of the machine the tests run on."""
    for name in (
        "AWS_PROFILE",
        "AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "STORAGE_EMULATOR_HOST",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in servers.KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def _cloud(scheme: str, ports: servers.Ports) -> Iterator[Cloud]:
    gate = Gate(scheme, getattr(ports, scheme))
    try:
        yield Cloud(gate, gate.url(f"jobs/{next(_NUMBERS)}"))
    finally:
        gate.close()


@pytest.fixture
def s3(server_ports: servers.Ports, aws_keys: None) -> Iterator[Cloud]:
    yield from _cloud("s3", server_ports)


@pytest.fixture
def gs(server_ports: servers.Ports, aws_keys: None) -> Iterator[Cloud]:
    yield from _cloud("gs", server_ports)


@pytest.fixture(params=["s3", "gs"])
def cloud(request: pytest.FixtureRequest, server_ports: servers.Ports, aws_keys: None) -> Iterator[Cloud]:
    """Both clouds, one after the other."""
    yield from _cloud(request.param, server_ports)
