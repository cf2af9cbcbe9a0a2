"""What `Run` and the hooks share, unless their tests cover it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import TrainError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy, save_policy
from tests.support.train import ranks
from tests.support.train.programs import Numbers


def test_interruptions_are_read_from_the_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_policy, "SHORTEST_S", 0.01)

    def start() -> Run:
        run = Run(str(tmp_path), model=torch.nn.Linear(1, 1))
        assert run._session.storage._interruptions is not None
        run._session.storage._interruptions.join()
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


def test_the_best_checkpoints_by_a_metric_are_kept(tmp_path: Path) -> None:
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


def leave_the_loop_on_one_rank_alone(url: str) -> None:
    """For example a script that stops early by its own loss or its own count of batches."""
    run = Run(url, model=torch.nn.Linear(1, 1), save=SavePolicy(every_steps=1))
    batches = run.loader(Numbers(40), global_batch=8)
    for _ in run.epochs(2):
        for number, _ in enumerate(batches):
            if run.rank == 1 and number == 2:
                break
            if run.steps_done < 2:
                run.step()
                continue
            with pytest.raises(TrainError, match=r"after step 3, the ranks .* in epoch 0 and 1"):
                run.step()
            return


def test_ranks_at_different_positions_are_an_error(tmp_path: Path) -> None:
    """They would continue with wrong samples, and hang at the end."""
    assert ranks.run(leave_the_loop_on_one_rank_alone, 2, str(tmp_path)) == [0, 0]
