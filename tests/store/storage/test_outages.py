"""Requests that are sent again."""

from __future__ import annotations

import random

from elasticctl_store.storage import Patience
from elasticctl_store.storage.outages import Waiter


def test_a_retry_leaves_a_scripts_random_numbers_alone() -> None:
    """A run that a storage has kept waiting computes what any other does."""
    patience = Patience(tries=5, first_pause_s=0.001, longest_pause_s=0.002)
    before = random.getstate()
    with Waiter("s3://bucket", patience).request("ask") as tries:
        tries.failed("it does not answer")
    assert random.getstate() == before
