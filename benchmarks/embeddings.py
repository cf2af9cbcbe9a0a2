"""How much a run writes per save if few rows of an embedding change: SparseAdam, whose state has as many rows.

    python -m benchmarks.embeddings [--megabytes 200] [--saves 60] [--percent 1] [--dense]

Two runs alternate, as in `benchmarks.adapters`: one that leaves out what has not changed, and one that writes
everything. With `--dense`, all rows change between two saves.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.adapters import compare

WIDTH = 64


def main() -> None:
    """Measure, and print one line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="the size of embedding and optimizer")
    parser.add_argument("--saves", type=int, default=60)
    parser.add_argument("--percent", type=float, default=1.0, help="the rows that change between two saves")
    parser.add_argument("--dense", action="store_true", help="all rows change between two saves")
    given = parser.parse_args()
    rows = max(1000, given.megabytes * 1_000_000 // (3 * 4 * WIDTH))
    embedding = torch.nn.Embedding(rows, WIDTH, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())

    def train() -> dict[str, Any]:
        chosen = torch.arange(rows) if given.dense else torch.randperm(rows)[: round(rows * given.percent / 100)]
        optimizer.zero_grad()
        embedding(chosen).square().sum().backward()
        optimizer.step()
        return {"model": embedding.state_dict(), "optimizer": optimizer.state_dict()}

    compare(given.saves, train)


if __name__ == "__main__":
    main()
