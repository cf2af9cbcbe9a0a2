"""What can be done to a folder of checkpoints from outside: to bytes, names, files, folders and the order of things.

What is done to single objects, on any storage, with checksums made right again afterwards, is in `train.damage`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elasticctl_store.checkpoints import entries, verify
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import DamagedError, FormatError, FullError, StorageError
from elasticctl_store.storage import Storage, all_keys
from tests.support.storage_soak.states import is_right
from tests.support.train.checkpoints import read_alone
from tests.support.train.damage import MemoryStorage, Objects, damage_objects, sign


def damage_storage(storage: Storage, dice: random.Random) -> None:
    """Change objects by the storage's own requests, so that the service vouches for each; as far as there is room."""
    before: Objects = {key: storage.get(key) for key in all_keys(storage, "")}
    if not before:
        return
    after = {key: data for key, data in damaged(before, dice).items() if storable(key)}
    storage.delete([key for key in before if key not in after])
    with suppress(FullError):
        for key, data in after.items():
            if before.get(key) != data:
                storage.put(key, [data])


def damaged(before: Objects, dice: random.Random) -> Objects:
    """Damage objects with `train.damage`, except for two things: intact entries of another version, which are rightly
    refused, and states that no run saved, under checksums that are all right again, which cannot be noticed."""
    while True:
        after = damage_objects(before, dice)
        after = {
            key: before.get(key, data) if is_of_another_version(key, data) else data for key, data in after.items()
        }
        if not holds_forged(after):
            return after


def holds_forged(objects: Objects) -> bool:
    """Whether a checkpoint reads as intact, but no run has saved it."""
    storage = MemoryStorage(objects)
    for commit in read_commits(storage):
        for rank in range(len(commit.shares)):
            try:
                state, local = read_alone(storage, commit, rank)
                verify.verify(storage, commit, lambda count: None)
            except StorageError:
                continue
            save, made = entries.save_of(commit.folder), state.get("made")
            if not (made and is_right(state, local, rank) and save and save.step == commit.step == made["step"]):
                return True
    return False


def is_of_another_version(key: str, data: bytes) -> bool:
    try:
        entries.decode(data, entries.position_of(key) or 0)
    except FormatError:
        return True
    except DamagedError:
        pass
    return False


def storable(key: str) -> bool:
    """Whether each service accepts the name."""
    return key.isprintable() and not key.endswith("/") and len(key) < 200


