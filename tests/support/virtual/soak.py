"""Search many stories for one that fails: `make soak`, or `python -m tests.support.virtual.soak --help`.

With `--seed` one story is told, shrunk if it fails, and printed as Python that tells it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from tests.support.virtual.checks import BrokenPromise
from tests.support.virtual.script import Script
from tests.support.virtual.story import Story, as_text, draw, fails, shrink, tell
from tests.support.virtual.world import Setup, World


@dataclass(slots=True)
class Sums:
    """What all stories together came to."""

    seeds: int = 0
    incidents: int = 0
    workers: int = 0
    days: float = 0.0
    events: int = 0
    requests: int = 0
    passes: int = 0
    generations: int = 0
    looks: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    def add(self, story: Story, world: World) -> None:
        """Add a story that has been told."""
        self.seeds += 1
        self.incidents += len(story.incidents)
        self.workers += len(world.launchers)
        self.days += world.loop.time() / 86_400.0
        self.events += world.loop.events
        self.requests += world.plane.requests
        self.passes += world.plane.passes
        self.generations += world.status.generation
        self.looks += world.looked
        self.ended[world.status.phase.value] += 1

    def describe(self, cpu_s: float) -> str:
        """In words."""
        ended = ", ".join(f"{count} {phase}" for phase, count in sorted(self.ended.items()))
        return (
            f"{self.seeds} seeds in {cpu_s:.0f} s of CPU: {self.days:.0f} simulated days, {self.workers} workers, "
            f"{self.incidents} incidents, {self.generations} generations, {self.requests} requests, {self.passes} "
            f"passes, {self.events} events; the status was held against the truth {self.looks} times; jobs: {ended}"
        )


def search(first: int, seeds: int, seconds: float) -> int:
    """Tell stories until there are enough of them, the time is over, or Ctrl-C; returns how many failed."""
    sums, failed, began = Sums(), [], time.process_time()
    with suppress(KeyboardInterrupt):
        for seed in range(first, first + seeds):
            story = draw(seed)
            failure = fails(story, on_end=sums.add)
            if failure:
                failed.append(seed)
                print(f"seed {seed}: {failure}\n{as_text(shrink(story))}\n", flush=True)
            if time.process_time() - began > seconds:
                break
    print(sums.describe(time.process_time() - began))
    print(f"failed: {failed}" if failed else "no story failed")
    return len(failed)


def spend_a_day(workers: int = 1000, bursts: int = 6) -> str:
    """A day of a large job that loses up to a dozen machines at once, now and then; returns how it went."""
    script = Script(30.0, 20.0, 120.0, step_s=2.0 * workers**0.8, steps=100_000, save_every_s=1800.0, stop_s=3.0)
    world = World(Setup(workers, workers // 2, workers, nodes=workers, script=script), 1)
    dice, began = random.Random(1), time.process_time()

    def lose(machines: int) -> None:
        names = [node.name for node in world.cluster.nodes.values() if node.up]
        for name in dice.sample(names, machines):
            world.lose_node(name, 1.5)
            world.loop.after(dice.uniform(100.0, 1500.0), world.add_node)

    world.begin()
    for _ in range(bursts):
        world.loop.at(dice.uniform(600.0, 80_000.0), lose, dice.randint(1, 12))
    world.run(86_400.0)
    status, training = world.status, world.now_training
    world.close()
    if training is None or not training.is_moving or not training.has_stepped:
        raise BrokenPromise(f"a day of {workers} workers ended with {status.phase}, {status.activity}")
    cpu_s = time.process_time() - began
    return (
        f"a day of {workers} workers in {cpu_s:.0f} s of CPU: {sum(status.restarts.values())} lost in {bursts} bursts, "
        f"{status.generation} generations, {world.plane.requests} requests, {world.plane.passes} passes, "
        f"{world.loop.events} events"
    )


def main() -> None:
    """Search, or tell one story."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5000, help="how many at most")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of CPU at most")
    parser.add_argument("--seed", type=int, help="tell the story of this one")
    flags = parser.parse_args()
    if flags.seed is None:
        print(spend_a_day(), flush=True)
        sys.exit(search(flags.first, flags.seeds, flags.seconds) > 0)
    story = draw(flags.seed)
    if fails(story):
        story = shrink(story)
    print(as_text(story))
    print(tell(story).status)


if __name__ == "__main__":
    main()
