"""A terminal whose screen can be read: what a person would see of a command line, at any size, while it runs."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pexpect
import pyte

from tests.support.waiting import wait_until

ELASTICCTL = (sys.executable, "-m", "elasticctl.cli")
_OTHER_SCREEN = 1049
_STEPS = 100


class _Screen(pyte.Screen):
    """pyte's screen, with the second one that full-screen programs draw on, and a count of lines scrolled away."""

    def __init__(self, columns: int, lines: int) -> None:
        self.on_other = False
        self.scrolled = 0
        self._usual: Any = None
        super().__init__(columns, lines)

    def set_mode(self, *modes: int, **kwargs: Any) -> None:
        if kwargs.get("private") and _OTHER_SCREEN in modes:
            self._usual = copy.deepcopy(self.buffer), copy.copy(self.cursor)
            self.on_other = True
            self.erase_in_display(2)
            self.cursor_position()
        super().set_mode(*modes, **kwargs)

    def reset_mode(self, *modes: int, **kwargs: Any) -> None:
        super().reset_mode(*modes, **kwargs)
        if kwargs.get("private") and _OTHER_SCREEN in modes and self._usual is not None:
            self.buffer, self.cursor = self._usual
            self.on_other, self._usual = False, None

    def index(self) -> None:
        self.scrolled += self.cursor.y == self.lines - 1
        super().index()


class Terminal:
    """`elasticctl ARGS`, or another program, on a terminal of its own; `screen()` is what it shows now."""

    def __init__(
        self, *args: str, program: Sequence[str] = ELASTICCTL, columns: int = 120, lines: int = 40, **environ: str
    ) -> None:
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.child: pexpect.spawn[bytes] = pexpect.spawn(
            program[0],
            [*program[1:], *args],
            env={**inherited, "TERM": "xterm-256color", **environ},
            timeout=240,
            dimensions=(lines, columns),
        )
        self._screen = _Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    def screen(self) -> list[str]:
        """The lines, after all that has been written up to now."""
        with suppress(pexpect.TIMEOUT, pexpect.EOF):
            for _ in range(0 if self.child.closed else _STEPS):
                block = self.child.read_nonblocking(1 << 16, timeout=0)
                self.raw += block
                self._stream.feed(block)
        return [line.rstrip() for line in self._screen.display]

    def shows(self, *texts: str) -> list[str]:
        """Wait until all of these texts are to be seen; returns the screen."""
        return self.until(lambda lines: all(any(text in line for line in lines) for text in texts))

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the screen is as wanted, and return it."""
        last: list[list[str]] = []

        def look() -> bool:
            last[:] = [self.screen()]
            return seen(last[0])

        try:
            wait_until(look)
        except AssertionError as e:
            raise AssertionError("\n".join(["not seen; the screen:", *last[0]])) from e
        return last[0]

    def resize(self, columns: int, lines: int) -> None:
        """Drag its corner."""
        self.screen()
        self._screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    @property
    def on_other_screen(self) -> bool:
        """True while it shows the screen that full-screen programs draw on."""
        return self._screen.on_other

    @property
    def scrolled(self) -> int:
        """How many lines have left it at the top."""
        return self._screen.scrolled

    def reset_scrolled(self) -> None:
        """Count from zero: what was on its way to the screen while its size changed did not fit."""
        self._screen.scrolled = 0

    def type(self, text: str) -> None:
        """Type a line."""
        self.child.sendline(text)

    def press(self, keys: str) -> None:
        """Type without Enter."""
        self.child.send(keys)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.child.sendintr()

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        wait_until(lambda: self.screen() and not self.child.isalive())
        self.screen()
        self.child.close()
        assert self.child.exitstatus is not None
        return self.child.exitstatus
