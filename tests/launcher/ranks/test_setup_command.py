"""The set-up command: it runs before the ranks, once per machine, in an environment that is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticctl_launcher.ranks import setup_command
from elasticctl_launcher.ranks.setup_command import SetUp, set_up
from elasticctl_protocol import variables
from elasticctl_store.errors import TrainError

INSTALL = "python install.py requirements.txt"
SCRIPT = """
import pathlib, site, sys
with open("../runs", "a") as file:
    file.write("x")
name = pathlib.Path(sys.argv[1]).read_text().strip()
pathlib.Path(site.getsitepackages()[0], name + ".py").write_text("there = True")
print("installed", name)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "install.py").write_text(SCRIPT)
    (folder / "requirements.txt").write_text("extra_of_a_test\n")
    return folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, variables.SETUP: INSTALL, variables.SETUP_CACHE: str(tmp_path / "cache")}


def made(environ: dict[str, str], code: Path) -> SetUp:
    found = set_up(dict(environ), code, lambda line: None)
    assert found is not None
    return found


def runs(code: Path) -> int:
    path = code.parent / "runs"
    return len(path.read_text()) if path.exists() else 0


def test_it_runs_once_and_adds_to_the_launchers_packages(environ: dict[str, str], code: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        found = set_up(environ, code, said.append)
        assert found is not None
        found.close()
    assert found is not None
    assert runs(code) == 1
    assert said[:2] == [f"setup: {INSTALL}", "setup: installed extra_of_a_test"]
    assert said[-1] == f"setup: {INSTALL}: already done on this machine"
    command = found.translate([sys.executable, "-c", "import extra_of_a_test, pytest, sys; print(sys.prefix)"])
    output = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    assert output.strip() == environ["VIRTUAL_ENV"] == str(found.folder)
    with pytest.raises(ImportError):
        __import__("extra_of_a_test")  # not installed into this environment
    assert subprocess.run(["pip", "--version"], env=environ, check=True, capture_output=True).stdout.startswith(b"pip ")
    assert found.translate(["bash", "train.sh"]) == ["bash", "train.sh"]
    assert found.translate(["python", "train.py"]) == [str(found.folder / "bin/python"), "train.py"]
    assert set_up({}, code, said.append) is None


def test_it_runs_again_for_changed_files_and_after_a_failure(environ: dict[str, str], code: Path) -> None:
    made(environ, code).close()
    (code / "requirements.txt").write_text("another_of_a_test")
    made(environ, code).close()
    assert runs(code) == 2
    (code / "requirements.txt").unlink()
    for _ in range(2):
        with pytest.raises(TrainError, match=r"setup failed with exit code 1: python install.py .*No such file"):
            made(environ, code)
    assert runs(code) == 4
    cache = Path(environ[variables.SETUP_CACHE])
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2, "nothing of what failed is kept"


def test_each_worker_installs_a_folder_itself(environ: dict[str, str], code: Path) -> None:
    environ[variables.SETUP] = f"{INSTALL} ."
    folders = []
    for _ in range(2):
        found = made(environ, code)
        folders.append(found.folder)
        found.close()
    assert runs(code) == 2
    assert not any(folder.exists() for folder in folders)


def test_unused_environments_are_deleted(environ: dict[str, str], code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = made(environ, code)
    (code / "requirements.txt").write_text("another_of_a_test")
    unused = made(environ, code)
    unused.close()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * setup_command.KEPT_S)
    setup_command.delete_unused(used.folder.parent)
    assert (used.folder.exists(), unused.folder.exists()) == (True, False)
    used.close()


def test_incomplete_environments_of_killed_workers_are_deleted(environ: dict[str, str], code: Path) -> None:
    used = made(environ, code)
    (code / "requirements.txt").write_text("another_of_a_test")
    half_made = made(environ, code)
    (half_made.folder / setup_command.DONE).unlink()
    setup_command.delete_unused(used.folder.parent)
    assert half_made.folder.exists(), "its worker is still creating it"
    half_made.close()
    setup_command.delete_unused(used.folder.parent)
    assert (used.folder.exists(), half_made.folder.exists()) == (True, False)
    used.close()


def test_processes_that_the_command_leaves_are_waited_for_and_named(
    environ: dict[str, str], code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_command, "LEFT_BEHIND_S", 0.1)
    said: list[str] = []
    environ[variables.SETUP] = "(until [ -e said ]; do sleep 0.05; done; echo installed) & echo begun"

    def say(line: str) -> None:
        said.append(line)
        if "FIX" in line:
            (code / "said").touch()

    found = set_up(environ, code, say)
    assert found is not None
    found.close()
    warning = next(line for line in said if "FIX" in line)
    assert warning.startswith("setup: the command has ended, but processes that it started still run: waiting for sh")
    assert said.index("setup: begun") < said.index(warning) < said.index("setup: installed")
