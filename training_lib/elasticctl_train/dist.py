"""The group of ranks: joining it, and the few small messages that this library passes between ranks.

Messages are JSON in tensors over a gloo group of this library's own: `torch.distributed`'s object collectives use
pickle, and a collective on the training's group could collide with one of DistributedDataParallel.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from elasticctl_store.errors import TrainError

log = logging.getLogger("elasticctl_train")

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LET_GO_S = 0.02
_DESTROY = distributed_c10d.destroy_process_group
_CONNECT = timedelta(seconds=2)
"""The timeout of one attempt to reach a store."""
_LOOK = timedelta(seconds=0.75)
"""How long one wait for others lasts before checking whether they can still come. A process that wakes up more than
twice a second counts as moving (`elasticctl_launcher.hangs`)."""
_LONGEST_LOOK_S = 0.05
"""The longest pause of a rank between two checks whether the others have come; the pauses grow up to it."""
_SURVIVING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
"""Make torch leave NCCL's failures to `inplace.connections`. It would wait for a minute and then end the process."""
_PATIENT = timedelta(days=3650)
"""How long a message may take: a rank may have to wait for its storage, while the others wait for it. The loss of a
rank is noticed immediately, by its connections, or by the process that started it."""


@dataclass(slots=True)
class Channel:
    """What messages pass through. All copies of a `World` share one, so that none of them keeps a group alive on its
    own.

    `training`: the group of gradients, if that is not the default group. `groups_made`: how many groups there were once
    `rejoin` had made these. `is_cut()`: the group has been given up.
    `is_dead()`: nothing that still waits there will ever end. `is_stuck`: something that waits there was given up.
    """

    group: dist.ProcessGroup | None = None
    training: dist.ProcessGroup | None = None
    groups_made: int = 0
    is_cut: Callable[[], bool] = lambda: False
    is_dead: Callable[[], bool] = lambda: False
    is_stuck: bool = False

    def make_groups(self, size: int) -> None:
        """Make this library's groups of all `size` ranks, in the same order on all of them."""
        self.group = dist.new_group(backend="gloo", timeout=_PATIENT) if size > 1 else None
        self.training = dist.new_group()
        self.groups_made = _torch_groups().group_count

    def give_up(self) -> None:
        """Record that something that waits here was given up."""
        self.is_stuck = True

    def release(self) -> None:
        """Let go of the groups."""
        self.group, self.training, self.is_stuck = None, None, False


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks. `owned`: this library created the process group and destroys it."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    channel: Channel = field(default_factory=Channel)
    owned: bool = False

    def broadcast(self, message: Any) -> Any:
        """Return rank 0's `message` (JSON data) on every rank; what the others pass is ignored. All ranks must call."""
        if self.size == 1:
            return message
        data = _to_bytes(message) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)], dtype=torch.int64)
        self._call(dist.broadcast, length, src=0)
        if self.rank != 0:
            data = torch.empty(int(length), dtype=torch.uint8)
        self._call(dist.broadcast, data, src=0)
        return _from_bytes(data)

    def gather(self, message: Any) -> list[Any]:
        """Return every rank's `message` (JSON data) on every rank, in order of rank. All ranks must call."""
        if self.size == 1:
            return [message]
        data = _to_bytes(message)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._call(dist.all_gather, lengths, torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._call(dist.all_gather, found, padded)
        return [_from_bytes(data[: int(length)]) for data, length in zip(found, lengths, strict=True)]

    def share(self, data: torch.Tensor, source: int) -> None:
        """Fill `data` (uint8, of equal length on all ranks) with rank `source`'s. All ranks must call."""
        self._call(dist.broadcast, data, src=source)

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send `data` (uint8) to a rank that calls `receive`; return once it has been sent."""
        self._call_apart(dist.send, data, to)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Fill `data` (uint8) with what rank `source` sends."""
        self._call_apart(dist.recv, data, source)

    def highest(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks. All ranks must call."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64)
        self._call(dist.all_reduce, numbers, op=dist.ReduceOp.MAX)
        return [int(number) for number in numbers]

    def _call(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Run a collective to completion. Raises RuntimeError if a peer is lost, GroupOver if it would never
        complete."""
        with collective_errors():
            finish(collective(*arguments, group=self.channel.group, async_op=True, **options), self.channel)

    def _call_apart(self, transfer: Callable[..., Any], *arguments: Any) -> None:
        """Like `_call`, for transfers that cannot be waited for with a timeout, after which gloo would abort the whole
        group."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                transfer(*arguments, group=self.channel.group)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=run, name="elasticctl-transfer", daemon=True)
        thread.start()
        with collective_errors():
            while thread.is_alive():
                thread.join(_LOOK.total_seconds())
                if thread.is_alive():
                    _check_dead(self.channel)
            if errors:
                raise errors[0]


class GroupOver(RuntimeError):
    """The group ended before it was complete."""


@contextmanager
def collective_errors() -> Iterator[None]:
    """Mark the RuntimeErrors that are raised inside as errors of collectives; see `is_of_collective`."""
    try:
        yield
    except RuntimeError as error:
        error._elasticctl_collective = True  # type: ignore[attr-defined]
        raise


def is_of_collective(error: BaseException) -> bool:
    """Return whether a collective of this library raised this error. Errors of the script may have the same type."""
    return getattr(error, "_elasticctl_collective", False)


def finish(work: Any, channel: Channel) -> None:
    """Wait for a collective. Raises RuntimeError if a peer is lost, GroupOver if it would never complete."""
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError:  # also raised on a timeout
            if work.is_completed():
                work.wait()
                return
        _check_dead(channel)


def finish_on_gpu(channel: Channel) -> None:
    """Wait until the current GPU has finished all of its queued work. Raises GroupOver if the group was given up.

    Neither the GPU nor torch shows whether a collective there has ended with a result or was aborted.
    """
    torch.cuda.current_stream().synchronize()
    if channel.is_cut():
        raise GroupOver("the group was given up before the GPU had a result")


def _check_dead(channel: Channel) -> None:
    if channel.is_dead():
        channel.give_up()
        raise GroupOver("a transfer to a lost peer never ends")


def join(environ: Mapping[str, str] = os.environ) -> World:
    """Join the group that torchrun's environment describes, unless the script has; without either, return a world of
    one.

    The backend is nccl if there are GPUs, otherwise gloo. Raises TrainError as `refuse_helper` does.
    """
    refuse_helper()
    here = device(environ)
    owned = is_ours_to_join(environ)
    if owned:
        dist.init_process_group(_backend(here), **_place_in_kept_store(environ))
    if not dist.is_initialized():
        return World(device=here)
    channel = Channel(dist.new_group(backend="gloo", timeout=_PATIENT) if dist.get_world_size() > 1 else None)
    atexit.register(_end_threads, channel)
    return World(dist.get_rank(), dist.get_world_size(), here, channel, owned)


def _place_in_kept_store(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments for a store that outlives the group, as under torchrun: a prefix that no other group has used.

    A script may make several runs, one after the other. With the same prefix, each would find the addresses of the
    last.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    server = TCPStore(*address, is_master=False, timeout=default_pg_timeout, wait_for_workers=False)
    attempt = f"elasticctl/attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    number = server.add(f"{attempt}/groups of rank {environ['RANK']}", 1)
    store = PrefixStore(f"{attempt}/group {number}", server)
    return {"store": store, "rank": int(environ["RANK"]), "world_size": int(environ["WORLD_SIZE"])}


def refuse_helper() -> None:
    """Raise TrainError in a helper process that imports the script because a rank has started it.

    Such a process has the rank's environment: it would join the group a second time as that rank, and take over its
    storage. `multiprocessing` marks it while it imports the script, and refuses to start another process in it.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TrainError(
            "a process that this script has started, such as a worker of a DataLoader, imports the script and must not "
            "train as well. FIX: put the script's code into a function, main(), and call it below "
            'if __name__ == "__main__":'
        )


def collectives_of_script() -> int:
    """Return the number of collectives in the default group so far."""
    group: Any = dist.group.WORLD  # torch's annotations lack the method
    return 0 if group is None else int(group._get_sequence_number_for_group())


def has_other_groups(world: World) -> bool:
    """Return whether the script has made process groups since `rejoin`, though it may have destroyed them since."""
    groups = _torch_groups()
    ours = groups.default_pg, world.channel.group, world.channel.training
    return groups.group_count > world.channel.groups_made or not all(group in ours for group in groups.pg_map)


def _torch_groups() -> Any:
    """Return torch's record of this process's groups, for which it has no public name."""
    module: Any = dist.distributed_c10d
    return module._world


def is_ours_to_join(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether there is a group to join that the script has not joined itself."""
    return not dist.is_initialized() and all(environ.get(name) for name in _TORCHRUN_VARIABLES)


def meet(is_over: Callable[[], bool]) -> Store:
    """Wait until all ranks of the group that the environment describes have arrived; return the store for `rejoin`.

    Raises GroupOver as soon as `is_over()`, because one of them may never come.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = None
    while server is None:
        if is_over():
            raise GroupOver
        with suppress(RuntimeError):  # its host may be gone; the group is over soon then
            server = TCPStore(*address, is_master=False, timeout=_CONNECT, wait_for_workers=False)
    store = PrefixStore(f"elasticctl/ranks/{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
    if store.add("here", 1) == int(os.environ["WORLD_SIZE"]):
        store.set("all here", "")
    began = time.monotonic()
    while not store.check(["all here"]):
        if is_over():
            raise GroupOver
        time.sleep(min(_LONGEST_LOOK_S, (time.monotonic() - began) / 10))
    return store


def rejoin(world: World, store: Store, environ: Mapping[str, str] = os.environ) -> World:
    """Form the group of the ranks that have met, in place of any other. Raises RuntimeError if one of them is lost.

    The default group is the script's own. `training` uses a separate group, so that the two never collide.
    """
    _take_down(world.channel)
    _torch_groups().group_count = 0  # a failed attempt has counted, and group names must agree on all ranks
    os.environ |= _SURVIVING
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    dist.init_process_group(_backend(world.device), store=store, rank=rank, world_size=size)
    world.channel.make_groups(size)
    if not world.owned:
        atexit.register(_end_threads, world.channel)
    return World(rank, size, world.device, world.channel, owned=True)


def groups(world: World) -> list[dist.ProcessGroup]:
    """Return the groups whose collectives run on the world's device: the script's own, and that of gradients."""
    return [group for group in (dist.group.WORLD, world.channel.training) if group is not None]


def connect_gpus(world: World) -> None:
    """Connect the GPUs of all ranks, which NCCL would otherwise do in the first step. Raises RuntimeError."""
    if world.size > 1:
        dist.all_reduce(torch.zeros(1, device=world.device), group=world.channel.training)
        finish_on_gpu(world.channel)


def leave(world: World) -> None:
    """Destroy the process group, if this library created it, and release this library's own. Must be the last call.

    The group's threads end here; see `_end_threads`.
    """
    if world.owned:
        _take_down(world.channel)
    else:
        world.channel.release()
    _let_script_destroy()


def _let_script_destroy() -> None:
    """Let the script call `destroy_process_group` though there is no group any more, as most DDP scripts do at the end.

    torch would raise an AssertionError then, with all training done.
    """
    for module in (distributed_c10d, dist, sys.modules["__main__"]):
        if vars(module).get("destroy_process_group") is _DESTROY:
            vars(module)["destroy_process_group"] = _destroy_if_any


@functools.wraps(_DESTROY)
def _destroy_if_any(group: dist.ProcessGroup | None = None) -> None:
    if group is None and not dist.is_initialized():
        log.info("Run has left the process group already: destroy_process_group() can be removed from the script")
        return
    _DESTROY(group)


def _take_down(channel: Channel) -> None:
    """Destroy all groups and their threads, except those in which something is stuck, which would block."""
    if channel.is_stuck:
        for group in _torch_groups().pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    channel.release()
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_threads(channel: Channel) -> None:
    """At the exit of the interpreter, also after an error: end this library's threads, and give others a moment.

    gloo's threads release a message's tensors some time after the message has arrived, and need the interpreter for
    that. While it exits they cannot have it, and the process aborts ("terminate called without an active exception",
    https://github.com/pytorch/pytorch/pull/179291) instead of exiting with its own exit code.
    """
    group, channel.group = channel.group, None
    if not dist.is_initialized():
        return
    if group is not None:
        with suppress(RuntimeError, ValueError):  # the script has destroyed it
            dist.destroy_process_group(group)
        del group
    time.sleep(_LET_GO_S)


def _to_bytes(message: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def _backend(of: torch.device) -> str:
    return "nccl" if of.type == "cuda" else "gloo"


def device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return this rank's GPU, which becomes the current one; the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    return gpu
