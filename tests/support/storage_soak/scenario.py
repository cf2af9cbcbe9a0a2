"""Draws a scenario from a seed, and runs it: what happens to one URL. All of it is checked after each event."""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from elasticctl_store import storage as storages
from elasticctl_store.checkpoints import entries
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import all_keys
from elasticctl_train.checkpoint import saving
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.incremental import unchanged
from tests.support.storage_soak import runs, verbs
from tests.support.storage_soak.damages import damage_folder, damage_storage
from tests.support.storage_soak.places import QUICK, Place, answers
from tests.support.storage_soak.states import local_of, state_of
from tests.support.storage_soak.world import World, expect
from tests.support.waiting import wait_until

Event = Callable[[World], None]
NOBODY = 65534


def run_scenario(place: Place, seed: int, folder: Path) -> None:
    """Run the scenario of this seed at an unused place; `folder` is for other files.

    An error has the events so far as a note.
    """
    world = World(place, random.Random(seed), folder)
    with prepared(seed), a_neighbor(place.url) as check_neighbor:
        try:
            for event in draw(world):
                event(world)
            heal(world)
            check_neighbor()
        except Exception as e:
            e.add_note("\n".join(world.lines))
            raise


@contextmanager
def prepared(seed: int) -> Iterator[None]:
    """No log, small base files, and names of saves that the seed decides."""
    dice = random.Random(seed)
    names = mock.patch.object(secrets, "token_hex", lambda count=32: dice.randbytes(count).hex())
    logging.disable()
    try:
        with (
            names,
            mock.patch.object(unchanged, "LEAST_BYTES", 1000),
            mock.patch.object(unchanged, "LEAST_SHARE", 0.1),
            mock.patch.object(saving, "ROOM_PAUSES_S", runs.ROOM_PAUSES_S),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def a_neighbor(url: str) -> Iterator[Callable[[], None]]:
    """Another project's checkpoint in the same bucket or folder, whose name begins like this one's.

    The block may call what it gets, to see that nothing of it has changed.
    """
    path, mark, options = url.partition("?")
    storage = storages.open(f"{path}-2{mark}{options}", QUICK)
    checkpoints = Checkpointer(storage)
    checkpoints.save(state_of(1, 0, 0), Label(1), local=local_of(1, 0))
    expect(checkpoints.settle(), "a neighbor cannot save")
    before = {key: storage.get(key) for key in all_keys(storage, "")}

    def check() -> None:
        after = {key: storage.get(key) for key in all_keys(storage, "")}
        changed = {key for key in before | after if before.get(key) != after.get(key)}
        expect(not changed, f"another project's objects have changed: {changed}")

    try:
        yield check
    finally:
        with suppress(StorageError):
            storage.delete(list(before))


def draw(world: World) -> Iterator[Event]:
    """A beginning without harm, and what happens then."""
    dice = world.dice
    for _ in range(2):
        yield runs.run
    if dice.random() < 0.5:
        yield runs.ranks_save
    acts = [runs.run] * 4 + [runs.ranks_save, runs.zombie]
    people = [verbs.looks, verbs.repairs, verbs.prunes, verbs.prunes, verbs.removes, verbs.pulls, verbs.starts_from]
    harm = [damaged] * dice.choice((0, 2, 4)) + [runs.killed_run]
    harm += [stormy] * (4 if world.place.gate is not None else 2) if world.place.liar is not None else []
    harm += [forbidden] if world.place.root is not None and os.geteuid() == 0 else []
    harm += [short_of_room] * 3 if world.place.disk is not None else []
    for _ in range(dice.choice((3, 5, 8))):
        yield dice.choice((*acts, *people, *harm, *harm))
        if world.is_damaged and dice.random() < 0.1:
            yield verbs.starts_over


def damaged(world: World) -> None:
    """Damage what is stored, once or a few times."""
    for _ in range(world.dice.choice((1, 1, 2, 3))):
        if world.place.root is not None:
            world.log(damage_folder(world.place.root, world.dice))
        else:
            damage_storage(world.storage, world.dice)
            world.log("objects are damaged")
    world.reset_after_damage()


def stormy(world: World) -> None:
    """A run, or one that is killed, while the storage's answers cannot be trusted, or the network fails."""
    liar, link, dice = world.place.liar, world.place.link, world.dice
    assert liar is not None
    world.whole_commits()  # an answer to be given again later
    world.log(f"answers: {liar.start_lying(dice.randrange(1 << 30))}")
    is_network_bad = link is not None and dice.random() < 0.3
    if link is not None and is_network_bad:
        link.slow(2, 2)
    world.is_honest = False
    world.stores_what_it_says = world.place.gate is not None
    world.is_damaged |= not world.stores_what_it_says
    try:
        dice.choice((runs.run, runs.run, runs.killed_run if world.place.gate else runs.ranks_save))(world)
    finally:
        liar.stop_lying()
        if link is not None and is_network_bad:
            link.repair()
            wait_until(lambda: answers(world.storage))
        world.is_honest = world.stores_what_it_says = True


def forbidden(world: World) -> None:
    """A run that is not root finds something that it may not read, or not write to; then it may again."""
    root, dice = world.place.root, world.dice
    if root is None or not root.exists():
        return
    above = [root, *sorted(root.rglob("*"))]
    for path in above:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    target = dice.choice([path for path in above if not path.is_symlink()])
    mode = target.stat().st_mode
    target.chmod(dice.choice((0, 0o555 if target.is_dir() else 0o444, 0o333)))
    world.log(f"{target.relative_to(root)} gets mode {target.stat().st_mode & 0o777:o}")
    world.is_honest = False
    os.seteuid(NOBODY)
    try:
        runs.run(world)
    finally:
        os.seteuid(0)
        world.is_honest = True
        if target.exists():
            target.chmod(mode)


def short_of_room(world: World) -> None:
    """Somebody else fills the disk; then a run saves as far as there is room, or is killed at it."""
    place, dice = world.place, world.dice
    left = dice.choice((0, 8_000, 30_000, 60_000, 100_000))
    place.fill(left)
    world.log(f"room: {left} bytes")
    world.is_honest = False
    try:
        dice.choice((runs.run, runs.run, runs.killed_run, runs.ranks_save))(world)
    finally:
        world.is_honest = True
        if dice.random() < 0.7:
            place.empty()


def delete_misplaced(world: World) -> None:
    """What a start refuses as lying where no save has written it, and asks for by name."""
    for key in (*all_keys(world.storage, entries.DATA), *all_keys(world.storage, entries.BASE)):
        if entries.save_of(entries.folder_of(key)) is None and entries.is_named_by_save(key):
            world.storage.delete([key])


def heal(world: World) -> None:
    """End all faults: a run goes on and saves, or people start over; nothing is left that no commit needs."""
    if world.place.disk is not None:
        world.place.empty()
    acknowledged = world.acknowledged
    for _ in range(2):
        runs.take_a_turn(world, 1)
        if world.acknowledged > acknowledged:
            break
        expect(world.is_damaged, "nothing is wrong, and a run does not save")
        verbs.ask(world, "repair", "--start-over", "--yes")
        delete_misplaced(world)
        world.whole.clear()
        world.floor = (0, 0)
    expect(world.acknowledged > acknowledged, "a run does not save, though it was started over")
    if not world.is_damaged:
        found = list(read_commits(world.storage))
        kept = {folder for commit in found for folder in (commit.folder, *commit.bases)}
        left = {entries.folder_of(key) for above in ("data/", "base/") for key in all_keys(world.storage, above)} - kept
        expect(not left, f"no commit needs {left}, and it stays")
    if world.place.root is not None:
        above = world.place.root
        empty = [path for path in above.glob("*/*") if path.is_dir() and not any(path.iterdir())]
        expect(world.is_damaged or not empty, f"empty folders: {empty}")
