"""Sharded state (FSDP2, DTensor): saved as shards, restored at another world size and sharding."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from tests.support.train import ranks, sharded
from tests.support.train.checkpoints import read_alone
from tests.support.train.states import same


def trained(folder: Path, url: str, world_size: int, how: str, stop: int) -> dict[str, Any]:
    """Train until step `stop`; return the notes of rank 0."""
    notes = folder / f"{world_size}-{how}-{stop}"
    assert ranks.run(sharded.train, world_size, url, str(notes), how, stop) == [0] * world_size
    noted: dict[str, Any] = json.loads(notes.read_text())
    return noted


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Eight steps of two ranks without an interruption."""
    return trained(tmp_path_factory.mktemp("undisturbed"), "", 2, "rows", 8)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, undisturbed: dict[str, Any]) -> Path:
    """The state two ranks have committed after four steps."""
    folder = tmp_path_factory.mktemp("interrupted")
    first = trained(folder, str(folder / "state"), 2, "rows", 4)
    assert first["losses"] == undisturbed["losses"][:4]
    return folder / "state"


def resumed(state: Path, tmp_path: Path, world_size: int, how: str) -> dict[str, Any]:
    """Continue training from a copy of the state."""
    for file in state.rglob("*.*"):
        copy = tmp_path / "state" / file.relative_to(state)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    noted = trained(tmp_path, str(tmp_path / "state"), world_size, how, 8)
    assert noted["first"] == 4
    return noted


def test_resumed_ranks_end_exactly_as_uninterrupted_ones(
    tmp_path: Path, interrupted: Path, undisturbed: dict[str, Any]
) -> None:
    second = resumed(interrupted, tmp_path, 2, "rows")
    assert second["losses"] == undisturbed["losses"][4:]
    assert second["ends"] == undisturbed["ends"]
    assert second["moments"] == undisturbed["moments"]


@pytest.mark.parametrize(("world_size", "how"), [(1, "plain"), (3, "columns"), (4, "hybrid")])
def test_it_resumes_at_another_world_size_and_sharding(
    tmp_path: Path, interrupted: Path, undisturbed: dict[str, Any], world_size: int, how: str
) -> None:
    second = resumed(interrupted, tmp_path, world_size, how)
    assert second["losses"] == pytest.approx(undisturbed["losses"][4:], rel=1e-9)
    for kind in ("ends", "moments"):
        assert second[kind].keys() == undisturbed[kind].keys()
        for name, value in second[kind].items():
            if name != "steps":  # counts the forward passes of one rank
                torch.testing.assert_close(torch.tensor(value), torch.tensor(undisturbed[kind][name]))


@pytest.mark.parametrize(
    ("saved_by", "restored_by", "spreads"),
    [
        (3, 4, {"rows": "slices", "columns": "some", "plain": "both"}),
        (4, 3, {"both": "columns", "twice": "columns", "slices": "rows", "some": "rows", "replicated": "rows"}),
        (4, 1, {"replicas": "plain"}),
    ],
)
def test_shards_are_restored_to_any_other_sharding(
    tmp_path: Path, saved_by: int, restored_by: int, spreads: dict[str, str]
) -> None:
    assert ranks.run(sharded.save_tensors, saved_by, str(tmp_path), list(spreads)) == [0] * saved_by
    for how in spreads:
        storage = LocalStorage(tmp_path / how)
        read, _ = read_alone(storage, next(read_commits(storage)))
        assert same(read["model"], sharded.tensors_for("plain") | {"plain": torch.arange(1000.0)})
    if "replicas" in spreads:  # replicas are written once
        files = [safetensors.torch.load_file(file) for file in tmp_path.glob("replicas/data/*/*.safetensors")]
        written = sum(tensor.nbytes for file in files for tensor in file.values())
        whole = [*sharded.tensors_for("plain").values(), torch.arange(1000.0), torch.arange(saved_by)]
        assert written == sum(tensor.nbytes for tensor in whole)
    assert ranks.run(sharded.restore_tensors, restored_by, str(tmp_path), spreads) == [0] * restored_by


def test_it_resumes_exactly_in_mixed_precision_with_states_of_other_shapes(tmp_path: Path) -> None:
    how = "mixed statistics"
    whole = trained(tmp_path, "", 2, how, 8)
    first = trained(tmp_path, str(tmp_path / "state"), 2, how, 4)
    second = trained(tmp_path, str(tmp_path / "state"), 2, how, 8)
    assert second["first"] == 4
    assert first["losses"] + second["losses"] == whole["losses"]
    assert (second["ends"], second["moments"]) == (whole["ends"], whole["moments"])


def test_states_of_other_shapes_than_their_parameters_are_resharded(tmp_path: Path) -> None:
    """Also over a mesh of two dimensions instead of one."""
    whole = trained(tmp_path, "", 2, "statistics", 4)
    trained(tmp_path, str(tmp_path / "state"), 3, "statistics", 2)
    second = trained(tmp_path, str(tmp_path / "state"), 4, "statistics hybrid", 4)
    assert second["losses"] == pytest.approx(whole["losses"][2:], rel=1e-9)
    for name, value in second["moments"].items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(whole["moments"][name]))


def test_tensor_parallel_and_sharded_training_resumes_in_other_layouts(tmp_path: Path) -> None:
    found = []
    for number, world_size in enumerate((2, 4, 1), start=1):
        notes = tmp_path / f"notes-{number}"
        arguments = str(tmp_path / "state"), str(notes), 2 * number
        assert ranks.run(sharded.train_in_two_dimensions, world_size, *arguments) == [0] * world_size
        found.append(torch.load(notes))
    for before, after in pairwise(found):
        assert same(after["begin"], before["end"])
    assert "the model is tensor-parallel" in found[0]["loader"]
    assert "loader" not in found[2]


def test_meshes_that_differ_from_rank_to_rank_are_refused(tmp_path: Path) -> None:
    """Each save refuses them, and `Run` does before training."""
    url, outcome = str(tmp_path / "state"), str(tmp_path / "outcome")
    assert ranks.run(sharded.save_over_meshes, 4, url, outcome) == [0] * 4
    said = Path(f"{outcome}-0").read_text()
    assert "a sharded tensor needs the same mesh on all ranks" in said
    assert "model: the ranks' models differ in names, shapes or shards of tensors" in said
    assert list(read_commits(LocalStorage(tmp_path / "state"))) == []
