"""Everything that can happen to a storage of checkpoints, a folder, a full disk and servers: docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.storage_soak.places import Places
from tests.support.storage_soak.soak import tell_at


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    with Places() as found:
        yield found


@pytest.mark.timeout(900)  # processes that are killed, servers
@pytest.mark.parametrize(("kind", "seeds"), [("folder", 12), ("disk", 4), ("s3", 2), ("gs", 2)])
def test_whatever_happens_no_checkpoint_is_lost_or_wrong(places: Places, kind: str, seeds: int, aws_keys: None) -> None:
    for seed in range(seeds):
        told = tell_at(places, kind, seed)
        assert not told.failure, "\n".join((f"{kind}, seed {seed}:", *told.lines, told.failure))
