"""`Run`: what a training script imports."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from elasticctl_train import data, dist, parts, rng, storage
from elasticctl_train.checkpoint import Checkpointer, Label, Restored
from elasticctl_train.commits import Commit
from elasticctl_train.data import Cursor, ElasticLoader, EpochPlan, Feed
from elasticctl_train.errors import TrainError
from elasticctl_train.parts import Stateful
from elasticctl_train.policy import Cadence, SavePolicy
from elasticctl_train.preemption import Notice
from elasticctl_train.progress import Progress
from elasticctl_train.report import Reporter

log = logging.getLogger("elasticctl_train")

STORAGE_VARIABLE = "ELASTICCTL_STORAGE"
_ABANDON_GRACE_S = 2.0
_DRAINED_WAIT_S = 60.0


class Run:
    """One training run: joins the ranks, resumes from the newest whole checkpoint, saves as it goes.

        with Run("file:///runs/a", model=model, optimizer=optimizer) as run:
            for epoch in run.epochs(90):
                for images, labels in run.loader(dataset, global_batch=1024, shuffle=True):
                    loss = loss_of(run.model(images.to(run.device)), labels.to(run.device))
                    optimizer.zero_grad()
                    run.scale_loss(loss).backward()
                    optimizer.step()
                    run.step(loss=loss)

    `rank`, `world_size` and `device` tell where this process is; `run.model` is the model to call.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        save: SavePolicy = SavePolicy(),  # noqa: B008 - frozen
        **others: Stateful,
    ) -> None:
        """Join, take over the storage URL and resume. Every rank must call it.

        `url` is where checkpoints go; without one, $ELASTICCTL_STORAGE, and without that none are kept. `model` may be
        wrapped in DistributedDataParallel already; a bare one is moved to `run.device`. `others` are saved under their
        names like the rest. Raises StateError for a state that a checkpoint cannot hold, StorageError, and RestoreError
        when the checkpoint found is not one of these objects.
        """
        _show_log()
        self._given = model
        self._parts = parts.named(model=model, optimizer=optimizer, scheduler=scheduler, **others)
        parts.check(self._parts)
        self._world = dist.join()
        self.rank, self.world_size = self._world.rank, self._world.size
        self.device = self._world.device
        if isinstance(model, DistributedDataParallel):
            self.device = next(model.parameters()).device
        else:
            model.to(self.device)
        self._reporter = Reporter(self.rank)
        self._progress = Progress(self._reporter)
        self._cursor = self._saved = Cursor()
        self._feed = Feed(self.rank, self.world_size)
        self._seed = torch.initial_seed()
        self._rng: dict[str, Any] | None = None
        self._finished = False
        self._checkpoints = self._open(url, save)
        self._notice = Notice.from_environment()
        self._cadence = Cadence(save, self._cursor.step, notice_possible=self._notice.possible)
        self._next_check = self._cadence.first_check
        self._reporter.send("resumed", step=self._cursor.step)

    @property
    def is_main(self) -> bool:
        """True on the one rank that should print and plot."""
        return self.rank == 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps done so far, over all incarnations of the run."""
        return self._cursor.step

    @property
    def own_samples(self) -> int:
        """How many samples of the current batch are this rank's: 0 when it holds a stand-in (see `data`)."""
        return self._feed.own

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model to call: in DistributedDataParallel when there are several ranks, else the one given."""
        if self.world_size == 1 or isinstance(self._given, DistributedDataParallel):
            return self._given
        return DistributedDataParallel(self._given)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs (from 0) that are not done yet; of a half-done one the loader yields the rest."""
        self._progress.total_epochs = total
        while self._cursor.epoch < total:
            yield self._cursor.epoch
            self._feed.take()
            self._cursor = self._cursor.next_epoch()

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> ElasticLoader:
        """This rank's batches of what is left of the epoch. `global_batch` samples make one batch over all ranks.

        `options` (num_workers, collate_fn, pin_memory, …) go to torch's DataLoader. Raises DataError.
        """
        cursor = self._cursor
        plan = EpochPlan(data.length_of(dataset), global_batch, shuffle, seed, cursor.epoch, drop_last)
        data.check(plan, cursor)
        self._cursor = replace(cursor, length=plan.length, shuffle=shuffle, seed=seed)
        self._progress.plan = plan
        return data.make_loader(dataset, plan, self._feed, cursor.position, self._begin, options)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Weight a loss that is the mean over this rank's samples, so that gradients are the global batch's mean.

        Ranks' slices of a global batch can differ by one sample, and DistributedDataParallel takes the plain mean over
        ranks. Call `backward` on the result; report and log the loss itself.
        """
        return loss if self._feed.weight == 1.0 else loss * self._feed.weight

    def step(self, *, loss: torch.Tensor | float | None = None) -> None:
        """Call last in the loop's body, after `optimizer.step()`: counts, reports, and saves when it is time.

        Where the launcher gives notice that the group has to change, does not return: all ranks commit the same step
        and wait to be stopped. Raises FencedError when a younger run has taken over the storage URL.
        """
        samples = self._feed.take()
        self._cursor = replace(self._cursor, step=self._cursor.step + 1, position=self._cursor.position + samples)
        self._progress.step(self._cursor, samples, loss)
        if self._cursor.step >= self._next_check:
            self._meet()

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Report numbers of one's own; the newest of each also goes into the next checkpoint's entry."""
        self._progress.note(metrics)
        self._progress.send(self._cursor, self._progress.metrics)

    def finish(self) -> None:
        """Commit the end of training, wait for it, and leave the group. Every rank must call it; a second call is idle.

        Raises SaveError when the end could not be committed.
        """
        if self._finished:
            return
        self._finished = True
        if self._checkpoints is not None and not self._commit_here(self._checkpoints):
            raise self._checkpoints.failure()
        self._progress.send(self._cursor, self._progress.metrics)
        self._reporter.close()
        self._world.highest(0)  # nobody takes the group down while another still uses it
        self._checkpoints = None
        self._world = dist.leave(self._world)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        elif self._checkpoints is not None:
            self._checkpoints.abandon(_ABANDON_GRACE_S)

    def _open(self, url: str | None, save: SavePolicy) -> Checkpointer | None:
        url = url or os.environ.get(STORAGE_VARIABLE)
        if not url:
            if self.is_main:
                log.warning("no storage URL and no $%s: no checkpoints are kept", STORAGE_VARIABLE)
            return None
        kept = storage.open(url)
        checkpoints = Checkpointer(kept, self._world, keep_last=save.keep_last, on_commit=self._committed)
        restored = checkpoints.restore()
        if restored is not None:
            self._resume(restored, checkpoints)
        elif self.is_main:
            log.info("no checkpoint at %s yet: starting at step 0", checkpoints.url)
        return checkpoints

    def _resume(self, restored: Restored, checkpoints: Checkpointer) -> None:
        where = f"{checkpoints.url}, step {restored.commit.step}"
        parts.load(self._parts, restored.state, where)
        own = restored.state[parts.OWN]
        self._cursor = self._saved = Cursor(**own["cursor"])
        self._seed = own["seed"]
        self._progress.metrics = dict(restored.commit.metrics)
        if restored.local is not None:
            self._rng = restored.local["rng"]
            rng.restore(restored.local["rng"])
        else:
            rng.seed_all(self._seed, checkpoints.generation, self.rank)
        if self.is_main:
            ranks = f"{len(restored.commit.shares)} -> {self.world_size} ranks"
            log.info(
                "resumed from step %d, epoch %d (%s, %s)", self.steps_done, self._cursor.epoch, checkpoints.url, ranks
            )

    def _begin(self) -> None:
        """The first batch is about to be fetched: forget random numbers drawn since the resume, by set-up code."""
        self._feed.take()
        if self._rng is not None:
            rng.restore(self._rng)
            self._rng = None

    def _meet(self) -> None:
        """The ranks agree: is it time to save, to stop, and when do they meet again."""
        due, next_check = self._cadence.check(self._cursor.step)
        if self._checkpoints is not None:
            due, self._next_check, stop = self._checkpoints.agree(due, next_check, self._notice.given())
        else:
            due = False
            mine = next_check if self.is_main else 0
            self._next_check, noticed = self._world.highest(mine, self._notice.given())
            stop = bool(noticed)
        if stop:
            self._drain()
        if due and self._checkpoints is not None:
            self._save(self._checkpoints)

    def _drain(self) -> NoReturn:
        """Commit this step on all ranks, tell the launcher, and wait for it to stop this process."""
        if self._checkpoints is not None and not self._commit_here(self._checkpoints):
            log.warning("%s; an older one has to do", self._checkpoints.failure())
        self._progress.send(self._cursor, self._progress.metrics)
        self._reporter.send_surely("drained", step=self._cursor.step)
        time.sleep(_DRAINED_WAIT_S)
        raise TrainError(f"stopped at step {self._cursor.step} as told, but nobody ended this process")

    def _commit_here(self, checkpoints: Checkpointer) -> bool:
        """Have this very step committed, on all ranks; False when that failed."""
        if checkpoints.settle() and self._saved == self._cursor:
            return True
        self._save(checkpoints)
        return checkpoints.settle()

    def _save(self, checkpoints: Checkpointer) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state[parts.OWN] = {"cursor": asdict(self._cursor), "seed": self._seed}
        self._saved = self._cursor
        label = Label(self._cursor.step, self._cursor.epoch, dict(self._progress.metrics))
        checkpoints.save(state, label, local={"rng": rng.capture()}, rank_0_only=parts.rank_0_only(self._parts))

    def _committed(self, commit: Commit, duration_s: float) -> None:
        self._reporter.send(
            "committed",
            step=commit.step,
            committed=commit.number,
            size_bytes=commit.size_bytes,
            duration_s=round(duration_s, 4),
            url=self._checkpoints.url if self._checkpoints else None,
        )


def _show_log() -> None:
    """Print this library's few lines to stderr where the script has not set up logging itself."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("elasticctl: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
