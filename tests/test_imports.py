"""Starting fast: help and completion import nothing heavy. Each case is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.spec import API_VERSION, PLURAL
from elasticctl.settings import contexts
from elasticctl.settings.contexts import Config, Context
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job

ROOT = Path(__file__).parents[1]
HEAVY = {
    "torch",
    "kubernetes",
    "boto3",
    "google",
    "jinja2",
    "aiohttp",
    "jsonschema",
    "psutil",
    "rich",
    "yaml",
    "numpy",
    "asyncio",
    "pydantic",
}
PROBE = """
import sys
from elasticctl.cli.main import main
code = main(sys.argv[1:])
print("LOADED", *sorted(sys.modules), file=sys.stderr)
raise SystemExit(code)
"""


def loaded_by(args: list[str], home: Path, *, probe: str = PROBE, **environ: str) -> set[str]:
    """The modules that a command line has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", probe, *args],
        env={**os.environ, "ELASTICCTL_HOME": str(home), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("LOADED")[2].split())


def test_help_is_light(tmp_path: Path) -> None:
    """One process for them all: what none of them imports is not there in the end."""
    verbs = ("", "submit", "rerun", "explain", "dashboard", "list")
    lines = [[*verb.split(), "--help"] for verb in verbs] + [[], ["config"], ["version"], ["completion", "fish"]]
    probe = PROBE.replace("code = main(sys.argv[1:])", f"code = sum(main(line) for line in {lines})")
    assert not loaded_by([], tmp_path, probe=probe) & HEAVY


def test_completion_is_light(tmp_path: Path) -> None:
    """Job names are asked of a local cluster that runs; none runs here, and completion starts none."""
    typed = ["elasticctl ", "elasticctl sta", "elasticctl status ", "elasticctl scale "]
    probe = f"""
import os, sys
from elasticctl.cli.main import main
for words in {typed}:
    os.environ["_TYPER_COMPLETE_ARGS"] = words
    try:
        main([])
    except SystemExit as e:
        assert not e.code
print("LOADED", *sorted(sys.modules), file=sys.stderr)
"""
    loaded = loaded_by([], tmp_path, probe=probe, _ELASTICCTL_COMPLETE="complete_zsh")
    assert "typer" in loaded
    assert not loaded & HEAVY
    assert not (tmp_path / "local").exists()


def test_the_laptop_needs_no_torch_to_look_at_checkpoints(tmp_path: Path) -> None:
    loaded = loaded_by(["checkpoints", "list", str(tmp_path / "none")], tmp_path)
    assert "elasticctl_store.checkpoints.verify" in loaded
    assert not loaded & (HEAVY | {"elasticctl_train"})


def test_the_laptop_needs_no_torch_to_make_a_manifest(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    loaded = loaded_by(["submit", str(script), "--workers", "2", "--dry-run"], tmp_path)
    assert not loaded & {"torch", "kubernetes", "boto3", "google", "aiohttp", "numpy"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An API server with a job that trains; yields what has the command line ask it."""
    server = FakeApi()
    job = shell_job("digits", "true") | {"status": {"phase": "Running"}}
    server.put(f"/apis/{API_VERSION}/namespaces/default/{PLURAL}/digits", job)
    content = {
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
        "clusters": [{"name": "lab", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(content))
    contexts.save_config(
        Config("lab", (Context("local", "local"), Context("lab", "kubernetes"))), tmp_path / "config.yaml"
    )
    yield {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    server.close()


@pytest.mark.parametrize(
    ("args", "needless"),
    [
        (["list"], {"elasticctl.diagnosis"}),
        (["list", "-o", "json"], {"elasticctl.api.observed.cost", "elasticctl.api.podtemplate"}),
        (["status", "digits"], set()),
    ],
)
def test_a_cluster_is_asked_with_little(
    args: list[str], needless: set[str], lab: dict[str, str], tmp_path: Path
) -> None:
    """Nothing of logs, watches, quotas and proxies; and of what a job costs, and why it waits, where that is said."""
    cluster = {f"elasticctl.cluster.{name}" for name in ("kube.follow_logs", "kube.read_logs", "stored_logs")}
    cluster.add("elasticctl.kubeapi.watch")
    loaded = loaded_by(args, tmp_path, **lab)
    assert "elasticctl.kubeapi.connection" in loaded
    assert not loaded & (HEAVY - {"yaml"})
    assert not loaded & (cluster | {"elasticctl.api.quota", "urllib.request"} | needless)


def test_no_time_is_spent_on_garbage(tmp_path: Path) -> None:
    """The script begins where `python -m` does, and that puts the search for garbage off."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["elasticctl"] == "elasticctl.cli.__main__:run"
    probe = "import gc, sys; seen = []; gc.callbacks.append(lambda phase, _: seen.append(phase)); "
    probe += "from elasticctl.cli.__main__ import run; code = run(); print(seen.count('start')); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", probe, "list", "--help"],
        env={**os.environ, "ELASTICCTL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.splitlines()[-1]) <= 1  # before it has begun
