"""Stories: a job, its cluster and everything that goes wrong, all drawn from one seed, and what has to become of it.

`tell(story)` runs one and raises `BrokenPromise` where a property does not hold; `shrink` drops incidents from a story
that fails as long as it still fails the same way. `python -m tests.support.virtual.story SEED` tells a story again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from elasticctl.api.status import Phase
from tests.support.virtual.checks import BrokenPromise
from tests.support.virtual.clock import EPOCH
from tests.support.virtual.script import Script
from tests.support.virtual.watcher import Watcher
from tests.support.virtual.world import Setup, World

SETTLE_S = 400.0
"""How long after the last incident everything has to be in order, if the script needs no time for anything."""
BACK_S = 120.0


class What(Enum):
    """What can go wrong."""

    LOSE_NODE = "a machine dies"
    KILL = "a launcher is killed"

    def __repr__(self) -> str:
        return f"What.{self.name}"


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happens at `at_s` to the machine that `pick` (0 to 1) chooses among those there are, for `for_s`.

    `known_s`: when the cluster notices.
    """

    at_s: float
    what: What
    pick: float = 0.0
    for_s: float = 0.0
    known_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Story:
    """What is told. After `quiet_s` nothing more goes wrong."""

    seed: int
    setup: Setup
    incidents: tuple[Incident, ...] = ()

    @property
    def quiet_s(self) -> float:
        """When the last incident is over."""
        return max((item.at_s + item.for_s + item.known_s + BACK_S for item in self.incidents), default=0.0)


def draw(seed: int) -> Story:
    """The story of a seed."""
    dice = random.Random(seed)
    workers = dice.choice((1, 2, 3, 3, 4, 5, 8))
    script = draw_script(dice)
    setup = Setup(
        workers=workers,
        minimum=dice.randint(1, workers),
        maximum=workers + dice.randint(0, 2),
        nodes=workers + dice.randint(0, 2),
        pod_start_s=dice.choice((0.5, 3.0, 20.0)),
        script=script,
    )
    span_s = script.import_s + script.first_step_s + script.steps * script.pace_s(workers)
    count = dice.randint(0, 6)
    incidents = sorted((draw_incident(dice, span_s) for _ in range(count)), key=lambda item: item.at_s)
    return Story(seed, setup, tuple(incidents))


def draw_script(dice: random.Random) -> Script:
    """A script that is quick or slow in everything."""
    return Script(
        import_s=dice.choice((0.5, 5.0, 60.0)),
        load_s=dice.choice((0.1, 2.0, 60.0)),
        first_step_s=dice.choice((0.5, 10.0, 120.0, 600.0)),
        step_s=dice.choice((0.1, 1.0, 10.0)),
        steps=dice.randint(100, 3000),
        save_every_s=dice.choice((30.0, 120.0, 600.0)),
        save_s=dice.choice((0.2, 5.0)),
        stop_s=dice.choice((0.1, 0.5, 5.0)),
        teardown_s=dice.choice((0.1, 1.0, 30.0)),
        export_s=dice.choice((0.0, 10.0, 3600.0)),
        reports=dice.random() < 0.8,
    )


def draw_incident(dice: random.Random, span_s: float) -> Incident:
    """One incident within the time that the script needs."""
    what = dice.choice(list(What))
    known_s = dice.choice((0.5, 1.5, 45.0))
    return Incident(dice.uniform(0.0, span_s), what, dice.random(), known_s=known_s)


def happen(world: World, item: Incident) -> None:
    """Let it happen."""
    names = [node.name for node in world.cluster.nodes.values() if node.up and node.pod is not None]
    name = names[int(item.pick * len(names))] if names else ""
    pod = world.pod_on(name)
    match item.what:
        case What.LOSE_NODE if name:
            world.lose_node(name, item.known_s)
            world.loop.after(item.for_s + BACK_S, world.add_node)
        case What.KILL if pod is not None:
            world.ledger.note_fault()
            world.cluster.kill(pod)


def tell(story: Story) -> World:
    """Run a story to its end; raises BrokenPromise."""
    world = World(story.setup, story.seed)
    try:
        world.begin()
        for item in story.incidents:
            world.loop.at(item.at_s, happen, world, item)
        watcher = Watcher(world, story.quiet_s)
        watcher.begin()
        script = story.setup.script
        once_s = script.import_s * 1.1 + script.load_s + script.first_step_s
        settled_s = story.quiet_s + SETTLE_S + 3 * once_s
        world.run(settled_s)
        watcher.check_moves()
        longest_s = script.steps * script.pace_s(story.setup.minimum) + script.export_s * 2 + once_s
        world.run(settled_s + longest_s + 600.0)
        check_end(world)
    finally:
        world.close()
    return world


def check_end(world: World) -> None:
    """How the job has to end."""
    status = world.status
    if status.phase is not Phase.SUCCEEDED:
        raise BrokenPromise(
            f"the job is {status.phase} ({status.reason}: {status.message}), but nothing is wrong with it"
        )
    if world.storage.step != world.script.steps:
        raise BrokenPromise(f"it succeeded at step {world.storage.step} of {world.script.steps}")


def fails(story: Story) -> str:
    """How a story fails; empty if it does not."""
    try:
        tell(story)
    except BrokenPromise as error:
        return str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises
        return f"{type(error).__name__}: {error}"
    return ""


def kind_of(failure: str) -> str:
    """What two failures have in common, without names and numbers."""
    return "".join(" " if c.isdigit() else c for c in failure)[:40]


def shrink(story: Story, failing: Callable[[Story], str] = fails) -> Story:
    """A story with as few incidents as possible that fails the same way."""
    kind = kind_of(failing(story))
    size = max(1, len(story.incidents) // 2)
    while size:
        at = 0
        while at < len(story.incidents):
            fewer = replace(story, incidents=story.incidents[:at] + story.incidents[at + size :])
            if kind_of(failing(fewer)) == kind:
                story = fewer
            else:
                at += size
        size //= 2
    return story


def as_text(story: Story) -> str:
    """The story as Python that tells it again."""
    lines = [f"    {item!r}," for item in story.incidents]
    return "\n".join(["tell(Story(", f"  {story.seed},", f"  {story.setup!r},", "  (", *lines, "  ),", "))"])


def true_time(world: World) -> float:
    """Seconds since the epoch."""
    return EPOCH + world.loop.time()
