"""What ranks run in the tests of sharded state, and of who reads what at a restore; `programs` has the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elasticctl_store import storage
from elasticctl_store.checkpoints.commits import CommitWriter
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.errors import DataError, FencedError, SaveError, StateError, StorageError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy
from elasticctl_train.checkpoint import rank_shares
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.incremental import tables, unchanged
from elasticctl_train.checkpoint.memory import buffers, local_tier
from elasticctl_train.dist import World, join, leave
from tests.support.train.programs import Numbers, table_state
from tests.support.train.states import same
from tests.support.waiting import wait_until

torch.set_num_threads(1)


class Network(torch.nn.Module):
    """Widths that no number of ranks divides, tied weights, a buffer, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 7).double()
        self.middle = torch.nn.Linear(7, 7, bias=False).double()
        self.last = torch.nn.Linear(7, 1).double()
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1  # type: ignore[operator, has-type]
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(x) * self.scale  # type: ignore[no-any-return]


class RowStatistics(torch.optim.Optimizer):
    """Keeps, as Adafactor does, less than a number for each element: of a matrix its rows' and columns' means."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square()
            found = {"rows": square.mean(-1), "columns": square.mean(0)} if square.dim() > 1 else {"rows": square}
            state = self.state[parameter]
            for key, value in found.items():
                state[key] = state[key].mul_(0.9).add_(value) if key in state else torch.zeros_like(value).add_(value)
            parameter.sub_(parameter.grad * self.param_groups[0]["lr"] / (1 + state["rows"].sum()))


def model_for(how: str) -> torch.nn.Module:
    """The same network `plain`, sharded over all ranks (`rows`, `columns`), or in replicas of two shards (`hybrid`).

    `mixed` is `rows` that computes in bfloat16. `statistics` is `rows` with another optimizer.
    """
    torch.manual_seed(0)
    model = Network()
    if how == "plain":
        return model
    world_size = dist.get_world_size()
    shape = (world_size // 2, 2) if "hybrid" in how else (world_size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def place(parameter: torch.nn.Parameter) -> Shard:
        by_columns = how == "columns" and parameter.dim() == 2 and parameter.shape[1] % world_size == 0
        return Shard(1 if by_columns else 0)  # FSDP2 itself takes no other columns

    reduced = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = reduced if "mixed" in how else MixedPrecisionPolicy()
    for part in (model.first, model.middle, model.last, model):
        fully_shard(part, mesh=mesh, shard_placement_fn=place, mp_policy=precision)
    return model


def train(url: str, notes: str, how: str, stop: int, save: SavePolicy = SavePolicy(every_steps=2)) -> None:  # noqa: B008
    """Train the network until step `stop`; note the losses of rank 0 and, at the end, every tensor, whole."""
    world = join()
    model = model_for(how)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    if "statistics" in how:
        optimizer = RowStatistics(model.parameters())
    run = Run(url or None, model=model, optimizer=optimizer, save=save)
    losses = []
    with run:
        for _ in run.epochs(100):
            for batch in run.loader(Numbers(24), global_batch=12, shuffle=True, seed=3):
                x = batch.double()[:, None] / 24
                x = torch.cat([x, x.square(), x.sin()], dim=1)
                loss = (run.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                mean = loss.detach().clone()
                if run.world_size > 1:
                    dist.all_reduce(mean)
                losses.append((mean / run.world_size).item())
                run.step(loss=loss)
                if run.steps_done == stop:
                    break
            if run.steps_done == stop:
                break
        ends = {name: whole(tensor).tolist() for name, tensor in model.state_dict().items()}
        moments = {
            f"{index}/{key}": whole(value).tolist()
            for index, entry in optimizer.state_dict()["state"].items()
            for key, value in entry.items()
        }
    if run.is_main:
        noted = {"first": stop - len(losses), "losses": losses, "ends": ends, "moments": moments}
        Path(notes).write_text(json.dumps(noted))
    leave(world)


def train_in_two_dimensions(url: str, notes: str, stop: int) -> None:
    """Train with tensor parallelism between pairs of ranks and FSDP2 between the pairs; alone: without either.

    Rank 0 notes the whole state at the beginning and at the end, and what `run.loader` says.
    """
    world = join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6)).double()
    if world.size > 1:
        mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        parallelize_module(model, mesh["tp"], {"2": RowwiseParallel(input_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: dict[str, Any] = {}
    with Run(url, model=model, optimizer=optimizer, save=SavePolicy(every_steps=2)) as run:
        try:
            run.loader(Numbers(8), global_batch=4)
        except DataError as e:
            found["loader"] = str(e)
        found["begin"] = whole_state(model, optimizer)
        while run.steps_done < stop:
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(run.steps_done)).double()
            loss = (run.model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
        found["end"] = whole_state(model, optimizer)
    if run.is_main:
        torch.save(found, notes)
    leave(world)


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors, whole."""
    states = optimizer.state_dict()["state"]
    moments = {f"{index}/{key}": value for index, entry in states.items() for key, value in entry.items()}
    return {name: whole(tensor).detach().clone() for name, tensor in [*model.state_dict().items(), *moments.items()]}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, wherever its shards are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "both": [Shard(0), Shard(1)],
    "twice": [Shard(0), Shard(0)],
    "replicas": [Replicate(), Shard(0)],
    "replicated": [Replicate()],
    "some": [Shard(0)],
    "slices": [Shard(0)],
}


