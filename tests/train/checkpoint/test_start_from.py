"""A run that starts from another run's checkpoint does not change it."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import MissingError, TrainError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.dist import join, leave
from tests.support.train import ranks
from tests.support.train.programs import Numbers
from tests.support.train.states import same


def train(url: Path, epochs: int) -> int:
    """Train on 12 numbers in 3 steps per epoch, and save each step; return the number of steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = SavePolicy(every_steps=1, keep_last=100)
    with Run(url.as_uri(), model=model, optimizer=optimizer, save=policy) as run:
        for _ in run.epochs(epochs):
            for batch in run.loader(Numbers(12), global_batch=4):
                loss = run.model(batch.float().unsqueeze(1)).square().mean()
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                run.step(loss=loss)
                if run._session.storage.checkpoints is not None:
                    assert run._session.storage.checkpoints.settle()
        return run.steps_done


def steps(url: Path) -> list[int]:
    """The steps that are kept; the last one is committed again at the end of training."""
    return sorted({commit.step for commit in read_commits(LocalStorage(url))})


def content(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run of two epochs: commits of the steps 1 to 6."""
    assert train(tmp_path / "old", 2) == 6
    return tmp_path / "old"


@pytest.mark.parametrize(("wanted", "begins"), [("4", 5), ("latest", 7)])
def test_a_run_starts_from_another_url_without_changing_it(
    old: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
    begins: int,
) -> None:
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{old.as_uri()}#{wanted}")
    before = content(old)
    with caplog.at_level(logging.INFO, logger="elasticctl_train"):
        assert train(tmp_path / "new", 3) == 9
    assert content(old) == before
    assert steps(tmp_path / "new") == list(range(begins, 10))
    assert f"started from step {begins - 1}, epoch {(begins - 1) // 3} of {old.as_uri()}" in caplog.messages


def test_a_commit_of_its_own_takes_precedence(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{old.as_uri()}#2")
    assert train(tmp_path / "new", 1) == 3
    monkeypatch.setenv("ELASTICCTL_START_FROM", "file:///gone#2")
    with caplog.at_level(logging.INFO, logger="elasticctl_train"):
        assert train(tmp_path / "new", 2) == 6
    assert any("resumed from step 3" in message for message in caplog.messages)


def test_a_run_with_nothing_left_to_do_still_commits(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{old.as_uri()}#latest")
    assert train(tmp_path / "new", 2) == 6
    assert steps(tmp_path / "new") == [6]


def test_a_missing_step_is_reported_with_those_that_exist(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{old.as_uri()}#40")
    with pytest.raises(MissingError, match="has no intact checkpoint of step 40 to start from; its steps: 6, 5"):
        train(tmp_path / "new", 3)
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{(tmp_path / 'empty').as_uri()}#latest")
    with pytest.raises(MissingError, match=r"has no intact checkpoint to start from; its steps: none at all"):
        train(tmp_path / "new", 3)


def test_a_damaged_step_is_not_replaced_by_another(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest` is the newest intact checkpoint; a number is that step or an error."""
    newest = [commit for commit in read_commits(LocalStorage(old)) if commit.step == 6]
    for file in (file for commit in newest for file in (old / commit.folder).glob("*.safetensors")):
        file.chmod(0o600)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{old.as_uri()}#6")
    with pytest.raises(MissingError, match="no intact checkpoint of step 6"):
        train(tmp_path / "new", 3)
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{old.as_uri()}#latest")
    assert train(tmp_path / "other", 3) == 9
    assert min(steps(tmp_path / "other")) == 6


@pytest.mark.parametrize("value", ["latest", "#3", "file:///x#", "file:///x#-1", "file:///x#newest"])
def test_an_invalid_origin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ELASTICCTL_START_FROM", value)
    with pytest.raises(TrainError, match="set it to URL#STEP or URL#latest"):
        train(tmp_path / "new", 1)


def test_a_run_needs_a_storage_of_its_own(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_START_FROM", f"{old.as_uri()}#latest")
    with pytest.raises(TrainError, match="needs a storage URL for this run"):
        Run(model=torch.nn.Linear(1, 1))


def on_two_ranks(root: str) -> None:
    """Both ranks get the state, or the error."""
    world = join()
    checkpoints = Checkpointer(LocalStorage(Path(root, "new")), world)
    origin = LocalStorage(Path(root, "old"))
    restored = checkpoints.start_from(origin, 3)
    try:
        checkpoints.start_from(origin, 4)
        said = "nothing"
    except MissingError as e:
        said = str(e)
    Path(root, f"rank-{world.rank}.json").write_text(json.dumps([restored.commit.step, restored.state["n"], said]))
    leave(world)


def test_errors_are_raised_on_every_rank(tmp_path: Path) -> None:
    first = Checkpointer(LocalStorage(tmp_path / "old"))
    state: dict[str, Any] = {"n": 7}
    first.save(state, Label(3))
    assert first.settle()
    assert ranks.run(on_two_ranks, 2, str(tmp_path)) == [0, 0]
    notes = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert same(notes[0], notes[1])
    assert notes[0][:2] == [3, 7]
    assert "of step 4" in notes[0][2]
