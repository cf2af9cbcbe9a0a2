"""The verb itself: what it prints, how it ends, and what it does not tell other users of the machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dashboard.process import Dashboard, Guest, Serve
from tests.support.processes import processes_of
from tests.support.waiting import wait_until


def test_the_printed_link_opens_the_page_and_another_is_offered(serve: Serve) -> None:
    dashboard = serve()
    first = dashboard.link()
    assert "<title>elasticctl</title>" in Guest(first).page
    second = dashboard.link()
    assert second != first
    assert "<title>elasticctl</title>" in Guest(second).page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_cleanly_and_starts_no_cluster(serve: Serve, home: Path, number: signal.Signals) -> None:
    dashboard = serve()
    dashboard.link()
    code, said = dashboard.end(number)
    assert (code, said.splitlines()[-1]) == (0, "the dashboard has stopped")
    assert "Traceback" not in said
    assert processes_of(home) == []


def test_a_port_that_is_taken_is_one_line(serve: Serve) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, said = serve("--port", str(port)).end_by_itself()
    assert code == 2
    assert said == (
        f"error: cannot listen on 127.0.0.1:{port}: address already in use. FIX: --port 0 takes a free one\n"
    )


def test_nothing_but_the_loopback_is_listened_on(serve: Serve) -> None:
    port = int(re.findall(r":(\d+)/", serve().link())[0])
    listening = subprocess.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True)
    ours = [line.split()[1] for line in listening.stdout.splitlines() if f":{port:04X} " in line.split(" rem")[0] + " "]
    assert [address.partition(":")[0] for address in ours if address.endswith(f":{port:04X}")] == ["0100007F"]


def test_the_browser_is_opened_without_the_link_in_its_command_line(home: Path, tmp_path: Path) -> None:
    """A link in a command line could be read, and used first, by anybody on this machine."""
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$1" > {seen}.tmp && mv {seen}.tmp {seen}\n')
    browser.chmod(0o700)
    dashboard = Dashboard(DISPLAY=":7", BROWSER=str(browser))
    try:
        dashboard.link()
        wait_until(seen.exists)
        page = Path(seen.read_text().removeprefix("file://"))
        assert "ticket" not in str(page)
        assert page.stat().st_mode & 0o077 == 0
        assert page.parent.stat().st_mode & 0o077 == 0
        found = re.search(r"url=(\S+)\"", page.read_text())
        assert found
        assert "<title>elasticctl</title>" in Guest(found[1]).page
    finally:
        dashboard.end()
    assert not page.exists()


def test_no_secret_is_in_the_environment_or_the_arguments(serve: Serve) -> None:
    dashboard = serve()
    ticket = dashboard.link().partition("ticket=")[2]
    folder = Path("/proc") / str(dashboard.process.pid)
    for name in ("cmdline", "environ"):
        assert ticket.encode() not in (folder / name).read_bytes()


def test_a_port_that_cannot_be_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticctl.cli", "dashboard", "--port", "70000"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert (done.returncode, done.stderr) == (2, "error: --port 70000: ports go up to 65535\n")
