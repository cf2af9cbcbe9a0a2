"""`dcp.save` and `dcp.load` over our storage, in one process: what is restored, what is refused, and other readers."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from elasticctl_store.checkpoints import entries, verify
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Retention
from elasticctl_store.checkpoints.reader import seal
from elasticctl_store.errors import DamagedError, MissingError, RestoreError, SaveError, StateError, TrainError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.dcp import ElasticReader, ElasticWriter
from tests.support.train import checkpoints
from tests.support.train.dcp_programs import blank, only_if, refusal
from tests.support.train.states import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def some_state() -> dict[str, Any]:
    """Tensors of many kinds, and values of all kinds that a checkpoint can hold."""
    return {
        "model": checkpoints.model_state(),
        "__metadata__": torch.ones(2),
        "columns first": torch.arange(6.0).view(2, 3).t(),
        "values": {
            "text": "x",
            "none": None,
            "nan": float("inf"),
            "$odd": 1,
            "pair": (1, [2.5, True]),
            "list": [1, "a"],
            "bytes": b"\x00\xff a blob",
        },
        "tensors in a pair": (torch.ones(3, dtype=torch.bfloat16), "and text"),
        "list": [torch.zeros(2), {"deep": torch.ones(2, 2)}],
        "a.b": 1,
    }


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=ElasticWriter(folder, **options))


def load(state: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=ElasticReader(folder, **options))
    return state


def test_everything_is_restored_without_pickles(tmp_path: Path) -> None:
    save(some_state(), tmp_path)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"PK\x03\x04" not in stored  # torch.save writes zip files
    assert same(load(blank(some_state()), tmp_path), some_state())


def test_a_save_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    save(some_state(), tmp_path, step=7)
    (commit,) = read_commits(LocalStorage(tmp_path))
    assert commit.step == 7
    verify.verify(LocalStorage(tmp_path), commit, lambda count: None)
    restored = Checkpointer(LocalStorage(tmp_path)).restore()
    assert restored is not None
    assert same(restored.state["values"], some_state()["values"])
    assert same(restored.state["model"], some_state()["model"])


def test_checkpoints_of_a_checkpointer_are_loaded(tmp_path: Path) -> None:
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]}
    kept = Checkpointer(LocalStorage(tmp_path))
    kept.save({"model": checkpoints.model_state(), "optimizer": optimizer}, Label(4), local={"own": torch.ones(2)})
    assert kept.settle()
    state = load(blank({"model": checkpoints.model_state(), "optimizer": optimizer}), tmp_path)
    assert same(state["model"], checkpoints.model_state())
    assert state["optimizer"] == optimizer


def test_a_step_is_chosen_by_number(tmp_path: Path) -> None:
    writer = ElasticWriter(tmp_path)
    for value in (1.0, 2.0):
        dcp.save({"t": torch.full((2,), value)}, storage_writer=writer)
    dcp.save({"t": torch.full((2,), 9.0)}, storage_writer=writer, checkpoint_id="#9")
    assert [commit.step for commit in read_commits(LocalStorage(tmp_path))] == [9, 2, 1]
    assert load({"t": torch.zeros(2)}, tmp_path)["t"][0] == 9
    assert load({"t": torch.zeros(2)}, tmp_path, step=1)["t"][0] == 1
    state = {"t": torch.zeros(2)}
    dcp.load(state, storage_reader=ElasticReader(), checkpoint_id=f"{tmp_path}#2")
    assert state["t"][0] == 2
    assert said_of(lambda: load(state, tmp_path, step=5), MissingError).endswith("existing steps: 9, 2, 1")


def test_older_checkpoints_stay_by_default(tmp_path: Path) -> None:
    for _ in range(5):
        save({"t": torch.ones(2)}, tmp_path)
    assert len(list(read_commits(LocalStorage(tmp_path)))) == 5
    save({"t": torch.ones(2)}, tmp_path, keep=Retention(last=2))
    assert [commit.step for commit in read_commits(LocalStorage(tmp_path))] == [6, 5]


def test_an_async_save_has_the_state_at_its_start(tmp_path: Path) -> None:
    state = {"t": torch.ones(1000), "n": 1}
    saving = dcp.async_save(state, storage_writer=ElasticWriter(tmp_path))
    state["t"].zero_()
    saving.result()  # type: ignore[union-attr]
    assert same(load({"t": torch.zeros(1000), "n": 0}, tmp_path), {"t": torch.ones(1000), "n": 1})


def test_the_url_of_a_run_in_the_same_process_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with Run(url, model=torch.nn.Linear(1, 1)) as run:
        run.step()
        said = said_of(lambda: dcp.save({"t": torch.ones(2)}, storage_writer=ElasticWriter(url)), SaveError)
        assert said.startswith(f"file://{url}: a Run of this process saves there")
        dcp.save({"t": torch.ones(2)}, storage_writer=ElasticWriter(f"{url}/exports"))
    assert load({"t": torch.zeros(2)}, tmp_path / "run/exports")["t"][0] == 1
    assert len(list(read_commits(LocalStorage(tmp_path / "run")))) == 1


class Overtaken(ElasticWriter):
    """Another save with the same writer starts before the method `at` of the first one."""

    at = ""

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        self.be_overtaken("write_data")
        return super().write_data(*arguments, **options)

    def finish(self, *arguments: Any, **options: Any) -> None:
        self.be_overtaken("finish")
        super().finish(*arguments, **options)

    def be_overtaken(self, name: str) -> None:
        if self.at == name:
            self.at = ""
            dcp.save({"t": torch.full((2,), 2.0)}, storage_writer=self)


@pytest.mark.parametrize("at", ["write_data", "finish"])
def test_a_save_overtaken_by_another_one_is_refused(tmp_path: Path, at: str) -> None:
    """As with dcp.async_save if its result is ignored."""
    writer = Overtaken(tmp_path)
    writer.at = at
    said = said_of(lambda: dcp.save({"t": torch.ones(2), "n": 1}, storage_writer=writer), SaveError)
    assert said.startswith("another save with this writer has begun before this one was done")
    assert len(list(read_commits(LocalStorage(tmp_path)))) == 1
    assert load({"t": torch.zeros(2)}, tmp_path)["t"][0] == 2


class Forgetful(DefaultSavePlanner):
    """Plans a tensor that is not written."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return replace(super().finish_plan(new_plan), items=[])


