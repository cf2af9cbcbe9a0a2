"""`Run` in a single process, without torchrun's environment."""

from __future__ import annotations

import copy
import json
import logging
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import DataError, NotFiniteError, RestoreError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Checkpointer, Label, Run, SavePolicy, TrainError
from tests.support.train.programs import Numbers, NumberStream
from tests.support.train.states import same

EVERY_STEP = SavePolicy(every_steps=1)


class StopHere(Exception):
    """Stands for the end of the process."""


class Augmented(Dataset[torch.Tensor]):
    """Draws random numbers while it is read, as augmentations do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) + index


def test_a_script_that_exits_inside_the_block_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(1, 1)

    def exit_after(steps: int, code: int | None) -> None:
        save = SavePolicy(every_s=10_000.0)
        with Run(str(tmp_path), model=model, optimizer=torch.optim.SGD(model.parameters()), save=save) as run:
            for _ in range(steps):
                run.step()
            raise SystemExit(code)

    for steps, code in ((0, 0), (2, 1), (2, None)):
        assert "exits inside" not in caplog.text
        with pytest.raises(SystemExit):
            exit_after(steps, code)
    assert "after step 2; the last save is of step 0. FIX: to save the end, leave the block first" in caplog.text


def train(url: str | None, epochs: int = 3, stop_at: int = -1) -> tuple[dict[str, Any], list[int]]:
    """Train a network with dropout, saving every step; returns the final state and the epochs that were ended."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ended = []
    with Run(url, model=model, optimizer=optimizer, scheduler=scheduler, save=EVERY_STEP) as run:
        torch.rand(3)  # as set-up code may
        for epoch in run.epochs(epochs):
            for batch in run.loader(Augmented(), global_batch=6, shuffle=True):
                loss = run.model(batch).square().mean()
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                run.step(loss=loss)
                while run._session.busy:
                    time.sleep(0.001)  # on a slow disk, the next save would be skipped
                if run.steps_done == stop_at:
                    raise StopHere
            ended.append(epoch)
            scheduler.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict()}, ended


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return train(None)[0]


