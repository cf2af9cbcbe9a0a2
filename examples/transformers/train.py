"""Train a small vision transformer on handwritten digits with Hugging Face's Trainer, on ranks that may join and leave.

    elasticctl submit examples/transformers/train.py --workers 2
    python examples/transformers/train.py                      # or in one process

Requires `pip install transformers accelerate scikit-learn` in addition to elasticctl.
"""

import numpy
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from elasticctl_train.hooks.transformers import ElasticCallback


class Digits(Dataset[dict[str, torch.Tensor]]):
    """1797 scans of 8 x 8 pixels from scikit-learn; every fifth is for the test."""

    def __init__(self, *, test: bool) -> None:
        digits = load_digits()
        chosen = (numpy.arange(len(digits.target)) % 5 == 0) == test
        self.images = torch.tensor(digits.images[chosen], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target[chosen])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the fraction of the test set that is classified correctly."""
    return {"accuracy": float((prediction.predictions.argmax(axis=1) == prediction.label_ids).mean())}


def main() -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, initializer_range=0.1, num_labels=10,
    )  # fmt: skip
    hook = ElasticCallback()
    trainer = Trainer(
        ViTForImageClassification(config),
        TrainingArguments(
            "out", num_train_epochs=10, per_device_train_batch_size=32, learning_rate=1e-3, eval_strategy="epoch",
            save_strategy="no", logging_strategy="epoch", log_on_each_node=False, disable_tqdm=True, report_to=[],
        ),
        train_dataset=Digits(test=False),
        eval_dataset=Digits(test=True),
        compute_metrics=accuracy,
        callbacks=[hook],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=hook.resume(trainer))


if __name__ == "__main__":
    main()
