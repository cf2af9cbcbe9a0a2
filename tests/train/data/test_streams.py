"""Iterable datasets: every sample of an epoch once, at any world size and with any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from elasticctl_store.errors import DataError, StateError
from elasticctl_train import Run, SavePolicy
from elasticctl_train.data import streams
from elasticctl_train.data.sample_order import Cursor, Feed, slice_of
from elasticctl_train.data.streams import StreamLoader, StreamPlan


class Stream(IterableDataset[int]):
    """0, 1, 2, …, shifted by the epoch; counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.reads = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.reads += 1
            yield number + 1000 * self.epoch


class Stateful(Stream):
    """Saves its position and continues there."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            self.reads += 1
            yield self.at - 1 + 1000 * self.epoch
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


def loader(dataset: Any, feed: Feed, plan: StreamPlan, **options: Any) -> StreamLoader:
    feed.restart_at(plan.mark)
    return streams.make_loader(dataset, plan, feed, lambda: Cursor(epoch=plan.epoch, position=plan.position), options)


@given(
    st.integers(0, 60),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=4),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60)
def test_every_sample_is_used_once_while_the_world_size_changes(
    length: int, global_batch: int, changes: list[tuple[int, int]], stateful: bool, drop_last: bool
) -> None:
    position, mark, seen = 0, None, list[int]()
    for world_size, steps in [*changes, (2, 1000)]:
        plan = StreamPlan(global_batch, 1, position, drop_last, mark)
        feeds = [Feed(rank, world_size) for rank in range(world_size)]
        made = [loader((Stateful if stateful else Stream)(length), feed, plan, collate_fn=list) for feed in feeds]
        for _, parts in zip(range(steps), zip(*made, strict=True), strict=False):
            assert all(parts), "a rank without a sample gets a stand-in"
            total = feeds[0].total
            for feed, part in zip(feeds, parts, strict=True):
                assert feed.own == len(slice_of(range(total), feed.rank, world_size))
                seen += part[: feed.own]
            assert sum(feed.own for feed in feeds) == total
            assert sum(feed.weight for feed in feeds) == pytest.approx(world_size)
            position, mark = position + total, feeds[-1].mark
    used = length - length % global_batch if drop_last else length
    assert sorted(seen) == [1000 + number for number in range(used)]


@pytest.mark.parametrize("dataset", [Stream(30), Stateful(30)])
def test_workers_do_not_change_batches_and_prefetched_ones_are_not_counted(dataset: Stream) -> None:
    feed = Feed(1, 2)
    alone = [batch.tolist() for batch in loader(dataset, Feed(1, 2), StreamPlan(8))]
    batches = iter(loader(dataset, feed, StreamPlan(8), num_workers=2))
    assert [next(batches).tolist() for _ in range(2)] == alone[:2]
    assert feed.drop_pending() == 16
    assert feed.mark == ({"at": 16} if isinstance(dataset, Stateful) else None)
    rest = loader(dataset, feed, StreamPlan(8, position=16, mark=feed.mark), num_workers=2)
    assert [batch.tolist() for batch in rest] == alone[2:]


def test_a_stream_with_a_state_is_not_read_again() -> None:
    dataset = Stateful(40)
    assert [n for batch in loader(dataset, Feed(), StreamPlan(8, position=32, mark={"at": 32})) for n in batch] == [
        *range(32, 40)
    ]
    assert dataset.reads == 8


def test_a_stream_that_has_become_shorter_is_refused() -> None:
    with pytest.raises(DataError, match="Stream ended at sample 10, but 16 have been trained on"):
        list(loader(Stream(10), Feed(), StreamPlan(8, position=16)))
    assert list(loader(Stream(16), Feed(), StreamPlan(8, position=16))) == []


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (StreamPlan(0), {}, "global_batch=0 makes no batch"),
        (StreamPlan(8), {"batch_size": 4}, "batch_size=4: run.loader forms the batches"),
    ],
)
def test_invalid_options_are_refused(plan: StreamPlan, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        loader(Stream(8), Feed(), plan, **options)


# In a run.


def read(url: str, dataset: Stream, stop_at: int = -1) -> list[int]:
    """Train on two epochs; return the samples that were read. `stop_at`: the process ends after this step."""
    seen: list[int] = []
    run = Run(url, model=torch.nn.Linear(1, 1), save=SavePolicy(every_steps=1))
    for _ in run.epochs(2):
        for batch in run.loader(dataset, global_batch=8):
            seen += batch.tolist()
            run.step()
            if run.steps_done == stop_at:
                run.finish()
                return seen
    run.finish()
    return seen


@pytest.mark.parametrize("kind", [Stream, Stateful])
@pytest.mark.parametrize("stop_at", [2, 4, 6])
def test_a_run_continues_in_the_middle_of_a_stream(tmp_path: Path, kind: type[Stream], stop_at: int) -> None:
    expected = [number + 1000 * epoch for epoch in range(2) for number in range(30)]
    assert read(str(tmp_path), kind(30), stop_at) + read(str(tmp_path), kind(30)) == expected


@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_a_batch_that_was_not_trained_on_is_repeated(tmp_path: Path, kind: type[Stream]) -> None:
    def read(run: Run, stop_at: int) -> list[int]:
        seen: list[int] = []
        for batch in run.loader(dataset, global_batch=8):
            if run.steps_done == stop_at:
                break
            seen += batch.tolist()
            run.step()
        return seen

    never = SavePolicy(every_steps=1000)
    dataset = kind(40)
    run = Run(str(tmp_path), model=torch.nn.Linear(1, 1), save=never)
    assert next(iter(run.loader(dataset, global_batch=8))).tolist() == list(range(8))  # only a look at the first batch
    first = read(run, 1) + read(run, 3)
    run.finish()
    dataset = kind(40)
    assert first + read(Run(str(tmp_path), model=torch.nn.Linear(1, 1), save=never), -1) == list(range(40))


@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_a_stream_loader_made_before_the_loop_follows_training(tmp_path: Path, kind: type[Stream]) -> None:
    def read(stop_at: int) -> list[int]:
        seen: list[int] = []
        with Run(str(tmp_path), model=torch.nn.Linear(1, 1), save=SavePolicy(every_steps=1000)) as run:
            loader = run.loader(kind(30), global_batch=8)
            for _ in run.epochs(3):
                for batch in loader:
                    seen += batch.tolist()
                    run.step()
                    if run.steps_done == stop_at:
                        return seen
        return seen

    assert read(6) + read(-1) == [number + 1000 * epoch for epoch in range(3) for number in range(30)]


def test_unsupported_uses_of_a_stream_are_refused(tmp_path: Path) -> None:
    run = Run(str(tmp_path), model=torch.nn.Linear(1, 1))
    with pytest.raises(DataError, match="Stream comes in an order of its own: give it a set_epoch"):
        run.loader(Stream(30), global_batch=8, shuffle=True)

    class Opaque(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    with pytest.raises(StateError, match=r"dataset/file: a checkpoint cannot hold a builtins\.object"):
        run.loader(Opaque(30), global_batch=8)
    for _ in run.loader(Stream(30), global_batch=8):
        run.step()
        break
    with pytest.raises(DataError, match="begun with samples=unknown and cannot be continued with samples=30"):
        run.loader(torch.arange(30), global_batch=8)  # type: ignore[arg-type]
