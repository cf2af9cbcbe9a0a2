"""What ranks run in the tests of `torch.distributed.checkpoint` over our storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from elasticctl_store.errors import TrainError
from elasticctl_train.dcp import ElasticReader, ElasticWriter
from elasticctl_train.dist import join, leave
from tests.support.train.sharded import tensors_for


def state_for(how: str) -> dict[str, Any]:
    """Tensors spread in the way called `how`, a plain one, and values of several kinds."""
    return {
        "model": tensors_for(how) | {"plain": torch.arange(1000.0)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99), "lr": 0.1}]},
        "epoch": 3,
    }


def blank(value: Any) -> Any:
    """The same with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else None


def save(url: str, how: str) -> None:
    """Save such a state."""
    world = join()
    dcp.save(state_for(how), storage_writer=ElasticWriter(url))
    leave(world)


def save_in_process(url: str) -> None:
    """Save twice in another process, with one writer."""
    world = join()
    writer = ElasticWriter(url)
    for _ in range(2):
        kind = AsyncCheckpointerType.PROCESS
        dcp.async_save(state_for("plain"), storage_writer=writer, async_checkpointer_type=kind).result()  # type: ignore[union-attr]
    leave(world)


def save_with_cached_plans(url: str, outcome: str) -> None:
    """Save twice with a planner that hands the first save's plan over to the second; note what that one raises."""
    world = join()
    for _ in range(2):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        try:
            dcp.save(state_for("plain"), storage_writer=ElasticWriter(url), planner=planner)
        except dcp.CheckpointException as e:
            Path(f"{outcome}-{world.rank}").write_text(str(e))
    leave(world)


def load(url: str, how: str, outcome: str) -> None:
    """Load it in another spread; each rank compares its part bit by bit and notes how many tensors it has compared."""
    world = join()
    wanted = state_for(how)
    state = blank(wanted)
    dcp.load(state, storage_reader=ElasticReader(url))
    for name, tensor in wanted["model"].items():
        found = state["model"][name]
        if isinstance(tensor, DTensor):
            assert torch.equal(found.to_local(), tensor.to_local()), name
        else:
            assert torch.equal(found, tensor), name
    assert state["optimizer"] == wanted["optimizer"]
    assert state["epoch"] == 3
    Path(f"{outcome}-{world.rank}").write_text(str(len(wanted["model"])))
    leave(world)


def refusal(error: dcp.CheckpointException) -> TrainError:
    """What the first rank that failed has raised."""
    raised = next(iter(error.failures.values()))[0]
    assert isinstance(raised, TrainError), raised
    return raised
