"""What the processes of the tests run.

Imported once, by the fork server, so every import is at the top: torch's optimizers would import `torch._dynamo` on
first use, and that takes seconds.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints.entries import Commit, ObjectRef, Retention
from elasticctl_store.errors import SaveError, StorageError
from elasticctl_store.storage import Storage, cloud, s3
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy
from elasticctl_train.checkpoint import parts, rank_shares
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.incremental import tables, unchanged
from elasticctl_train.dist import join
from tests.support.interrupting import die_at_change
from tests.support.train.states import same

torch.set_num_threads(1)
gc.freeze()  # else the first full collection of each process goes through all of torch: 0.2 s


class Numbers(Dataset[int]):
    """0, 1, 2, …"""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class NumberStream(IterableDataset[int]):
    """The same, one after the other."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


def state_of(step: int) -> dict[str, Any]:
    """A state of which every bit that is not frozen depends on the step."""
    torch.manual_seed(step)
    tensors = {"w": torch.randn(300), "b": torch.randn(3, 3).bfloat16(), "n": torch.tensor(step)}
    tensors["frozen"] = torch.arange(600.0)
    return {"model": tensors, "scheduler": {"last": step}}


def save(storage: Storage, acknowledged: str, saves: int) -> None:
    """Resume, then save `saves` steps; every commit that is acknowledged is noted in the file `acknowledged` first."""

    def on_commit(commit: Commit, duration_s: float) -> None:
        os.write(notes, f"{commit.step}\n".encode())

    unchanged.LEAST_BYTES = 0  # so that the frozen tensor gets a file of its own
    notes = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    checkpoints = Checkpointer(storage, keep=Retention(last=1), on_commit=on_commit)
    restored = checkpoints.restore()
    step = restored.commit.step if restored else 0
    for _ in range(saves):
        step += 1
        checkpoints.save(state_of(step), Label(step))
        checkpoints.settle()


def save_and_die(root: str, acknowledged: str, die_at: int) -> None:
    """Save three steps into a folder; SIGKILL oneself just before the `die_at`-th change of the file system."""
    die_at_change(die_at)
    save(LocalStorage(Path(root)), acknowledged, saves=3)


def save_to(url: str, acknowledged: str, saves: int, keys: Mapping[str, str]) -> None:
    """Save `saves` steps, on clouds in parts and ranges as if they were large, with `keys` in the environment."""
    os.environ |= keys
    s3.PART_BYTES = cloud.RANGE_BYTES = 1000
    save(storages.open(url), acknowledged, saves)


