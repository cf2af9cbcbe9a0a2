"""Everything that can happen to a storage of checkpoints, a folder, a full disk and servers: docs/recovery.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.storage_soak.places import Places
from tests.support.storage_soak.scenario import run_scenario


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    with Places() as found:
        yield found


@pytest.mark.seeds(6, search=60)
@pytest.mark.parametrize("kind", ["folder", pytest.param("disk", marks=pytest.mark.needs("tmpfs"))])
def test_whatever_happens_no_checkpoint_is_lost_or_wrong(places: Places, kind: str, seed: int, tmp_path: Path) -> None:
    check(places, kind, seed, tmp_path)


@pytest.mark.needs("fake-gcs-server")
@pytest.mark.needs("tmpfs")
@pytest.mark.needs("toxiproxy-server")
@pytest.mark.needs("versitygw")
@pytest.mark.seeds(1, search=10)
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_nor_is_it_in_a_bucket(places: Places, kind: str, seed: int, tmp_path: Path, aws_keys: None) -> None:
    check(places, kind, seed, tmp_path)


def check(places: Places, kind: str, seed: int, folder: Path) -> None:
    """Run the scenario of this seed; `folder` is for other files."""
    with places.place(kind) as place:
        run_scenario(place, seed, folder)