def tensors_for(how: str) -> dict[str, torch.Tensor]:
    """Tensors of awkward shapes and kinds, spread over all ranks (`some`: the first two) in the way called `how`."""
    generator = torch.Generator().manual_seed(1)
    whole = {
        "odd": torch.randn(5, 3, generator=generator),
        "few rows": torch.randn(1, 4, generator=generator).bfloat16(),
        "empty": torch.empty(0, 4),
        "wide": torch.randint(-9, 9, (4, 301), generator=generator, dtype=torch.int16),
        "complex": torch.randn(3, 2, generator=generator, dtype=torch.complex64),
    }
    if how == "plain":
        return whole
    placements, world_size = PLACEMENTS[how], dist.get_world_size()
    shape = (world_size // 2, 2) if len(placements) == 2 else (world_size,)
    mesh = DeviceMesh("cpu", [0, 1]) if how == "some" else init_device_mesh("cpu", shape)
    if how == "slices":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "tensor"))["tensor"]
    return {name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in whole.items()}


def save_tensors(folder: str, kinds: Sequence[str]) -> None:
    """Save them once in each spread, next to a plain tensor that all ranks hold."""
    world = join()
    for how in kinds:
        checkpoints = Checkpointer(LocalStorage(Path(folder, how)), world)
        state = {"model": tensors_for(how) | {"plain": torch.arange(1000.0)}}
        checkpoints.save(state, Label(1), local={"rank": torch.tensor(world.rank)})
        assert checkpoints.settle()
    leave(world)


