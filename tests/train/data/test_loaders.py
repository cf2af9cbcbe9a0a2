"""Loaders over map-style datasets: the sampler, the loader for other frameworks, and torchdata's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticctl_store.errors import DataError, RestoreError
from elasticctl_train import Run, SavePolicy
from elasticctl_train.data import loaders
from elasticctl_train.data.loaders import ElasticDataLoader, ElasticLoader, ElasticSampler
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed
from tests.support.train.programs import Numbers

TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
"""A warning of torchdata 0.11 with torch 2.13."""


def loader(length: int = 40, position: int = 0, feed: Feed | None = None, **options: Any) -> ElasticLoader:
    def where() -> Cursor:
        return Cursor(position=position)

    return loaders.make_loader(Numbers(length), EpochPlan(length, 8), feed or Feed(), where, where, options)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_workers_prefetch_are_not_counted(workers: int) -> None:
    feed = Feed()
    batches = iter(loader(feed=feed, num_workers=workers))
    assert feed.drop_pending() == 0
    assert next(batches).tolist() == list(range(8))
    assert next(batches).tolist() == list(range(8, 16))
    assert feed.drop_pending() == 16
    assert feed.drop_pending() == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_continues_from_the_position(workers: int) -> None:
    rest = loader(length=30, position=16, num_workers=workers)
    assert len(rest) == 2
    assert [batch.tolist() for batch in rest] == [list(range(16, 24)), list(range(24, 30))]
    assert list(loader(position=40)) == []


def test_the_length_before_a_pass_is_the_number_of_remaining_batches() -> None:
    """The loader is created before the loop over epochs, by a rank that has joined in the middle of one."""
    place = [Cursor(position=16)]
    feed = Feed()
    feed.begin_epoch()
    feed.adopt_repeated(1)
    batches = loaders.make_loader(Numbers(40), EpochPlan(40, 8), feed, lambda: place[0], lambda: place[0], {})
    assert len(batches) == 2, "ranks that have repeated a batch end after two more if they count batches"
    passed = iter(batches)
    next(passed)
    assert len(batches) == 3, "after that, the real number of remaining batches"
    place[0] = Cursor(position=32)
    feed.begin_rest()
    feed.begin_epoch()
    assert len(batches) == 1, "the epoch starts again"
    place[0] = Cursor(epoch=1)
    feed.begin_epoch()
    assert len(batches) == 5
    feed.adopt_repeated(6)
    assert len(batches) == 5, "a loop that continues after the repeated batches does not count them"


def test_the_length_includes_repeated_batches() -> None:
    """For scripts that make a step every few batches and at the end of the epoch."""
    feed, place = Feed(), [Cursor()]
    batches = loaders.make_loader(Numbers(40), EpochPlan(40, 8), feed, lambda: place[0], lambda: place[0], {})
    assert len(batches) == 5
    seen = []
    for number, batch in enumerate(batches):
        seen.append(batch.tolist()[0])
        if number == 2:  # these two batches are lost with their group
            place[0] = Cursor(position=8)
            feed.move(0, 1)
        is_last = number + 1 == len(batches)
        assert is_last == (number == 6)
    assert seen == [0, 8, 16, 8, 16, 24, 32]
    place[0] = Cursor(epoch=1)
    assert len([len(batches) for _ in batches]) == len(batches) == 5


@pytest.mark.parametrize("name", ["batch_size", "sampler", "batch_sampler"])
def test_options_that_would_change_batches_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"{name}=4: run.loader forms the batches"):
        loader(**{name: 4})


class Pids(Numbers):
    """Yields the process that fetched the sample."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_ignore_sigterm_and_call_the_scripts_worker_init_fn(capfd: pytest.CaptureFixture[str]) -> None:
    plan = EpochPlan(400, 8)
    options = {"num_workers": 2, "worker_init_fn": lambda worker: os.write(1, f"worker {worker}\n".encode())}
    batches = iter(loaders.make_loader(Pids(400), plan, Feed(), Cursor, Cursor, options))
    pids = set(next(batches).tolist()) | set(next(batches).tolist())
    assert os.getpid() not in pids
    subprocess.run(["sh", "-c", 'kill -TERM "$@"', "sh", *map(str, pids)], check=True)  # not by their parent
    assert len(list(batches)) == 48
    assert set(capfd.readouterr().out.split("\n")) == {"worker 0", "worker 1", ""}


