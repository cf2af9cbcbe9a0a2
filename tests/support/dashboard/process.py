"""`elasticctl dashboard` as a process of its own, as it is typed, and a guest who comes by its link."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from typing import Any
from urllib.parse import urlsplit

from elasticctl.dashboard.access import TOKEN_HEADER

LINK = re.compile(r"http://127\.0\.0\.1:\d+/\S+")
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")
PATIENCE_S = 240.0


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
        said = self.process.communicate(timeout=PATIENCE_S)[1]
        return self.process.returncode, said


Serve = Callable[..., Dashboard]


class Guest:
    """A client that keeps cookies, let in by a link; `page` is what it then sees."""

    def __init__(self, link: str) -> None:
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with self._opener.open(link, timeout=PATIENCE_S) as answer:
            self.url: str = answer.url
            self.page: str = answer.read().decode()
        assert "ticket" not in self.url

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The stream of news, each with its name."""
        with self._opener.open(f"{self.url}events", timeout=PATIENCE_S) as stream:
            name = ""
            for line in stream:
                key, _, value = line.decode().rstrip().partition(": ")
                name = value if key == "event" else name
                if key == "data":
                    yield name, json.loads(value)

    def change(self, path: str, body: dict[str, Any], token: str) -> None:
        """Have something done; raises where it is refused."""
        where = urlsplit(self.url)
        headers = {TOKEN_HEADER: token, "Origin": f"{where.scheme}://{where.netloc}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        self._opener.open(request, timeout=PATIENCE_S).close()