def save_over_meshes(url: str, outcome: str) -> None:
    """Save tensors that each half of the ranks shards over a mesh of its own; each rank notes why that failed."""
    world = join()
    mesh = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])][world.rank // 2]
    checkpoints = Checkpointer(storage.open(url), world)
    checkpoints.save({"model": {"w": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])}}, Label(1))
    assert not checkpoints.settle()
    model = torch.nn.Linear(3, 4, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    try:
        Run(url, model=model)
    except StateError as e:
        Path(f"{outcome}-{world.rank}").write_text(f"{checkpoints.failure()}, {e}")
    leave(world)


def restore_tensors(folder: str, spreads: Mapping[str, str]) -> None:
    """Restore them in another spread, first as ranks of one node, then each on a node of its own.

    Each rank compares its part bit by bit.
    """
    world = join()
    for saved, how in spreads.items():
        live = tensors_for(how)
        for node in ("one", f"of rank {world.rank}"):
            be_on(node, f"{folder}/{world.rank}")
            compare_restored(LocalStorage(Path(folder, saved)), world, live)
    leave(world)


def be_on(node: str, note: str) -> None:
    """Have this process take itself for one on `node`; `note` is a path to keep that at."""
    local_tier.BOOT_ID_FILE = Path(f"{note}.boot")
    local_tier.BOOT_ID_FILE.write_text(node)


def compare_restored(place: LocalStorage, world: World, live: dict[str, torch.Tensor]) -> None:
    """Restore tensors that are spread like these, and compare."""
    restored = Checkpointer(place, world).restore({"model": live})
    assert restored is not None
    found = restored.state["model"]
    assert torch.equal(found.pop("plain"), torch.arange(1000.0))
    assert found.keys() == live.keys()
    for name, tensor in live.items():
        assert type(found[name]) is type(tensor), name
        assert found[name].shape == tensor.shape
        if isinstance(tensor, DTensor):
            assert found[name].placements == tensor.placements
            assert torch.equal(found[name].to_local(), tensor.to_local()), name
        else:
            assert torch.equal(found[name], tensor), name
    if restored.local is not None:
        assert int(restored.local["rank"]) == world.rank


class Counted(LocalStorage):
    """A folder that counts the reads of tensor files."""

    reads = 0

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self.reads += 1
        super().read_into(key, start, into)


def large_state() -> dict[str, Any]:
    """A tensor that several ranks write, more than one parcel of it, and small ones."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(5000, 1000, generator=generator)
    return {"model": {"embedding": embedding, "t": embedding[:7, :3].t(), "flag": torch.tensor([True, False, True])}}


def tier_of(node: str) -> str:
    """The local tier of a node: its folder, if there is one; else it has none."""
    return node if Path(node).is_dir() else ""


def save_on_nodes(places: Mapping[str, list[str]]) -> None:
    """Save the large state twice to each URL, on nodes of which it names each rank's."""
    world = join()
    for url, nodes in places.items():
        os.environ["ELASTICCTL_LOCAL_TIER"] = tier_of(nodes[world.rank])
        checkpoints = Checkpointer(storage.open(url), world)
        for step in (1, 2):
            checkpoints.save(large_state(), Label(step), local={"rank": torch.tensor(world.rank)})
            assert checkpoints.settle()
    leave(world)


def lose_commits(url: str, node: str, fates: list[str]) -> None:
    """Go on from what is there, and save the large state, changed, once for each of `fates`, all ranks on one node.

    What comes of a save, once all shares are written: `commits`, `fails`, or `dies`, with all ranks, before the commit.
    """
    world = join()
    os.environ["ELASTICCTL_LOCAL_TIER"] = node
    append, fate = CommitWriter.append, ""

    def fateful_append(writer: CommitWriter, commit: Commit) -> Commit:
        if fate == "fails":
            raise StorageError("the storage is away")
        if fate == "dies":
            wait_until(Path(f"{url}-written").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        return append(writer, commit)

    CommitWriter.append = fateful_append  # type: ignore[method-assign]
    checkpoints = Checkpointer(storage.open(url), world)
    checkpoints.restore()
    for number, fate in enumerate(fates):
        changed = {"model": {name: tensor + number for name, tensor in large_state()["model"].items()}}
        state = large_state() if fate == "commits" else changed
        checkpoints.save(state, Label(number), local={"rank": torch.tensor(world.rank)})
        if fate == "dies":
            checkpoints._saves.join()
            Path(f"{url}-written").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        assert checkpoints.settle() == (fate == "commits")


def outlive(url: str, outcome: str) -> None:
    """Save on ranks of which the last one's share is swept by a newer run; each notes how that ends."""
    world = join()
    checkpoints = Checkpointer(storage.open(url), world)
    write = rank_shares.Share.write

    def write_unless_swept(share: rank_shares.Share, *arguments: Any) -> Any:
        if world.rank < world.size - 1:
            return write(share, *arguments)
        Checkpointer(storage.open(url))  # takes the URL over
        return None

    rank_shares.Share.write = write_unless_swept  # type: ignore[method-assign]
    checkpoints.save(large_state(), Label(1))
    try:
        checkpoints.settle()
    except FencedError as e:
        Path(f"{outcome}-{world.rank}").write_text(str(e))
    leave(world)


def restore_without_memory(url: str, outcome: str) -> None:
    """Restore where rank 1 has no memory for what it reads; each rank notes why that failed, and they meet again."""
    world = join()
    reserve, reserve_shared = buffers.anonymous, local_tier.reserve
    buffers.anonymous = lambda size_bytes: reserve(1 << 48 if world.rank == 1 else size_bytes)
    local_tier.reserve = lambda size_bytes: reserve_shared(1 << 48 if world.rank == 1 else size_bytes)
    try:
        Checkpointer(storage.open(url), world).restore()
    except StorageError as e:
        Path(f"{outcome}-{world.rank}").write_text(str(e))
    leave(world)


def restore_on_nodes(places: Mapping[str, list[str]]) -> None:
    """Restore the large state from each URL, and compare it.

    URL-RANK gets how often this rank has read from storage, and in how many parcels it took part.
    """
    world = join()
    share, parcels = World.share, 0

    def counted_share(world: World, data: torch.Tensor, source: int) -> None:
        nonlocal parcels
        parcels += 1
        share(world, data, source)

    World.share = counted_share  # type: ignore[method-assign]
    for url, nodes in places.items():
        os.environ["ELASTICCTL_LOCAL_TIER"] = tier_of(nodes[world.rank])
        be_on(nodes[world.rank], f"{url}-{world.rank}")
        parcels, counted = 0, Counted(Path(url))
        restored = Checkpointer(counted, world).restore()
        assert restored is not None
        assert same(restored.state, large_state())
        assert restored.local is None or int(restored.local["rank"]) == world.rank
        Path(f"{url}-{world.rank}").write_text(f"{counted.reads} {parcels}")
    leave(world)


def train_with_copies(url: str, nodes: list[str], notes: str, stop: int) -> None:
    """Train as `train` does, until step 8, each rank on a node of its own; copy each step to memory, and store none.

    After step `stop`, all ranks kill themselves.
    """
    rank = int(os.environ["RANK"])
    os.environ |= {"ELASTICCTL_LOCAL_TIER": nodes[rank], "ELASTICCTL_COPIES": f"{nodes[rank]}/copies.sock"}
    be_on(nodes[rank], f"{notes}-{rank}")
    agree, step = Checkpointer.agree, Run.step

    def wait_for_copy(checkpoints: Checkpointer | None) -> None:
        assert checkpoints is not None
        assert checkpoints.copies is not None
        checkpoints._saves.join()
        wait_until(checkpoints.copies.is_ready)
        checkpoints.copies._due_s = 0.0

    def agree_on_copy(checkpoints: Checkpointer, *arguments: Any) -> Any:
        wait_for_copy(checkpoints)
        return agree(checkpoints, *arguments)

    def step_to_end(run: Run, *arguments: Any, **more: Any) -> None:
        step(run, *arguments, **more)
        run._session.meetings._next = 0
        if run.steps_done == stop:
            wait_for_copy(run._session.storage.checkpoints)
            Path(f"{notes}-{rank}-copied").touch()
            wait_until(lambda: all(Path(f"{notes}-{other}-copied").exists() for other in range(len(nodes))))
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpointer.agree = agree_on_copy  # type: ignore[assignment, method-assign]
    Run.step = step_to_end  # type: ignore[method-assign]
    train(url, notes, "rows", 8, SavePolicy(every_s=3600))


def save_tables(root: str, saves: int, first: int = 1) -> None:
    """Go on from what is there, and save tables of which each rank has a shard: of one by rows, of one by columns."""
    unchanged.LEAST_BYTES, unchanged.LEAST_SHARE, tables.SAMPLE_ROWS = 0, 0, 4
    world = join()
    mesh = init_device_mesh("cpu", (world.size,))
    checkpoints = Checkpointer(LocalStorage(Path(root)), world)
    restored = checkpoints.restore()
    if restored is not None and not same(restored.state, table_state(first - 1)):
        raise SaveError("not what was saved")
    for step in range(first, first + saves):
        state = table_state(step)
        for dim, name in enumerate(("wide", "narrow")):
            state["model"][name] = distribute_tensor(state["model"][name].contiguous(), mesh, [Shard(dim)])
        checkpoints.save(state, Label(step))
        if not checkpoints.settle():
            raise SaveError("not committed")
