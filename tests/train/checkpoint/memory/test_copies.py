"""All ranks are killed, and nodes are lost: sharded training resumes from copies in launchers' memory."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl_launcher.peers.copy_holder import CopyHolder
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.memory import copies
from tests.support.train import ranks, sharded

SIZE, STOP = 2, 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    notes = tmp_path_factory.mktemp("undisturbed") / "notes"
    assert ranks.run(sharded.train, SIZE, "", str(notes), "rows", 8) == [0] * SIZE
    noted: dict[str, Any] = json.loads(notes.read_text())
    return noted


def test_steps_back_covers_the_time_until_the_next_copy_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distance between the last two copies does not count, because the last one may have cost more."""
    clock_s = [100.0]
    monkeypatch.setattr(copies.time, "monotonic", lambda: clock_s[0])
    made = copies.Copies(tmp_path, "no socket")
    steps_back = []
    for step, write_s in [(10, 0.1), (20, 2.0), (30, 2.0)]:  # a step each second
        made.begin_copy(step, 0.001)
        made.next_folder(1, step, "run")
        steps_back.append(made.steps_back)
        clock_s[0] += write_s
        assert made.is_ready()
        clock_s[0] += 10.0 - write_s
    assert steps_back == [0, 10, 42]  # twenty times the duration of a copy, plus that duration


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[str]]:
    """Two nodes whose launchers send each other copies, and on which all ranks were killed after a step."""
    found = [tmp_path / f"node{number}" for number in range(SIZE)]
    with contextlib.ExitStack() as stack:
        holders = []
        for node in found:
            node.mkdir(mode=0o700)
            holder = CopyHolder("127.0.0.1", str(node / "copies.sock"), node / "copies", lambda: b"token")
            holders.append(stack.enter_context(contextlib.closing(holder)))
        for number, holder in enumerate(holders):
            other = holders[1 - number].address
            holder.join_group(lambda other=other: other)
        arguments = str(tmp_path / "state"), [str(node) for node in found]
        killed = ranks.run(sharded.train_with_copies, SIZE, *arguments, str(tmp_path / "first"), STOP)
        assert killed == [-signal.SIGKILL] * SIZE
        assert list(read_commits(LocalStorage(tmp_path / "state"))) == []
        yield arguments[1]


def test_a_launcher_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    made = copies.Copies(tmp_path / "copies", str(tmp_path / "none.sock"))
    made.begin_copy(7, 0.001)
    assert made.is_ready()
    assert made.lack == "the launcher does not answer"


def resume(tmp_path: Path, nodes: list[str]) -> dict[str, Any]:
    notes = tmp_path / "second"
    arguments = str(tmp_path / "state"), nodes, str(notes), 0
    assert ranks.run(sharded.train_with_copies, SIZE, *arguments) == [0] * SIZE
    noted: dict[str, Any] = json.loads(notes.read_text())
    return noted


def test_training_resumes_exactly_from_memory_after_a_node_is_lost(
    tmp_path: Path, nodes: list[str], undisturbed: dict[str, Any]
) -> None:
    shutil.rmtree(Path(nodes[1], "copies"))
    second = resume(tmp_path, nodes)
    assert second["first"] == STOP
    assert second["losses"] == undisturbed["losses"][STOP:]
    assert (second["ends"], second["moments"]) == (undisturbed["ends"], undisturbed["moments"])


def test_a_damaged_copy_is_replaced_by_an_older_one(
    tmp_path: Path, nodes: list[str], undisturbed: dict[str, Any]
) -> None:
    for file in tmp_path.glob(f"node*/copies/*/data/*step{STOP:09d}*/share-00001-*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    second = resume(tmp_path, nodes)
    assert second["first"] == STOP - 1
    assert second["losses"] == undisturbed["losses"][STOP - 1 :]
