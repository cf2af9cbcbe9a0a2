"""A move that is cut off anywhere: at most one place trains after it, and it has the newest committed step."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, ElasticctlError, NotFoundError, UnreachableError
from elasticctl.api.spec import ANNOTATION_MOVED_TO, ANNOTATION_MOVING_FROM, ANNOTATION_MOVING_TO, ElasticJob
from elasticctl.cli.framework.place import Where
from elasticctl.cli.verbs.change_jobs import lifecycle
from elasticctl.cli.views.job import status_table
from elasticctl.dashboard.access import ChangeRequest, apply_change
from elasticctl.diagnosis import diagnose
from elasticctl.diagnosis.findings import Case
from elasticctl.operations.logs import delete_stored_logs
from elasticctl.operations.observer import SILENT
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from elasticctl.terminal import Terminal
from elasticctl_store.checkpoints import run_records
from elasticctl_store.checkpoints.commits import CommitWriter, moved_to, read_commits
from elasticctl_store.checkpoints.retention import take_over
from elasticctl_store.checkpoints.run_records import Rollback
from elasticctl_store.errors import MovedError, StorageError
from elasticctl_store.storage.local import LocalStorage
from tests.support import journals
from tests.support.job_samples import job

NAME = "digits"


class Killed(BaseException):
    """The command is killed, at this very moment."""


@dataclass
class Bomb:
    """Goes off before effect number `at`, counted from 1; never where that is 0."""

    at: int = 0
    seen: int = 0

    def effect(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise Killed


@dataclass
class OneCluster:
    """Jobs in memory, whose workers stop and start immediately."""

    bomb: Bomb
    jobs: dict[str, Manifest] = field(default_factory=dict)
    uids: int = 0
    ended: str = ""

    def get_job(self, namespace: str, name: str) -> Manifest:
        if name not in self.jobs:
            raise NotFoundError(f"no job {name}")
        found = copy.deepcopy(self.jobs[name])
        now = "Suspended" if found["spec"].get("suspend") else "Running"
        found["status"]["phase"] = self.ended or now
        return found

    def list_jobs(self, namespace: str | None) -> list[Manifest]:
        return [self.get_job("default", name) for name in self.jobs]

    def list_pods(self, namespace: str, name: str) -> list[Manifest]:
        return []

    def create_job(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        name = manifest["metadata"]["name"]
        if name in self.jobs:
            raise ConflictError("taken")
        if not dry_run:
            self.bomb.effect()
            self.uids += 1
            made = copy.deepcopy(manifest)
            made["metadata"]["uid"] = f"made-{id(self)}-{self.uids}"
            made["status"] = {}
            self.jobs[name] = made
        return manifest

    def patch_job(self, namespace: str, name: str, patch: Any) -> Manifest:
        self.get_job(namespace, name)
        self.bomb.effect()
        self.jobs[name] = merged(self.jobs[name], patch)
        return self.get_job(namespace, name)

    def delete_job(self, namespace: str, name: str) -> None:
        self.get_job(namespace, name)
        self.bomb.effect()
        del self.jobs[name]


def merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


class World:
    """Two contexts, `east` and `west`, and a job that trains in the east."""

    def __init__(self, root: Path) -> None:
        self.root, self.bomb = root, Bomb()
        self.clusters = {name: OneCluster(self.bomb) for name in ("east", "west")}
        begun = job(NAME)
        container = begun["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
        container["env"] = [{"name": "ELASTICCTL_STORAGE", "value": self.url("here")}]
        begun["metadata"].pop("annotations", None)
        begun["spec"]["suspend"] = False
        self.clusters["east"].jobs[NAME] = begun
        self.best = 0
        self.train()

    def url(self, name: str) -> str:
        return (self.root / name).as_uri()

    def reach(self, where: Where) -> Target:
        context = Context(where.context, "kubernetes", storage=self.url("other"))
        return Target(context, "default", self.clusters[where.context], Terminal())  # type: ignore[arg-type]

    def job(self, place: str) -> ElasticJob:
        return ElasticJob.from_manifest(self.clusters[place].get_job("default", NAME))

    def move(self, to: str, storage: str = "") -> None:
        lifecycle.move(job=NAME, to=to, storage=storage and self.url(storage), where=Where("east"))

    def resume(self, place: str, *, here: bool = False) -> None:
        lifecycle.resume(jobs=(NAME,), here=here, where=Where(place))

    def start(self, place: str) -> None:
        """As a user who changes the object directly."""
        self.clusters[place].patch_job("default", NAME, {"spec": {"suspend": False}})

    def delete(self, place: str) -> None:
        lifecycle.delete(jobs=(NAME,), yes=True, where=Where(place))

    def train(self) -> list[str]:
        """Have every job that is not suspended make a step, from its storage's newest; returns where one did."""
        trained = []
        for place, cluster in self.clusters.items():
            for manifest in cluster.list_jobs(None):
                if manifest["spec"].get("suspend"):
                    continue
                env = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"]
                url = next(item["value"] for item in env if item["name"] == "ELASTICCTL_STORAGE")
                storage = LocalStorage(Path(url.removeprefix("file://")))
                try:
                    writer = take_over(storage)
                except MovedError:
                    continue
                newest = next(read_commits(storage), None)
                assert (newest.step if newest else 0) == self.best, f"{place} trains on an older copy"
                journals.commit(storage, writer, self.best + 1)
                trained.append(place)
        assert len(trained) <= 1, "the job trains in two places"
        self.best += len(trained)
        return trained


