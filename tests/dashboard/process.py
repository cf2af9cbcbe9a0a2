"""`elasticctl dashboard` as a process of its own, as it is typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

LINK = re.compile(r"http://127\.0\.0\.1:\d+/\S+")
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")


class Dashboard:
    """`elasticctl dashboard` as a process; `link()` is the next link that it prints."""

    def __init__(self, *args: str, **environ: str) -> None:
        without = {name: value for name, value in os.environ.items() if name not in SCREENS}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elasticctl.cli", "dashboard", *args],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**without, **environ},
        )

    def link(self) -> str:
        """Wait for the next one."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = LINK.search(line)
            if found:
                return found[0]
        raise AssertionError(f"it ended with {self.process.wait()} and has printed no link")

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """End it as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.end_by_itself()

    def end_by_itself(self) -> tuple[int, str]:
        """Wait for its end; its exit code, and what it still had to say."""
        said = self.process.communicate(timeout=20)[1]
        return self.process.returncode, said


Serve = Callable[..., Dashboard]