def train(url: str, notes: str, end: dict[str, Any]) -> None:
    """Train on `end["samples"]` numbers for `end["epochs"]`; note which samples this rank trained on in which step.

    `end` may also name a step after which all ranks stop cleanly (`stop`) or are killed (`kill`), options of Run, and
    say that the numbers come as a `stream`.
    """
    model = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = Run(url or None, model=model, optimizer=optimizer, save=SavePolicy(every_steps=end.get("every_steps", 2)))
    with run, open(f"{notes}-{run.rank}.jsonl", "a", buffering=1) as file:
        file.write(json.dumps({"resumed": run.steps_done, "world_size": run.world_size}) + "\n")
        for epoch in run.epochs(end["epochs"]):
            if end.get("stream"):
                loader: Any = run.loader(NumberStream(end["samples"]), global_batch=end["global_batch"])
            else:
                loader = run.loader(Numbers(end["samples"]), global_batch=end["global_batch"], shuffle=True, seed=7)
            for batch in loader:
                x = batch.double()[:, None] / end["samples"]
                x = torch.cat([x, x.square(), x.sin()], dim=1)
                loss = (run.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                own = batch[: run.own_samples].tolist()
                file.write(json.dumps({"step": run.steps_done + 1, "epoch": epoch, "samples": own}) + "\n")
                run.step(loss=loss)
                if run.steps_done == end.get("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.steps_done == end.get("stop"):
                    return
        if run.is_main:
            weights = [parameter.tolist() for parameter in model.parameters()]
            Path(f"{notes}-weights.json").write_text(json.dumps(weights))


def train_until_notice(url: str, notes: str, end: dict[str, Any], folder: str) -> None:
    """Train under a launcher that listens at `folder`/agent and gives notice by the file `folder`/notice-RANK."""
    os.environ |= {
        "ELASTICCTL_AGENT_SOCKET": f"{folder}/agent",
        "ELASTICCTL_GENERATION": "4",
        "ELASTICCTL_NOTICE_FILE": f"{folder}/notice-{os.environ['RANK']}",
    }
    train(url, notes, end)


def train_in_the_cloud(url: str, notes: str, end: dict[str, Any], folder: str, keys: Mapping[str, str]) -> None:
    """Train with these AWS keys, and, if there is a `folder`, under a launcher; see `train_until_notice`.

    `end["message_s"]` is how long messages between ranks may take where nothing else is said.
    """
    os.environ |= {**keys, "AWS_CONFIG_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true"}
    if "message_s" in end:
        distributed_c10d.default_pg_timeout = timedelta(seconds=end["message_s"])
    if folder:
        train_until_notice(url, f"{notes}/notes", end, folder)
    else:
        train(url, f"{notes}/notes", end)


def lose_a_rank_in_mid_save(url: str) -> None:
    """Rank 1 dies in its second save, when it has written its tensors, and not yet what they are."""
    put, objects = LocalStorage.put, 0

    def deadly(storage: LocalStorage, key: str, *arguments: Any, **options: Any) -> int:
        nonlocal objects
        objects += key.startswith("data/")
        if objects == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return put(storage, key, *arguments, **options)

    LocalStorage.put = deadly  # type: ignore[method-assign, assignment]
    train(url, f"{url}-notes", {"epochs": 1000, "samples": 64, "global_batch": 8, "every_steps": 4})


def fail_saves_on_rank_1(url: str, failing: list[int], outcome: str) -> None:
    """Rank 1 cannot write its shares of these numbers; each rank notes how the run ended.

    It ends after 20 steps, or as many more as a slow disk takes for three saves to be begun.
    """
    write, saves = rank_shares.Share.write, 0

    def failing_write(share: rank_shares.Share, *arguments: Any) -> ObjectRef:
        nonlocal saves
        saves += 1
        if saves in failing and os.environ["RANK"] == "1":
            raise StorageError("the disk is full")
        return write(share, *arguments)

    rank_shares.Share.write = failing_write  # type: ignore[method-assign]
    run = Run(url, model=torch.nn.Linear(2, 2), save=SavePolicy(every_steps=1))
    checkpoints = run._session.storage.checkpoints
    assert checkpoints is not None
    while run.steps_done < 20 or checkpoints._saves.number < 3:
        run.step()
        time.sleep(0.001)
    try:
        run.finish()
        ended = "finished"
    except SaveError as e:
        ended = str(e)
    Path(f"{outcome}-{run.rank}").write_text(ended)


def note_random_numbers(url: str, outcome: str) -> None:
    """Resume, note the next numbers of every generator, make a step, save."""
    run = Run(url, model=torch.nn.Linear(1, 1))
    if run.steps_done == 0:
        torch.manual_seed(run.rank)
    Path(f"{outcome}-{run.rank}").write_text(json.dumps(torch.rand(2).tolist()))
    run.step()
    run.finish()


def save_differing_buffers(url: str) -> None:
    """A model whose buffers differ by rank, as DistributedDataParallel leaves them after a step."""
    model = torch.nn.BatchNorm1d(3)
    run = Run(url, model=model)
    with torch.no_grad():
        model.running_mean.fill_(float(run.rank + 1))  # type: ignore[union-attr, operator]
    run.step()
    run.finish()


def average_on_rank_0(url: str, outcome: str) -> None:
    """Keep an average of the weights on rank 0 alone, next to a second model; note what is restored of it."""
    model, critic = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    critics = torch.optim.SGD(critic.parameters(), lr=0.1)
    run = Run(url, model=model, optimizer=optimizer, critic=critic, critics=critics, average=average)
    with run, torch.no_grad():
        Path(f"{outcome}-{run.rank}").write_text(json.dumps(sum(one.sum().item() for one in average.parameters())))
        if run.is_main:
            for one in average.parameters():
                one.fill_(1.0)
        run.step()


def step_wrapped(url: str, how: str, outcome: str) -> None:
    """Make one step with the model as it is called `how`; rank 0 notes the step, the sum of weights, and its layers."""
    join()
    model: Any = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    if "compiled" in how:
        model = torch.compile(model, backend="eager")
    if "parallel" in how:
        model = DistributedDataParallel(model)
    if "compiled parallel" in how:
        model = torch.compile(model, backend="eager")
    with Run(url, model=model) as run, torch.no_grad():
        total = sum(parameter.sum().item() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.add_(1.0)
        run.step()
        layers = [type(layer).__name__ for layer in parts.layers(run.model)]
    if run.is_main:
        Path(outcome).write_text(json.dumps([run.steps_done, total, layers]))


def trained(notes: Sequence[Path]) -> dict[int, list[int]]:
    """The samples trained on in each step that counts: a resume undoes the steps after the checkpoint."""
    steps: dict[int, list[int]] = {}
    for note in notes:
        done: dict[int, list[int]] = {}
        for file in sorted(note.parent.glob(f"{note.name}-*.jsonl")):
            head, *lines = [json.loads(line) for line in file.read_text().splitlines()]
            for line in lines:
                done.setdefault(line["step"], []).extend(line["samples"])
        steps = {step: samples for step, samples in steps.items() if step <= head["resumed"]} | done
    return steps


def frozen_state(step: int) -> dict[str, Any]:
    """A frozen model, and a small part of it that is trained."""
    generator = torch.Generator().manual_seed(0)
    frozen = {f"layer.{index}": torch.randn(50, 40, generator=generator) for index in range(10)}
    return {"model": {**frozen, "adapter": torch.full((40,), float(step))}}


def table_state(step: int) -> dict[str, Any]:
    """A model with tables, of which some rows have changed in each of the steps so far, and a part that is trained."""
    generator = torch.Generator().manual_seed(0)
    wide, narrow = torch.randn(300, 20, generator=generator), torch.zeros(200, 33, dtype=torch.bfloat16).t()
    for each in range(step):
        wide[torch.randint(300, (3 if each % 4 else 9,), generator=generator)] += 1
        narrow[each % 33, :] = -0.0 if each % 2 else math.nan
    return {"model": {"wide": wide, "narrow": narrow, "bias": torch.full((40,), float(step))}}


def save_tables(root: str, saves: int, first: int = 1) -> None:
    """Go on from what is there, and save such states on all ranks."""
    unchanged.LEAST_BYTES, unchanged.LEAST_SHARE, tables.SAMPLE_ROWS = 0, 0, 4
    world = join()
    checkpoints = Checkpointer(LocalStorage(Path(root)), world)
    restored = checkpoints.restore()
    if restored is not None and not same(restored.state, table_state(first - 1)):
        raise SaveError("not what was saved")
    for step in range(first, first + saves):
        checkpoints.save(table_state(step), Label(step))
        if not checkpoints.settle():
            raise SaveError("not committed")


def save_with_frozen_part(root: str, saves: int, first: int = 1) -> None:
    """Go on from what is there, and save such states on all ranks."""
    unchanged.LEAST_BYTES = 0
    world = join()
    checkpoints = Checkpointer(LocalStorage(Path(root)), world)
    checkpoints.restore()
    for step in range(first, first + saves):
        checkpoints.save(frozen_state(step), Label(step), local={"rank": world.rank})
        if not checkpoints.settle():
            raise SaveError("not committed")
