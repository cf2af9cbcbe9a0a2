"""What people do to checkpoints: `elasticctl checkpoints`, and a job that starts from another one's."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys

import safetensors.torch

from elasticctl.cli.main import main
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.errors import TrainError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from tests.support.storage_soak.world import World, expect, order
from tests.support.train.checkpoints import read_alone
from tests.support.train.states import same

EXIT_CODES = range(7)


def ask(world: World, *arguments: str) -> tuple[int, str]:
    """Run a command line in this process; returns how it ended, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.stdin
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.stdin = io.StringIO("")
        try:
            code = main(("checkpoints", arguments[0], world.place.url, *arguments[1:]))
        finally:
            sys.stdin = before
    world.log(f"{' '.join(arguments)}: {code} {err.getvalue()[-300:].strip()!r}")
    expect("Traceback" not in err.getvalue(), f"{arguments[0]}: {err.getvalue()}")
    expect(code in EXIT_CODES, f"{arguments[0]} ends with {code}: {err.getvalue()}")
    return code, out.getvalue()


def looks(world: World) -> None:
    """`list` and `verify`: what verify finds whole is what a look finds."""
    ask(world, "list")
    _, out = ask(world, "verify", "-o", "json")
    if out.strip():
        found = {
            one["objects"][0]["key"].rpartition("/")[0] + "/" for one in json.loads(out)["checkpoints"] if one["whole"]
        }
        whole = {commit.folder for commit in world.whole_commits()}
        expect(found == whole, f"verify finds whole: {found}, a look {whole}")


def repairs(world: World) -> None:
    before, intact = world.whole_commits(), world.intact()
    ask(world, "repair")
    world.check_kept(before, intact)


def starts_over(world: World) -> None:
    """`repair --start-over` refuses where anything is whole."""
    before = world.whole_commits()
    code, _ = ask(world, "repair", "--start-over", "--yes")
    expect(not before or bool(world.whole_commits()), "start-over deleted what was whole")
    if code == 0 and not before:
        world.whole.clear()
    world.reset_after_damage()


def prunes(world: World) -> None:
    before, intact = world.whole_commits(), world.intact()
    ask(world, "prune", "--keep-last", str(world.dice.choice((1, 2, 5))), "--yes")
    keep_newest(world.check_kept(before, intact), before)


def removes(world: World) -> None:
    before, intact = world.whole_commits(), world.intact()
    ask(world, "rm", str(world.dice.randrange(1, 13)), "--yes")
    keep_newest(world.check_kept(before, intact), before)


def keep_newest(after: list[Commit], before: list[Commit]) -> None:
    expect(not before or (bool(after) and after[0] == before[0]), f"{before[:1]} is gone, {after[:1]} is the newest")


def pulls(world: World) -> None:
    target, whole = world.folder / "pulled.safetensors", world.whole_commits()
    code, _ = ask(world, "pull", str(target), "--force")
    expect(code == 0 or not whole, f"pull refuses, though {whole[:1]} is whole")
    if code == 0:
        tensors = safetensors.torch.load_file(target)
        state, _ = read_alone(world.storage, whole[0])
        expect(same({name: tensors[name] for name in state["model"]}, state["model"]), "pull gives a wrong tensor")


def starts_from(world: World) -> None:
    """Another job starts from what is here."""
    whole, folder = world.whole_commits(), world.folder / "other"
    try:
        restored = Checkpointer(LocalStorage(folder)).start_from(world.storage, None)
    except TrainError as e:
        world.log(f"start from: {e}")
        world.check_refusal(e, whole)
        return
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    expect(order(restored.commit) == order(whole[0]), f"starts from {restored.commit}, not {whole[0]}")
    world.check_state(restored.commit, restored.state, restored.local, 0)
