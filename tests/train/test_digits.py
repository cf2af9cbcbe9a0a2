"""The example, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage

SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "train.py"


def test_it_learns_the_digits_and_resumes(tmp_path: Path) -> None:
    def run(epochs: int) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-W", "error", str(SCRIPT), "--storage", str(tmp_path), "--epochs", str(epochs)]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(argv, check=True, capture_output=True, text=True, env=environ, timeout=100)

    first = run(8)
    assert re.search(r"epoch 7: step 184, test accuracy 0\.9[5-9]", first.stdout)
    assert next(read_commits(LocalStorage(tmp_path))).metrics["test_accuracy"] >= 0.95
    second = run(9)
    assert "resumed from step 184, epoch 8" in second.stderr
    assert second.stdout.startswith("epoch 8: step 207")
