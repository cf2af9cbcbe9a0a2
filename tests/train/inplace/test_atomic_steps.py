"""Return to the end of the last step, undoing what the script has done since."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elasticctl_train.checkpoint import parts
from elasticctl_train.data.sample_order import Cursor, Feed, Step
from elasticctl_train.dist import Channel, World, collective_errors
from elasticctl_train.inplace.atomic_steps import LastStep, StepGate
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel, PeerWatch
from elasticctl_train.inplace.keep_ranks import KeepRanks
from elasticctl_train.script_loop import ScriptLoop


class Scalars:
    """A part whose state is one number."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Bench:
    """A model, an optimizer, a small part and a large one, in a step that has begun."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.small, self.large = Scalars(), nn.Linear(200, 200)
        self.watch = PeerWatch(2, lambda error: self.last.copy_large())
        self.last = LastStep(self.model, [self.optimizer], {"small": self.small, "large": self.large})
        self.gate = StepGate(self.watch, [self.optimizer], self.last.check_parameters)
        self.last.begin_step()

    def backward(self) -> None:
        self.model(torch.randn(8, 4)).square().mean().backward()

    def lose(self) -> None:
        self.watch.record_loss(RuntimeError("Connection closed by peer"))

    def change_large(self) -> None:
        with torch.no_grad():
            self.large.weight.add_(1)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_lost_step_leaves_no_trace(bench: Bench) -> None:
    before = {name: value.clone() for name, value in bench.model.state_dict().items()}
    large, drawn = bench.large.weight.clone(), torch.get_rng_state()
    bench.small.value = 1  # ahead of the loss
    bench.optimizer.param_groups[0]["lr"] = 0.5
    bench.backward()
    bench.lose()
    bench.optimizer.step()
    bench.change_large()
    bench.small.value = 2
    assert bench.last.restore()
    assert all(torch.equal(value, before[name]) for name, value in bench.model.state_dict().items())
    assert torch.equal(bench.large.weight, large)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (bench.small.value, bench.optimizer.param_groups[0]["lr"]) == (0, 0.1)
    assert all(not parameter.grad.any() for parameter in bench.model.parameters() if parameter.grad is not None)


def test_changes_between_two_steps_are_not_undone(bench: Bench) -> None:
    bench.backward()
    bench.optimizer.step()
    bench.last.end_step()
    bench.lose()
    bench.small.value = 3
    assert bench.last.restore()
    assert bench.small.value == 3


def test_a_step_already_known_to_be_lost_is_undone_too(bench: Bench) -> None:
    bench.last.end_step()
    bench.lose()
    bench.small.value = 3
    bench.last.begin_step(is_lost=True)
    large = bench.large.weight.clone()
    bench.small.value = 4
    bench.change_large()
    assert bench.last.restore()
    assert bench.small.value == 3
    assert torch.equal(bench.large.weight, large)


def test_large_parameters_changed_before_the_loss_cannot_be_restored(bench: Bench) -> None:
    bench.change_large()
    bench.lose()
    assert not bench.last.restore()


def test_parameters_changed_without_an_optimizer_cannot_be_restored(bench: Bench) -> None:
    bench.backward()
    bench.lose()
    bench.optimizer.step()
    for parameter in bench.model.parameters():
        parameter.data.mul_(0.99)
    assert not bench.last.restore()


@pytest.mark.parametrize("is_early", [False, True])
def test_the_first_steps_show_whether_a_script_changes_parameters_early(bench: Bench, is_early: bool) -> None:
    bench.backward()
    if is_early:
        bench.model[0].weight.data.mul_(0.99)
    bench.optimizer.step()
    bench.model[0].weight.data.mul_(0.99)
    assert bench.last.changes_early is is_early


def test_taking_over_the_parameters_of_another_rank_is_not_a_change_by_the_script(bench: Bench) -> None:
    bench.model[0].weight.data.mul_(0.99)  # as DistributedDataParallel does, which `run.model` makes in the first step
    bench.last.accept_parameters()
    bench.backward()
    bench.optimizer.step()
    assert not bench.last.changes_early


def test_replaced_buffers_are_restored(bench: Bench) -> None:
    """For modules that assign `self.scale = ...`, or register a buffer in their first pass."""
    norm = bench.model[1]
    norm.register_buffer("scale", torch.ones(4))
    norm.register_buffer("later", None)
    bench.last.begin_step()
    norm.scale = norm.scale * 0.9
    norm.later = torch.ones(2)
    norm.register_buffer("cache", torch.ones(3))
    bench.lose()
    assert bench.last.restore()
    assert torch.equal(norm.scale, torch.ones(4))
    assert norm.later is None
    assert torch.equal(norm.cache, torch.ones(3))
    bench.last.begin_step()
    norm.cache = torch.ones(5)
    assert bench.last.restore()
    assert torch.equal(norm.cache, torch.ones(3)), "buffers that were registered later are kept"


def test_parameters_added_to_an_optimizer_in_a_lost_step_are_removed(bench: Bench) -> None:
    """The script adds them again when it repeats the step."""
    more = {"params": list(bench.large.parameters()), "lr": 0.5}
    bench.optimizer.add_param_group(dict(more))
    bench.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    bench.lose()
    assert bench.last.restore()
    (group,) = bench.optimizer.param_groups
    assert len(group["params"]) == 4
    bench.optimizer.add_param_group(more)


def test_a_skipped_step_returns_the_value_of_its_closure(bench: Bench) -> None:
    def closure() -> torch.Tensor:
        bench.backward()
        return torch.ones(())

    before = bench.model[0].weight.clone()
    bench.lose()
    assert bench.optimizer.step(closure).item() == 1  # type: ignore[attr-defined]
    assert bench.optimizer.step() is None
    assert torch.equal(bench.model[0].weight, before)


class TwoSteps(Bench):
    """As in a GAN: each step of the script steps two optimizers, with a backward pass between them."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)
        self.second = torch.optim.AdamW(self.other.parameters(), lr=0.1)
        self.gate = StepGate(self.watch, [self.optimizer, self.second], self.last.check_parameters)
        for _ in range(2):
            self.make_step(self.second)
            self.make_step(self.optimizer)
            self.gate.end_step()
            self.last.begin_step()

    def make_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def state(self) -> list[torch.Tensor]:
        parameters = [*self.other.parameters(), *self.model.parameters()]
        return [*parameters, *(tensor for state in self.second.state.values() for tensor in state.values())]


