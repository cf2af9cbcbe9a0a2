"""A full run with planted secrets, and a search for them in all that it leaves, prints or shows in `ps`.

Planted are a job's secret, the credentials of its storage, and the rendezvous tokens. They may be in the folder for
secrets, in the workers' token files, and in the memory of those who need them: nowhere else.
"""

from __future__ import annotations

import json
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import local_paths
from elasticctl_store import storage as storages
from elasticctl_store.storage import all_keys
from tests.support.cli import Run
from tests.support.clouds import Cloud
from tests.support.waiting import wait_until

TOKEN, ACCESS_KEY = "planted-hub-5d11c0", "planted/aws+0b77e2"
SCRIPT = """\
import os
import sys
import time
import torch
from elasticctl_train import Run
from torch.utils.data import TensorDataset

assert os.environ["HF_TOKEN"].startswith("planted") and os.environ["HF_TOKEN"].endswith("5d11c0")
model = torch.nn.Linear(1, 1)
with Run(model=model) as run:
    for _ in run.epochs(2):
        for (batch,) in run.loader(TensorDataset(torch.ones(8, 1)), global_batch=4):
            run.step(loss=run.model(batch).sum())
if len(sys.argv) > 1:
    print("waiting", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    sys.exit("it went wrong in the end")
"""
VERBS = (
    "status JOB", "status JOB -o json", "list -o yaml", "logs JOB", "logs JOB --previous", "describe JOB",
    "describe JOB -o json", "events JOB", "events JOB -o json", "history JOB", "history JOB -o json", "explain JOB",
    "explain JOB -o json", "checkpoints JOB", "checkpoints JOB -o json", "checkpoints verify JOB",
    "rerun JOB --dry-run",
    "config view", "config get-contexts", "secret list", "secret list -o json", "local status -o json", "wait JOB",
    "logs nothing", "submit train.py --secret nothing", f"submit train.py --storage s3://me:{ACCESS_KEY}@bucket/p",
    f"config set-context local --storage s3://me:{ACCESS_KEY}@bucket/p",
    f"secret set hub HF_TOKEN={TOKEN}", f"checkpoints s3://me:{ACCESS_KEY}@bucket/p",
)  # fmt: skip


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder to be searched, with a short path: sockets go there."""
    with tempfile.TemporaryDirectory(prefix="es-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aws_keys: None) -> Path:
    """A folder with a script, and secrets in files."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hub.env").write_text(f"HF_TOKEN={TOKEN}\n")
    (tmp_path / "aws.env").write_text(f"AWS_ACCESS_KEY_ID=AKIATEST\nAWS_SECRET_ACCESS_KEY={ACCESS_KEY}\n")
    (tmp_path / ".elasticctlignore").write_text("*.env\ngate\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ACCESS_KEY)
    return tmp_path


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.exists() and stat.S_ISREG(path.stat().st_mode):
            yield str(path), path.read_bytes()


def command_lines() -> Iterator[tuple[str, bytes]]:
    for process in psutil.process_iter():
        try:
            yield f"ps {process.pid}", " ".join(process.cmdline()).encode("utf-8", "surrogateescape")
        except psutil.Error:
            continue


def tokens(home: Path) -> list[bytes]:
    """What the workers and the supervisor prove with who they are."""
    found = [path.read_bytes().strip() for path in (home / "local/pods").glob("*/token")]
    return [*found, local_paths().secret.read_bytes().strip()]


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("light_spares")
def test_planted_secrets_are_nowhere_to_be_found(
    run: Run, local_cluster: LocalCluster, home: Path, project: Path, scratch: Path, s3: Cloud
) -> None:
    assert run("secret", "set", "hub", "--from-env-file", "hub.env").code == 0
    assert run("secret", "set", "aws", "--from-env-file", "aws.env").code == 0
    assert run("config", "set-context", "local", "--storage", s3.url).code == 0
    refs = ("--secret", "hub", "--secret", "aws:AWS_ACCESS_KEY_ID", "--secret", "aws:AWS_SECRET_ACCESS_KEY")
    said = {"submit": run("submit", "train.py", "--backoff-limit", "0", "-d", *refs, "--", str(project / "gate"))}
    assert said["submit"].code == 0, said["submit"].err
    wait_until(lambda: "waiting" in [line.text for line in local_cluster.logs("default", "train", LogQuery())])
    places = [*command_lines(), *contents(scratch)]  # while it runs
    hidden = [TOKEN.encode(), ACCESS_KEY.encode(), *tokens(home)]
    assert len(hidden) == 4
    (project / "gate").touch()
    said["ended"] = run("wait", "train", "--timeout", "60s")
    assert said["ended"].code == 1
    for verb in VERBS:
        said[verb] = run(*verb.replace("JOB", "train").split())
    assert [verb for verb, done in said.items() if "JOB" in verb and done.code not in (0, 1)] == []
    assert "it went wrong in the end" in said["explain JOB"].out
    assert json.loads(said["checkpoints JOB -o json"].out)["checkpoints"]
    places += [(verb, (done.out + done.err).encode()) for verb, done in said.items()]
    places += [
        (path, data)
        for path, data in contents(home)
        if "/local/secrets/" not in path and not path.endswith(("/token", "/local/secret"))
    ]
    bucket = storages.open(s3.url)
    places += [(key, bucket.get(key)) for key in all_keys(bucket, "")]
    assert any(place.endswith("state.db") for place, _ in places)
    assert any("workspaces/packs/" in place for place, _ in places)
    assert [place for place, data in places for secret in hidden if secret in data] == []
