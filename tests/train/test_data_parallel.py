"""Parts of a model that a script freezes and unfreezes while it trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from elasticctl_store.errors import TrainError
from elasticctl_train import Run, SavePolicy
from elasticctl_train.data_parallel import ResumableDataParallel
from elasticctl_train.dist import Channel
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel, PeerWatch
from tests.support.train import ranks
from tests.support.train.programs import Numbers


def in_both_ways(program: Callable[[bool], None]) -> None:
    """The model in the DistributedDataParallel of ranks that restart, and of those that stay."""
    dist.init_process_group("gloo")
    for stays in (False, True):
        program(stays)
        dist.barrier()


def freeze_and_thaw(stays: bool) -> None:
    """Gradients are the means over both ranks, for all parameters that have any."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    first, last = nn.Linear(2, 2), nn.Linear(2, 1)
    module = nn.Sequential(first, last)
    last.requires_grad_(False)
    watch = PeerWatch(2, lambda error: pytest.fail(str(error)), Channel(training=dist.group.WORLD))
    model: nn.Module = ElasticDataParallel(module, watch, init_sync=True) if stays else ResumableDataParallel(module)
    inputs = torch.ones(1, 2) * (rank + 1)
    plan = [(True, False), (True, True), (True, True), (False, True), (False, False), (True, True)]
    for is_first_trained, is_last_trained in plan:
        first.requires_grad_(is_first_trained)
        last.requires_grad_(is_last_trained)
        module.zero_grad()
        outputs = model(inputs)
        if is_first_trained or is_last_trained:
            outputs.sum().backward()
        for parameter in module.parameters():
            assert (parameter.grad is not None) == parameter.requires_grad
            if parameter.grad is not None:
                both = [torch.empty_like(parameter) for _ in range(2)]
                dist.all_gather(both, parameter.grad)
                assert torch.equal(*both)
    with model.no_sync():  # type: ignore[operator]
        first.requires_grad_(False)
        model(inputs).sum().backward()
    assert torch.equal(last.bias.grad, torch.tensor([2.0])), "the earlier mean plus this rank's gradient"


def test_gradients_of_parameters_unfrozen_later_are_averaged() -> None:
    assert ranks.run(in_both_ways, 2, freeze_and_thaw) == [0, 0]


def join_and_hook(stays: bool) -> None:
    """A pass before rank 1 enters `join`, as a newcomer, and one after it; then unsupported methods."""
    module, rank = nn.Linear(2, 1), dist.get_rank()
    watch = PeerWatch(2, lambda error: pytest.fail(str(error)), Channel(training=dist.group.WORLD))
    model: Any = ElasticDataParallel(module, watch, init_sync=True) if stays else ResumableDataParallel(module)
    with ExitStack() as stack:
        for entering in range(2):
            if rank == entering:
                stack.enter_context(model.join())
            module.zero_grad()
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            assert torch.equal(module.weight.grad, torch.tensor([[1.5, 1.5]]))
            if stays:
                model.reform()
    with pytest.raises(TrainError, match=r"run\.loader gives all ranks the same number"), Join([model]):
        pass
    if stays:
        with pytest.raises(TrainError, match="pass Run the model in DistributedDataParallel with your hook"):
            model.register_comm_hook(None, fp16_compress_hook)


def test_join_does_nothing_and_unsupported_methods_raise() -> None:
    """In torch's own `join`, ranks that stay and newcomers would wait for each other in different collectives."""
    assert ranks.run(in_both_ways, 2, join_and_hook) == [0, 0]


def leave_one_out() -> None:
    """The loss depends on one of two parameters."""
    dist.init_process_group("gloo")
    layers: Any = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    layers.forward = layers[0].forward
    model = ResumableDataParallel(layers)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as raised:
        model(torch.ones(1, 1))
    assert raised.value.__notes__[0].startswith("FIX: freeze parameters")
    dist.barrier()


def test_a_parameter_without_a_gradient_is_an_error_with_a_fix() -> None:
    assert ranks.run(leave_one_out, 2) == [0, 0]


def train(url: Path, steps: int, *, thaws: bool, begins_frozen: bool = True) -> nn.ModuleList:
    """Train; the first layer is frozen until step 2."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    model[0].requires_grad_(not begins_frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(str(url), model=model, optimizer=optimizer, save=SavePolicy(every_steps=1)) as run:
        for _ in run.epochs(1):
            for batch in run.loader(Numbers(40), global_batch=4):
                if run.steps_done == 2 and thaws:
                    model[0].requires_grad_(True)
                optimizer.zero_grad()
                model[1](model[0](batch[:, None].float() / 40)).square().mean().backward()
                optimizer.step()
                run.step()
                if run.steps_done == steps:
                    return model
    return model


def test_unfrozen_parameters_are_trained_after_a_resume(tmp_path: Path) -> None:
    """The script unfreezes it in a step, or an epoch, that is not repeated."""
    undisturbed = train(tmp_path / "whole", 6, thaws=True)
    train(tmp_path / "parts", 4, thaws=True)
    resumed = train(tmp_path / "parts", 6, thaws=True)
    assert resumed[0].weight.requires_grad
    for one, other in zip(undisturbed.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_edited_script_decides_what_is_frozen(tmp_path: Path) -> None:
    train(tmp_path, 4, thaws=False)
    assert train(tmp_path, 6, thaws=False, begins_frozen=False)[0].weight.requires_grad


def train_on_a_rank(url: str, folder: str, steps: int) -> None:
    """Train in steps that are all saved; record the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(240, 8)
    run = Run(url, model=model, optimizer=optimizer, save=SavePolicy(every_steps=1))
    for _ in run.epochs(1):
        for batch in run.loader(Numbers(240), global_batch=12):
            optimizer.zero_grad()
            run.scale_loss(run.model(inputs[batch]).square().mean()).backward()
            optimizer.step()
            run.step()
            if run.steps_done == steps:
                run.finish()
                torch.save(model.state_dict(), Path(folder) / f"{run.rank}-{steps}")
                return


def test_after_a_restart_three_ranks_sum_gradients_in_the_same_order(tmp_path: Path) -> None:
    """The order depends on the gradient buckets, which DistributedDataParallel rebuilds."""
    for url, steps in (("whole", 12), ("parts", 5), ("parts", 6), ("parts", 12)):
        folder = tmp_path / f"{url}-weights"
        folder.mkdir(exist_ok=True)
        assert ranks.run(train_on_a_rank, 3, str(tmp_path / url), str(folder), steps) == [0, 0, 0]
    whole, parts = (torch.load(tmp_path / f"{url}-weights" / "0-12") for url in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