def test_an_incomplete_save_is_not_taken_for_a_lost_commit(tmp_path: Path) -> None:
    writer = ElasticWriter(tmp_path)
    said = said_of(lambda: dcp.save({"t": torch.ones(2)}, storage_writer=writer, planner=Forgetful()), SaveError)
    assert "do not form a complete state" in said
    assert Checkpointer(LocalStorage(tmp_path)).restore() is None


def said_of(action: Any, kind: type[TrainError]) -> str:
    """The error of one rank inside DCP's error."""
    with pytest.raises(dcp.CheckpointException) as caught:
        action()
    raised = next(iter(caught.value.failures.values()))[0]
    if isinstance(raised, AssertionError):  # DCP wraps errors of reading the metadata in this
        return str(raised)
    assert isinstance(refusal(caught.value), kind)
    return str(raised)


@pytest.mark.parametrize("odd", [datetime.timedelta(1), {1, 2}, bytearray(b"bytes"), torch.float32])
def test_objects_are_refused_unless_pickles_are_allowed(tmp_path: Path, odd: Any) -> None:
    state = {"t": torch.ones(2), "deep": {"odd": odd}}
    assert said_of(lambda: save(state, tmp_path), StateError).startswith("deep.odd: a checkpoint cannot hold")
    assert list(read_commits(LocalStorage(tmp_path))) == []
    save(state, tmp_path, allow_pickle=True)
    empty = {"t": torch.zeros(2), "deep": {"odd": None}}
    assert "FIX: if you trust its author" in said_of(lambda: load(empty, tmp_path), RestoreError)
    assert load(empty, tmp_path, allow_pickle=True)["deep"]["odd"] == odd


@only_if(dcp.save, "use_collectives")
def test_a_save_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="use_collectives=True"):
        dcp.save({"t": torch.ones(2)}, storage_writer=ElasticWriter(tmp_path), use_collectives=False)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_damage_is_refused_and_an_older_step_can_be_chosen(tmp_path: Path, suffix: str) -> None:
    for value in (1.0, 2.0):
        save({"t": torch.full((50,), value)}, tmp_path)
    checkpoints.damage(tmp_path, next(read_commits(LocalStorage(tmp_path))), suffix, -3)
    state = {"t": torch.zeros(50)}
    if suffix == ".json":  # the document of that step is lost
        assert load(state, tmp_path)["t"][0] == 1
    else:
        assert "checksum" in said_of(lambda: load(state, tmp_path), DamagedError)
        assert state["t"].count_nonzero() == 0
        assert load(state, tmp_path, step=1)["t"][0] == 1


@pytest.mark.parametrize(
    "said",
    [
        7,
        {},
        {"paths": 7},
        {"paths": [["t", ["nowhere"]]]},
        {"paths": [["t", ["t", 0]]]},
        {"paths": [["t", ["t"]], ["t", ["t"]]]},
        {"paths": [["t", ["t"]]], "raw": ["u"]},
        {"paths": [["n", ["n"]]], "raw": ["n"]},
        {"paths": [["t", ["t"]]], "planner_data": {"$what": 1}},
        {"paths": [[["t"], ["t"]]]},
    ],
)
def test_names_that_do_not_match_the_state_are_damage(tmp_path: Path, said: Any) -> None:
    """A hostile storage has valid digests."""
    save({"t": torch.ones(2), "n": 1}, tmp_path)
    storage = LocalStorage(tmp_path)
    (commit,) = read_commits(storage)
    document = json.loads(storage.get(commit.shares[0].key))
    del document["sha256"]
    data = seal({**document, "dcp": said})
    storage.put(commit.shares[0].key, [data])
    entry = json.loads(storage.get(entries.key_of(commit.position)))
    del entry["sha256"]
    entry["shares"][0] |= {"size_bytes": len(data), "checksum": entries.checksum([data])}
    text = json.dumps({**entry, "sha256": entries.digest_of(entry)}, sort_keys=True, separators=(",", ":"))
    storage.put(entries.key_of(commit.position), [text.encode()])
    assert "no checkpoint can be read: step 1: " in said_of(lambda: load({"t": torch.zeros(2)}, tmp_path), DamagedError)


class Renaming(DefaultSavePlanner):
    """Saves each item under another name."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(
            {f"old_{name}": value for name, value in state_dict.items()}, storage_meta, is_coordinator
        )


def test_planners_behave_as_with_files(tmp_path: Path) -> None:
    state = {"t": torch.ones(3), "n": 7}
    dcp.save(state, storage_writer=ElasticWriter(tmp_path), planner=Renaming(), no_dist=True)
    assert load({"old_t": torch.zeros(3)}, tmp_path)["old_t"].sum() == 3
    wanted = {"old_t": torch.zeros(3), "new": torch.full((1,), 5.0)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, storage_reader=ElasticReader(tmp_path), planner=planner)
    assert (wanted["old_t"].sum(), wanted["new"].item()) == (3, 5)
    found: dict[str, Any] = {}  # as `dcp_to_torch_save` reads
    _load_state_dict(found, storage_reader=ElasticReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert same(found, {"old_t": torch.ones(3), "old_n": 7})
