"""How long a save stops training in one process, with the optimizer's state copied at once and in the background.

    python -m benchmarks.save_standstill [--megabytes 300] [--rounds 10]
    python -m benchmarks.save_standstill --steps-for 240 --every 30 [--megabytes 500]

Both ways are measured in turns. A save stops training when it is called, and when the optimizer's next step has to wait
for what is not copied yet; that step comes half a second later here. Both times are given as multiples of a memcpy of
the state by one thread, measured just before.

With `--steps-for`, a script with `Run` trains for that long instead, and saves in every second interval of `--every`
seconds. The duration of a step is reported for both kinds of intervals: in wall time, and in processor time of the
thread that trains, which is less sensitive to other work on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import mean, median
from typing import Any

import torch

from elasticctl_store import storage
from elasticctl_train import Checkpointer, Label, Run, SavePolicy

SIDE = 1024
PASS_S = 0.5


def main() -> None:
    """Measure, and print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="the state's size")
    parser.add_argument("--rounds", type=int, default=10, help="saves of each kind")
    parser.add_argument("--folder", help="where to save")
    parser.add_argument("--steps-for", type=float, metavar="S", help="train for this long instead, in seconds")
    parser.add_argument(
        "--every",
        type=float,
        default=30.0,
        metavar="S",
        help="with --steps-for: seconds between saves, in half of that time",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.steps_for:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            train(folder, given.megabytes, given.steps_for, given.every)
        return
    parameters = [torch.nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(max(1, given.megabytes // 12))]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(Checkpointer(storage.open(folder)), parameters, optimizer, given.rounds)


def measure(
    checkpoints: Checkpointer, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, rounds: int
) -> None:
    """Save in turns, and print the medians and the maxima."""

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


def train(folder: str, megabytes: int, seconds: float, every_s: float) -> None:
    """Train with and without saves in turns, and print how long steps take."""
    model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE) for _ in range(max(1, megabytes // 12))])
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(256, SIDE)
    took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with Run(folder, model=model, optimizer=optimizer, save=SavePolicy(every_s=1e9, keep_last=1)) as run:
        began_s, saved_in = time.monotonic(), -1
        while (now_s := time.monotonic()) - began_s < seconds:
            turn = int((now_s - began_s) // every_s)
            saves = turn % 2 == 1
            if saves and saved_in != turn:
                run._session._cadence._saved_s, saved_in = -1e9, turn  # due at the next step
                run._session._next_check = 0
            before_s = time.monotonic(), time.thread_time()
            loss = run.model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
            if turn:  # the first steps are slow for other reasons
                took[saves].append((time.monotonic() - before_s[0], time.thread_time() - before_s[1]))
    for number, clock in enumerate(("by the clock", "in processor time")):
        without, with_saves = ([step[number] for step in took[saves]] for saves in (False, True))
        print(
            f"{clock}: a step takes {1000 * mean(without):.0f} ms, with saves {1000 * mean(with_saves):.0f} ms: "
            f"{100 * mean(without) / mean(with_saves):.1f} % of the rate; the longest "
            f"{max(without) / median(without):.2f} and {max(with_saves) / median(without):.2f} times the median"
        )


def compute(seconds: float) -> None:
    """Use one processor like a forward and a backward pass."""
    x, end_s = torch.randn(512, 512), time.monotonic() + seconds
    while time.monotonic() < end_s:
        x @ x


def timed(action: Any) -> float:
    """Return how long it takes, in seconds."""
    started_s = time.monotonic()
    action()
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
