"""Runs that save: in this process, in one that is killed, of several ranks, and one that has been replaced."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints import entries, repair
from elasticctl_store.checkpoints.commits import read_entries
from elasticctl_store.checkpoints.entries import Commit, Generation, Retention
from elasticctl_store.checkpoints.retention import take_over
from elasticctl_store.errors import TrainError
from elasticctl_train.checkpoint import rank_shares, saving
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.incremental import unchanged
from tests.support import servers
from tests.support.gate import Fault, Seen
from tests.support.interrupting import die_at_change
from tests.support.storage_soak import verbs
from tests.support.storage_soak.places import QUICK
from tests.support.storage_soak.states import local_of, state_of
from tests.support.storage_soak.world import World, expect
from tests.support.train import ranks
from tests.support.train.checkpoints import make_share

LONGEST_LIFE_S = 300.0
ROOM_PAUSES_S = (0.001,) * 6
"""No storage here counts late what has been deleted."""


def run(world: World) -> None:
    """A run takes over, goes on from what is there, and saves a few times."""
    take_a_turn(world, world.dice.choice((0, 1, 1, 2, 3)))


def take_a_turn(world: World, saves: int) -> None:
    """A run that saves so many times."""
    before, intact = world.whole_commits(), world.intact()
    world.run_number += 1
    number = world.run_number
    keep = Retention(last=world.dice.choice((1, 2, 3)), every_s=world.dice.choice((None, None, 3600.0)))
    with a_clock(world):
        train(world, number, keep, saves, before, intact)


def train(world: World, number: int, keep: Retention, saves: int, before: list[Commit], intact: list[str]) -> None:
    """Take over, go on, and save so many times; people may look, or delete, between two saves."""
    try:
        checkpoints = Checkpointer(world.storage, keep=keep, on_commit=world.acknowledge)
        restored = checkpoints.restore()
    except TrainError as e:
        world.log(f"run {number}: refused: {e}")
        world.check_refusal(e, before)
        world.check_kept(before, intact)
        world.check_room(e)
        return
    world.check_restored(restored, before)
    made = restored.state["made"] if restored is not None else {"step": 0, "era": number}
    first, era = made["step"] + 1, made["era"] if world.dice.random() < 0.7 else number
    world.log(f"run {number}: from step {made['step']}, keeps {keep.last}")
    for step in range(first, first + saves):
        if step > first and world.is_honest and world.dice.random() < 0.3:
            world.dice.choice((verbs.looks, verbs.prunes, verbs.removes))(world)
        checkpoints.save(state_of(step, number, era), Label(step), local=local_of(step, 0))
        is_saved = checkpoints.settle()
        world.log(f"step {step}: {'saved' if is_saved else checkpoints.failure()}")
        if not is_saved:
            world.check_room(checkpoints.failure())
    if world.dice.random() < 0.3:
        world.zombie = checkpoints, number
    world.check_kept(before, intact)


@contextmanager
def a_clock(world: World) -> Iterator[None]:
    """A machine whose clock may be wrong, by hours or years; not where requests are signed with the time."""
    off_s, now = world.dice.choice((0.0, 0.0, 0.0, -5e3, 5e3, -3e8, 3e8)), time.time
    if world.place.gate is not None or not off_s:
        yield
        return
    world.log(f"a clock that is {off_s:.0f} s off")
    with mock.patch.object(time, "time", side_effect=lambda: now() + off_s):
        yield


def zombie(world: World) -> None:
    """A run that has been replaced saves once more, which must not become visible."""
    if world.zombie is None:
        return
    (checkpoints, number), world.zombie = world.zombie, None
    before, intact = world.whole_commits(), world.intact()
    try:
        checkpoints.save(state_of(777, number, 0), Label(777), local=local_of(777, 0))
        is_saved = checkpoints.settle()
    except TrainError as e:
        world.log(f"zombie: {e}")
        is_saved = False
    world.log(f"zombie: {'saved' if is_saved else 'fenced'}")
    world.check_kept(before, intact)
    if is_saved and not world.is_damaged:
        generations = [entry.generation for _, entry in read_entries(world.storage) if isinstance(entry, Generation)]
        expect(max(generations) == checkpoints.generation, "a run that has been replaced has saved")


def ranks_save(world: World) -> None:
    """Three ranks save, without processes; some are interrupted, before or after the commit."""
    before, intact = world.whole_commits(), world.intact()
    world.run_number += 1
    number, size = world.run_number, world.dice.choice((2, 3))
    written = size if world.dice.random() < 0.7 else world.dice.randrange(size)
    step = max((commit.step for commit in before), default=0) + 1
    storage = world.storage
    try:
        writer = take_over(storage)
        mine = writer.generation
        folder = entries.save_folder(mine.generation, 1, step, mine.run_id)
        for rank in range(written):
            share = make_share(state_of(step, number, number), local_of(step, rank), rank, size)
            share = dataclasses.replace(share, label=repair.label(step, 0, {}, time.time()))
            share.write(storage, entries.share_key(folder, rank, size))
            rank_shares.check_stored(storage, entries.share_key(folder, rank, size))
        if written == size and world.dice.random() < 0.8:
            found = rank_shares.gather(storage, folder, size, threading.Event())
            commit = Commit(0, mine.generation, 0, step, 0, found.refs, found.size_bytes, time.time())
            commit = writer.append(dataclasses.replace(commit, bases=found.bases))
            world.acknowledge(commit)
            if world.dice.random() < 0.8:
                storage.put(entries.marker_key(folder), [entries.encode(commit)])
            world.log(f"{size} ranks: saved step {step}")
        else:
            world.log(f"{size} ranks: interrupted at step {step}, {written} shares are there")
    except TrainError as e:
        world.log(f"{size} ranks: {e}")
    world.check_kept(before, intact)


def killed_run(world: World) -> None:
    """A run in a process of its own is killed at some change of the disk, or at some request."""
    before, intact = world.whole_commits(), world.intact()
    world.run_number += 1
    number, at = world.run_number, world.dice.randrange(1, 120)
    notes = world.folder / f"acknowledged-{number}"
    gate = world.place.gate
    keep = world.dice.choice((1, 2, 3))
    process = ranks.alone(save_until_killed, world.place.url, str(notes), number, keep, 0 if gate else at, servers.KEYS)
    if gate is not None:
        kill_at(gate.seen[-1].number + at if gate.seen else at, gate, process.pid or 0)
    process.join(LONGEST_LIFE_S)
    is_over = process.exitcode is not None
    process.kill()
    process.join()
    if gate is not None:
        gate.before = lambda seen: None
    expect(is_over, f"a run that was to be killed at {at} does not end")
    expect(process.exitcode in (0, 3, -signal.SIGKILL), f"a run ended with {process.exitcode}")
    acknowledged = notes.read_text().splitlines() if notes.exists() else []
    world.log(f"run {number}: killed at {at} ({process.exitcode}), {len(acknowledged)} acknowledged")
    for line in acknowledged:
        position, _, entry = line.partition(" ")
        world.acknowledge(entries.decode_commit(entry.encode(), int(position)))
    world.check_kept(before, intact)


def kill_at(number: int, gate: Any, pid: int) -> None:
    """Kill the process at that request to the gate, before it is carried out or after."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def before(seen: Seen) -> Fault | None:
        if seen.number < number:
            return None
        return Fault(call_after=kill, lose="after") if number % 2 else Fault(call=kill, lose="before")

    gate.before = before


def save_until_killed(url: str, notes: str, number: int, keep: int, at: int, keys: Mapping[str, str]) -> None:
    """In a process of its own: go on and save four steps; with `at`, until that many-th change of the file system.

    Exits with 3 where it refuses.
    """
    os.environ |= keys
    unchanged.LEAST_BYTES = 1000
    saving.ROOM_PAUSES_S = ROOM_PAUSES_S
    if at:
        die_at_change(at)
    log = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_commit(commit: Commit, duration_s: float) -> None:
        os.write(log, f"{commit.position} {entries.encode(commit).decode()}\n".encode())

    try:
        checkpoints = Checkpointer(storages.open(url, QUICK), keep=Retention(last=keep), on_commit=on_commit)
        restored = checkpoints.restore()
        made = restored.state["made"] if restored is not None else {"step": 0, "era": number}
        for step in range(made["step"] + 1, made["step"] + 5):
            checkpoints.save(state_of(step, number, made["era"]), Label(step), local=local_of(step, 0))
            checkpoints.settle()
    except TrainError:
        os._exit(3)
