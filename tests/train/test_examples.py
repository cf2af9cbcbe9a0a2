"""The examples, run as their first lines describe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from tests.support.forked.launcher import take_output
from tests.support.train import ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = 1797


def train(path: str, log: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Become the process of an example, which appends its output to a file and runs in its folder."""
    take_output(Path(log))
    os.chdir(Path(log).parent)
    ranks.run_script(Path(path), arguments, {"CUDA_VISIBLE_DEVICES": "", **environ})


def trained(path: Path, folder: Path, *arguments: str, world_size: int = 1, **environ: str) -> str:
    """Run an example with torchrun's variables; return its output."""
    log = folder / "log"
    log.write_text("")
    codes = ranks.run(train, world_size, str(path), str(log), arguments, environ)
    assert codes == [0] * world_size, log.read_text()
    return log.read_text()


def run(*argv: str, cwd: Path) -> str:
    """Run a command that must succeed; return its output."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        argv, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def right(said: str) -> int:
    """The number of correct samples in the last epoch."""
    found = re.findall(rf"epoch 9: (\d+) of (?:{SAMPLES}|{SAMPLES // 2 + 1}) right", said)
    assert len(found) == 1, said
    return int(found[0])


def test_the_example_learns_the_digits_and_resumes(tmp_path: Path) -> None:
    script, state = EXAMPLES / "digits" / "train.py", str(tmp_path / "state")
    first = trained(script, tmp_path, "--storage", state, "--epochs", "8")
    assert re.search(r"epoch 7: step 184, test accuracy 0\.9[5-9]", first)
    assert next(read_commits(LocalStorage(tmp_path / "state"))).metrics["test_accuracy"] >= 0.95
    second = trained(script, tmp_path, "--storage", state, "--epochs", "9")
    assert "resumed from step 184, epoch 8" in second
    assert re.findall(r"epoch \d+: step \d+", second) == ["epoch 8: step 207"]


def test_the_plain_and_the_elastic_script_learn_the_same(tmp_path: Path) -> None:
    plain = trained(EXAMPLES / "ddp" / "plain.py", tmp_path, world_size=2)
    assert right(plain) > 0.95 * SAMPLES / 2
    elastic = EXAMPLES / "ddp" / "elastic.py"
    assert right(trained(elastic, tmp_path, ELASTICCTL_STORAGE="./state")) > 0.95 * SAMPLES
    again = trained(elastic, tmp_path, ELASTICCTL_STORAGE="./state")
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
