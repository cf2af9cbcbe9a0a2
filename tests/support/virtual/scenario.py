"""Scenarios: a job, its cluster and everything that goes wrong, all drawn from one seed, and the required outcome.

`run_scenario` raises `BrokenPromise` where a property does not hold. `shrink` drops incidents from a scenario that
fails, as long as it still fails in the same way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

from elasticctl.api.status import Phase
from tests.support.virtual.checks import BrokenPromise, Watcher
from tests.support.virtual.launcher import Timing
from tests.support.virtual.script import Bug, Fault, Script
from tests.support.virtual.world import Setup, World

SETTLE_S = 400.0
"""How long after the last incident everything must be in order, if the script itself takes no time."""
BACK_S = 120.0
STAYING_SHARE = 0.5
"""The share of scripts with the training library that keep their processes."""
SLOW_SHARE = 0.2
"""The share of scripts that take minutes to stop, to tear down or to import."""
UNSTEADY_SHARE = 0.25
"""The share of scenarios in which something comes and goes, or the service is away for an hour."""
SUSPENDED_SHARE = 0.15
"""The share of scenarios in which the job is suspended, once or more."""
HANG_S = 2500.0
"""How long it takes to detect a hang and to decide who caused it."""


class What(Enum):
    """What can go wrong."""

    LOSE_NODE = "a machine dies, and another comes after a while"
    RECLAIM = "a machine is taken back, with notice"
    KILL = "a launcher is killed"
    DELETE_POD = "somebody deletes a pod"
    LOSE_MOST = "most machines die at the same time, and come back after a while"
    CUT_SERVICE = "a launcher cannot reach the service"
    ISOLATE = "a machine is cut off from the network"
    FREEZE = "nothing on a machine moves"
    CRASH_SERVICE = "the controller's process dies, and is restarted after a while"
    API_AWAY = "the API server does not answer"
    STORAGE_AWAY = "the storage does not answer"
    LOSSY = "messages get lost"
    LATE = "messages come late"
    CLOCK_STEP = "the controller's clock is set"
    SCALE = "the job is scaled"
    FLAP = "a launcher's connection to the service comes and goes"
    CRASH_LOOP = "the controller's process dies again and again"
    SUSPEND = "the owner suspends the job for a while"

    def __repr__(self) -> str:
        return f"What.{self.name}"


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happens at `at_s`, for `for_s`, to the machine that `pick` (0 to 1) chooses.

    `known_s`: when the cluster notices. `amount`: by how much, for kinds that have a degree.
    """

    at_s: float
    what: What
    pick: float = 0.0
    for_s: float = 0.0
    known_s: float = 1.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. After `quiet_s` nothing more goes wrong."""

    seed: int
    setup: Setup
    incidents: tuple[Incident, ...] = ()

    @property
    def quiet_s(self) -> float:
        """When the last incident is over."""
        return max((item.at_s + item.for_s + item.known_s + BACK_S for item in self.incidents), default=0.0)

    @property
    def has_to_fail(self) -> bool:
        """The script fails more often than the backoff limit allows."""
        bug = self.setup.script.bug
        return bug is not None and (bug.times == 0 or bug.times > self.setup.backoff_limit)


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    dice = random.Random(seed)
    workers = dice.choice((1, 2, 3, 3, 4, 5, 8))
    backoff_limit = dice.choice((0, 1, 3, 3, 3, 6))
    script = draw_script(dice, backoff_limit)
    can_stay = script.reports and not (script.bug is not None and script.bug.permanent)  # such a bug strikes before
    script = replace(script, stays=can_stay and random.Random(f"stays {seed}").random() < STAYING_SHARE)
    script, timing = slow_down(script, random.Random(f"slow {seed}"))
    setup = Setup(
        workers=workers,
        minimum=dice.randint(1, workers),
        maximum=workers + dice.randint(0, 2),
        nodes=workers + dice.randint(0, 2),
        backoff_limit=backoff_limit,
        pod_start_s=dice.choice((0.5, 3.0, 20.0)),
        lag_s=dice.choice((0.05, 0.05, 2.0)),
        lazy=dice.random() < 0.9,
        elected=dice.random() < 0.5,
        script=script,
        timing=timing,
        grace_s=max(30.0, timing.stop_grace_s + 30.0),
    )
    span_s = script.import_s + script.first_step_s + script.steps * script.pace_s(workers)
    count = dice.choice((0, 1, 1, 2, 3, 4, 6, 10))
    incidents = [draw_incident(dice, span_s) for _ in range(count)]
    incidents += draw_unsteady(random.Random(f"unsteady {seed}"), span_s)
    incidents += draw_suspended(random.Random(f"suspended {seed}"), span_s)
    return Scenario(seed, setup, tuple(sorted(incidents, key=lambda item: item.at_s)))


def slow_down(script: Script, dice: random.Random) -> tuple[Script, Timing]:
    """Make some scripts take minutes instead of seconds; their launchers give them the time to stop."""
    if dice.random() >= SLOW_SHARE:
        return script, Timing()
    stop_s = dice.choice((script.stop_s, 60.0))
    teardown_s = dice.choice((script.teardown_s, 120.0, 300.0))
    slow = replace(script, stop_s=stop_s, teardown_s=teardown_s, import_s=dice.choice((script.import_s, 300.0)))
    return slow, Timing(stop_grace_s=max(5.0, stop_s * 1.5))


def draw_unsteady(dice: random.Random, span_s: float) -> list[Incident]:
    """Draw what comes and goes for a while, or a service that is away for long: rare by chance, but revealing."""
    if dice.random() >= UNSTEADY_SHARE:
        return []
    what = dice.choice((What.FLAP, What.FLAP, What.CRASH_LOOP, What.CRASH_SERVICE))
    for_s = 3600.0 if what is What.CRASH_SERVICE else dice.choice((30.0, 120.0, 600.0))
    at_s = dice.uniform(0.0, min(span_s, dice.choice((60.0, span_s))))
    return [Incident(at_s, what, dice.random(), for_s, dice.choice((0.5, 1.5, 45.0)), dice.random())]


def draw_suspended(dice: random.Random, span_s: float) -> list[Incident]:
    """One time or some in which the job is suspended, one after the other."""
    found, at_s = [], 0.0
    for _ in range(dice.randint(1, 3) if dice.random() < SUSPENDED_SHARE else 0):
        at_s += dice.uniform(0.0, min(span_s, dice.choice((5.0, 60.0, span_s))))
        found.append(Incident(at_s, What.SUSPEND, for_s=dice.choice((0.2, 2.0, 20.0, 120.0, 3000.0))))
        at_s += found[-1].for_s + 0.01
    return found


def draw_script(dice: random.Random, backoff_limit: int) -> Script:
    """A script that is quick or slow in everything, and right or wrong."""
    steps = dice.randint(100, 3000)
    bug = None
    if dice.random() < 0.3:
        fault = dice.choice(list(Fault))
        permanent = fault in (Fault.FAILS_IN_IMPORT, Fault.HAS_A_SYNTAX_ERROR)
        bug = Bug(
            fault,
            step=dice.choice((1, 5, steps // 2)),
            rank=dice.randrange(8),
            closes_first=dice.random() < 0.3,
            times=0 if permanent or not backoff_limit or dice.random() < 0.7 else dice.randint(1, backoff_limit),
        )
    step_s = dice.choice((0.1, 1.0, 1.0, 10.0))
    return Script(
        import_s=dice.choice((0.5, 5.0, 60.0)),
        load_s=dice.choice((0.1, 2.0, 60.0)),
        first_step_s=dice.choice((0.5, 10.0, 120.0, 600.0)),
        step_s=step_s,
        steps=steps,
        save_every_s=dice.choice((0.02, 0.1, 0.3)) * steps * step_s,
        save_s=dice.choice((0.2, 5.0)),
        stop_s=dice.choice((0.1, 0.5, 5.0)),
        teardown_s=dice.choice((0.1, 1.0, 30.0)),
        export_s=dice.choice((0.0, 10.0, 3600.0)),
        reports=dice.random() < 0.8,
        bug=bug,
    )


def draw_incident(dice: random.Random, span_s: float) -> Incident:
    """One incident within the time that the script needs."""
    what = dice.choice([what for what in What if what not in _UNSTEADY])
    for_s = dice.choice((1.0, 8.0, 30.0, 120.0, 600.0, 3600.0))
    known_s = dice.choice((0.5, 1.5, 45.0))
    at_s = dice.uniform(0.0, min(span_s, dice.choice((60.0, span_s))))
    return Incident(at_s, what, dice.random(), for_s, known_s, dice.random())


def happen(world: World, item: Incident) -> None:
    """Cause the incident."""
    names = [node.name for node in world.cluster.nodes.values() if node.up and not node.cut and node.pod is not None]
    if item.what not in _ON_NODES:
        happen_to_all(world, item)
    elif item.what is What.LOSE_MOST:
        for name in names[: max(1, round(item.amount * 2.0 * len(names)))]:
            world.lose_node(name, item.known_s)
            world.loop.after(item.for_s + BACK_S * item.pick, world.add_node)
    elif names:
        happen_to_node(world, item, names[int(item.pick * len(names))])


def happen_to_node(world: World, item: Incident, name: str) -> None:
    """Cause an incident of one machine."""
    match item.what:
        case What.LOSE_NODE:
            world.lose_node(name, item.known_s)
            world.loop.after(item.for_s + BACK_S, world.add_node)
        case What.RECLAIM:
            world.reclaim(name, 30.0 + 90.0 * item.amount)
            world.loop.after(item.for_s + BACK_S, world.add_node)
        case What.KILL:
            world.kill(name)
        case What.DELETE_POD:
            world.delete_pod(name)
        case What.CUT_SERVICE:
            world.cut_service(name, item.for_s)
        case What.FLAP:
            for since_s, for_s in come_and_go(item):
                world.loop.after(since_s, world.cut_service, name, for_s)
        case What.ISOLATE:
            world.isolate(name, item.for_s, 40.0 + item.known_s)
        case What.FREEZE:
            world.freeze(name, item.for_s)


def happen_to_all(world: World, item: Incident) -> None:
    """Cause an incident of the control plane, of the network, or of the job."""
    match item.what:
        case What.CRASH_SERVICE:
            world.crash_service(item.for_s)
        case What.CRASH_LOOP:
            for since_s, for_s in come_and_go(item):
                world.loop.after(since_s, world.crash_service, for_s)
        case What.API_AWAY:
            world.stop_api(item.for_s)
        case What.STORAGE_AWAY:
            world.stop_storage(item.for_s)
        case What.LOSSY:
            world.change_weather(item.for_s, lost_share=item.amount * 0.5)
        case What.LATE:
            world.change_weather(item.for_s, late_share=item.amount, late_s=60.0 * item.pick)
        case What.CLOCK_STEP:
            world.step_clock((item.amount - 0.5) * (7200.0 if item.pick < 0.5 else 6 * 86_400.0))
        case _:
            happen_to_job(world, item)


def happen_to_job(world: World, item: Incident) -> None:
    """Have the owner change the job."""
    match item.what:
        case What.SUSPEND:
            world.suspend(item.for_s)
        case What.SCALE:
            low, high = world.setup.minimum, world.setup.maximum
            world.scale(low + int(item.pick * (high - low + 1)))
        case _:
            raise ValueError(f"cannot simulate {item.what}")


def come_and_go(item: Incident) -> list[tuple[float, float]]:
    """Return when something is away, in seconds since the incident began, and for how long each time."""
    dice, found, since_s = random.Random(item.amount), [], 0.0
    while since_s < item.for_s:
        for_s = min(dice.choice((0.5, 3.0, 12.0)) * dice.uniform(0.5, 1.5), item.for_s - since_s)
        found.append((since_s, for_s))
        since_s += for_s + dice.choice((0.2, 2.0, 20.0)) * dice.uniform(0.5, 1.5)
    return found


_UNSTEADY = {What.FLAP, What.CRASH_LOOP, What.SUSPEND}
_ON_NODES = {
    What.LOSE_NODE, What.RECLAIM, What.KILL, What.DELETE_POD, What.LOSE_MOST, What.CUT_SERVICE, What.ISOLATE,
    What.FREEZE, What.FLAP,
}  # fmt: skip

_STAND_STILL = {What.ISOLATE, What.FREEZE}


def run_scenario(scenario: Scenario) -> World:
    """Run a scenario to its end; raises BrokenPromise."""
    world = World(scenario.setup, scenario.seed)
    try:
        world.start()
        for item in scenario.incidents:
            world.loop.at(item.at_s, happen, world, item)
        script, setup = scenario.setup.script, scenario.setup
        longest_s = script.steps * script.pace_s(setup.minimum)
        watcher = Watcher(world, scenario.quiet_s, max(97.0, longest_s / 40.0))
        watcher.start()
        once_s = script.import_s * 1.1 + script.load_s + script.first_step_s + script.stop_s + script.teardown_s
        tries = 1 if script.bug is None else setup.backoff_limit + 1
        stood_s = max((item.for_s for item in scenario.incidents if item.what in _STAND_STILL), default=0.0)
        learnt_s = 10.0 * (once_s + stood_s)  # a hang is found in time that depends on how long steps have taken
        tries_s = tries * (learnt_s + script.teardown_s + HANG_S)
        settled_s = scenario.quiet_s + SETTLE_S + 3 * once_s + (tries_s if script.bug else 0.0)
        if not scenario.has_to_fail:
            world.run(settled_s)
            watcher.check_moves()
        world.run(settled_s + longest_s + script.export_s * 3 + tries_s)
        check_end(world, has_to_fail=scenario.has_to_fail)
    finally:
        world.close()
    return world


def check_end(world: World, *, has_to_fail: bool) -> None:
    """Check how the job has ended."""
    status, bug = world.status, world.script.bug
    shown = f"{status.phase} ({status.reason}: {status.message})"
    if not has_to_fail:
        if status.phase is not Phase.SUCCEEDED:
            raise BrokenPromise(f"it is {shown}, but nothing is wrong with it")
        if world.storage.step != world.script.steps:
            raise BrokenPromise(f"it succeeded at step {world.storage.step} of {world.script.steps}")
        return
    assert bug is not None
    if status.phase is not Phase.FAILED:
        raise BrokenPromise(f"it is {shown}, but it has a bug, which struck {world.figures.hits} times")
    named = bug.error or f"exit code {bug.exit_code}"
    if named not in status.message and not world.ledger.is_culprit_cut():
        raise BrokenPromise(f"it is {shown}, which does not name the bug")
    world.ledger.check_budget()


def fails(scenario: Scenario) -> str:
    """Run a scenario, and return how it fails; empty if it does not."""
    try:
        run_scenario(scenario)
    except BrokenPromise as error:
        return str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises
        return f"{type(error).__name__}: {error}"
    return ""


def kind_of(failure: str) -> str:
    """Return a failure without its names and numbers, so that failures of one kind are equal."""
    return "".join(" " if c.isdigit() else c for c in failure)[:40]


def shrink(scenario: Scenario) -> Scenario:
    """Return a scenario with as few incidents as possible that fails in the same way."""
    kind = kind_of(fails(scenario))
    size = max(1, len(scenario.incidents) // 2)
    while size:
        at = 0
        while at < len(scenario.incidents):
            fewer = replace(scenario, incidents=scenario.incidents[:at] + scenario.incidents[at + size :])
            if kind_of(fails(fewer)) == kind:
                scenario = fewer
            else:
                at += size
        size //= 2
    return scenario


def as_text(scenario: Scenario) -> str:
    """Return Python code that runs the scenario again."""
    lines = [f"    {item!r}," for item in scenario.incidents]
    return "\n".join(
        ["run_scenario(Scenario(", f"  {scenario.seed},", f"  {scenario.setup!r},", "  (", *lines, "  ),", "))"]
    )
