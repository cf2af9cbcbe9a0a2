"""What `Run` and the hooks share, where it is not tested through them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy, policy


def test_how_often_it_was_interrupted_is_known_from_its_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "SHORTEST_S", 0.01)

    def start() -> Run:
        run = Run(str(tmp_path), model=torch.nn.Linear(1, 1))
        assert run._session._interruptions is not None
        run._session._interruptions.join()
        return run

    for _ in range(3):
        start()  # and is killed
    for _ in range(3):
        start().finish()
    with caplog.at_level(logging.INFO, logger="elasticctl_train"):
        run = start()
        while not any("saving every" in message for message in caplog.messages):
            run.step()
            time.sleep(0.001)
        run.finish()
    # Killed 3 times, and once that it is taken to have seen in 4 hours.
    said = next(message for message in caplog.messages if "saving every" in message)
    assert said.endswith("an interruption is expected every 1.0 h")


def test_the_best_by_a_metric_stay_and_are_resumed_past(tmp_path: Path) -> None:
    keep = SavePolicy(every_steps=1, keep_last=1, keep_best=2, metric="accuracy", mode="max")
    accuracies = [0.5, 0.9, 0.1, 0.8, 0.2, 0.3]
    run = Run(str(tmp_path), model=torch.nn.Linear(1, 1), save=keep)
    for accuracy in accuracies:
        run.log(accuracy=accuracy)
        run.step()
        while run._session.busy:
            time.sleep(0.001)
    run.finish()
    assert [commit.step for commit in read_commits(LocalStorage(tmp_path))] == [6, 4, 2]
    assert Run(str(tmp_path), model=torch.nn.Linear(1, 1)).steps_done == 6
