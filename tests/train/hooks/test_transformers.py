"""The callback in the real transformers Trainer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import RestoreError, TrainError
from elasticctl_store.storage.local import LocalStorage
from tests.support.train import hook_programs, ranks
from tests.support.train.hook_programs import note_samples

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of transformers and accelerate about this version of torch


def train(tmp_path: Path, name: str, **options: Any) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    seen: list[list[float]] = []
    url = str(tmp_path / name) if name else ""
    return seen, hook_programs.transformers_train(url, str(tmp_path / "out"), seen.append, **options)


def test_a_resumed_run_ends_exactly_as_an_uninterrupted_one(tmp_path: Path) -> None:
    seen, weights = train(tmp_path, "")
    assert len(seen) == 12
    for stop_at in (3, 4):
        before, _ = train(tmp_path, str(stop_at), stop_at=stop_at)
        after, found = train(tmp_path, str(stop_at))
        assert before == seen[:stop_at]
        assert after == seen[stop_at:]
        assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("when", ["steps", "epoch"])
def test_evaluations_are_those_of_an_uninterrupted_run(tmp_path: Path, when: str) -> None:
    """Early stopping counts evaluations, the scheduler lowers the rate, and each one draws a random number."""
    options: dict[str, Any] = {
        "epochs": 6,
        "patience": 3,
        "eval_strategy": when,
        "eval_steps": 2,
        "learning_rate": 3.0,
        "metric_for_best_model": "eval_loss",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
    }
    seen, weights = train(tmp_path, "", **options)
    steps = sum(len(each) > 1 for each in seen)
    assert steps == (8 if when == "steps" else 16), "training ended early"
    for stop_at in (4, steps - 1):
        before, _ = train(tmp_path, str(stop_at), stop_at=stop_at, **options)
        after, found = train(tmp_path, str(stop_at), **options)
        assert before + after == seen
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_finished_training_is_not_repeated_but_can_be_extended(tmp_path: Path) -> None:
    _, weights = train(tmp_path, "state")
    seen, found = train(tmp_path, "state")
    assert seen == []
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    seen, _ = train(tmp_path, "state", epochs=4)
    assert len(seen) == 4
    seen, _ = train(tmp_path, "state", max_steps=18)
    assert len(seen) == 2
    assert train(tmp_path, "state", max_steps=18)[0] == []
    newest = next(read_commits(LocalStorage(tmp_path / "state")))
    assert newest.step == 18
    assert newest.metrics["loss"] > 0


def test_samples_are_counted_through_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = note_samples(monkeypatch)
    train(tmp_path, "whole")
    train(tmp_path, "state", stop_at=5)
    train(tmp_path, "state")
    assert counted[0] == counted[-1]
    assert counted[0]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, "state", epochs=1)
    monkeypatch.setattr(hook_programs, "network", lambda: torch.nn.Sequential(torch.nn.Linear(2, 1)))
    with pytest.raises(RestoreError, match=r"(?s)step 4: the checkpoint does not fit this model: .*network\.2\.weight"):
        train(tmp_path, "state")


def test_another_global_batch_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, "state", stop_at=2)
    monkeypatch.setattr(hook_programs, "GLOBAL_BATCH", 5)
    with caplog.at_level(logging.WARNING, logger="elasticctl_train"):
        train(tmp_path, "state")
    assert (
        "saved with 6 samples per step, continuing with 5: samples of this epoch are repeated or skipped" in caplog.text
    )


def test_a_callback_that_was_not_asked_to_resume_explains_how() -> None:
    from elasticctl_train.hooks.transformers import (
        ElasticCallback,  # otherwise each process that collects tests would import it
    )

    with pytest.raises(TrainError, match=r"FIX: trainer\.train\(resume_from_checkpoint=hook\.resume\(trainer\)\)"):
        ElasticCallback().on_train_begin(None, None, None)  # type: ignore[arg-type]


def test_an_evaluation_before_training_is_ignored() -> None:
    from elasticctl_train.hooks.transformers import ElasticCallback

    ElasticCallback().on_log(None, None, None, logs={"eval_loss": 1.0})  # type: ignore[arg-type]


@pytest.mark.timeout(900)
def test_two_ranks_continue_with_the_rest_of_the_epoch(tmp_path: Path) -> None:
    def steps(stop_at: int) -> list[list[float]]:
        folder = tmp_path / str(stop_at)
        folder.mkdir()
        codes = ranks.run(hook_programs.transformers_rank, 2, str(tmp_path / "s"), str(folder), stop_at)
        assert codes == [0, 0]
        both = [json.loads((folder / f"seen-{rank}").read_text()) for rank in range(2)]
        return [one + other for one, other in zip(*both, strict=True)]

    both = steps(2) + steps(4)
    assert len(both) == 4
    assert sorted({number for step in both for number in step}) == list(range(20))
    assert sum(map(len, both)) <= 24, "accelerate completes the last batch with samples of the first"
