"""The script of plain.py, made elastic: ranks may join and leave at any time.

elasticctl submit examples/ddp/elastic.py --workers 2
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run

EPOCHS, GLOBAL_BATCH = 10, 64


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    with Run(model=model, optimizer=optimizer, scheduler=scheduler) as run:
        for epoch in run.epochs(EPOCHS):
            right = seen = 0
            for images, labels in run.loader(dataset, global_batch=GLOBAL_BATCH, shuffle=True):
                images, labels = images.to(run.device), labels.to(run.device)
                outputs = run.model(images)
                loss = nn.functional.cross_entropy(outputs, labels)
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                right += (outputs.argmax(dim=1) == labels).sum().item()
                seen += len(labels)
                run.step(loss=loss)
            scheduler.step()
            if run.is_main:
                print(f"epoch {epoch}: {right} of {seen} right", flush=True)


if __name__ == "__main__":
    main()
