"""What ranks run in the tests of `torch.distributed.checkpoint` over our storage."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from elasticctl_store.errors import TrainError
from elasticctl_train.dcp import ElasticReader, ElasticWriter
from elasticctl_train.dist import join, leave
from tests.support.train.sharded import tensors_for


def only_if(call: Callable[..., Any], option: str) -> pytest.MarkDecorator:
    """Marks a test of what an option of `call` does to us: the oldest releases of torch lack some."""
    return pytest.mark.skipif(option not in inspect.signature(call).parameters, reason=f"this torch has no {option}")


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
        kind = state_dict_saver.AsyncCheckpointerType.PROCESS
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


def _specs() -> list[ShardingSpec]:
    """Ways to spread 32 elements over two ranks: evenly, in turns, and in pieces of any length."""
    chunks = [ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in order]) for order in ((0, 1), (0, 1, 1, 0))]
    pieces = [
        EnumerableShardingSpec([ShardMetadata([0], [8], "rank:1/cpu"), ShardMetadata([8], [24], "rank:0/cpu")]),
        EnumerableShardingSpec([ShardMetadata([0], [10], "rank:0/cpu"), ShardMetadata([10], [22], "rank:1/cpu")]),
    ]
    return [*chunks, *pieces]


def _whole(tensor: ShardedTensor, rank: int) -> torch.Tensor:
    """What all ranks hold of it, on rank 0."""
    found = torch.zeros(tensor.size())
    tensor.gather(out=found if rank == 0 else None)
    return found


def exchange_sharded_tensors(url: str) -> None:
    """Save a ShardedTensor and a plain one, and load each as the other, for each two ways to spread it."""
    world = join()
    for then in _specs():
        for now in _specs():
            plain = torch.arange(32.0)
            saved = {"sharded": sharded_tensor.rand(then, 32), "plain": plain}
            dcp.save(saved, storage_writer=ElasticWriter(url))
            loaded = {"sharded": torch.zeros(32), "plain": sharded_tensor.zeros(now, 32)}
            dcp.load(loaded, storage_reader=ElasticReader(url))
            sharded, spread = _whole(saved["sharded"], world.rank), _whole(loaded["plain"], world.rank)
            if world.rank == 0:
                assert torch.equal(loaded["sharded"], sharded)
                assert torch.equal(spread, plain)
    leave(world)
