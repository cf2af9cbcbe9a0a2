"""The verb itself: what it prints, how it ends, and what it does not reveal to other users of the machine."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.dashboard.process import Dashboard, Guest, Serve
from tests.support.processes import processes_of
from tests.support.waiting import wait_until


def test_the_printed_link_opens_the_page_and_another_is_offered(serve: Serve, home: Path) -> None:
    dashboard = serve()
    first = dashboard.link()
    assert "<title>elasticctl</title>" in Guest(first).page
    second = dashboard.link()
    assert second != first
    assert "<title>elasticctl</title>" in Guest(second).page
    port = int(re.findall(r":(\d+)/", first)[0])
    tables = "".join((Path("/proc/net") / name).read_text() for name in ("tcp", "tcp6"))
    addresses = [line.split()[1] for line in tables.splitlines() if line.split()[3] == "0A"]
    assert [address for address in addresses if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    folder = Path("/proc") / str(dashboard.process.pid)
    for name in ("cmdline", "environ"):
        assert second.partition("ticket=")[2].encode() not in (folder / name).read_bytes()
    ends_cleanly(dashboard, home, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_ends_cleanly_and_starts_no_cluster(serve: Serve, home: Path, number: signal.Signals) -> None:
    dashboard = serve()
    dashboard.link()
    ends_cleanly(dashboard, home, number)


def ends_cleanly(dashboard: Dashboard, home: Path, number: signal.Signals) -> None:
    code, said = dashboard.end(number)
    assert (code, said.splitlines()[-1]) == (0, "the dashboard has stopped")
    assert "Traceback" not in said
    assert processes_of(home) == []


def test_a_port_that_is_taken_or_cannot_be_is_one_line(run: Run, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("dashboard", "--port", str(port))
    fix = "FIX: --port 0 takes a free one"
    assert (done.code, done.err) == (
        2,
        f"error: cannot listen on 127.0.0.1:{port}: address already in use. {fix}\n",
    )
    done = run("dashboard", "--port", "70000")
    assert (done.code, done.err) == (2, "error: --port 70000: ports go up to 65535\n")


def test_the_browser_is_opened_without_the_link_in_its_command_line(home: Path, tmp_path: Path) -> None:
    """A link in a command line could be read, and used first, by any user of this machine."""
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$1" > "{seen}.tmp" && mv "{seen}.tmp" "{seen}"\n')
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
