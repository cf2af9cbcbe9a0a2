"""`stacks`: all ranks of a real job, and where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.stacks import Stacks
from tests.support.cli import Run
from tests.support.waiting import wait_until

SCRIPT = """
import threading, time

def stuck_here():
    time.sleep(10_000)

threading.Thread(target=stuck_here, name="feeder", daemon=True).start()
stuck_here()
"""


@pytest.mark.usefixtures("light_spares")
def test_each_rank_of_a_job_is_shown(local_cluster: LocalCluster, run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert run("submit", "-d", "--name", "stuck", "--workers", "2", str(script)).code == 0

    def shown() -> str:
        return run("stacks", "stuck").out

    text = str(wait_until(lambda: (out := shown()).count("    stuck_here (") == 4 and out))
    assert text.count("rank 0, stuck-worker-") == text.count("rank 1, stuck-worker-") == 1
    assert text.count(f"stuck_here ({script}:5)") == 4, "as it was submitted, not the copy that runs"
    assert text.count("  feeder:\n") == text.count("  MainThread:\n") == 2
    one = run("stacks", "stuck", "--rank", "1")
    assert (one.code, one.out.count("rank 1, "), one.out.count("rank 0, ")) == (0, 1, 0)
    missing = run("stacks", "stuck", "--rank", "7")
    assert (missing.code, missing.err) == (3, "error: no rank 7 runs in the 2 workers of stuck\n")


def test_a_worker_may_answer_anything() -> None:
    odd = {"rank": None, "stacks": ["x", {"frames": 3}, {"thread": "t", "frames": [None]}]}
    assert list(Stacks("w", (odd,)).lines())
    assert list(Stacks("w", ({},)).lines()) == ["rank None, w: no Python stack can be read"]
    assert list(Stacks("w", ({"rank": 1},)).lines(rank=0)) == []