@contextlib.contextmanager
def a_world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patched:
        world = World(Path(root))
        patched.setattr(os, "fsync", lambda descriptor: None)  # it takes most of the time
        patched.setenv("ELASTICCTL_CONFIG", str(Path(root) / "contexts.yaml"))
        patched.setattr(lifecycle, "reach", world.reach)
        for name in ("put", "delete"):
            patched.setattr(LocalStorage, name, counted(world.bomb, getattr(LocalStorage, name)))
        yield world


def counted(bomb: Bomb, work: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **options: Any) -> Any:
        bomb.effect()
        return work(*args, **options)

    return counting


ACTIONS: dict[str, Callable[[World], None]] = {
    "move": lambda world: world.move("west"),
    "move in place": lambda world: world.move("east", "there"),
    "move elsewhere": lambda world: world.move("west", "elsewhere"),
    "resume": lambda world: world.resume("east"),
    "resume here": lambda world: world.resume("east", here=True),
    "resume there": lambda world: world.resume("west"),
    "resume there all the same": lambda world: world.resume("west", here=True),
    "start by hand": lambda world: world.start("east"),
    "start there by hand": lambda world: world.start("west"),
    "delete": lambda world: world.delete("east"),
    "delete there": lambda world: world.delete("west"),
}


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    to=st.sampled_from(["west", "east"]),
    killed_at=st.integers(1, 20),
    actions=st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 20)), max_size=5),
)
@example(to="west", killed_at=13, actions=[("move in place", 0), ("resume there all the same", 0)])
def test_wherever_it_is_killed_and_whatever_is_typed_then_at_most_one_place_trains(
    to: str, killed_at: int, actions: list[tuple[str, int]]
) -> None:
    """Each action may itself be killed; after each, whatever is not suspended trains."""
    with a_world() as world:
        for name, at in [(f"first to {to}", killed_at), *actions]:
            world.bomb.at, world.bomb.seen = at, 0
            with contextlib.suppress(Killed, ElasticctlError):
                ACTIONS.get(name, lambda world: world.move(to, "there"))(world)
            world.bomb.at = 0
            world.train()


@pytest.mark.parametrize("to", ["west", "east"])
def test_wherever_it_is_killed_the_same_command_brings_it_to_its_end(to: str) -> None:
    killed_at, is_over = 0, False
    while not is_over:
        killed_at += 1
        with a_world() as world:
            world.bomb.at, world.bomb.seen = killed_at, 0
            try:
                world.move(to, "there")
                is_over = True
                world.bomb.at = 0
            except Killed:
                world.bomb.at = 0
                world.train()
                world.move(to, "there")
            assert world.train() == [to]
            assert next(read_commits(LocalStorage(world.root / "there"))).step == world.best
            assert not world.job("east").is_moving
    assert killed_at > 10


def test_an_unfinished_move_is_shown_with_the_command_that_ends_it() -> None:
    with a_world() as world:
        LocalStorage(world.root / "here").put(run_records.INTERRUPTIONS, [b"seen"])
        world.bomb.at, world.bomb.seen = 4, 0
        with pytest.raises(Killed):
            world.move("west", "there")
        world.bomb.at = 0
        assert world.job("east").moving_to == f"west {world.url('there')}"
        with pytest.raises(ConflictError, match=r"to context west is not finished. FIX: finish it with `elast"):
            world.resume("east")
        shown = status_table(world.clusters["east"].get_job("default", NAME), [], 0.0)
        assert "Its move to context west is not finished" in str(shown.rows)
        finding = diagnose(Case(world.job("east")))[0]
        assert (finding.rule, finding.decisive) == ("moving", True)
        assert [step.command for step in finding.mends] == [
            f"elasticctl move {NAME} --to west",
            f"elasticctl resume {NAME} --here",
        ]
        world.resume("east", here=True)
        assert not world.job("east").is_moving
        assert world.train() == ["east"]
        assert [path for path in (world.root / "there").rglob("*") if path.is_file()] == []


