"""Train a small network on scikit-learn's handwritten digits, on any number of ranks, which may change at any time.

elasticctl submit examples/digits/train.py --context local -- --epochs 20
python examples/digits/train.py   # or in one process
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: 1797 scans of 8 x 8 pixels from scikit-learn; every fifth is for the
    test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def build_model() -> nn.Module:
    """Return a convolutional network of about 20,000 parameters."""
    features = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Return the fraction of the test set that is classified correctly."""
    images, labels = (tensor.to(device) for tensor in test.tensors)
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean()
    model.train()
    return right.item()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training data")
    parser.add_argument("--global-batch", type=int, default=64, help="samples of a step over all ranks together")
    parser.add_argument("--storage", help="folder or URL for checkpoints; default: the job's own")
    parser.add_argument("--save-every-s", type=float, default=1.0, help="seconds between checkpoints")
    parser.add_argument("--step-delay-s", type=float, default=0.0, help="sleep in each step: this model trains in "
                        "seconds, and a demonstration needs time to interrupt it")  # fmt: skip
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = load_data()
    net = build_model()
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    save = SavePolicy(every_s=args.save_every_s)

    with Run(args.storage, model=net, optimizer=optimizer, scheduler=scheduler, save=save) as run:
        for epoch in run.epochs(args.epochs):
            for images, labels in run.loader(train, global_batch=args.global_batch, shuffle=True):
                loss = nn.functional.cross_entropy(run.model(images.to(run.device)), labels.to(run.device))
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                time.sleep(args.step_delay_s)
                run.step(loss=loss)
            scheduler.step()
            test_accuracy = accuracy(net, test, run.device)
            run.log(test_accuracy=test_accuracy)
            if run.is_main:
                print(f"epoch {epoch}: step {run.steps_done}, test accuracy {test_accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