@pytest.mark.parametrize("stop_at", [1, 4, 5, 11])
def test_a_resumed_run_ends_exactly_as_an_uninterrupted_one(
    tmp_path: Path, undisturbed: dict[str, Any], stop_at: int
) -> None:
    with pytest.raises(StopHere):
        train(str(tmp_path), stop_at=stop_at)
    state, ended = train(str(tmp_path))
    assert same(state, undisturbed)
    assert ended == list(range((stop_at - 1) // 4, 3))  # an epoch whose end was not reached is ended now, even if empty


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    state, _ = train(str(tmp_path))
    again, ended = train(str(tmp_path))
    assert same(again, state)
    assert ended == []
    longer, ended = train(str(tmp_path), epochs=4)
    assert ended == [3]
    assert not same(longer, state)


def test_without_a_url_the_jobs_storage_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_STORAGE", (tmp_path / "job").as_uri())
    train(None, epochs=1)
    assert next(read_commits(LocalStorage(tmp_path / "job"))).step == 4


def test_without_any_url_a_message_says_that_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    train(None, epochs=1)
    assert [record.message for record in caplog.records] == [
        "no storage URL and no $ELASTICCTL_STORAGE: no checkpoints are saved"
    ]


def test_the_log_says_where_a_run_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="elasticctl_train"):
        train(str(tmp_path), epochs=1)
        train(str(tmp_path), epochs=1)
    assert caplog.messages == [
        f"no checkpoint at file://{tmp_path} yet: starting at step 0",
        f"resumed from step 4, epoch 1 (file://{tmp_path}, 1 -> 1 ranks)",
    ]


def test_everything_is_reported_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.setblocking(False)
        monkeypatch.setenv("ELASTICCTL_AGENT_SOCKET", str(tmp_path / "agent"))
        monkeypatch.setenv("ELASTICCTL_GENERATION", "2")
        with Run(str(tmp_path / "state"), model=torch.nn.Linear(1, 1)) as run:
            run.step(loss=0.5)
            run.log(accuracy=0.75)
        reports = []
        with suppress(BlockingIOError):
            while True:
                reports.append(json.loads(agent.recv(65536)))
    rows = [json.loads(row) for message in reports for row in message.get("rows", ())]
    values = [{name: row[name] for name in row if name != "at"} for row in rows]
    assert values == [{"step": 1, "loss": 0.5}, {"step": 1, "accuracy": 0.75}]
    reports = [message for message in reports if message["kind"] != "metrics"]
    assert [message["kind"] for message in reports] == [
        "resumed",
        "progress",
        "progress",
        "committed",
        "progress",
        "finished",
    ]
    assert all(message["rank"] == 0 and message["generation"] == 2 for message in reports)
    committed = reports[3]
    assert (committed["step"], committed["committed"]) == (1, 1)
    assert committed["url"] == (tmp_path / "state").as_uri()
    assert committed["size_bytes"] > 0
    assert reports[4]["metrics"] == {"loss": 0.5, "accuracy": 0.75}
    assert next(read_commits(LocalStorage(tmp_path / "state"))).metrics == {"loss": 0.5, "accuracy": 0.75}


def test_epochs_without_a_step_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script without `run.step()` trains, but would lose everything."""
    model = torch.nn.Linear(4, 1)
    said = "had batches but no run.step()"
    with Run(str(tmp_path), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        for epoch in run.epochs(4):
            for number, _ in enumerate(run.loader(Augmented(), global_batch=6)):
                if epoch == 0 and number == 1:
                    run.step()  # the rest of this epoch is the remainder of an accumulation
            assert caplog.text.count(said) == (epoch > 1)
    assert f"epoch 1 {said}" in caplog.text


@pytest.mark.parametrize("data", [Numbers(6), NumberStream(6)])
def test_loops_that_do_not_use_run_epochs_are_refused(data: Dataset[int]) -> None:
    """A script with its own loop over epochs would train only in the first one, and succeed."""
    with Run(model=torch.nn.Linear(1, 1)) as run:
        for _ in run.loader(data, global_batch=2):
            run.step()
        with pytest.raises(DataError, match=r"FIX: .*run\.epochs"):
            next(iter(run.loader(data, global_batch=2)))


def test_batches_fetched_ahead_of_their_steps_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """For example by a prefetcher of the script. Accumulated gradients are not affected."""
    said = "taken from run.loader ahead of their steps"
    with Run(model=torch.nn.Linear(1, 1)) as run:
        for epoch in run.epochs(3):
            for number, _ in enumerate(run.loader(Numbers(12), global_batch=2), 1):
                if number % (3 - epoch) == 0:
                    run.step()
        assert said not in caplog.text
    with Run(model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(2):
            batches = iter(run.loader(Numbers(12), global_batch=2))
            ahead = next(batches)
            while ahead is not None:
                ahead = next(batches, None)
                run.step()
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("goes_by_steps_done", [False, True])
def test_a_step_continues_while_gradients_accumulate(tmp_path: Path, goes_by_steps_done: bool) -> None:
    """A script that accumulates gradients may call run.step for each batch: a resume must not lose some of them."""
    seen: Counter[int] = Counter()
    for stop_at in (6, None):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Run(str(tmp_path), model=model, optimizer=optimizer, save=EVERY_STEP) as run:
            assert run.steps_done == (0 if stop_at else 6)
            for _ in run.epochs(1):
                for index, batch in enumerate(run.loader(Numbers(36), global_batch=3)):
                    seen.update(batch.tolist())
                    loss = run.model(batch[:, None].float()).sum()
                    loss.backward()
                    before = run.steps_done
                    if (before if goes_by_steps_done else index) % 3 == 2:
                        optimizer.step()
                        optimizer.zero_grad()
                    run.step(loss=loss)
                    assert run.steps_done == before + 1
                    if run.steps_done == stop_at:
                        break
                if stop_at:
                    break
    assert seen == Counter(range(36))
    assert run.steps_done == 12


def test_a_resume_repeats_a_step_whose_gradients_were_not_used(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    for stop_at in (5, None):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with suppress(KeyboardInterrupt), Run(str(tmp_path), model=model, optimizer=optimizer, save=EVERY_STEP) as run:
            seen.append([])
            for _ in run.epochs(1):
                for batch in run.loader(Numbers(12), global_batch=2):
                    seen[-1] += batch.tolist()
                    run.model(batch[:, None].float()).sum().backward()
                    if run.steps_done % 3 == 2:
                        optimizer.step()
                        optimizer.zero_grad()
                    run.step()
                    if run.steps_done == stop_at:
                        raise KeyboardInterrupt
    assert seen == [[*range(10)], [*range(6, 12)]]


def test_steps_of_optimizers_outside_of_the_run_are_counted(tmp_path: Path) -> None:
    """The script has replaced the optimizer that it passed to the run."""
    model = torch.nn.Linear(1, 1)
    with Run(str(tmp_path), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in run.epochs(1):
            for batch in run.loader(Numbers(12), global_batch=2):
                optimizer.zero_grad()
                run.model(batch[:, None].float()).sum().backward()
                optimizer.step()
                run.step()
    assert run.steps_done == 6


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_at", [3, 4, 6])
def test_a_loader_made_before_the_loop_follows_training(tmp_path: Path, stop_at: int, workers: int) -> None:
    def read(url: str | None, stop_at: int, inside: bool) -> list[tuple[int, list[int]]]:
        seen: list[tuple[int, list[int]]] = []
        run = Run(url, model=torch.nn.Linear(1, 1), save=SavePolicy(every_steps=1000))
        with run:
            loader = run.loader(Numbers(30), global_batch=8, shuffle=True, num_workers=workers)
            for epoch in run.epochs(3):
                for batch in run.loader(Numbers(30), global_batch=8, shuffle=True) if inside else loader:
                    seen.append((epoch, batch.tolist()))
                    run.step()
                    if run.steps_done == stop_at:
                        return seen
            assert len(loader) == 4
        return seen

    found = read(str(tmp_path), stop_at, inside=False) + read(str(tmp_path), -1, inside=False)
    assert found == read(None, -1, inside=True)
    assert len({tuple(batch) for _, batch in found}) == 12, "each epoch is shuffled again"


def train_with_all(url: str, steps: int) -> tuple[int, list[Any], list[Any]]:
    """Train with everything that a loop may have; return the step it resumed from, and the states then and at the end.

    One step more is counted, in which the optimizer does nothing: in its first run it has no state even then.
    """
    torch.manual_seed(steps)
    lr = torch.optim.lr_scheduler
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    ema = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    warm_up, cosine = lr.LinearLR(optimizer, total_iters=3), lr.CosineAnnealingLR(optimizer, 10)
    scheduler = lr.SequentialLR(optimizer, [warm_up, cosine], [3])
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)  # type: ignore[attr-defined]
    found: list[Any] = [model, ema, optimizer, scheduler, scaler]
    run = Run(url, model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, scaler=scaler)
    with run:
        done, before = run.steps_done, [dict(copy.deepcopy(part.state_dict())) for part in found]
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(run.model(torch.randn(4, 2)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            ema.update_parameters(model)
            run.step()
        run.step()
    return done, before, [dict(part.state_dict()) for part in found]


def test_all_parts_of_a_loop_are_restored(tmp_path: Path) -> None:
    _, _, left = train_with_all(str(tmp_path), 0)
    for steps, resumed in ((2, 1), (5, 4), (1, 10)):
        done, found, ended = train_with_all(str(tmp_path), steps)
        assert done == resumed
        assert same(found, left)
        left = ended


def test_a_checkpoint_of_something_else_is_refused_with_a_fix(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    kept = Checkpointer(LocalStorage(tmp_path))
    kept.save({"model": model.state_dict()}, Label(1))
    assert kept.settle()
    with pytest.raises(RestoreError, match="something other than Run saved it"):
        Run(str(tmp_path), model=model)


def test_a_failed_save_is_reported_until_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "agent"))
        listening.settimeout(240)
        monkeypatch.setenv("ELASTICCTL_AGENT_SOCKET", listening.getsockname())

        def unsaved() -> str:
            messages = (json.loads(listening.recv(65536)) for _ in range(1000))
            return next(str(message["reason"]) for message in messages if message["kind"] == "unsaved")

        with Run(str(state), model=torch.nn.Linear(1, 1), save=EVERY_STEP) as run:
            (state / "data").write_text("in the way")
            run.step()
            assert "cannot write" in unsaved()
            (state / "data").unlink()
            while run._session.busy:
                time.sleep(0.001)
            run.step()
            assert unsaved() == ""


def diverge(url: str, at: int = 4) -> None:
    """Train until the end, with a loss that is NaN from step `at` on; every step is to be saved."""
    model = torch.nn.Linear(1, 1)
    with Run(url, model=model, optimizer=torch.optim.SGD(model.parameters()), save=EVERY_STEP) as run:
        for _ in run.epochs(1):
            for _ in run.loader(Numbers(40), global_batch=4):
                run.step(loss=float("nan") if run.steps_done >= at - 1 else 1.0)
                while run._session.busy:
                    time.sleep(0.001)


def test_a_nan_loss_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="elasticctl_train"):
        diverge(tmp_path.as_uri())
    assert [text for text in caplog.messages if "NaN" in text] == ["the loss is NaN since step 4"]
    assert next(iter(read_commits(LocalStorage(str(tmp_path))))).step == 10


def test_a_nan_loss_ends_a_job_that_is_configured_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_ON_NAN", "stop")
    with pytest.raises(NotFiniteError, match="the loss is NaN since step 4, and the job is configured to stop then"):
        diverge(tmp_path.as_uri())
    assert next(iter(read_commits(LocalStorage(str(tmp_path))))).step == 3


def test_a_checkpoint_lists_parameters_that_are_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model.register_buffer("mask", torch.full((2, 2), float("-inf")))  # as attention has them
    with Run(str(tmp_path), model=model, save=EVERY_STEP) as run:
        for bad in (None, float("nan"), float("inf")):
            if bad is not None:
                model[1].weight.data.fill_(bad)
            run.step()
            while run._session.busy:
                time.sleep(0.001)
    found = {commit.step: commit.not_finite for commit in read_commits(LocalStorage(str(tmp_path)))}
    assert found == {1: (), 2: ("model/1.weight",), 3: ("model/1.weight",)}
    assert "the checkpoint of step 2 has parameters that are NaN or infinite: model/1.weight" in caplog.text


def test_an_unknown_choice_for_nan_losses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_ON_NAN", "explode")
    with pytest.raises(
        TrainError, match=r"ELASTICCTL_ON_NAN=explode is invalid\. FIX: set it to warn, stop or rollback"
    ):
        diverge(tmp_path.as_uri())


def test_a_second_finish_does_nothing(tmp_path: Path) -> None:
    with Run(str(tmp_path), model=torch.nn.Linear(1, 1)) as run:
        run.step()
        run.finish()
    run.finish()
    assert len(list(read_commits(LocalStorage(tmp_path)))) == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with Run(str(tmp_path), model=torch.nn.Linear(1, 1)) as run:
        run.step()
    said = "step 1: the checkpoint does not fit this model: 2 are of another shape: "
    with pytest.raises(RestoreError, match=said):
        Run(str(tmp_path), model=torch.nn.Linear(2, 2))
    assert len(list(read_commits(LocalStorage(tmp_path)))) == 1


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_resume_chooses_what_a_changed_run_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    saved = torch.nn.Linear(1, 1)
    with Run(str(tmp_path), model=saved, ema=torch.nn.Linear(1, 1)) as run:
        run.step()
    model = torch.nn.Linear(1, 1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RestoreError, match=r"also holds 'ema'.* set Run\(…, resume=…\) or \$ELASTICCTL_RESUME: "):
        Run(str(tmp_path), model=model)
    assert same(dict(model.state_dict()), dict(before))
    if by == "variable":
        monkeypatch.setenv("ELASTICCTL_RESUME", "model-only")
    with Run(str(tmp_path), model=model, resume="ignore" if by == "argument" else None) as run:
        assert run.steps_done == 1
        run.step()
    assert same(dict(model.state_dict()), dict(saved.state_dict()))
    assert "although it does not fit this run: the checkpoint also holds 'ema'" in caplog.text
    monkeypatch.delenv("ELASTICCTL_RESUME", raising=False)
    assert Run(str(tmp_path), model=torch.nn.Linear(1, 1)).steps_done == 2  # what was saved since then fits


def test_an_invalid_choice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_RESUME", "all")
    with pytest.raises(TrainError, match="give one of strict, ignore, model-only"):
        Run(str(tmp_path), model=torch.nn.Linear(1, 1))
    assert list(tmp_path.iterdir()) == []


def test_a_part_cannot_take_the_runs_own_name(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="this name is taken"):
        Run(str(tmp_path), model=torch.nn.Linear(1, 1), run=torch.nn.Linear(1, 1))


def test_other_data_in_the_middle_of_an_epoch_is_refused(tmp_path: Path) -> None:
    with Run(str(tmp_path), model=torch.nn.Linear(1, 1), save=EVERY_STEP) as run:
        for _ in run.epochs(1):
            for _ in run.loader(Numbers(30), global_batch=10):
                run.step()
                break
            break
    run = Run(str(tmp_path), model=torch.nn.Linear(1, 1))
    with pytest.raises(DataError, match="begun with samples=30"):
        run.loader(Numbers(31), global_batch=10)
