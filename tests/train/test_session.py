"""What `Run` and the hooks share, where it is not tested through them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits
from elasticctl_store.checkpoints.entries import Generation
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy, policy
from elasticctl_train.policy import PRIOR_S


def test_how_often_it_was_interrupted_is_known_from_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    first: Generation = CommitWriter.take_over(storage).generation
    long_ago = replace(first, at=time.time() - 5 * PRIOR_S)
    storage.put(entries.key_of(first.position), [entries.encode(long_ago)])
    CommitWriter.take_over(storage)
    monkeypatch.setattr(policy, "SHORTEST_S", 0.01)
    with caplog.at_level(logging.INFO, logger="elasticctl_train"):
        run = Run(str(tmp_path), model=torch.nn.Linear(1, 1))
        while not any("saving every" in message for message in caplog.messages):
            run.step()
            time.sleep(0.001)
        run.finish()
    # 2 restarts in 5 x 4 hours, and one in 4 hours that it is taken to have seen: every 8 hours.
    said = next(message for message in caplog.messages if "saving every" in message)
    assert said.endswith("an interruption is expected every 8.0 h")


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
