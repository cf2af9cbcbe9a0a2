"""A worker prints complete lines, in the order of the uploads, and its ranks never block the launcher."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from elasticctl_launcher import worker_output
from elasticctl_launcher.worker_output import OutputHandler, Uploads, WorkerOutput
from tests.support.waiting import wait_until


def test_lines_are_uploaded_in_the_order_in_which_they_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", printed)
    copies: list[str] = []
    made = WorkerOutput()
    made.store_in(Uploads(log=SimpleNamespace(add=lambda at, rank, text: copies.append(text))))  # type: ignore[arg-type]
    ranks = [
        threading.Thread(target=lambda rank=rank: [made.print_rank_line(rank, f"{rank}: {n}") for n in range(500)])
        for rank in range(4)
    ]
    for rank in ranks:
        rank.start()
    for n in range(100):
        made.print_message(f"own {n}\nand more")
    for rank in ranks:
        rank.join()
    assert printed.getvalue().split("\n")[:-1] == copies
    assert len(copies) == 4 * 500 + 2 * 100


def test_characters_that_the_output_cannot_encode_are_escaped() -> None:
    """An error here would end the thread that reads a rank's pipe, and the rank with it."""
    code = "from elasticctl_launcher.worker_output import WorkerOutput as O; O().print_rank_line(0, 'caf\\u00e9')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout == b"caf\\xe9\n"


def test_log_records_are_printed_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", printed)
    logger = logging.getLogger("of-a-test")
    logger.propagate = False
    handler = OutputHandler(WorkerOutput())
    logger.addHandler(handler)
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("it failed")
    finally:
        logger.removeHandler(handler)
    lines = printed.getvalue().split("\n")[:-1]
    assert lines[0] == "[launcher] it failed"
    assert lines[-1] == "[launcher] ValueError: no"
    assert all(line.startswith("[launcher] ") for line in lines)


def test_unread_output_of_ranks_does_not_block_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_output, "PRINT_TIMEOUT_S", 0.05)
    receive, send = os.pipe()
    own = io.StringIO()
    with open(send, "w") as full, open(receive) as reader:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", own)
        made = WorkerOutput()
        blocked = threading.Thread(target=lambda: made.print_rank_line(0, "x" * 200_000))
        blocked.start()
        wait_until(made._lock.locked)
        made.print_message("continues")
        assert blocked.is_alive()
        assert own.getvalue() == "[launcher] continues\n"
        assert len(reader.read(200_001)) == 200_001
        blocked.join()
