"""A network that can be broken: toxiproxy, a real TCP proxy, between the parts of the system."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_until


@dataclass(frozen=True, slots=True)
class Link:
    """A way to `upstream` (host:port) through the proxy, at `address`; whole until one of its methods breaks it."""

    admin: str
    name: str
    address: str

    def cut(self) -> None:
        """Break off all connections, and refuse new ones."""
        self._ask("POST", "", enabled=False)

    def swallow(self) -> None:
        """Accept connections and what is sent on them, and let nothing through; what was swallowed is lost."""
        self._add("timeout", timeout=0)

    def hold(self) -> None:
        """Let nothing through until `repair`, and then everything, on the same connections."""
        self._add("latency", latency=1_000_000_000)

    def slow(self, latency_ms: int, jitter_ms: int = 0) -> None:
        """Delay what is sent, in each direction."""
        self._add("latency", latency=latency_ms, jitter=jitter_ms)

    def reset(self) -> None:
        """Reset all connections, and each new one as soon as anything is sent on it."""
        self._add("reset_peer", timeout=0)

    def repair(self) -> None:
        """Undo all faults."""
        self._ask("POST", "", enabled=True)
        for toxic in self._ask("GET", "/toxics"):
            self._ask("DELETE", f"/toxics/{toxic['name']}")

    def _add(self, kind: str, **attributes: int) -> None:
        for stream in ("upstream", "downstream"):
            self._ask("POST", "/toxics", name=f"{kind}-{stream}", type=kind, stream=stream, attributes=attributes)

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        return _request(f"{self.admin}/proxies/{self.name}{path}", method, body)


class BrokenNetwork:
    """A toxiproxy server; `link` makes a way to somewhere that can be broken."""

    def __init__(self) -> None:
        port = free_port()
        self._admin = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            ["toxiproxy-server", "-host", "127.0.0.1", "-port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)

    def link(self, name: str, upstream: str) -> Link:
        """A link to `upstream`, "host:port"."""
        address = f"127.0.0.1:{free_port()}"
        _request(f"{self._admin}/proxies", "POST", {"name": name, "listen": address, "upstream": upstream})
        return Link(self._admin, name, address)

    def close(self) -> None:
        """End the server, and with it all links."""
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            _request(f"{self._admin}/version", "GET", {})
        except OSError:
            return False
        return True


@pytest.fixture
def network() -> Iterator[BrokenNetwork]:
    made = BrokenNetwork()
    yield made
    made.close()


def _request(url: str, method: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=10) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text