class Stuck(Numbers):
    """Yields the process that fetched the sample, and hangs before the second batch."""

    def __getitem__(self, index: int) -> int:
        if index >= 8:
            time.sleep(1000)
        return os.getpid()


def test_a_rank_can_end_while_its_workers_are_stuck() -> None:
    """multiprocessing terminates what is left at the end of the interpreter, and then waits for it without a limit."""
    batches = iter(loaders.make_loader(Stuck(400), EpochPlan(400, 8), Feed(), Cursor, Cursor, {"num_workers": 1}))
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    with suppress(RuntimeError):  # raised by torch's handler of SIGCHLD if it runs before the worker is reaped
        worker.join(240)
    worker.join(240)
    assert worker.exitcode == 128 + signal.SIGTERM


def test_a_loader_does_not_use_the_scripts_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    for _ in loader():
        pass
    assert torch.rand(1) == expected


def test_a_dataset_that_cannot_be_indexed_is_refused() -> None:
    with pytest.raises(DataError, match=r"object: .*__len__ and __getitem__"):
        loaders.length_of(object())


# The sampler alone, under a DataLoader of the script's own.


def epoch_of(samplers: list[ElasticSampler], batches: int, options: dict[str, Any]) -> list[int]:
    """Train on up to so many of the remaining global batches on all ranks; return the samples."""
    seen: list[int] = []
    iterators = [iter(DataLoader(Numbers(45), batch_sampler=sampler, **options)) for sampler in samplers]
    for _ in range(batches):
        slices = [next(iterator, None) for iterator in iterators]
        if slices[0] is None:
            break
        for sampler, part in zip(samplers, slices, strict=True):
            assert part is not None
            seen += part[: sampler.own_samples].tolist()
            sampler.advance()
    return seen


def samplers(world_size: int, state: dict[str, Any] | None, **plan: Any) -> list[ElasticSampler]:
    made = [ElasticSampler(EpochPlan(45, 8, **plan), rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_continues_at_any_world_size(workers: int) -> None:
    seen, state = [], None
    for world_size, batches in [(2, 1), (1, 2), (3, 1), (2, 10)]:
        made = samplers(world_size, state, shuffle=True, seed=3)
        seen += epoch_of(made, batches, {"num_workers": workers})
        states = [sampler.state_dict() for sampler in made]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert sorted(seen) == list(range(45))
    assert state == {"epoch": 1, "position": 0, "length": 45, "shuffle": True, "seed": 3}
    assert seen == epoch_of(samplers(1, None, shuffle=True, seed=3), 10, {}), "in the order of one rank"


def test_after_the_last_batch_the_next_epoch_begins() -> None:
    (sampler,) = samplers(1, None, shuffle=True)
    first = epoch_of([sampler], 99, {})
    assert (sampler.epoch, len(sampler)) == (1, 6)
    (resumed,) = samplers(1, sampler.state_dict(), shuffle=True)
    second = epoch_of([resumed], 99, {})
    assert sorted(first) == sorted(second) == list(range(45))
    assert first != second
    assert resumed.epoch == 2


def test_setting_the_current_epoch_changes_nothing() -> None:
    (sampler,) = samplers(1, None)
    sampler.advance()
    sampler.set_epoch(0)
    assert sampler.state_dict()["position"] == 8
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.state_dict()["position"]) == (4, 0)


def test_a_position_in_other_data_is_refused() -> None:
    (sampler,) = samplers(1, None)
    sampler.advance()
    other = ElasticSampler(EpochPlan(44, 8))
    with pytest.raises(DataError, match="epoch 0 was begun with samples=45 and cannot be continued with samples=44"):
        other.load_state_dict(sampler.state_dict())
    with pytest.raises(DataError, match="makes no batch out of 3"):
        ElasticSampler(EpochPlan(3, 8, drop_last=True))


def test_a_sampler_takes_its_rank_from_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert next(iter(ElasticSampler(EpochPlan(45, 9)))) == [6, 7, 8]


# The loader for frameworks that own the loop.


def whole(**options: Any) -> ElasticDataLoader:
    return ElasticDataLoader(Numbers(45), global_batch=8, shuffle=True, seed=5, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 2, 6])
