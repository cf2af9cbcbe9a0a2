"""The private names of torch that the launcher relies on exist in the installed release."""

from __future__ import annotations

import importlib
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from elasticctl_launcher.bootstrap import DUMPS
from elasticctl_launcher.torch_names import COLLECTIVE_FILES, DEVICE_CALLS, NEXT_BATCH, OPTIONAL_NAMES, PRIVATE_NAMES


@pytest.mark.parametrize(("module", "name"), PRIVATE_NAMES)
def test_each_private_name_of_torch_exists(module: str, name: str) -> None:
    assert attrgetter(name)(importlib.import_module(module)) is not None


@pytest.mark.parametrize("file", [*COLLECTIVE_FILES, *(file for file, _ in DEVICE_CALLS), NEXT_BATCH[0]])
def test_each_file_of_torch_exists(file: str) -> None:
    assert Path(torch.__file__).parents[1].joinpath(file[1:]).is_file()


def test_the_bootstrap_reads_the_listed_recorders() -> None:
    assert sorted(DUMPS) == sorted(name for _, name in OPTIONAL_NAMES)