def files(root: Path) -> list[str]:
    """Return all files, except those that are far larger than the others."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if is_small(path) and not path.is_symlink())


def is_small(path: Path) -> bool:
    """Whether it is a file that can be read whole."""
    return path.is_file() and path.stat().st_size < 1 << 20


def folders(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())


def entry_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "journal").glob("*.json") if is_small(path))


def a_file(root: Path, dice: random.Random) -> Path:
    return root / dice.choice(files(root))


def alike(root: Path, path: Path, dice: random.Random) -> Path:
    """Another file of the same kind, perhaps the same."""
    return root / dice.choice([name for name in files(root) if name.endswith(path.suffix)])


def link_over(root: Path, dice: random.Random) -> None:
    one = a_file(root, dice)
    other = alike(root, one, dice)
    if one != other:
        other.unlink()
        os.link(one, other)


def swap_folders(root: Path, dice: random.Random) -> None:
    found = [folder for folder in folders(root) if folder.parent != root]
    if len(found) > 1:
        one, other = dice.sample(found, 2)
        one.rename(root / "between")
        other.rename(one)
        (root / "between").rename(other)


def remove_many(root: Path, dice: random.Random) -> None:
    above, ending = dice.choice(("journal/", "data/", "base/")), dice.choice(("", ".json", ".safetensors", "committed"))
    share = dice.choice((0.3, 0.6, 1.0))
    for name in files(root):
        if name.startswith(above) and name.endswith(ending) and dice.random() < share:
            (root / name).unlink()


def remove_folder(root: Path, dice: random.Random) -> None:
    shutil.rmtree(dice.choice(folders(root)))


def turn_back_journal(root: Path, dice: random.Random) -> None:
    """As a copy from earlier has it."""
    found = entry_files(root)
    for path in found[: dice.randrange(len(found))]:
        path.unlink()


def turn_back_data(root: Path, dice: random.Random) -> None:
    found = sorted((root / "data").iterdir())
    for path in found[dice.randrange(len(found)) :]:
        shutil.rmtree(path, ignore_errors=True)


def double_entry(root: Path, dice: random.Random) -> None:
    data = dice.choice(entry_files(root)).read_bytes()
    position = dice.choice((dice.randrange(1, 30), dice.randrange(1, 10**6), 10**12 - 2, 0))
    with suppress(ValueError, TypeError):
        if dice.random() < 0.5:
            data = sign({**json.loads(data), "position": position})
    (root / entries.key_of(position)).write_bytes(data)


def forge(root: Path, dice: random.Random) -> None:
    """An entry with another value and the right digest; not with another format, which is to be refused."""
    path = dice.choice(entry_files(root))
    body = json.loads(path.read_bytes())
    name = dice.choice([name for name in body if name not in ("sha256", "position", "format")])
    match body[name]:
        case [{"key": key}, *_] as shares if dice.random() < 0.5:
            share = dice.choice(shares)
            field = dice.choice(list(share))
            share[field] = dice.choice((share[field], 0, 1 << 40, "crc32:00000000", f"{key}x", "../../x"))
        case [_, *_] as items:
            body[name] = dice.choice((items[1:], items + items, items[::-1], ["base/"]))
        case bool():
            pass
        case int(value):
            body[name] = dice.choice((value + 1, value - 1, 0, value * 1000, -1, 10**15))
        case float(value):
            body[name] = dice.choice((value + 1e6, value - 1e6, 0.0, 4e9, 1e10))
        case dict():
            body[name] = dice.choice(({}, {"loss": -1e9}, {"loss": "x"}))
        case str(value):
            body[name] = dice.choice(("", "x", value + value, "moved", "commit", "generation"))
    path.write_bytes(sign(body))


def rename(root: Path, dice: random.Random) -> None:
    path = a_file(root, dice)
    name = path.name
    other = (name.upper(), unicodedata.normalize("NFD", name + "é"), f"{name} ", name.replace("0", "\u0660", 1))
    path.rename(path.with_name(dice.choice((*other, f".{name}", f"{name}~", f"{name}.partial", f"{name}\n"))))


def rename_folder(root: Path, dice: random.Random) -> None:
    path = dice.choice(folders(root))
    other = (path.name.upper(), f"{path.name} ", f"{path.name}.old", path.name.replace("0", "1", 1) + "x")
    target = path.with_name(dice.choice(other))
    if not target.exists():
        path.rename(target)


def put_link(root: Path, dice: random.Random) -> None:
    path = a_file(root, dice)
    elsewhere = (str(a_file(root, dice)), "/dev/zero", "/dev/null", "/etc/passwd", "nowhere", path.name, "..")
    path.unlink()
    path.symlink_to(dice.choice(elsewhere))


def put_link_to_folder(root: Path, dice: random.Random) -> None:
    path, outside = dice.choice(folders(root)), root.with_name(f"{root.name}-outside")
    shutil.rmtree(outside, ignore_errors=True)
    path.rename(outside)
    path.symlink_to(outside)


def put_folder(root: Path, dice: random.Random) -> None:
    path = a_file(root, dice)
    path.unlink()
    path.mkdir()
    if dice.random() < 0.5:
        (path / "x").write_bytes(b"1")


def put_pipe(root: Path, dice: random.Random) -> None:
    path = a_file(root, dice)
    path.unlink()
    os.mkfifo(path)


def put_hole(root: Path, dice: random.Random) -> None:
    os.truncate(a_file(root, dice), 6 << 30)


def add_other_files(root: Path, dice: random.Random) -> None:
    names = (
        "journal/x.json",
        "journal/000000000000.json",
        "journal/999999999999.json",
        "journal/a/b.json",
        "data/set/a",
    )
    names += ("data/readme", "base/foo/b", "x", "rollbacks/1.json", "rollbacks/000000000003.json", "interruptions.json")
    for name in dice.sample(names, 3):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(dice.choice((b"", b"{}", b"[]", b"x")))


def add_partial(root: Path, dice: random.Random) -> None:
    path = a_file(root, dice)
    shutil.copy(path, path.with_name(f"{path.name}.deadbeef.partial"))


def objects(root: Path, dice: random.Random) -> None:
    """What `train.damage` does to objects, to files."""
    before = {name: (root / name).read_bytes() for name in files(root)}
    after = damaged(before, dice)
    for name in before.keys() - after.keys():
        (root / name).unlink()
    for name, data in after.items():
        if before.get(name) != data:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    link_over, swap_folders, remove_many, remove_folder, turn_back_journal, turn_back_data, double_entry, forge, rename,
    rename_folder, put_link, put_link_to_folder, put_folder, put_pipe, put_hole, add_other_files, add_partial,
    *[objects] * 6,
)  # fmt: skip


def damage_folder(root: Path, dice: random.Random) -> str:
    """Do one of them; returns which. Some find nothing to do it to."""
    chosen = dice.choice(DAMAGES)
    with suppress(OSError, IndexError, ValueError, TypeError, KeyError, RecursionError):
        chosen(root, dice)
    return chosen.__name__