def test_a_loader_with_a_state_continues_after_the_last_batch(workers: int, done: int) -> None:
    undisturbed = whole()
    expected = [batch.tolist() for _ in range(2) for batch in undisturbed]
    loader = whole(num_workers=workers)
    begun = iter(loader)
    seen = [next(begun).tolist() for _ in range(done)]
    assert seen == expected[:done]
    resumed = whole(num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict() == loader.state_dict()
    assert len(resumed) == 6
    rest = [batch.tolist() for _ in range(2 - done // 6) for batch in resumed]
    assert seen + rest == expected


def test_an_epoch_that_is_set_after_iter_counts() -> None:
    """Frameworks create the iterator first and set the epoch afterwards."""
    loader = whole()
    iterator = iter(loader)
    loader.set_epoch(1)
    both = whole()
    epochs = [[batch.tolist() for batch in both] for _ in range(2)]
    assert [batch.tolist() for batch in iterator] == epochs[1] != epochs[0]


def test_the_weight_is_that_of_the_newest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = ElasticDataLoader(Numbers(17), global_batch=8)
    weights = [loader.scale_loss(torch.tensor(1.0)).item() for _ in loader]
    assert weights == pytest.approx([3 * 3 / 8, 3 * 3 / 8, 3.0])


# torchdata's, as a part of a run's state.


def read(url: str, steps: int, epochs: int = 2, workers: int = 0, **others: Any) -> list[tuple[int, list[int]]]:
    """Read so many batches in steps that are saved; return each with its epoch."""
    seen: list[tuple[int, list[int]]] = []
    torch.manual_seed(0)
    batches = StatefulDataLoader(Numbers(20), batch_size=4, shuffle=True, num_workers=workers)
    run = Run(url, model=torch.nn.Linear(1, 1), save=SavePolicy(every_steps=1), batches=batches, **others)
    for epoch in run.epochs(epochs):
        for batch in batches:
            seen.append((epoch, batch.tolist()))
            run.step()
            if len(seen) == steps:
                run.finish()
                return seen
    run.finish()
    return seen


@TORCHDATA
@pytest.mark.parametrize(("workers", "steps"), [(0, 3), (2, 3), (0, 5)])
def test_a_stateful_data_loader_continues_where_it_was(tmp_path: Path, workers: int, steps: int) -> None:
    expected = read(str(tmp_path / "whole"), 99, workers=workers)
    first = read(str(tmp_path / "parts"), steps, workers=workers)
    assert first == expected[:steps]
    rest = read(str(tmp_path / "parts"), 99, workers=workers)
    for epoch in range(2):
        assert sorted(n for e, batch in first + rest if e == epoch for n in batch) == list(range(20))


@TORCHDATA
def test_at_another_world_size_it_starts_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader = StatefulDataLoader(Numbers(20), batch_size=4)
    loaders.restore({"batches": loader}, {"loaders": {}}, 2, 3)
    assert caplog.messages == ["batches: the positions were saved on 2 ranks and cannot be used on 3: starting over"]
    with pytest.raises(RestoreError, match="the checkpoint has no 'batches'"):
        loaders.restore({"batches": loader}, {"loaders": {}}, 3, 3)


def test_a_loader_without_a_position_is_not_a_part() -> None:
    with pytest.raises(DataError, match=r"batches: a DataLoader cannot save its position. FIX: use run\.loader"):
        Run(model=torch.nn.Linear(1, 1), batches=DataLoader(Numbers(3)))  # type: ignore[arg-type]
