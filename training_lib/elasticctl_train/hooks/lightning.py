"""Lightning: `Trainer(callbacks=[ElasticCallback()])` saves, resumes, responds to notice and reports.

The state is what Lightning itself would write to a checkpoint file, taken from its checkpoint connector and given back
to it; that is the only private API of Lightning in use here. Training resumes in the middle of an epoch if the training
data loader has `state_dict()` and `load_state_dict()`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from elasticctl_store.errors import TrainError
from elasticctl_train import dist, rng
from elasticctl_train.checkpoint import compatibility, parts
from elasticctl_train.checkpoint.newest import Restored
from elasticctl_train.data.loaders import is_shared_position
from elasticctl_train.data.sample_order import Cursor, Step
from elasticctl_train.meetings import Snapshot
from elasticctl_train.save_policy import SavePolicy
from elasticctl_train.session import Session
from elasticctl_train.strategies import RestartRanks

log = logging.getLogger("elasticctl_train")

_MODEL, _OPTIMIZERS, _REST = "model", "optimizers", "lightning"
_SAMPLES = "elasticctl_samples"
_HYPERPARAMETERS = ("hparams_name", "hyper_parameters", "hparams_type")
"""What Lightning writes for `load_from_checkpoint`: arbitrary objects, of no use to a module that exists already."""


class ElasticCallback(Callback):
    """Keeps the state of `Trainer.fit` at a storage URL and resumes from there.

    Its checkpoints replace those of ModelCheckpoint: pass `Trainer(enable_checkpointing=False)`. With several ranks and
    an `ElasticDataLoader`, also pass `use_distributed_sampler=False`.
    """

    def __init__(self, url: str | None = None, *, save: SavePolicy = SavePolicy()) -> None:  # noqa: B008 - frozen
        """`url` is where checkpoints are stored (default: $ELASTICCTL_STORAGE; without it, none are saved)."""
        self._url, self._policy = url, save
        self._session: Session | None = None
        self._rng: dict[str, Any] | None = None
        self._begun = False
        self._free_since_s: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the URL and pass the checkpoint there to the trainer, which restores loops and optimizers next.

        Raises StateError, StorageError and RestoreError.
        """
        fit = partial(compatibility.check, {_MODEL: pl_module})
        self._session = Session(
            self._url,
            RestartRanks(dist.join(), "a framework owns the training loop"),
            self._policy,
            lambda: self._snapshot(trainer, pl_module),
            fit,
        )
        self._session.losses.refuse_rollback("Lightning chooses the batches")
        restored = self._session.restored
        if restored is not None:
            _restore_trainer(trainer, _checkpoint_of(restored, self._session.world.size))
            self._rng = restored.local["rng"] if restored.local is not None else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start or resume training, including its random numbers."""
        session = self._begin_session(trainer)
        before = _samples_of(session.restored) if session.cursor.step else 0
        if before is not None and _samples_per_step(trainer):
            session.progress.count_samples_from(before)
        session.progress.expect(trainer.max_epochs, _total_steps(trainer, pl_module))
        if self._rng is not None:
            rng.restore(self._rng)
        elif session.restored is not None:
            rng.seed_all(torch.initial_seed(), session.storage.generation, session.world.rank)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record that a batch has been fetched."""
        if self._free_since_s is not None:
            self._running().progress.times.add_data(time.monotonic() - self._free_since_s)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude validation from the time spent fetching batches."""
        self._free_since_s = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an optimizer step, report, and save when it is time, or stop after notice; see `Session.step`.

        After the last batch of an epoch, saving and stopping are deferred to the next one: Lightning would not run the
        end of a restored epoch.
        """
        session, cursor = self._running(), self._cursor(trainer)
        if cursor.step > session.cursor.step:
            session.progress.expect(trainer.max_epochs, _total_steps(trainer, pl_module))
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            step = Step(_samples_per_step(trainer), loss=loss, cursor=cursor)
            session.step(step, hold=trainer.is_last_batch)
        self._free_since_s = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the metrics that were logged, and store them with the next commit."""
        self._running().log({name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit the end of training. Raises SaveError."""
        session = self._running()
        session.go_to(self._cursor(trainer))
        session.finish()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If training was already over, report its end."""
        if not self._begun:
            self._begin_session(trainer).finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give a save in flight a moment."""
        if self._session is not None:
            self._session.abandon()

    def _running(self) -> Session:
        if self._session is None:
            raise TrainError("ElasticCallback: Trainer.fit has not started. FIX: pass the callback to one Trainer")
        return self._session

    def _begin_session(self, trainer: Trainer) -> Session:
        session = self._running()
        session.begin_training(self._cursor(trainer))
        self._begun = True
        return session

    def _cursor(self, trainer: Trainer) -> Cursor:
        return Cursor(trainer.global_step, trainer.current_epoch)

    def _snapshot(self, trainer: Trainer, pl_module: LightningModule) -> Snapshot:
        rest = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        state = {_MODEL: rest.pop("state_dict"), _OPTIMIZERS: rest.pop("optimizer_states"), _REST: rest}
        for name in _HYPERPARAMETERS:
            rest.pop(name, None)
            rest.pop(f"datamodule_{name}", None)
        session = self._running()
        rest[_SAMPLES] = session.progress.samples_at(session.cursor)
        local = {"rng": rng.capture(), "loaders": rest["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])}
        return Snapshot(state, local, {_REST} | parts.rank_0_only({_MODEL: pl_module}))


def _total_steps(trainer: Trainer, module: LightningModule) -> int | None:
    """Return the number of optimizer steps of the whole training; None if unknown.

    Lightning's estimate counts one step per batch. A module that optimizes manually, such as a GAN, may make any number
    of steps: later batches are assumed to make as many as the average so far.
    """
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        return None
    if module.automatic_optimization:
        return int(steps)
    batches = trainer.fit_loop.total_batch_idx + 1
    if batches < 1 or not trainer.global_step:
        return None
    total = round(steps * trainer.global_step / batches)
    return total if trainer.max_steps == -1 else min(total, trainer.max_steps)


def _samples_per_step(trainer: Trainer) -> int:
    """Return the number of samples in one optimizer step, over all ranks; 0 if the data loader does not provide it."""
    return int(getattr(trainer.train_dataloader, "global_batch", 0)) * trainer.accumulate_grad_batches


def _samples_of(restored: Restored | None) -> int | None:
    """Return how many samples had been trained on at a checkpoint; None if unknown."""
    return None if restored is None else restored.state[_REST].get(_SAMPLES)


def _checkpoint_of(restored: Restored, world_size: int) -> dict[str, Any]:
    """Return the checkpoint in Lightning's format, with the positions of this rank's data loaders if they fit."""
    state = restored.state
    checkpoint: dict[str, Any] = {**state[_REST], "state_dict": state[_MODEL], "optimizer_states": state[_OPTIMIZERS]}
    fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    positions = fit_loop.get("combined_loader", [])
    ranks_before = len(restored.commit.shares)
    if positions and ranks_before == world_size and restored.local is not None:
        fit_loop["combined_loader"] = restored.local["loaders"]
    elif positions and not all(is_shared_position(position) for position in positions):
        log.warning(
            "the data loaders' positions were saved on %d ranks and cannot be used on %d: the epoch starts over",
            ranks_before,
            world_size,
        )
        del fit_loop["combined_loader"]
    return checkpoint


def _restore_trainer(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Do what `Trainer.fit(ckpt_path=…)` does with a checkpoint that it has read from a file."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
