"""What a real launcher prints, and what of it is in the storage: the same lines, whatever ends it."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from elasticctl_launcher import worker_output
from elasticctl_store import stored_logs
from elasticctl_store.storage.local import LocalStorage
from elasticctl_store.stored_logs import Line

from .conftest import Lab

TALKS = """
import os, sys, time
print("héllo €", "x" * 40_000 + "é" * 10_000, flush=True)
sys.stderr.write("to the other stream, 50 %\\r100 %\\n")
number = 0
while not os.path.exists(os.environ["LAB"] + "/done"):
    print("line", number, flush=True)
    number += 1
    time.sleep(0.02)
"""


def talk(lab: Lab, *options: str, nproc: int = 1) -> LocalStorage:
    folder = lab.folder / "storage"
    lab.add("a-0")
    lab.start(
        "a-0",
        sys.executable,
        "-c",
        TALKS,
        options=("--nproc-per-node", str(nproc), "--preload", "none", *options),
        LAB=str(lab.folder),
        ELASTICCTL_STORAGE=folder.as_uri(),
        ELASTICCTL_JOB_UID="job-uid",
    )
    return LocalStorage(folder)


def stored(storage: LocalStorage) -> list[Line]:
    return [line for log in stored_logs.find(storage, "job-uid") for line in log.lines()]


def printed(lab: Lab) -> list[str]:
    return (lab.folder / "a-0.log").read_bytes().decode().split("\n")[:-1]


def test_every_line_is_stored_as_it_was_printed(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on")
    lab.until(lambda: "line 50" in printed(lab))
    (lab.folder / "done").touch()
    assert lab.workers["a-0"].wait(20) == 0
    found = stored(storage)
    assert [line.text for line in found] == printed(lab)
    assert [line.number for line in found] == list(range(1, len(found) + 1))
    assert {line.rank for line in found if not line.text.startswith("[launcher]")} == {0}
    assert {line.rank for line in found if line.text.startswith("[launcher]")} <= {None}
    assert max(len(line.text.encode()) for line in found) <= 16_000, "nobody breaks them up any further"
    assert "".join(line.text for line in found if set(line.text[-1:]) & set("xé")).endswith("é" * 10_000)
    assert "\ufffd" not in "".join(line.text for line in found), "no character is broken"


def test_of_several_ranks_each_line_has_its_own(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on", nproc=2)
    lab.until(lambda: {"[rank0] line 20", "[rank1] line 20"} <= set(printed(lab)))
    (lab.folder / "done").touch()
    assert lab.workers["a-0"].wait(20) == 0
    found = stored(storage)
    assert [line.text for line in found] == printed(lab)
    assert all(line.text.startswith(f"[rank{line.rank}] ") for line in found if line.rank is not None)


def test_sigterm_loses_nothing(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on")
    lab.until(lambda: "line 5" in printed(lab))
    lab.workers["a-0"].send_signal(signal.SIGTERM)
    assert lab.workers["a-0"].wait(20) == 143
    assert [line.text for line in stored(storage)] == printed(lab)


def test_killed_outright_it_loses_its_last_seconds_only(lab: Lab) -> None:
    storage = talk(lab, "--log-upload", "on")
    lab.until(lambda: len(stored(storage)) > 50)
    killed_at = time.time()
    lab.kill("a-0")
    found, said = stored(storage), printed(lab)
    assert [line.text for line in found] == said[: len(found)]
    assert killed_at - found[-1].at < 2 * worker_output.FLUSH_S


@pytest.mark.parametrize("options", [("--log-upload", "off"), ()])
def test_a_folder_of_this_machine_is_left_alone_unless_told(lab: Lab, options: tuple[str, ...]) -> None:
    storage = talk(lab, *options)
    lab.until(lambda: "line 5" in printed(lab))
    (lab.folder / "done").touch()
    assert lab.workers["a-0"].wait(20) == 0
    assert stored(storage) == []


def test_a_storage_that_is_not_to_be_had_stops_nobody(lab: Lab) -> None:
    (lab.folder / "storage").write_text("in the way")
    talk(lab, "--log-upload", "on")
    lab.until(lambda: "cannot store the log for now" in lab.output("a-0"))
    (lab.folder / "done").touch()
    assert lab.workers["a-0"].wait(20) == 0


def test_a_wrong_word_is_refused(lab: Lab) -> None:
    lab.start("a-0", "true", ELASTICCTL_LOG_UPLOAD="maybe")
    assert lab.workers["a-0"].wait(20) == 2
    assert "'maybe' is none of auto, on, off" in lab.output("a-0")
    assert not Path(lab.folder / "storage").exists()
