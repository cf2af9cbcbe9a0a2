"""How many processors there are for this process."""

from __future__ import annotations

import os

import pytest

from elasticctl_train import processors
from elasticctl_train.copying import Copier


def test_only_those_it_is_bound_to_count() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert processors.available() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert processors.available() == len(before)


def test_where_nobody_is_bound_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert processors.available() == os.cpu_count()
    Copier().copy([], [])
