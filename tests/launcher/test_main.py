"""What the launcher imports, and when (each case is a process of its own), and how it ends if it cannot start."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from elasticctl_launcher import main as launcher


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_torch_is_imported_only_to_start_ranks() -> None:
    ours = "elasticctl_launcher.main, elasticctl_launcher.launcher_states"
    assert output_of(f"import sys, {ours}; print('torch' in sys.modules)") == "False\n"


def test_torch_registers_the_backend_in_any_order_of_imports() -> None:
    registered = "print('elasticctl' in rendezvous_handler_registry._registry)"
    code = f"""
import elasticctl_launcher.rendezvous
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
{registered}
"""
    assert output_of(code) == "True\n"


@pytest.mark.parametrize(("arguments", "line"), [((), "no command"), (("--", "x"), "ELASTICCTL_JOB is not set")])
def test_usage_errors_are_one_line(
    arguments: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in launcher.REQUIRED:
        monkeypatch.delenv(name, raising=False)
    assert launcher.main([*arguments]) == launcher.EXIT_USAGE
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ELASTICCTL_NOTICE_SOURCE": "azure"}, "'azure' is not one of off, "),
        ({"ELASTICCTL_METADATA_URL": "ftp://azure"}, "azure"),
        ({"ELASTICCTL_LOG_UPLOAD": "maybe"}, "'maybe' is not one of auto, on, off"),
    ],
)
def test_an_invalid_setting_is_refused(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as refused:
        launcher.main(["--", "true"])
    assert refused.value.code == launcher.EXIT_USAGE
    assert said in capsys.readouterr().err


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unpack(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/elasticctl-launch-x")

    monkeypatch.setattr(launcher, "unpack_workspace", unpack)
    monkeypatch.setattr(launcher, "handle_signals", lambda handler: None)
    known = dict.fromkeys(launcher.REQUIRED, "x") | {"ELASTICCTL_RDZV_ENDPOINT": f"unix://{tmp_path}/none"}
    for name, value in (known | {"ELASTICCTL_TERMINATION_LOG": str(tmp_path / "end")}).items():
        monkeypatch.setenv(name, value)
    assert launcher.main(["--", "true"]) == launcher.EXIT_FAILED
    assert "No space left on device: '/tmp/elasticctl-launch-x'\n" in capsys.readouterr().err
    assert "No space left" in json.loads((tmp_path / "end").read_text())["error"]
