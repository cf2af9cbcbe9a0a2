"""The group that this process trains in, through all its generations."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch._C._distributed_c10d import HashStore

from elasticctl_protocol import variables
from elasticctl_store.errors import StateError
from elasticctl_train import dist
from elasticctl_train.inplace import handover
from elasticctl_train.inplace.connections import TIMEOUT, GroupConnections, gpu_failure, is_stuck
from elasticctl_train.inplace.elastic_ddp import PeerWatch, is_own
from elasticctl_train.inplace.launcher_link import LauncherLink
from elasticctl_train.inplace.newest_state import Agreement, Standing

log = logging.getLogger("elasticctl_train")

_LONG_S = 3600.0
_CHECK_S = 0.75
"""How often NCCL's state is checked: rarely enough that the rank does not seem to move."""
State = dict[str, Any]


class ElasticGroup:
    """This process's membership in each generation in which the launcher gives it a place.

    `world` is its place in the newest generation, and `watch` tracks whether a peer is lost. `has_state`: one of the
    ranks of the newest generation had a state at its start. `thread` is the identifier of the thread that trains.
    """

    def __init__(self, link: LauncherLink, on_loss: Callable[[], None] = lambda: None) -> None:
        """`on_loss()` is called when a loss is noticed, from any thread."""
        self._link, self._on_loss = link, on_loss
        channel = dist.Channel(is_cut=lambda: self._connections.is_cut, is_dead=lambda: self._connections.is_dead)
        self.world = dist.World(device=dist.device(), channel=channel)
        self._connections = GroupConnections.none()
        self.watch = PeerWatch(1, partial(self._give_up, link.generation, self._connections), channel)
        self.has_state = False
        self.thread = threading.get_ident()
        link.listen(on_over=self._cut)
        if self.world.device.type == "cuda":
            threading.Thread(target=self._watch_gpus, name="elasticctl-nccl", daemon=True).start()

    @staticmethod
    def find_link() -> LauncherLink | None:
        """Return the launcher's link for a group; None if it keeps no process, or the script has joined a group."""
        return LauncherLink.open() if dist.is_ours_to_join() else None

    @property
    def is_over(self) -> bool:
        """True if the generation has ended. Its ranks continue until they notice, or check."""
        return self._link.is_over

    @property
    def generation(self) -> int:
        """The newest generation in which this process has a place."""
        return self._link.generation

    @contextmanager
    def alone(self) -> Iterator[PeerWatch]:
        """Form a group of this process alone, before `enter`; yield the group's watch, which raises all errors."""
        self.world = dist.rejoin(self.world, HashStore(), {"RANK": "0", "WORLD_SIZE": "1"})
        watch = PeerWatch(1, lambda error: None, self.world.channel, survives=False)
        try:
            yield watch
        finally:
            dist.leave(self.world)

    def enter(self, standing: Standing, state: Callable[[], Mapping[str, Any]]) -> tuple[Agreement, State | None]:
        """Report to the launcher that this process stays, and join the other ranks, without a time limit.

        Returns how the ranks arrived at one state, and that state if this rank had to take it over, else None.
        `state()` returns the state that this rank gives to others. Raises StateError if it fails, ConnectionError if
        the launcher hangs up, and RuntimeError for errors of this process itself (`is_own`).
        """
        self._link.attach()
        if os.environ.pop(variables.PLACE, ""):
            os.environ.update(self._link.wait_for_place())
        return self._join(standing, state)

    def enter_next(self, standing: Standing, state: Callable[[], Mapping[str, Any]]) -> tuple[Agreement, State | None]:
        """Wait for a place in the next generation, and enter it. See `enter`."""
        os.environ.update(self._link.wait_for_place())
        return self._join(standing, state)

    def _join(self, standing: Standing, state: Callable[[], Mapping[str, Any]]) -> tuple[Agreement, State | None]:
        """Enter this generation, or a later one if it ends meanwhile."""
        while True:
            try:
                return self._enter(standing, state)
            except RuntimeError as error:
                if is_own(error):
                    raise
                self._link.report_lost(self.generation, _first_line(error))
                self._connections.seal()
                self._cut()
                os.environ.update(self._link.wait_for_place())

    def decline(self, why: str) -> NoReturn:
        """Make the launcher replace this process, and wait to be stopped."""
        log.warning("rank %d restarts: %s", self.world.rank, why)
        self._link.decline(why)
        while True:
            time.sleep(_LONG_S)

    def regroup(self, why: str) -> NoReturn:
        """Have all ranks meet in a new group. Raises GroupOver."""
        self._link.regroup(why)
        raise dist.GroupOver(why)

    def train_in_this_thread(self) -> None:
        """Record which thread trains."""
        self.thread = threading.get_ident()

    def close(self) -> None:
        """Let this process end with its generation from now on."""
        self.watch.close()
        self._link.close()

    def check_gpus(self) -> None:
        """Give up the generation if NCCL has lost a peer; abort the process if a collective has timed out."""
        generation, connections = self.generation, self._connections
        failed = gpu_failure(connections.on_gpus)
        if not failed or connections.is_cut:
            return
        if failed == TIMEOUT or not self.watch.survives:
            log.error("rank %d aborts: NCCL reports %s", self.world.rank, failed)
            os.abort()
        self._link.report_lost(generation, f"NCCL reports {failed}")
        connections.cut()

    def _enter(self, standing: Standing, state: Callable[[], Mapping[str, Any]]) -> tuple[Agreement, State | None]:
        # All connections that are opened from here on belong to this group: they are cut when it is given up.
        connections = self._connections = GroupConnections(int(os.environ["WORLD_SIZE"]), self._free)
        self.world = dist.rejoin(self.world, dist.meet(lambda: self._link.is_over))
        if self.world.device.type == "cuda":
            connections.add_gpu_groups(dist.groups(self.world))
            dist.connect_gpus(self.world)
        if not connections.seal():
            raise dist.GroupOver("a peer was lost while the group was being made")
        on_loss = partial(self._give_up, self.generation, connections)
        self.watch.reset(self.world.size, on_loss)
        # The ranks compare how far they are; those that are behind receive the state of one that is not.
        buckets = json.dumps(self.watch.buckets).encode()
        agreement = handover.agree(self.world, replace(standing, buckets_bytes=len(buckets)))
        self.watch.put_buckets(json.loads(handover.spread(self.world, agreement, buckets)))
        if self.world.rank == agreement.source:
            handover.send_state(self.world, agreement, _state_of(state) if agreement.receivers else {})
        received = handover.receive_state(self.world, agreement) if self.world.rank in agreement.receivers else None
        self.has_state = agreement.source is not None
        return agreement, received

    def _give_up(self, generation: int, connections: GroupConnections, error: BaseException) -> None:
        """Give up a generation because a collective of it has failed: report it, and cut the connections."""
        if generation == self.generation:
            self._on_loss()
        self._link.report_lost(generation, _first_line(error))
        connections.cut()

    def _watch_gpus(self) -> None:
        while True:
            time.sleep(_CHECK_S)
            self.check_gpus()

    def _cut(self) -> None:
        self._connections.cut()

    def _free(self, connections: GroupConnections) -> None:
        """Give up this process if its script still waits on connections on which nothing will ever arrive."""
        while connections is self._connections and self.world.device.type == "cpu":  # NCCL has aborted
            if is_stuck(self.thread) and connections is self._connections:
                self._link.decline("a collective with a lost peer never ends")
                return


def _state_of(state: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return `state()`. Raises StateError if the script's own code fails, which it would do in any other group, too."""
    try:
        return state()
    except RuntimeError as error:
        raise StateError(f"the state of this rank cannot be read: {error}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
