"""What the launcher relies on of torch's private names is there in the release that is installed."""

from __future__ import annotations

import importlib
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from elasticctl_launcher.bootstrap import DUMPS
from elasticctl_launcher.torch_names import COLLECTIVE_FILES, DEVICE_CALLS, NEXT_BATCH, OPTIONAL_NAMES, PRIVATE_NAMES


@pytest.mark.parametrize(("module", "name"), PRIVATE_NAMES)
def test_a_private_name_exists(module: str, name: str) -> None:
    assert attrgetter(name)(importlib.import_module(module)) is not None


@pytest.mark.parametrize("file", [*COLLECTIVE_FILES, *(file for file, _ in DEVICE_CALLS), NEXT_BATCH[0]])
def test_a_file_exists(file: str) -> None:
    assert Path(torch.__file__).parents[1].joinpath(file[1:]).is_file()


def test_the_bootstrap_of_a_rank_reads_the_recorders_that_are_listed() -> None:
    assert sorted(DUMPS) == sorted(name for _, name in OPTIONAL_NAMES)
