"""Hugging Face transformers: `Trainer(callbacks=[…])` saves, resumes, responds to notice and reports.

    hook = ElasticCallback()
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[hook])
    trainer.train(resume_from_checkpoint=hook.resume(trainer))

Trainer resumes from a folder, and calls callbacks too late for that. So `resume` creates a folder that contains only
the trainer's progress, in JSON. On this one object, it replaces the three methods by which Trainer reads everything
else from files with ones that read from the checkpoint. Trainer then resumes at the right batch by itself.

Trainer evaluates after a step, and again at the end of an epoch, and would do neither when it resumes there. So a
step counts only after that, and `resume` also wraps the method that does it. Trainer would make one step too many where
its last step was made in the middle of an epoch, so `resume` wraps the method that trains for an epoch, too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from elasticctl_store.errors import TrainError
from elasticctl_train import dist, rng
from elasticctl_train.checkpoint import compatibility, parts
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data.sample_order import Cursor, Step
from elasticctl_train.meetings import Snapshot
from elasticctl_train.save_policy import SavePolicy
from elasticctl_train.session import Session
from elasticctl_train.strategies import RestartRanks

log = logging.getLogger("elasticctl_train")

_PROGRESS, _STATE_FILE = "trainer", "trainer_state.json"


class ElasticCallback(TrainerCallback):
    """Keeps the state of `Trainer.train` at a storage URL and resumes from there.

    Its checkpoints replace Trainer's own: pass `TrainingArguments(save_strategy="no")`.
    """

    def __init__(self, url: str | None = None, *, save: SavePolicy = SavePolicy()) -> None:  # noqa: B008 - frozen
        """`url` is where checkpoints are stored (default: $ELASTICCTL_STORAGE; without it, none are saved)."""
        self._url, self._policy = url, save
        self._session: Session | None = None
        self._trainer: Trainer | None = None
        self._clean_up: Callable[[], object] = lambda: None
        self._free_since_s: float | None = None
        self._samples_before = 0
        self._is_epoch_over = False

    def resume(self, trainer: Trainer) -> str | None:
        """Take over the URL; return the value for `resume_from_checkpoint` of `trainer.train`: None, or a folder.

        Every rank must call it. Raises StorageError, and RestoreError if the checkpoint belongs to another model.
        """
        self._trainer = trainer
        fit = partial(compatibility.check, {"model": self._parts()["model"]})
        strategy = RestartRanks(dist.join(), "a framework owns the training loop")
        self._session = Session(self._url, strategy, self._policy, self._snapshot, fit)
        self._session.losses.refuse_rollback("the Trainer chooses the batches")
        own: Any = trainer
        own._maybe_log_save_evaluate = partial(self._end_step, own._maybe_log_save_evaluate)
        if hasattr(own, "_run_epoch"):  # not every release 5 has it
            own._run_epoch = partial(self._run_epoch, own._run_epoch)
        restored = self._session.restored
        if restored is None:
            return None
        progress = restored.state[_PROGRESS]
        self._samples_before = progress.get("samples") or restored.commit.step * progress["batch"]
        if progress["batch"] != _samples_per_step(trainer):
            log.warning(
                "saved with %d samples per step, continuing with %d: samples of this epoch are repeated or skipped",
                progress["batch"],
                _samples_per_step(trainer),
            )
        own._load_from_checkpoint = self._load_model
        own._load_optimizer_and_scheduler = self._load_optimizer_and_scheduler
        own._load_rng_state = self._load_rng_state
        folder = tempfile.mkdtemp(prefix="elasticctl-")
        self._clean_up = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        Path(folder, _STATE_FILE).write_text(json.dumps(progress["state"]))
        return folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start or resume training. Raises StateError for a state that a checkpoint cannot hold."""
        session = self._running()
        session.progress.expect(int(args.num_train_epochs), state.max_steps)
        self._clean_up()
        parts.check(self._parts())
        session.progress.count_samples_from(self._samples_before)
        self._restore_callbacks()
        session.begin_training(_cursor(state))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the last step of the epoch count once Trainer has done what is due at its end."""
        self._is_epoch_over = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record that the batches of a step have been fetched."""
        self._is_epoch_over = False
        if self._free_since_s is not None:
            self._running().progress.times.add_data(time.monotonic() - self._free_since_s)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the logged metrics, and store them with the next commit; ignore those from before `resume`."""
        if self._session is None:
            return
        self._session.log({name: value for name, value in (logs or {}).items() if isinstance(value, int | float)})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Commit the end of training. Raises SaveError."""
        session = self._running()
        session.go_to(_cursor(state))
        session.finish()

    def _run_epoch(self, run_epoch: Callable[..., None], *args: Any, **options: Any) -> None:
        """Train for an epoch, unless all steps have been made."""
        trainer: Any = self._trainer
        if trainer.state.global_step < trainer.state.max_steps:
            run_epoch(*args, **options)
        else:
            trainer.control.should_training_stop = True

    def _end_step(self, log_save_evaluate: Callable[..., None], *args: Any, **options: Any) -> None:
        """Log and evaluate as Trainer does. Then count the optimizer step, report, and save when it is time, or stop
        after notice; see `Session.step`."""
        log_save_evaluate(*args, **options)
        session = self._running()
        trainer: Any = self._trainer
        cursor, is_whole_epoch = _cursor(trainer.state), float(trainer.state.epoch or 0).is_integer()
        if cursor.step > session.cursor.step and (self._is_epoch_over or not is_whole_epoch):
            step = Step(_samples_per_step(trainer), cursor=cursor)
            session.step(step, hold=trainer.control.should_training_stop)
        self._free_since_s = time.monotonic()

    def _exportable(self) -> dict[str, list[ExportableState]]:
        """Return the callbacks whose state Trainer would save, such as that of early stopping, by class name."""
        trainer: Any = self._trainer
        found: dict[str, list[ExportableState]] = {}
        for each in trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                found.setdefault(type(each).__name__, []).append(each)
        return found

    def _restore_callbacks(self) -> None:
        restored = self._running().restored
        known = {} if restored is None else restored.state[_PROGRESS].get("callbacks", {})
        for name, callbacks in self._exportable().items():
            for callback, state in zip(callbacks, known.get(name, []), strict=False):
                vars(callback).update(state.get("attributes", {}))

    def _running(self) -> Session:
        if self._session is None:
            raise TrainError("resume was not called. FIX: trainer.train(resume_from_checkpoint=hook.resume(trainer))")
        return self._session

    def _parts(self) -> dict[str, Stateful]:
        trainer: Any = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        scaler = getattr(trainer.accelerator, "scaler", None)  # of mixed precision with float16
        return parts.unwrap(model=model, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler, scaler=scaler)

    def _snapshot(self) -> Snapshot:
        trainer: Any = self._trainer
        found = self._parts()
        state: dict[str, Any] = {name: part.state_dict() for name, part in found.items()}
        progress = json.loads(json.dumps(dataclasses.asdict(trainer.state)))
        samples = self._running().progress.samples_at(self._running().cursor)
        callbacks = {name: [each.state() for each in found] for name, found in self._exportable().items()}
        own = {"batch": _samples_per_step(trainer), "samples": samples, "callbacks": json.loads(json.dumps(callbacks))}
        state[_PROGRESS] = {"state": progress, **own}
        return Snapshot(state, {"rng": rng.capture()}, {_PROGRESS} | parts.rank_0_only(found))

    def _load_model(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self._load("model")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load("optimizer", "scheduler", "scaler")

    def _load(self, *names: str) -> None:
        session = self._running()
        restored = session.restored
        if restored is not None:
            wanted = {name: part for name, part in self._parts().items() if name in names}
            state = {name: value for name, value in restored.state.items() if name in names}
            compatibility.load(wanted, state, f"{session.storage.url}, step {restored.commit.step}")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        session = self._running()
        if session.restored is None:
            return
        if session.restored.local is not None:
            rng.restore(session.restored.local["rng"])
        else:
            rng.seed_all(torch.initial_seed(), session.storage.generation, session.world.rank)


def _cursor(state: TrainerState) -> Cursor:
    return Cursor(state.global_step, int(state.epoch or 0))


def _samples_per_step(trainer: Any) -> int:
    """Return the global batch: the number of samples in one optimizer step, over all ranks."""
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)
