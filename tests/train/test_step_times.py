"""How a rank sums up where the time of its steps goes."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from elasticctl_protocol.reports import StepSums
from elasticctl_train import Run, SavePolicy
from elasticctl_train.data import sample_order
from elasticctl_train.step_times import REPORT_EVERY_S, TimeSums

FETCH_S = 0.02


class Clock:
    """A clock that samples and passes advance."""

    now_s = 100.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now_s


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        Clock.now_s += FETCH_S
        return torch.ones(2)


class SlowStream(IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        for _ in range(6):
            Clock.now_s += FETCH_S
            yield torch.ones(2)


def test_sums_are_reported_twice_a_second_from_the_first_step_on() -> None:
    waits_s: list[float | None] = [None]
    times = TimeSums(lambda: waits_s[0])
    times.add_data(5.0)
    times.save_s = 3.0
    assert times.due_report(100.0) is None
    times.add_data(0.5)
    assert times.due_report(101.0) == StepSums(wall=1.0, data=0.5, save=0.0)
    assert times.due_report(101.0 + REPORT_EVERY_S / 2) is None
    waits_s[0] = 0.25
    assert times.due_report(102.0) == StepSums(wall=2.0, data=0.5, all_reduce=0.25, save=0.0)
    times.restart()
    assert times.due_report(110.0) is None
    assert times.due_report(111.0) == StepSums(wall=1.0, data=0.0, all_reduce=0.0, save=0.0)


def test_unknown_times_are_not_reported() -> None:
    times = TimeSums()
    times.due_report(1.0)
    assert times.due_report(2.0) == StepSums(wall=1.0, save=0.0)


def test_a_save_is_timed_even_if_it_fails() -> None:
    times = TimeSums()
    with suppress(ValueError), times.saving():
        time.sleep(0.01)
        raise ValueError("full")
    assert times.save_s >= 0.01


@pytest.mark.parametrize("dataset", [Slow(), SlowStream()], ids=["indexed", "stream"])
def test_only_the_time_in_the_loader_counts_as_data(
    dataset: Dataset[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_order, "time", Clock)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(model=model, optimizer=optimizer, save=SavePolicy()) as run:
        times = run._session.progress.times
        for _ in run.epochs(1):
            for batch in run.loader(dataset, global_batch=2):
                run.model(batch).sum().backward()
                Clock.now_s += 3 * FETCH_S  # is computing
                optimizer.step()
                run.step()
        assert times.data_s == pytest.approx(6 * FETCH_S)
        assert run._strategy.reduce_waits_s() == 0.0
