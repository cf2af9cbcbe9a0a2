"""How long a save holds training up in one process, with the optimizer's state copied at once and beside training.

    python -m benchmarks.standstill [--megabytes 300] [--rounds 10]

Both are measured by turns. A save holds training up as it is called, and where the optimizer's next step has to wait
for what is not copied yet; that step comes half a second later here. Both are given as multiples of a memcpy of the
state by one thread, measured just before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from typing import Any

import torch

from elasticctl_store import storage
from elasticctl_train import Checkpointer, Label

SIDE = 1024
PASS_S = 0.5


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="the state's size")
    parser.add_argument("--rounds", type=int, default=10, help="saves of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(max(1, given.megabytes // 12))]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        measure(Checkpointer(storage.open(folder)), parameters, optimizer, given.rounds)


def measure(
    checkpoints: Checkpointer, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, rounds: int
) -> None:
    """Save by turns, and print the medians and the worst."""

    def state() -> dict[str, Any]:
        return {
            "model": {str(i): one.detach() for i, one in enumerate(parameters)},
            "optimizer": optimizer.state_dict(),
        }

    checkpoints.prepare(state())
    source = torch.ones(3 * sum(one.nbytes for one in parameters), dtype=torch.uint8)
    target = source.clone()
    memcpy_s: list[float] = []
    held_s: dict[str, list[tuple[float, float]]] = {"at once": [], "beside training": []}
    for number in range(rounds):
        for way, found in held_s.items():
            compute(PASS_S / 5)
            memcpy_s.append(timed(lambda: target.copy_(source)))
            late = {"optimizer"} if way != "at once" else set[str]()
            save_s = timed(lambda: checkpoints.save(state(), Label(number), until_step=late))  # noqa: B023 - called here
            compute(PASS_S)
            with_save_s = timed(optimizer.step)
            checkpoints.settle()
            found.append((save_s, max(0.0, with_save_s - timed(optimizer.step))))
    unit_s = median(memcpy_s)
    print(f"memcpy: {1000 * unit_s:.0f} ms")
    for way, found in held_s.items():
        saves, sums = [save for save, _ in found], [save + wait for save, wait in found]
        print(f"{way}: save {median(saves) / unit_s:.2f}, with the step {median(sums) / unit_s:.2f} x memcpy, ", end="")
        print(f"worst save {max(saves) / unit_s:.2f}")


def compute(seconds: float) -> None:
    """What a forward and a backward pass do to one processor."""
    x, end_s = torch.randn(512, 512), time.monotonic() + seconds
    while time.monotonic() < end_s:
        x @ x


def timed(action: Any) -> float:
    """How long it takes, in seconds."""
    started_s = time.monotonic()
    action()
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
