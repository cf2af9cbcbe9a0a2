"""The position in the data: every sample of an epoch once, although the world size changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_store.errors import DataError
from elasticctl_train.data import sample_order as data
from elasticctl_train.data.loaders import ElasticSampler
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed, slice_of

plans = st.builds(
    EpochPlan,
    st.integers(1, 200),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 3),
    st.booleans(),
).filter(lambda plan: plan.end > 0)


@given(plans, st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), max_size=6), st.integers(1, 7))
def test_every_sample_is_used_once_while_the_world_size_changes(
    plan: EpochPlan, changes: list[tuple[int, int]], last_world_size: int
) -> None:
    position, seen, batches = 0, Counter[int](), []
    for world_size, steps in [*changes, (last_world_size, 1000)]:
        samplers = [
            ElasticSampler(plan, rank=rank, world_size=world_size, position=position) for rank in range(world_size)
        ]
        for global_batch, slices in list(zip(plan.batches(position), zip(*samplers, strict=True), strict=True))[:steps]:
            own = [s[: len(slice_of(global_batch, rank, world_size))] for rank, s in enumerate(slices)]
            batch = [number for part in own for number in part]
            assert max(map(len, own)) - min(map(len, own)) <= 1
            assert all(slices)
            seen.update(batch)
            batches.append(batch)
            position += len(batch)
    assert position == plan.end
    assert batches == [b[0] for b in (list(ElasticSampler(plan)),) for b in zip(b, strict=True)]
    assert all(count == 1 for count in seen.values())
    assert len(seen) == plan.end


@given(plans, st.integers(1, 7))
def test_weights_turn_the_mean_over_ranks_into_the_mean_of_the_batch(plan: EpochPlan, world_size: int) -> None:
    for batch in plan.batches(0):
        means, weights = [], []
        for rank in range(world_size):
            feed = Feed(rank, world_size)
            feed.hand_over(batch)
            own = slice_of(batch, rank, world_size) or range(batch.start, batch.start + 1)
            means.append(sum(own) / len(own))
            weights.append(feed.weight)
        over_ranks = sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / world_size
        assert over_ranks == pytest.approx(sum(batch) / len(batch))


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    orders = {
        (seed, epoch): tuple(int(i) for i in EpochPlan(50, 8, True, seed, epoch).order())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    torch.manual_seed(99)
    assert tuple(int(i) for i in EpochPlan(50, 7, True, 2, 1).order()) == orders[2, 1]


@pytest.mark.parametrize("plan", [EpochPlan(0, 8), EpochPlan(5, 8, drop_last=True), EpochPlan(5, 0), EpochPlan(5, -1)])
def test_a_plan_without_a_batch_is_refused(plan: EpochPlan) -> None:
    with pytest.raises(DataError, match=f"global_batch={plan.global_batch} makes no batch out of {plan.length}"):
        data.check(plan, Cursor())


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (EpochPlan(99, 8, True, 7), "samples=100 and cannot be continued with samples=99"),
        (EpochPlan(100, 8, False, 7), "shuffle=True"),
        (EpochPlan(100, 8, True, 8), "seed=7"),
    ],
)
def test_a_started_epoch_needs_the_same_data(plan: EpochPlan, said: str) -> None:
    begun = Cursor(step=5, epoch=2, position=40, length=100, shuffle=True, seed=7)
    with pytest.raises(DataError, match=f"epoch 2 was begun with .*{said}"):
        data.check(plan, begun)
    data.check(plan, begun.next_epoch())
    data.check(EpochPlan(100, 16, True, 7), begun)


def test_a_step_of_fewer_batches_than_others_is_detected() -> None:
    feed = Feed()
    steps = []
    for batches in (3, 3, 2, 1, 3):
        for _ in range(batches):
            feed.hand_over(range(8))
        taken = feed.take_step()
        assert taken.batches == batches
        steps.append((taken.samples, taken.torn))
    assert steps == [(24, True), (24, False), (16, True), (8, False), (24, False)], "it is unknown for the first one"


def test_the_first_batch_of_a_pass_is_distinguished_from_that_of_another_step() -> None:
    begun = list[bool]()
    feed = Feed(before_step=begun.append)
    for _ in range(2):
        for number, _ in enumerate(feed.watch_fetches(lambda: range(4))):
            feed.hand_over(range(8))
            if number % 2:
                feed.drop_pending()
    assert begun == [True, False, False] * 2, "and the end of the pass"
