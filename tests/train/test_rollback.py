"""`on-nan: rollback`: a run whose loss is NaN goes back to before it, and skips the batches in between."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticctl_store.checkpoints import run_records
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.checkpoints.run_records import Rollback
from elasticctl_store.errors import DamagedError, NotFiniteError, RollbackError, StorageError, TrainError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy
from elasticctl_train.checkpoint import checkpointer
from tests.support.train.programs import Numbers

NOTE = Rollback(3, 81, "NaN", {"epoch": 1, "position": 12})


class Diverges:
    """Trains on numbers: those in `bad` make the loss NaN, and `poisons_at` the parameters."""

    def __init__(self, url: str, *bad: int, poisons_at: int | None = None) -> None:
        self.url, self.bad, self.poisons_at = url, set(bad), poisons_at
        self.trained: list[list[int]] = []
        self.model = torch.nn.Linear(1, 1)

    def run(self, every_steps: int = 1, epochs: int = 1) -> int:
        """Train to the end; returns how many steps were made."""
        optimizer = torch.optim.SGD(self.model.parameters())
        save = SavePolicy(every_steps=every_steps)
        with Run(self.url, model=self.model, optimizer=optimizer, save=save) as run:
            for epoch in run.epochs(epochs):
                for batch in run.loader(Numbers(40), global_batch=4):
                    numbers = [int(value) + 40 * epoch for value in batch.flatten()]
                    self.trained.append(numbers)
                    is_bad = bool(self.bad.intersection(numbers))
                    if self.poisons_at in numbers:
                        self.model.weight.data.fill_(float("nan"))
                    run.step(loss=float("nan") if is_bad else 1.0)
                    while run._session.busy:
                        time.sleep(0.001)
            return run.steps_done


@pytest.fixture(autouse=True)
def told_to_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_ON_NAN", "rollback")


def test_a_rollback_continues_before_the_loss_and_skips_its_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Diverges(tmp_path.as_uri(), 13)
    with pytest.raises(RollbackError, match=r"is NaN since step 4: going back to step 3 \(1 of at most 10 times\)"):
        job.run()
    assert [step.step for step in read_commits(LocalStorage(tmp_path))] == [3, 2, 1]
    job.trained.clear()
    with caplog.at_level(logging.WARNING, logger="elasticctl_train"):
        assert job.run() == 9
    assert job.trained[0] == [16, 17, 18, 19]
    assert "went back to step 3, continuing from epoch 0, sample 16: the loss was NaN at step 4" in caplog.messages
    job.trained.clear()
    job.run()  # later commits have skipped the batch already
    assert job.trained == []


def test_batches_are_skipped_across_epochs(tmp_path: Path) -> None:
    job = Diverges(tmp_path.as_uri(), 47)  # of step 12, in the second epoch
    with pytest.raises(RollbackError, match="since step 12: going back to step 8"):
        job.run(every_steps=4, epochs=2)
    job.trained.clear()
    assert job.run(every_steps=4, epochs=2) == 8 + 8
    assert job.trained[0] == [48, 49, 50, 51]


def test_a_run_can_go_back_again(tmp_path: Path) -> None:
    job = Diverges(tmp_path.as_uri(), 13, 17)
    for step in (4, 4):  # nothing is committed in between
        with pytest.raises(RollbackError, match=f"since step {step}: going back to step 3"):
            job.run()
    assert job.run() == 8


def test_a_checkpoint_with_nan_parameters_is_skipped(tmp_path: Path) -> None:
    job = Diverges(tmp_path.as_uri(), 13, poisons_at=9)  # the loss of step 3 is still a number
    with pytest.raises(RollbackError, match="since step 4: going back to step 2"):
        job.run()
    assert job.model.weight.isnan().all()
    assert job.run() == 2 + 6
    assert job.model.weight.isfinite().all()


def test_a_loss_that_has_become_finite_again_is_ignored(tmp_path: Path) -> None:
    assert Diverges(tmp_path.as_uri(), 13).run(every_steps=5) == 10


def test_a_loss_at_the_last_step_counts(tmp_path: Path) -> None:
    job = Diverges(tmp_path.as_uri(), 39)
    with pytest.raises(RollbackError, match="since step 10: going back to step 8"):
        job.run(every_steps=8)
    assert job.run(every_steps=8) == 8


def test_without_an_earlier_checkpoint_the_job_fails(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match="since step 1, and there is no checkpoint from before that"):
        Diverges(tmp_path.as_uri(), 0).run()
    with pytest.raises(NotFiniteError, match="without a storage there is no checkpoint to go back to"):
        Diverges("", 0).run()


def test_the_number_of_rollbacks_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "MOST_ROLLBACKS", 1)
    job = Diverges(tmp_path.as_uri(), 13, 25)
    with pytest.raises(RollbackError):
        job.run()
    with pytest.raises(NotFiniteError, match="since step 6, and this run has gone back 1 times already"):
        job.run()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_users_that_cannot_skip_batches_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    loader = StatefulDataLoader(Numbers(8))
    with pytest.raises(TrainError, match=r"ELASTICCTL_ON_NAN=rollback: a data loader .*so no batches can be skipped"):
        Run(tmp_path.as_uri(), model=model, loader=loader)


def test_a_missing_checkpoint_is_not_taken_for_a_start_at_step_0(tmp_path: Path) -> None:
    job = Diverges(tmp_path.as_uri(), 13)
    with pytest.raises(RollbackError):
        job.run()
    storage = LocalStorage(tmp_path)
    for commit in list(read_commits(storage)):
        storage.delete([f"journal/{999_999_999_999 - commit.position:012d}.json"])
        storage.delete([f"{commit.folder}committed"])
        storage.delete([ref.key for ref in commit.shares])
    with pytest.raises(StorageError, match=r"the checkpoints from before step 4 are gone"):
        job.run()


def test_a_note_survives_its_encoding_and_invalid_ones_are_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run_records.write_rollback(storage, NOTE)
    run_records.write_rollback(storage, replace(NOTE, generation=4))
    assert run_records.read_rollbacks(storage) == [NOTE, replace(NOTE, generation=4)]
    for bad in (b"", b"[]", b'{"generation": "3"}', b"[" * 100_000):
        storage.put("rollbacks/000000000005.json", [bad])
        with pytest.raises(DamagedError, match=r"rollbacks/000000000005\.json: this is not a valid rollback note"):
            run_records.read_rollbacks(storage)


@pytest.mark.parametrize(
    ("changes", "allowed", "past"),
    [
        ({}, True, False),
        ({"step": 81}, False, False),
        ({"not_finite": ("model/weight",)}, False, False),
        ({"generation": 4, "step": 90, "not_finite": ("model/weight",)}, True, True),
    ],
)
def test_which_checkpoints_a_note_allows(changes: dict[str, object], allowed: bool, past: bool) -> None:
    commit = Commit(9, 3, 2, 80, 1, (ObjectRef("data/x/y", 0, "crc32:00000000"),), 0)
    commit = replace(commit, **changes)  # type: ignore[arg-type]
    assert (NOTE.allows(commit), NOTE.is_past(commit)) == (allowed, past)
