"""What the launcher imports, and when: each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("module", ["main", "states"])
def test_torch_is_imported_only_when_ranks_are_to_be_started(module: str) -> None:
    assert output_of(f"import sys, elasticctl_launcher.{module}; print('torch' in sys.modules)") == "False\n"


def test_torch_registers_our_backend_whoever_is_imported_first() -> None:
    registered = "print('elasticctl' in rendezvous_handler_registry._registry)"
    code = f"""
import elasticctl_launcher.rendezvous
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
{registered}
"""
    assert output_of(code) == "True\n"
