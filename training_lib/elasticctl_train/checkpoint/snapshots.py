"""This rank's copies of the state: what a save writes, so that training may change the state meanwhile.

The copies are in warm buffers and, if the node has a local tier, in files that outlive this process.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.errors import NoMemoryError
from elasticctl_train.checkpoint import plans, rank_shares
from elasticctl_train.checkpoint.incremental.unchanged import Unchanged
from elasticctl_train.checkpoint.memory.buffers import Buffers
from elasticctl_train.checkpoint.memory.copying import Copier, LateCopy
from elasticctl_train.checkpoint.memory.local_tier import Tier
from elasticctl_train.checkpoint.plans import State
from elasticctl_train.dist import World


class Snapshots:
    """Copies of one rank's share, one at a time; `tier` keeps the last one that was committed."""

    def __init__(self, world: World, tier: Tier | None) -> None:
        self.tier = tier
        self._restored_folder = ""
        """The save folder that the state came from: the tier keeps what it has of it until there is a newer commit."""
        self.unchanged = Unchanged()
        self._world = world
        self._copier = Copier()
        self._plan: plans.SharePlan | None = None
        self._buffers: Buffers | None = None
        self._late: LateCopy | None = None
        self._stored: rank_shares.Share | None = None
        self._may_wait, self._heeds_steps = True, False

    def prepare(self, state: State, local: State, rank_0_only: Collection[str]) -> None:
        """Allocate the buffers for such states in the background. Raises StateError."""
        self._late = None
        self._arrange(plans.flatten(state, local), rank_0_only)

    def take_snapshot(
        self, state: State, local: State, rank_0_only: Collection[str], until_step: Collection[str] = ()
    ) -> rank_shares.Share | NoMemoryError:
        """Return this rank's share, copied, or the reason why there is none. From here on, training may change the
        state.

        The parts in `until_step` are copied by the thread that writes the share, and at the latest when any optimizer's
        next step begins. Raises StateError.
        """
        if self._late is not None and self._late.is_torn:
            self._may_wait = False
        self._late = self._stored = None
        with _no_collection():
            flat = plans.flatten(state, local)
            plan, buffers = self._arrange(flat, rank_0_only)
            try:
                buffer = buffers.next()
            except NoMemoryError as e:
                return e.with_traceback(None)  # its frames would keep the state alive
            if self.tier is not None and buffer.in_tier:
                self.tier.unlabel(buffer.index)
            copied = plan.fill(buffer, flat, self._copier, until_step if self._may_wait else ())
            self._late = next((copy for copy in copied if isinstance(copy, LateCopy)), None)
            if self._late is not None:
                self._heed_steps()
            return rank_shares.Share(plan, buffer, flat.state, flat.local, copied)

    def finish(self) -> None:
        """Finish the late copies. Called by the thread that writes the share."""
        if self._late is not None:
            self._late.synchronize()

    def hasten(self) -> None:
        """Finish the late copies and confirm them. Called by the thread that trains."""
        if self._late is not None:
            self._late.finish()
            self._late.confirm()

    def confirm(self) -> None:
        """Check whether tensors were changed before their late copy. Called by the thread that trains."""
        if self._late is not None:
            self._late.confirm()

    def stored(self, share: rank_shares.Share, files: Sequence[ObjectRef]) -> None:
        """Record that the share is stored as these files, so the tier may offer them once they are also committed."""
        self._stored = share
        if self.tier is not None and share.buffer.in_tier:
            starts = [planned.start for planned in share.plan.files]
            self.tier.label(share.buffer.index, dict(zip(files, starts, strict=True)))

    def record_restored(self, folder: str) -> None:
        """Record which save was restored: the tier keeps it until the next commit."""
        self._restored_folder = folder

    def keep_snapshot(self) -> None:
        """Record that the last save is committed: its buffer holds the newest snapshot, and a former process's files
        can go."""
        if self._stored is not None:
            self.unchanged.committed(self._stored)
            self._stored = None
        if self._restored_folder and self.tier is not None:
            self.tier.clear()
            self._restored_folder = ""
        if self._buffers is not None:
            self._buffers.turn()

    def _heed_steps(self) -> None:
        """From now on, for as long as this object exists, call `hasten` before every step of every optimizer."""
        if not self._heeds_steps:
            self._heeds_steps = True
            myself = weakref.ref(self)

            def before_step(*_: object) -> None:
                found = myself()
                if found is not None:
                    found.hasten()

            weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove).atexit = False

    def _arrange(self, flat: plans.Flat, rank_0_only: Collection[str]) -> tuple[plans.SharePlan, Buffers]:
        """Return the plan for such states, and buffers of the right size; they are only renewed if the states have
        changed."""
        apart = self.unchanged.apart
        if self._plan is None or not self._plan.fits(flat, rank_0_only, apart):
            self._plan = plans.plan(flat, self._world.rank, self._world.size, rank_0_only, apart)
        size_bytes = self._plan.size_bytes
        if self._buffers is None or not self._buffers.fit(size_bytes):
            if self._buffers is not None:
                self._buffers.close()
            self._buffers = None  # free the memory before allocating more
            kept = self.tier is not None and self.tier.clear(but_for=self._restored_folder)
            gpu = next((tensor.device for tensor in flat.shared.values() if tensor.is_cuda), None)
            self._buffers = Buffers(size_bytes, tier=self.tier, pin=gpu, one_at_first=kept)
            _collect_once()
        return self._plan, self._buffers


@cache
def _collect_once() -> None:
    """Run the first full collection now, which the imports have made long, rather than during a save."""
    gc.collect()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Suspend the garbage collector: after the imports of torch, a full collection takes longer than copying 1 GB."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
