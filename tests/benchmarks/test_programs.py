"""The programs of benchmarks/ start: what they import from the product exists, and they print their options."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = [
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    for path in sorted((*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py")))
    if '__name__ == "__main__"' in path.read_text("utf-8")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of programs that end at SIGTERM as by Ctrl-C
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
