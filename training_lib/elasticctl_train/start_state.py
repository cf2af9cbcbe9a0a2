"""What a run starts from: its own newest checkpoint, the one before a loss that was not finite, or another run's."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from elasticctl_store import storage
from elasticctl_store.checkpoints.rollbacks import Rollback
from elasticctl_store.errors import StorageError, TrainError
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Like, Restored
from elasticctl_train.data.sample_order import Cursor

log = logging.getLogger("elasticctl_train")

STORAGE_VARIABLE = "ELASTICCTL_STORAGE"
START_FROM_VARIABLE = "ELASTICCTL_START_FROM"
"""`<URL>#<step>`, or `<URL>#latest`: the checkpoint to start from while a run has none of its own."""


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
    wanted = os.environ.get(START_FROM_VARIABLE, "")
    if restored is not None or not wanted:
        return Start(restored, back=back)
    url, step = _parse(wanted)
    if checkpoints is None:
        raise TrainError(f"${START_FROM_VARIABLE} needs a storage URL for this run. FIX: set ${STORAGE_VARIABLE}")
    return Start(checkpoints.start_from(storage.open(url, waits=waits), step, like), origin=url)


def _parse(wanted: str) -> tuple[str, int | None]:
    """The URL and the step (None: the newest) that the variable names. Raises TrainError."""
    url, _, step = wanted.rpartition("#")
    if not url or not (step == "latest" or (step.isascii() and step.isdigit())):
        raise TrainError(f"${START_FROM_VARIABLE}={wanted} is invalid. FIX: set it to URL#STEP or URL#latest")
    return url, None if step == "latest" else int(step)
