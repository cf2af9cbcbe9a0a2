"""What is detected of a script's loop: its own counts, its collectives, and state that is not passed to the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from elasticctl_train import Run
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed
from elasticctl_train.inplace.atomic_steps import LastStep
from elasticctl_train.script_loop import CollectiveCount, ScriptLoop, StepCount, UnsavedState


class Net(torch.nn.Linear):
    """A class of models that no other test uses."""


class Holder:
    """A script's own class around schedulers or averages."""

    def __init__(self, *held: object) -> None:
        self.held = list(held)


class Wrapper(torch.nn.Module):
    """A module around an average, as in libraries."""

    def __init__(self, average: torch.nn.Module) -> None:
        super().__init__()
        self.module = average


@pytest.fixture
def model() -> Net:
    return Net(2, 1)


@pytest.fixture
def optimizer(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def seen_of(between: Callable[[], object] = int, **parts: object) -> list[str]:
    """The findings of two steps, with an action between them."""
    unsaved = UnsavedState(parts)
    first = unsaved.search()
    between()
    second = unsaved.search()
    assert unsaved.search() is None
    return [each.why.removeprefix("the ").rpartition(" w")[0] if each else "" for each in (first, second)]


def test_schedulers_outside_of_the_parts_are_found(optimizer: torch.optim.Optimizer) -> None:
    inner = [StepLR(optimizer, 1), ChainedScheduler([ConstantLR(optimizer)], optimizer)]
    whole, plateau = SequentialLR(optimizer, inner, [3]), ReduceLROnPlateau(optimizer)
    both = ["ReduceLROnPlateau and the SequentialLR", ""]
    assert seen_of(optimizer=optimizer) == both, "schedulers inside the second one are not reported"
    assert seen_of(optimizer=optimizer, scheduler=whole) == ["ReduceLROnPlateau", ""]
    assert seen_of(optimizer=optimizer, warmup=Holder(whole, plateau)) == ["", ""]
    assert seen_of() == ["", ""], "schedulers of other optimizers are ignored"


def test_weight_averages_outside_of_the_parts_are_found(model: Net) -> None:
    average, other = AveragedModel(model), AveragedModel(Net(3, 1))
    assert seen_of(model=model) == ["AveragedModel", ""], "an average of another model is ignored"
    assert seen_of(model=model, average=average) == ["", ""]
    assert seen_of(model=model, averages=Holder(average), wrapped=Wrapper(other)) == ["", ""]


def test_changing_copies_outside_of_the_parts_are_found(model: Net) -> None:
    by_hand, reference, shared = copy.deepcopy(model), copy.deepcopy(model), copy.copy(model)
    frame = copy.deepcopy(model).to("meta")

    def update() -> None:
        for mine, its in zip(by_hand.parameters(), model.parameters(), strict=True):
            its.data.add_(1)
            mine.data.lerp_(its.data, 0.5)

    assert seen_of(update, model=model) == ["", "copy of Net"]
    assert seen_of(update, model=model, ema=Wrapper(by_hand)) == ["", ""], "unchanged copies are ignored"
    assert seen_of(update, model=model, ema=by_hand) == ["", ""]
    assert [type(each) for each in (reference, shared, frame)] == [Net] * 3, "they are alive"


def test_a_module_without_init_is_ignored(model: Net) -> None:
    unbuilt = Net.__new__(Net)  # as after an error in its constructor
    assert seen_of(model=model) == ["", ""]
    assert isinstance(unbuilt, Net), "it is alive"


def test_a_run_reports_state_that_is_not_saved(
    model: Net, optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture
) -> None:
    average = AveragedModel(model)
    with Run(model=model, optimizer=optimizer, average=average) as run:
        run.step()
    assert "not passed to Run" not in caplog.text
    with Run(model=model, optimizer=optimizer) as run:
        scheduler = StepLR(optimizer, 1)
        for _ in range(3):
            run.step()
    assert caplog.text.count("the AveragedModel and the StepLR were not passed to Run: checkpoints do not") == 1
    assert scheduler.optimizer is optimizer, "it is alive"


def train(
    steps: int, repeated: int, *, begin: int = 0, reads_first: bool = True, reads_last: bool = False
) -> StepCount:
    """A loop with so many iterations, some of which were lost."""
    count = StepCount()
    count.start_at(begin)
    if reads_first:
        count.record_read()
    for _ in range(steps + repeated):
        count.record_call()
        count.end_step()
    if reads_last:
        count.record_read()
    return count


@pytest.mark.parametrize("begin", [0, 100])
@pytest.mark.parametrize("repeated", [0, 1, 3])
def test_a_loop_over_a_range_is_ahead_by_the_repeated_steps(begin: int, repeated: int) -> None:
    assert train(20, repeated, begin=begin).is_ahead(begin + 20) == (repeated > 0)


def test_a_loop_that_reads_run_step_after_its_steps_is_not_ahead() -> None:
    assert not train(20, 3, reads_last=True).is_ahead(20)


def test_a_script_that_never_asks_would_start_from_scratch() -> None:
    assert not train(20, 3, reads_first=False).is_ahead(20)


def test_a_state_taken_over_from_a_peer_is_not_a_repetition() -> None:
    """Another rank has made more steps than this process."""
    assert not train(20, 0).is_ahead(21)


def test_a_loop_that_reads_run_step_before_each_step_follows_run() -> None:
    count = StepCount()
    count.record_read()
    count.record_call()
    assert not count.leads, "like a loop that reads it before each step"
    count.record_call()
    assert count.leads
    count.record_read()
    count.record_call()
    assert not count.leads


def test_a_loop_that_never_reads_run_step_cannot_be_followed() -> None:
    assert not train(20, 0, reads_first=False).leads


PLAN = EpochPlan(80, 8)


def test_a_loop_that_counts_batches_leaves_as_many_as_were_repeated() -> None:
    feed, loop = Feed(), ScriptLoop({})
    assert not loop.counts_batches(feed, PLAN, Cursor(position=64)), "nothing was repeated, so it has left on purpose"
    feed.adopt_repeated(2)
    assert loop.counts_batches(feed, PLAN, Cursor(position=64))
    assert loop.leaves_early(feed, PLAN, Cursor(position=64))
    assert not loop.counts_batches(feed, PLAN, Cursor(position=56))
    assert not loop.counts_batches(feed, None, Cursor(position=64)), "the end of a stream is unknown"
    feed.begin_rest()
    assert not loop.counts_batches(feed, PLAN, Cursor(position=64)), "the rest has begun, and nothing was repeated yet"
    feed.adopt_repeated(2)
    for _ in feed.watch_fetches(lambda: range(2)):
        feed.hand_over(range(8))
    assert not loop.leaves_early(feed, PLAN, Cursor(position=64)), "the pass has ended"


@pytest.mark.parametrize("changes_parameters", [False, True])
def test_the_end_of_an_epoch_is_undone(changes_parameters: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1)
    last_step = LastStep(model, [optimizer], {"scheduler": scheduler})
    last_step.begin_step(is_lost=True)
    optimizer.step()
    scheduler.step()
    if changes_parameters:
        with torch.no_grad():
            model.bias.add_(1)
    assert last_step.restore() != changes_parameters
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(
    ("counts", "differ"),
    [
        ([(0, False), (0, True), (0, True)], False),
        (
            [(3, False), (4, True), (5, True), (9, False), (10, True)],
            False,
        ),  # three between two epochs
        ([(0, False), (0, True), (1, True)], True),
        ([(0, False), (1, True), (0, False), (1, True), (1, True)], True),  # in another group, which counts from 0
    ],
)
def test_collectives_in_only_some_steps_are_detected(counts: list[tuple[int, bool]], differ: bool) -> None:
    own = CollectiveCount()
    for count, is_comparable in counts:
        own.begin_step(count, is_comparable=is_comparable)
    assert own.differ is differ


def test_collectives_since_the_last_step_are_detected() -> None:
    own = CollectiveCount()
    assert own.has_made_any(2)
    own.end_step(2)
    assert not own.has_made_any(2)
    assert own.has_made_any(3)
    own.enter_group()
    assert not own.has_made_any(0)


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        ({}, ""),
        ({"makes_groups": True}, "creates process groups"),
        ({"changes_early": True}, "before the optimizer's step"),
        ({"collectives": 1}, "before its first step"),
    ],
)
def test_an_unsupported_loop_restarts_and_the_log_says_what_to_change(shown: dict[str, Any], why: str) -> None:
    loop = ScriptLoop({})
    found = loop.why_restart(**{"makes_groups": False, "changes_early": False, "collectives": 0, **shown})
    assert (found is None) == (not why)
    if found is not None:
        assert why in found.why
        assert found.fix
