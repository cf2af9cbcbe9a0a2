"""Memory that ranks of one node read from one another."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elasticctl_train.checkpoint.memory import local_tier


def test_another_process_sees_what_is_in_the_memory() -> None:
    reserved = local_tier.reserve(5000)
    assert reserved is not None
    data, file = reserved
    data[:] = torch.arange(5000) % 251
    with file:
        spot = local_tier.address_of(file)
        assert spot is not None
        found = local_tier.map_address(spot)
    assert found is not None
    assert torch.equal(found, data)
    found[0] = 9
    assert data[0] == 0
    assert local_tier.map_address(spot) is None  # closed


def test_a_file_of_another_node_or_another_file_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    with path.open("rb") as file:
        spot = local_tier.address_of(file)
        assert spot is not None
        assert local_tier.map_address(spot) is not None
        assert local_tier.map_address(replace(spot, inode=spot.inode + 1)) is None
        assert local_tier.map_address(replace(spot, boot="another")) is None
        monkeypatch.setattr(local_tier, "BOOT_ID_FILE", tmp_path / "none")  # not Linux
        assert local_tier.map_address(spot) is None
        assert local_tier.address_of(file) is None


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with (tmp_path / "file").open("w+b") as file:
        spot = local_tier.address_of(file)
    assert spot is not None
    assert local_tier.map_address(replace(spot, path=str(path))) is None


def test_memory_that_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_tier.reserve(0) is None
    assert local_tier.reserve(1 << 48) is None
    monkeypatch.delattr(os, "memfd_create")
    assert local_tier.reserve(5000) is None
