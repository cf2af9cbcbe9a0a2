"""What a run of the tests selects, for the plugins that go by it."""

from __future__ import annotations

import pytest


def only_quick(config: pytest.Config) -> bool:
    """Are only quick tests wanted, as by `make quick`?"""
    return "not slow" in config.option.markexpr
