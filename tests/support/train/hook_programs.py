"""Training under other frameworks, in this process or on real ranks.

The frameworks are imported where they are used: the fork server of the other tests must not pay for them.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from elasticctl_train import SavePolicy
from elasticctl_train.session import Session

SAMPLES, GLOBAL_BATCH = 20, 6
EVERY_STEP = SavePolicy(every_steps=1)


class StopHere(Exception):
    """The process is gone, as far as the test is concerned."""


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Sample n is n and n + 1."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([index, index + 1.0]), "labels": torch.tensor(0.0)}


def network() -> torch.nn.Sequential:
    """A network that draws random numbers."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))


def stop_when_saved(session: Any, step: int, stop_at: int) -> None:
    """End the program after a step; every step is saved before the next."""
    while session.busy:
        time.sleep(0.001)
    if step == stop_at:
        raise StopHere


def lightning_fit(
    url: str,
    loader: Any,
    see: Callable[[int, list[float]], None],
    *,
    stop_at: int = -1,
    epochs: int = 3,
    steps_itself: bool = False,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train with Lightning, saving every step; returns the weights and the trainer. `see` gets steps and samples.

    `steps_itself`: the module calls its optimizer, twice for each batch.
    """
    import lightning.pytorch as lightning

    from elasticctl_train.hooks.lightning import ElasticCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"kept": "nowhere"})
            self.network = network()
            self.automatic_optimization = not steps_itself

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            see(self.global_step, batch["x"][:, 0].tolist())
            loss: torch.Tensor = self.network(batch["x"]).square().mean()
            if steps_itself:
                optimizer: Any = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Stop(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            stop_when_saved(hook._session, trainer.global_step, stop_at)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module, hook = Module(), ElasticCallback(url, save=EVERY_STEP)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[hook, Stop()], **{**quiet, **options})
    try:
        trainer.fit(module, loader)
    except StopHere:
        hook._session.abandon()  # type: ignore[union-attr]
    return {name: tensor.clone() for name, tensor in module.network.state_dict().items()}, trainer


def lightning_until_notice(url: str, folder: str) -> None:
    """A rank under a launcher that listens at `folder`/agent and gives notice by the file `folder`/notice."""
    from elasticctl_train import ElasticDataLoader

    warnings.simplefilter("ignore")
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "ELASTICCTL_AGENT_SOCKET": f"{folder}/agent",
        "ELASTICCTL_NOTICE_FILE": f"{folder}/notice",
    }
    size = int(os.environ["WORLD_SIZE"])
    with Path(folder, f"seen-{os.environ['RANK']}").open("a", buffering=1) as file:

        def see(step: int, samples: list[float]) -> None:
            file.write(json.dumps([step, samples]) + "\n")
            time.sleep(0.05)  # or the two epochs are over before notice comes

        loader = ElasticDataLoader(Samples(), global_batch=GLOBAL_BATCH, shuffle=True, seed=2)
        lightning_fit(url, loader, see, epochs=2000, devices=size, strategy="ddp", use_distributed_sampler=False)


def transformers_train(
    url: str,
    folder: str,
    see: Callable[[list[float]], None],
    *,
    stop_at: int = -1,
    epochs: int = 3,
    patience: int = 0,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train with transformers' Trainer, saving every step; returns the weights. `options` are `TrainingArguments`'.

    With `patience`, training ends early, after so many evaluations and one: no loss is better by enough. `see` gets
    the losses, too.
    """
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    from elasticctl_train.hooks.transformers import ElasticCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if self.training:
                see(x[:, 0].tolist())
            out = self.network(x)
            return {"loss": out.square().mean(), "logits": out}

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stop_when_saved(hook._session, state.global_step, stop_at)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            see([kwargs["metrics"]["eval_loss"]])

    model, hook = Model(), ElasticCallback(url, save=EVERY_STEP)
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        num_train_epochs=epochs,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=2,
        **options,
    )
    callbacks = [hook, Stop(), *([EarlyStoppingCallback(patience, 1e9)] if patience else [])]
    trainer = Trainer(model, args, train_dataset=Samples(), eval_dataset=Samples(), callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=hook.resume(trainer))
    except StopHere:
        hook._session.abandon()  # type: ignore[union-attr]
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


def transformers_rank(url: str, folder: str, stop_at: int) -> None:
    """A rank that notes what it has seen."""
    warnings.simplefilter("ignore")
    seen: list[list[float]] = []
    transformers_train(url, folder, seen.append, stop_at=stop_at)
    Path(folder, f"seen-{os.environ['RANK']}").write_text(json.dumps(seen))


def note_samples(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number at the end of each run in this process, from now on."""
    counted: list[int | None] = []
    finish = Session.finish

    def noting(session: Session) -> None:
        counted.append(session.progress.samples_at(session.cursor))
        finish(session)

    monkeypatch.setattr(Session, "finish", noting)
    return counted