def test_a_loss_between_two_optimizers_steps_undoes_the_first() -> None:
    bench = TwoSteps()
    before = [tensor.detach().clone() for tensor in bench.state()]
    bench.make_step(bench.second)
    bench.lose()
    bench.make_step(bench.optimizer)
    assert not all(map(torch.equal, before, bench.state()))
    assert bench.last.restore()
    assert bench.gate.undo()
    assert all(map(torch.equal, before, bench.state()))
    bench.gate.end_step()
    bench.watch.reset(2, lambda error: None)
    bench.last.begin_step()
    bench.make_step(bench.second)
    bench.make_step(bench.optimizer)
    bench.lose()
    assert not bench.gate.undo(), "nothing is copied before the last one, because a later loss belongs to the next step"


def test_a_step_interrupted_in_its_closure_is_undone(bench: Bench) -> None:
    bench.optimizer = torch.optim.LBFGS(bench.model.parameters(), lr=0.1, max_iter=4)  # type: ignore[assignment]
    gate = StepGate(bench.watch, [bench.optimizer], bench.last.check_parameters)
    before = [parameter.detach().clone() for parameter in bench.model.parameters()]
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(len(calls))
        assert not gate.is_made
        if len(calls) == 2:
            bench.lose()
        bench.optimizer.zero_grad()
        loss: torch.Tensor = bench.model(torch.ones(8, 4) + torch.eye(8, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    bench.optimizer.step(closure)
    assert len(calls) > 2, "it has continued to change parameters after the loss"
    assert gate.is_made
    assert bench.last.restore(gate.undone)
    assert gate.undo()
    assert all(map(torch.equal, before, bench.model.parameters()))
    assert not any(bench.optimizer.state.values())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_scheduler_may_be_created_before_or_after_the_run(is_first: bool) -> None:
    """Both wrap `optimizer.step`, and a GradScaler inspects its signature."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signature = inspect.signature(optimizer.step)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)] if is_first else []
    watch = PeerWatch(2, lambda error: None)
    StepGate(watch, [optimizer], lambda: None)
    schedulers = schedulers or [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedulers[0].step()  # would warn, which is an error here, if it had missed the optimizer's step
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(model.weight, before)
    assert list(inspect.signature(optimizer.step).parameters)[-1:] == list(signature.parameters)
    watch.record_loss(RuntimeError("Connection closed by peer"))
    before = model.weight.clone()
    optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    made = dist.group.WORLD
    assert made is not None
    yield made
    dist.destroy_process_group()


def test_an_error_of_the_script_is_not_a_lost_peer(group: dist.ProcessGroup) -> None:
    """The mistake would be repeated in each new group."""
    watch = PeerWatch(1, lambda error: pytest.fail(str(error)), Channel(training=group))
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model.forward = lambda inputs: model["used"](inputs)  # type: ignore[method-assign]
    wrapped = ElasticDataParallel(model, watch, init_sync=False)
    wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="find_unused_parameters"):
        wrapped(torch.ones(1, 2))
    with pytest.raises(torch.OutOfMemoryError):
        watch.record_loss(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))


def test_a_single_rank_broadcasts_no_buffers(group: dist.ProcessGroup) -> None:
    model = ElasticDataParallel(nn.BatchNorm1d(2), PeerWatch(1, pytest.fail, Channel(training=group)), init_sync=False)
    before = group._get_sequence_number_for_group()
    model(torch.rand(4, 2)).sum().backward()
    model.share_buffers()
    assert group._get_sequence_number_for_group() == before


def keep_ranks(watch: PeerWatch, *, is_over: bool = False) -> KeepRanks:
    """A run that keeps its process, alone in its group."""
    model = nn.Linear(2, 2)
    group: Any = SimpleNamespace(
        watch=watch, world=World(), is_over=is_over, train_in_this_thread=int, decline=sys.exit
    )
    run_parts = {parts.MODEL: model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return KeepRanks(lambda on_loss: group, run_parts, Feed(), ScriptLoop(run_parts), on_skip=lambda: None, saves=False)


def test_an_error_of_the_script_in_run_step_ends_it() -> None:
    """For example a loss with two elements: the error would be raised again in the next group."""
    stay = keep_ranks(PeerWatch(1, lambda error: pytest.fail(str(error))))
    with pytest.raises(RuntimeError, match="Scalar"):
        stay.complete(lambda: print(torch.ones(2).item()))


def test_a_failed_collective_in_run_step_is_a_lost_peer() -> None:
    lost: list[BaseException] = []
    stay = keep_ranks(PeerWatch(1, lost.append))

    def step() -> None:
        with collective_errors():
            raise RuntimeError("Connection closed by peer")

    assert not stay.complete(step)
    assert [str(error) for error in lost] == ["Connection closed by peer"]


def test_a_lost_step_of_a_loop_that_is_not_understood_is_not_repeated_here() -> None:
    """It cannot be undone, so the step must neither count nor be repeated."""
    stay = keep_ranks(PeerWatch(1, lambda error: None))
    stay.begin_step(is_first=True)
    model: Any = stay._last_step._parameters
    with torch.no_grad():
        model[0].add_(1)
    stay._gate._before_first()  # called by an optimizer
    with pytest.raises(SystemExit, match="changes parameters before the optimizer's step"):
        stay.enter_next(Step(8), Cursor(), dict)


def test_parameters_without_an_optimizer_are_detected() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    given = {parts.MODEL: model, "optimizer": torch.optim.SGD(model[0].parameters(), lr=0.1)}
    assert not parts.all_stepped(given)
    model[1].requires_grad_(False)
    assert parts.all_stepped(given)


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_optimizer_waits_for_reductions_on_the_gpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    waited: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    bench.watch.channel = Channel(is_cut=lambda: is_cut)
    before = bench.model[0].weight.clone()
    bench.backward()
    bench.watch.expect_gpu()
    bench.optimizer.step()
    assert torch.equal(bench.model[0].weight, before) == is_cut
    bench.watch.finish_on_gpu()
    assert waited == [True], "once per reduction"
    assert bench.watch.lost == is_cut
    assert bench.gate.undo() == is_cut
