"""What a run of the tests selects, for the plugins that go by it."""

from __future__ import annotations

import pytest


def only_quick(config: pytest.Config) -> bool:
    """Whether only quick tests are selected, as by `make quick`."""
    return "not slow" in config.option.markexpr
