"""The storage of a run: what the run starts from, when it takes the URL over, and how often it is interrupted.

A run starts from its own newest checkpoint, from the one before a loss that was not finite, or from another run's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from elasticctl_protocol import variables
from elasticctl_protocol.reports import StateSource
from elasticctl_store import storage
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.checkpoints.run_records import Rollback
from elasticctl_store.errors import StorageError, TrainError
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Like, Restored
from elasticctl_train.data.sample_order import Cursor
from elasticctl_train.dist import World
from elasticctl_train.interruptions import Hazard, Interruptions, this_machine, unknown_hazard
from elasticctl_train.save_policy import SavePolicy

log = logging.getLogger("elasticctl_train")

USED_URLS: set[str] = set()
"""The storage URLs to which runs of this process have saved."""
_END_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Start:
    """`restored` is the checkpoint that was found (None: there is none, and the run starts at step 0), `origin` the URL
    of the other run that it belongs to, and `back` says why this run has gone back, if it has.
    """

    restored: Restored | None = None
    origin: str = ""
    back: Rollback | None = None

    @property
    def is_copy(self) -> bool:
        """Whether the state comes from workers' memory."""
        return self.restored is not None and self.restored.is_copy

    def log_place(self, cursor: Cursor, url: str, world_size: int) -> None:
        """Log where training begins, for a run that keeps its checkpoints at `url` ("": nowhere)."""
        if self.restored is None:
            if url:
                log.info("no checkpoint at %s yet: starting at step 0", url)
        elif self.is_copy:
            log.info("resumed from step %d, epoch %d, from workers' memory", cursor.step, cursor.epoch)
        elif self.origin:
            log.info("started from step %d, epoch %d of %s", cursor.step, cursor.epoch, self.origin)
        elif self.back is not None:
            said = "went back to step %d, continuing from epoch %d, sample %d: the loss was %s at step %d"
            log.warning(said, cursor.step, cursor.epoch, cursor.position, self.back.value, self.back.step)
        else:
            ranks = f"{len(self.restored.commit.shares)} -> {world_size} ranks"
            log.info("resumed from step %d, epoch %d (%s, %s)", cursor.step, cursor.epoch, url, ranks)


def find_start(checkpoints: Checkpointer | None, like: Like | None, waits: storage.Waits, *, goes_back: bool) -> Start:
    """On all ranks: read the newest checkpoint or, while the run has none, the one of $ELASTICCTL_START_FROM.

    With `goes_back`, a run that has gone back reads one from before that. Raises StorageError, RestoreError as `like`
    does, and TrainError if the variable is wrong.
    """
    back = checkpoints.rollback() if checkpoints and goes_back else None
    restored = checkpoints.restore(like, back) if checkpoints else None
    if checkpoints and back and restored is None:
        before = f"this run is to go back, but the checkpoints from before step {back.step} are gone"
        raise StorageError(f"{checkpoints.url}: {before}. FIX: submit it again, under another URL")
    wanted = os.environ.get(variables.START_FROM, "")
    if restored is not None or not wanted:
        return Start(restored, back=back)
    url, step = _parse(wanted)
    if checkpoints is None:
        raise TrainError(f"${variables.START_FROM} needs a storage URL for this run. FIX: set ${variables.STORAGE}")
    return Start(checkpoints.start_from(storage.open(url, waits=waits), step, like), origin=url)