def test_with_a_job_that_is_deleted_meanwhile_its_move_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_world() as world:
        close = CommitWriter.close

        def the_job_is_deleted(self: CommitWriter, to: str) -> None:
            world.delete("east")
            close(self, to)

        monkeypatch.setattr(CommitWriter, "close", the_job_is_deleted)
        with pytest.raises(ConflictError, match="digits was not moved: it was deleted meanwhile"):
            world.move("west", "there")
        assert [cluster.jobs for cluster in world.clusters.values()] == [{}, {}]
        assert [path for path in (world.root / "there").rglob("*") if path.is_file()] == []


def test_the_dashboard_does_not_resume_a_job_whose_move_is_unfinished() -> None:
    with a_world() as world:
        cluster: Any = world.clusters["east"]
        mark = {"annotations": {ANNOTATION_MOVING_TO: f"west {world.url('there')}"}}
        cluster.patch_job("default", NAME, {"metadata": mark, "spec": {"suspend": True}})
        wish = ChangeRequest("resume", world.job("east").uid)
        with pytest.raises(ConflictError, match="the move of digits to context west is not finished"):
            apply_change(Target(Context("east", "kubernetes"), "default", cluster), NAME, wish)
        assert world.job("east").suspend


def test_a_job_that_has_arrived_and_was_not_started_says_so() -> None:
    with a_world() as world:
        world.move("west", "there")
        cluster = world.clusters["west"]
        mark = {ANNOTATION_MOVING_FROM: "east west"}
        cluster.patch_job("default", NAME, {"metadata": {"annotations": mark}, "spec": {"suspend": True}})
        for verb in (lambda: world.resume("west"), lambda: lifecycle.move(job=NAME, to="north", where=Where("west"))):
            with pytest.raises((ConflictError, KeyError)):
                verb()
        finding = diagnose(Case(world.job("west")))[0]
        assert finding.mends[0].command == f"elasticctl move {NAME} --context east --to west"
        world.resume("west", here=True)
        assert world.train() == ["west"]


def test_a_move_whose_storage_is_closed_cannot_be_called_off() -> None:
    with a_world() as world:
        CommitWriter.take_over(LocalStorage(world.root / "here")).close(world.url("there"))
        mark = {ANNOTATION_MOVING_TO: f"west {world.url('there')}"}
        world.clusters["east"].patch_job(
            "default", NAME, {"metadata": {"annotations": mark}, "spec": {"suspend": True}}
        )
        with pytest.raises(ConflictError, match=f"FIX: finish the move with `elasticctl move {NAME} --to west`"):
            world.resume("east", here=True)
        assert world.job("east").suspend


def test_the_loser_of_two_moves_says_where_the_job_is_and_deletes_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_world() as world:
        close = CommitWriter.close

        def another_is_faster(self: CommitWriter, to: str) -> None:
            monkeypatch.setattr(CommitWriter, "close", close)
            world.move("west", "faster")
            close(self, to)

        monkeypatch.setattr(CommitWriter, "close", another_is_faster)
        with pytest.raises(ConflictError, match=f"another move has taken it to {world.url('faster')}"):
            world.move("west", "there")
        assert world.train() == ["west"]
        assert world.job("east").moved_to == f"west {world.url('faster')}"
        assert [path for path in (world.root / "there").rglob("*") if path.is_file()] == []


def test_a_target_that_cannot_be_written_to_is_refused_before_anything_stops(tmp_path: Path) -> None:
    with a_world() as world:
        (world.root / "there").write_text("a file")
        with pytest.raises(ElasticctlError):
            world.move("west", "there")
        assert world.train() == ["east"]
        assert not world.job("east").is_moving
        assert moved_to(LocalStorage(world.root / "here")) is None


