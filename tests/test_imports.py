"""Starting fast: help and completion import nothing heavy. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
loaded = {name.partition(".")[0] for name in sys.modules}
print("LOADED", *sorted(loaded), file=sys.stderr)
raise SystemExit(code)
"""


def loaded_by(args: list[str], home: Path, **environ: str) -> set[str]:
    """The top-level modules that a command line has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *args],
        env={**os.environ, "ELASTICCTL_HOME": str(home), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("LOADED")[2].split())


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        [],
        ["submit", "--help"],
        ["rerun", "--help"],
        ["explain", "--help"],
        ["dashboard", "--help"],
        ["list", "--help"],
        ["config"],
        ["version"],
        ["completion", "fish"],
    ],
)
def test_help_is_light(args: list[str], tmp_path: Path) -> None:
    assert not loaded_by(args, tmp_path) & HEAVY


@pytest.mark.parametrize(
    "words", ["elasticctl ", "elasticctl sta", "elasticctl status ", "elasticctl scale ", "elasticctl list --"]
)
def test_completion_is_light(words: str, tmp_path: Path) -> None:
    """Job names are asked of a local cluster that runs; none runs here, and completion starts none."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "elasticctl.cli"],
        env={
            **os.environ,
            "ELASTICCTL_HOME": str(tmp_path),
            "_ELASTICCTL_COMPLETE": "complete_zsh",
            "_TYPER_COMPLETE_ARGS": words,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & HEAVY
    assert not (tmp_path / "local").exists()


def test_the_laptop_needs_no_torch_to_look_at_checkpoints(tmp_path: Path) -> None:
    loaded = loaded_by(["checkpoints", "list", str(tmp_path / "none")], tmp_path)
    assert "elasticctl_train" in loaded
    assert not loaded & HEAVY


def test_the_laptop_needs_no_torch_to_make_a_manifest(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    loaded = loaded_by(["submit", str(script), "--workers", "2", "--dry-run"], tmp_path)
    assert not loaded & {"torch", "kubernetes", "boto3", "google", "aiohttp", "numpy"}