class RunStorage:
    """The checkpoints of one run, on this rank. All ranks must make the same calls in the same order.

    The URL is taken over when there is something to read, or else when there is something to save. `checkpoints` is
    None until then, and if nothing is saved. `start` is what the run starts from, until the first step is done. `waits`
    says whether the storage is unavailable.
    """

    def __init__(self, url: str | None, policy: SavePolicy, on_commit: Callable[[Commit, float], None]) -> None:
        """`url` defaults to $ELASTICCTL_STORAGE; without it, nothing is saved. `on_commit(commit, duration_s)` is
        called on rank 0, from a thread."""
        self._given_url = url or os.environ.get(variables.STORAGE, "")
        self._policy, self._on_commit = policy, on_commit
        self._interruptions: Interruptions | None = None
        self.waits = storage.Waits()
        self.start = Start()
        self.checkpoints: Checkpointer | None = None
        self.is_open = False

    @property
    def url(self) -> str:
        """The storage URL of the checkpoints; empty if none are saved."""
        return self.checkpoints.url if self.checkpoints else self._given_url

    @property
    def generation(self) -> int:
        """The number of this incarnation among all that have taken over the URL; 0 if no checkpoints are saved."""
        return self.checkpoints.generation if self.checkpoints else 0

    @property
    def hazard(self) -> Hazard:
        """How often to expect interruptions from now on."""
        return unknown_hazard() if self._interruptions is None else self._interruptions.hazard()

    def find_start(self, world: World, like: Like | None, *, goes_back: bool) -> None:
        """Take over the URL, and read what the run starts from. See `find_start`."""
        self._take_over(world)
        self.start = find_start(self.checkpoints, like, self.waits, goes_back=goes_back)

    def open(self, world: World) -> Checkpointer | None:
        """Take over the URL, unless that is done; return None if no checkpoints are saved."""
        if not self.is_open:
            self._take_over(world)
            if self.checkpoints is not None:
                self.checkpoints.recall()
            self.begin_group(world, work_lost=False)  # a process has stayed, this one or another rank's
        return self.checkpoints

    def close(self, grace_s: float) -> None:
        """Give a save in flight a moment, and leave the URL until there is something to save again."""
        if self.checkpoints is not None:
            self.checkpoints.abandon(grace_s)
        self.checkpoints, self.is_open = None, False

    def release(self) -> None:
        """Let go of the checkpoints, all of which are committed: training has ended."""
        self.checkpoints = None

    def release_start(self) -> None:
        """Free the state that was read: it has been loaded."""
        self.start = replace(self.start, restored=None)

    def begin_group(self, world: World, *, work_lost: bool) -> None:
        """Record that this group has begun, and whether the work since the last commit was lost."""
        if self._interruptions is not None:
            machines = world.gather(this_machine())
            if world.rank == 0:
                self._interruptions.begin_group(machines, work_lost=work_lost)

    def end_group(self, world: World) -> None:
        """Record that this group ends without losing anything."""
        if self._interruptions is not None and world.rank == 0:
            self._interruptions.end_group(_END_GRACE_S)

    def source(self) -> tuple[StateSource | None, str | None]:
        """Return where the state that was read comes from, and why not from copies."""
        if self.start.restored is None:
            return None, None
        if self.start.is_copy:
            return StateSource.COPIES, None
        is_own = self.checkpoints is not None and not self.start.origin
        return StateSource.STORAGE, (self.checkpoints.why_storage or None) if self.checkpoints and is_own else None

    def _take_over(self, world: World) -> None:
        if self._given_url:
            kept = storage.open(self._given_url, waits=self.waits)
            USED_URLS.add(kept.url)
            keep, on_commit = self._policy.retention, self._on_commit
            self.checkpoints = Checkpointer(kept, world, keep=keep, on_commit=on_commit, waits=self.waits)
            self._interruptions = Interruptions(kept) if self._policy.auto else None
        elif world.rank == 0:
            log.warning("no storage URL and no $%s: no checkpoints are saved", variables.STORAGE)
        self.is_open = True


def _parse(wanted: str) -> tuple[str, int | None]:
    """The URL and the step (None: the newest) that the variable names. Raises TrainError."""
    url, _, step = wanted.rpartition("#")
    if not url or not (step == "latest" or (step.isascii() and step.isdigit())):
        raise TrainError(f"${variables.START_FROM}={wanted} is invalid. FIX: set it to URL#STEP or URL#latest")
    return url, None if step == "latest" else int(step)
