"""A run calls nothing but its strategy's interface: a new strategy needs no change to `Run`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy
from elasticctl_train import run as run_module
from elasticctl_train.data.sample_order import Cursor, Step
from elasticctl_train.dist import GroupOver, World
from elasticctl_train.strategies import RestartRanks
from tests.support.train.programs import Numbers, NumberStream

BATCH = 4


class Repeating(RestartRanks):
    """A third strategy: some steps are lost, and some groups end after a step, in one process."""

    stays = True

    def __init__(self, lost: Collection[int] = (), ended: Collection[int] = ()) -> None:
        super().__init__(World(), "")
        self.lost_calls, self.ended_calls = lost, ended
        self.step_calls = self.completed = 0
        self.repeated: list[Step | None] = []
        self.replaced = ""

    @property
    def is_lost(self) -> bool:  # type: ignore[override]
        self.step_calls += 1
        return self.step_calls in self.lost_calls

    def complete(self, work: Callable[[], None]) -> bool:
        self.completed += 1
        try:
            work()
        except GroupOver:
            return False
        return self.completed not in self.ended_calls

    def enter_next(self, lost: Step | None, cursor: Cursor, state: Callable[[], Mapping[str, Any]]) -> None:
        self.repeated.append(lost)
        assert state()["run"]["cursor"]["step"] == cursor.step

    def return_to_held(self) -> None:
        pass

    def replace(self, why: str) -> None:
        self.replaced = why
        raise SystemExit(why)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Repeating], Repeating]:
    def choose(strategy: Repeating) -> Repeating:
        monkeypatch.setattr(run_module, "choose_strategy", lambda *args, **options: strategy)
        return strategy

    return choose


def train(url: str | None = None, take: Callable[[Any], Iterator[Any]] = iter) -> tuple[Run, list[Any]]:
    """Train on 24 numbers; returns the run, and the batches of the steps that counted."""
    model = torch.nn.Linear(1, 1)
    counted = []
    save = SavePolicy(every_s=10_000.0)
    with Run(url, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save=save) as run:
        for epoch in run.epochs(2):
            for batch in take(run.loader(Numbers(24), global_batch=BATCH)):
                before = run.steps_done
                run.step()
                if run.steps_done > before:
                    counted.append((epoch, batch.tolist()))
    return run, counted


def by_length(loader: Any) -> Iterator[Any]:
    """Take as many batches as the loader has reported, like scripts that count."""
    batches = iter(loader)
    for _ in range(len(loader)):
        yield next(batches)


EVERY_BATCH = [(epoch, list(range(first, first + BATCH))) for epoch in (0, 1) for first in range(0, 24, BATCH)]


@pytest.mark.parametrize("take", [iter, by_length])
def test_the_batches_of_a_lost_step_are_repeated_and_counted_once(
    chosen: Callable[[Repeating], Repeating], take: Callable[[Any], Iterator[Any]]
) -> None:
    strategy = chosen(Repeating(lost={2, 5, 6}))
    run, counted = train(take=take)
    assert counted == EVERY_BATCH
    assert run.steps_done == 12
    assert [(step.samples, step.batches) for step in strategy.repeated if step] == [(BATCH, 1)] * 3


def test_a_step_that_was_made_before_the_group_ended_counts(chosen: Callable[[Repeating], Repeating]) -> None:
    strategy = chosen(Repeating(ended={3, 12}))
    run, counted = train()
    assert counted == EVERY_BATCH
    assert strategy.repeated == [None, None]
    assert run.world_size == 1


def test_ranks_that_have_agreed_to_restart_save_first(chosen: Callable[[Repeating], Repeating], tmp_path: Path) -> None:
    strategy = chosen(Repeating(ended={3}))
    strategy.enter_next = lambda *_: setattr(strategy, "must_restart", True)  # type: ignore[assignment,method-assign]
    with pytest.raises(SystemExit):
        train(str(tmp_path))
    assert "all ranks restart from step 3" in strategy.replaced
    assert next(read_commits(LocalStorage(tmp_path))).step == 3


def test_a_stream_is_left_to_a_restart(
    chosen: Callable[[Repeating], Repeating], caplog: pytest.LogCaptureFixture
) -> None:
    chosen(Repeating(lost=range(100)))
    model = torch.nn.Linear(1, 1)
    with Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as run:
        for _ in run.epochs(1):
            for _ in run.loader(NumberStream(24), global_batch=BATCH):
                run.step()
    assert run.steps_done == 6, "no step is repeated any more"
    assert caplog.text.count("ranks restart when the group changes, because a stream cannot be redistributed") == 1
