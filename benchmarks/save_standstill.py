"""How long a save stops training in one process, with the optimizer's state copied immediately and while training
continues.

    python -m benchmarks.save_standstill [--megabytes 300] [--repeats 10]

Both ways are measured in turns. A save stops training when it is called, and when the optimizer's next step has to wait
for what is not copied yet; that step comes half a second later here. Both times are given as multiples of a memcpy of
the state by one thread, measured just before.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.figures import Figure, in_turns, show_figures
from benchmarks.programs import count, parser
from elasticctl_store import storage
from elasticctl_train import Checkpointer, Label

SIDE = 1024
PASS_S = 0.5
NOW, LATE = "all copied immediately", "optimizer copied while training continues"
GOAL = 0.1


def measure(checkpoints: Checkpointer, megabytes: int, repeats: int) -> dict[str, list[float]]:
    """Save in turns; return multiples of a memcpy: of each save, and with the wait of the step after it."""
    parameters = [torch.nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(max(1, megabytes // 12))]
    optimizer: Any = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()

    def state() -> dict[str, Any]:
        model = {str(number): one.detach() for number, one in enumerate(parameters)}
        return {"model": model, "optimizer": optimizer.state_dict()}

    checkpoints.prepare(state())
    source = torch.ones(3 * sum(one.nbytes for one in parameters), dtype=torch.uint8)
    target = source.clone()
    memcpy_s: list[float] = []
    held_s: dict[str, list[float]] = {f"{way}: {what}": [] for way in (NOW, LATE) for what in ("save", "in all")}
    for number, way in in_turns((NOW, LATE), repeats):
        compute(PASS_S / 5)
        memcpy_s.append(timed(lambda: target.copy_(source)))
        late = {"optimizer"} if way == LATE else set[str]()
        save_s = timed(lambda: checkpoints.save(state(), Label(number), until_step=late))  # noqa: B023 - called here
        compute(PASS_S)
        with_save_s = timed(optimizer.step)
        checkpoints.settle()
        held_s[f"{way}: save"].append(save_s)
        held_s[f"{way}: in all"].append(save_s + max(0.0, with_save_s - timed(optimizer.step)))
    return {what: [one / median(memcpy_s) for one in found] for what, found in held_s.items()}


def compute(seconds: float) -> None:
    """Use one processor like a forward and a backward pass."""
    x, end_s = torch.randn(512, 512), time.monotonic() + seconds
    while time.monotonic() < end_s:
        x @ x


def timed(action: Callable[[], object]) -> float:
    """Return how long it takes, in seconds."""
    started_s = time.monotonic()
    action()
    return time.monotonic() - started_s


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if the goal is missed."""
    options = parser(__doc__)
    options.add_argument("--megabytes", type=count, default=300, metavar="N", help="the state's size (300)")
    options.add_argument("--repeats", type=count, default=10, metavar="N", help="saves of each kind (10)")
    args = options.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Checkpointer(storage.open(folder)), args.megabytes, args.repeats)
    goals = {f"{LATE}: in all": GOAL}
    figures = [Figure(what, "x memcpy", values, goals.get(what)) for what, values in found.items()]
    return int(not show_figures(f"a save of {args.megabytes} MB", figures))


if __name__ == "__main__":
    sys.exit(main())
