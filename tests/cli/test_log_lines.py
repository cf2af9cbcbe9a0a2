"""Lines of logs as they are printed: plain ones, and progress bars in their places."""

from __future__ import annotations

import io
import os
import sys

import pyte
import pytest

from elasticctl.cli.framework.log_lines import print_log_lines
from elasticctl.cluster.base import LogLine

BARS = [
    ("0", "start"), ("0", " 10%|#   |\r"), ("1", " 11%|#   |\r"), ("0", "a word between"), ("0", " 50%|##  |\r"),
    ("0", "100%|####|"), ("1", " 99%|####|\r"), ("1", " 99%|####|"),
]  # fmt: skip


class _Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def printed(*said: tuple[str, str]) -> None:
    print_log_lines([LogLine(f"job-worker-{worker}", 0.0, text) for worker, text in said], "job")


def on_terminal(monkeypatch: pytest.MonkeyPatch, *said: tuple[str, str], columns: int = 40, lines: int = 12) -> str:
    """What is sent to a terminal."""
    out = _Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(columns)), ("LINES", str(lines))):
        monkeypatch.setenv(name, value)
    printed(*said)
    return out.getvalue()


def on_screen(monkeypatch: pytest.MonkeyPatch, *said: tuple[str, str], columns: int = 40, lines: int = 12) -> list[str]:
    """What a terminal shows in the end."""
    sent = on_terminal(monkeypatch, *said, columns=columns, lines=lines)
    screen = pyte.Screen(columns, lines)
    pyte.Stream(screen).feed(sent.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()]


def test_bars_stay_below_the_lines_and_end_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ["worker-0 | start", "worker-0 | a word between"]
    assert on_screen(monkeypatch, *BARS[:5]) == [*begun, "worker-1 |  11%|#   |", "worker-0 |  50%|##  |"]
    assert on_screen(monkeypatch, *BARS) == [*begun, "worker-0 | 100%|####|", "worker-1 |  99%|####|"]


def test_bars_never_take_more_than_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [(str(worker % 30), "\u4e2d" * 40 + f" {worker}\r") for worker in range(90)]
    shown = on_screen(monkeypatch, *said, ("0", "done"), columns=30, lines=8)
    assert len(shown) <= 8
    assert all(line.startswith("worker-") for line in shown)


def test_each_worker_has_a_colour_unless_colours_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = on_terminal(monkeypatch, ("0", "begun"), ("1", "begun")).splitlines()
    assert [line.partition("worker")[0] for line in lines] == ["\x1b[36m", "\x1b[33m"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_terminal(monkeypatch, ("0", "begun"), ("1", "begun"))


def test_in_a_pipe_each_state_is_a_line_and_the_last_one_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
    printed(*BARS)
    assert capsys.readouterr().out.splitlines() == [
        "worker-0 | start", "worker-0 |  10%|#   |", "worker-1 |  11%|#   |", "worker-0 | a word between",
        "worker-0 |  50%|##  |", "worker-0 | 100%|####|", "worker-1 |  99%|####|",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\r  1%\r 50%\r100%", "100%"),
        ("inner: 50%\x1b[A\r", "inner: 50%"),
        ("from Windows\r", "from Windows"),
        ("one\rtwo\x07", "one\\u000dtwo\\u0007"),
        ("\ttabs stay", "\ttabs stay"),
    ],
)
def test_progress_bars_prefixed_by_other_launchers(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed(("0", text))
    assert capsys.readouterr().out == f"worker-0 | {shown}{os.linesep}"
