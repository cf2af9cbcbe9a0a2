"""Parts of a state that are copied during training are exactly those at the time of the save."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import SaveError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy
from elasticctl_train.checkpoint import rank_shares
from elasticctl_train.checkpoint.snapshots import Snapshots
from elasticctl_train.dist import World
from tests.support.train.checkpoints import read_alone
from tests.support.train.states import same
from tests.support.waiting import wait_until

WIDTH = 300
"""A square matrix of this width is large enough to be copied late."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adam, fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
}


class Network(torch.nn.Module):
    """Large and small parameters, a shared one, and buffers that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.again = torch.nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.inner.weight
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.outer = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outer(self.norm(self.again(self.inner(x))))
        return y


def change_early(model: torch.nn.Module, average: AveragedModel, chance: random.Random) -> None:
    """What a script may do right after a step, also without autograd's knowledge."""
    if chance.randrange(2):
        average.update_parameters(model)
    match chance.randrange(6):
        case 0:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.02, 0.02)
        case 1:
            model.inner.weight.detach().numpy()[:] *= 0.5  # type: ignore[union-attr]
        case 2:
            model(torch.ones(3, WIDTH))  # the buffers
        case 3:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.9)
        case 4:
            with torch.no_grad():
                model.again.weight.add_(torch.ones(()))  # type: ignore[operator, union-attr]


@pytest.mark.seeds(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_save_has_the_state_at_its_step(tmp_path: Path, kind: str, seed: int) -> None:
    """Five steps, each followed by a save; the next step follows immediately, or after other changes."""
    torch.manual_seed(seed)
    chance, model = random.Random(f"{kind} {seed}"), Network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    parts = {"model": model, "optimizer": optimizer, "average": average}
    then: dict[int, Any] = {}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with Run(str(tmp_path), save=SavePolicy(every_steps=1, keep_last=100), **parts) as run:  # type: ignore[arg-type]
        closure()
        for step in range(1, 6):
            optimizer.step(closure if kind == "lbfgs" else None)  # type: ignore[arg-type]
            wait_until(lambda: not run._session.busy)
            then[step] = now(parts)
            run.step()
            change_early(model, average, chance)
            if chance.randrange(2):
                closure()
    check(tmp_path, then)


def now(parts: dict[str, Any]) -> dict[str, Any]:
    """A copy of the current state."""
    found = {name: part.state_dict() for name, part in parts.items()}
    return copy.deepcopy({name: dict(state) for name, state in found.items()})


def check(folder: Path, then: dict[int, Any]) -> None:
    """Each checkpoint has the state as it was at its step."""
    storage = LocalStorage(folder)
    found = {commit.step: read_alone(storage, commit)[0] for commit in read_commits(storage)}
    assert found.keys() == then.keys()
    for step, state in then.items():
        assert same({part: found[step][part] for part in state}, state), step


@pytest.mark.seeds(3)
def test_a_script_that_never_steps_its_optimizer_is_saved(tmp_path: Path, seed: int) -> None:
    """It may write to the optimizer's state as well: then that one save fails, and none has a mixture."""
    torch.manual_seed(seed)
    chance, model = random.Random(seed), Network()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    parts, then = {"model": model, "optimizer": optimizer}, dict[int, Any]()
    with Run(str(tmp_path), save=SavePolicy(every_steps=1, keep_last=100), **parts) as run:  # type: ignore[arg-type]
        for step in range(1, 8):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * torch.randn_like(parameter)
            wait_until(lambda: not run._session.busy)
            then[step] = now(parts)
            run.step()
            for entry in optimizer.state.values() if chance.randrange(2) else ():
                entry["exp_avg"].mul_(0.5)
    storage = LocalStorage(tmp_path)
    kept = {commit.step for commit in read_commits(storage)}
    assert len(kept) >= len(then) - 1
    check(tmp_path, {step: state for step, state in then.items() if step in kept})


def adam() -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """An optimizer that has made a step, and the state to save."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(WIDTH, WIDTH))])
    stir(optimizer)
    return optimizer, {"optimizer": optimizer.state_dict()}


def stir(optimizer: torch.optim.Optimizer) -> None:
    """Make a step."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def content(share: Any) -> bytes:
    """The current bytes of the tensor file."""
    assert isinstance(share, rank_shares.Share)
    return bytes(share.buffer.data.numpy().data[: share.plan.size_bytes])


def test_only_the_next_step_needs_to_copy() -> None:
    """Also that of another optimizer; a save without such parts is copied immediately."""
    optimizer, state = adam()
    whole = content(Snapshots(World(), None).take_snapshot(state, {}, ()))
    for stepping in (optimizer, adam()[0]):
        snapshots = Snapshots(World(), None)
        share = snapshots.take_snapshot({"optimizer": optimizer.state_dict()}, {}, (), {"optimizer"})
        assert content(share) != whole
        if stepping is not optimizer:
            whole = content(Snapshots(World(), None).take_snapshot({"optimizer": optimizer.state_dict()}, {}, ()))
        stir(stepping)
        assert content(share) == whole


def test_a_state_written_to_outside_of_a_step_fails_the_save(tmp_path: Path) -> None:
    """A mixture is never saved; later saves copy everything immediately."""
    optimizer, state = adam()
    snapshots = Snapshots(World(), None)
    share = snapshots.take_snapshot(state, {}, (), {"optimizer"})
    assert isinstance(share, rank_shares.Share)
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()
    with pytest.raises(SaveError, match="outside of its step"):
        share.write(LocalStorage(tmp_path), "data/share.json")
    assert content(snapshots.take_snapshot(state, {}, (), {"optimizer"})) == content(
        Snapshots(World(), None).take_snapshot(state, {}, ())
    )
