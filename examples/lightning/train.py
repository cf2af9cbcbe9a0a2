"""Train on handwritten digits with Lightning, on any number of ranks, which may change at any time.

    elasticctl submit examples/lightning/train.py --workers 2
    python examples/lightning/train.py                         # or in one process

Requires `pip install lightning scikit-learn` in addition to elasticctl.
"""

import os

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticctl_train import ElasticDataLoader
from elasticctl_train.hooks.lightning import ElasticCallback

EPOCHS, GLOBAL_BATCH = 10, 64
NODES, RANKS_EACH = (int(os.environ.get(name, "1")) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))


class Digits(lightning.LightningModule):
    """A small network; `loader` knows the weight of this rank's samples in the global batch."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        super().__init__()
        self.loader = loader
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return self.loader.scale_loss(nn.functional.cross_entropy(self.network(images), labels))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.network(images).argmax(dim=1) == labels).float().mean()
        self.log("test_accuracy", accuracy, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            accuracy = self.trainer.callback_metrics["test_accuracy"].item()
            print(f"epoch {self.current_epoch}: test accuracy {accuracy:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=4e-3)


def main() -> None:
    lightning.seed_everything(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    train, test = TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])
    loader = ElasticDataLoader(train, global_batch=GLOBAL_BATCH, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        devices=RANKS_EACH,
        num_nodes=NODES,
        callbacks=[ElasticCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Digits(loader), loader, DataLoader(test, batch_size=len(test)))


if __name__ == "__main__":
    main()
