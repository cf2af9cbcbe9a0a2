"""The examples, run as their first lines say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = 1797


def run(*argv: str, cwd: Path, **environ: str) -> str:
    """What a command says; it has to succeed."""
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", **environ}
    done = subprocess.run(
        argv, cwd=cwd, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def right(said: str) -> int:
    """How many samples the last epoch got right."""
    found = re.findall(rf"epoch 9: (\d+) of (?:{SAMPLES}|{SAMPLES // 2 + 1}) right", said)
    assert len(found) == 1, said
    return int(found[0])


def test_the_plain_script_and_what_becomes_of_it_learn_the_same(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    plain = run(sys.executable, *torchrun, str(EXAMPLES / "ddp" / "plain.py"), cwd=tmp_path)
    assert right(plain) > 0.95 * SAMPLES / 2
    elastic = (sys.executable, str(EXAMPLES / "ddp" / "elastic.py"))
    assert right(run(*elastic, cwd=tmp_path, ELASTICCTL_STORAGE="./state")) > 0.95 * SAMPLES
    again = run(*elastic, cwd=tmp_path, ELASTICCTL_STORAGE="./state")
    assert "epoch 10" in again
    assert "right" not in again


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("light_spares", "forked_workers")
@pytest.mark.parametrize(
    ("script", "accuracy"),
    [
        ("lightning/train.py", r"epoch 9: test accuracy (0\.\d+)"),
        ("transformers/train.py", r"'eval_accuracy': '?(0\.\d+)"),
    ],
)
def test_frameworks_train_on_two_workers(
    script: str, accuracy: str, home: Path, local_cluster: LocalCluster, tmp_path: Path
) -> None:
    assert local_cluster.list_jobs(None) == []  # which starts the supervisor
    elasticctl = str(Path(sys.executable).parent / "elasticctl")
    name = script.partition("/")[0]
    options = ("--workers", "2", "--name", name, "--env", "OMP_NUM_THREADS=1", "--env", "PYTHONWARNINGS=ignore")
    said = run(elasticctl, "submit", str(EXAMPLES / script), *options, cwd=tmp_path)
    found = re.findall(accuracy, said)
    assert found, said
    assert float(found[-1]) > 0.9
    status = json.loads(run(elasticctl, "status", name, "-o", "json", cwd=tmp_path))["status"]
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == status["checkpoint"]["step"]
    assert status["generations"][-1]["workers"] == [f"{name}-worker-0", f"{name}-worker-1"]