def test_a_job_that_cannot_be_moved_is_unchanged() -> None:
    with a_world() as world:
        east, west = world.clusters["east"], world.clusters["west"]

        def is_refused(why: str, to: str = "west", storage: str = "") -> None:
            with pytest.raises(ElasticctlError, match=why):
                world.move(to, storage)
            assert not world.job("east").suspend
            assert not world.job("east").is_moving

        east.ended = "Succeeded"
        is_refused(r"digits has ended \(Succeeded\) and cannot be moved")
        east.ended = ""
        is_refused("is already in context east. FIX: give --storage", "east")
        is_refused("is where the job's state already is", "west", "here")
        taken = LocalStorage(world.root / "taken")
        journals.commit(taken, take_over(taken), 7)
        is_refused("a job has been running there. FIX: choose an empty target", "west", "taken")
        world.clusters["west"] = east
        is_refused("the contexts east and west lead to the same place")
        world.clusters["west"] = west
        west.jobs["digits"] = job(NAME)
        west.jobs["digits"]["metadata"]["uid"] = "another"
        is_refused("there is another job digits in context west")
        east.jobs[NAME]["status"] = {}
        (storage,) = east.jobs[NAME]["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"]
        storage["value"] = world.url("empty")
        is_refused("has committed no checkpoint in")
        storage["name"] = "OTHER"
        is_refused("names no storage")


def test_an_error_says_where_the_job_can_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_world() as world:
        put = LocalStorage.put

        def refuse(storage: LocalStorage, key: str, *args: Any, **options: Any) -> int:
            if storage.url == world.url("there") and key.startswith("data/"):
                raise StorageError("no permission")
            return put(storage, key, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "put", refuse)
            with pytest.raises(ElasticctlError, match="no permission"):
                world.move("west", "there")
        again = "Next: repeat the move, or: elasticctl resume digits --here --context east"
        assert f"digits is still in east, suspended. {again}\n" in capsys.readouterr().err
        world.resume("east", here=True)
        assert world.train() == ["east"]

        def unreachable(*args: object) -> Manifest:
            raise UnreachableError("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(world.clusters["west"], "patch_job", unreachable)
            with pytest.raises(UnreachableError):
                world.move("west", "there")
        assert "and can continue only from there. Next: repeat the move to start it there" in capsys.readouterr().err
        assert world.train() == []
        world.move("west", "there")
        assert world.train() == ["west"]


def test_a_damaged_checkpoint_is_skipped_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with a_world() as world:
        world.train()
        here, there = (LocalStorage(world.root / name) for name in ("here", "there"))
        journals.flip(world.root / "here", next(read_commits(here)))
        world.move("west", "there")
        said = capsys.readouterr().err
        assert "digits: step 2 is damaged: data/" in said
        assert "digits: step 1 copied" in said
        assert [commit.step for commit in read_commits(there)] == [1]


def test_the_records_of_a_run_move_along_and_the_checkpoint_that_it_has_gone_back_to() -> None:
    with a_world() as world:
        here, there = (LocalStorage(world.root / name) for name in ("here", "there"))
        writer = take_over(here)
        for _ in range(3):
            journals.commit(here, writer, world.best + 1)
            world.best += 1
        note = Rollback(writer.generation.generation, world.best - 1, "NaN", {"epoch": 0})
        run_records.write_rollback(here, note)
        here.put(run_records.INTERRUPTIONS, [b"seen"])
        world.move("west", "there")
        assert [commit.step for commit in read_commits(there)] == [note.step - 1]
        assert run_records.pending_rollback(there) == note
        assert there.get(run_records.INTERRUPTIONS) == b"seen"


def test_a_job_over_there_with_other_state_is_not_taken_for_the_one_that_moves() -> None:
    with a_world() as world:
        other = copy.deepcopy(world.clusters["east"].jobs[NAME])
        other["metadata"]["uid"] = "other"
        other["metadata"]["annotations"] = {"elastic.pytorch.org/moved-from": f"east {world.url('here')}"}
        world.clusters["west"].jobs[NAME] = other
        with pytest.raises(ConflictError, match=r"another job digits in context west, with its state in .*/here"):
            world.move("west", "there")


def test_logs_in_former_storages_go_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_world() as world:
        world.move("east", "there")
        world.move("east", "elsewhere")
        found = world.job("east")
        assert found.former_storages == (world.url("here"), world.url("there"))
        asked: list[str] = []

        class Noted:
            def __init__(self, job: ElasticJob, say: Any, former: str = "") -> None:
                asked.append(former)

            def delete(self) -> None:
                pass

        monkeypatch.setattr("elasticctl.cluster.stored_logs.StoredLogs", Noted)
        delete_stored_logs(found, SILENT)
        assert asked == ["", *found.former_storages]
        assert ANNOTATION_MOVED_TO not in world.clusters["east"].jobs[NAME]["metadata"]["annotations"]
