"""Checkpoints are verified, and pulled as one plain file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import verify
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.pieces import Piece
from elasticctl_store.checkpoints.reader import read_contents
from elasticctl_store.checkpoints.tensor_boxes import Box
from elasticctl_store.errors import DamagedError, MissingError, TrainError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from tests.support.train.checkpoints import damage, gather_shares, model_state, saved, write_shares


def ignore(count: int) -> None:
    """Ignore the progress."""


@pytest.mark.parametrize("chunk_bytes", [1 << 25, 1001])
def test_a_pulled_file_equals_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(verify, "CHUNK_BYTES", chunk_bytes)
    storage, (commit,) = saved(tmp_path / "state")
    read: list[int] = []
    assert verify.pull(storage, commit, "model", tmp_path / "model.safetensors", read.append) == 8
    pulled = safetensors.torch.load_file(tmp_path / "model.safetensors")
    expected = model_state()
    expected["turns"] = torch.view_as_real(expected["turns"])
    assert pulled.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(pulled[name], tensor), name
        assert pulled[name].dtype == tensor.dtype
    assert sum(read) == sum(path.stat().st_size for path in (tmp_path / "state" / commit.folder).glob("*.safetensors"))


def test_another_part_is_pulled_by_its_path(tmp_path: Path) -> None:
    storage, (commit,) = saved(tmp_path / "state")
    verify.pull(storage, commit, "optimizer", tmp_path / "o.safetensors", ignore)
    pulled = safetensors.torch.load_file(tmp_path / "o.safetensors")
    assert {name: tensor.tolist() for name, tensor in pulled.items()} == {
        "state.0.step": 1.0,
        "state.0.exp_avg": [1.0] * 4,
    }
    with pytest.raises(TrainError, match=r"step 1 has no part 'ema', only model, optimizer"):
        verify.pull(storage, commit, "ema", tmp_path / "e.safetensors", ignore)


def test_two_tensors_of_one_path_are_both_pulled(tmp_path: Path) -> None:
    checkpoints = Checkpointer(LocalStorage(tmp_path))
    part = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(3), 1: torch.full((4,), 2.0), "1": torch.full((5,), 3.0)}
    checkpoints.save({"odd": part, "plain": {"__metadata__": torch.ones(6)}}, Label(1))
    assert checkpoints.settle()
    (commit,) = read_commits(LocalStorage(tmp_path))
    verify.pull(LocalStorage(tmp_path), commit, "odd", tmp_path / "odd.safetensors", ignore)
    pulled = safetensors.torch.load_file(tmp_path / "odd.safetensors")
    assert {name: tensor.tolist() for name, tensor in pulled.items()} == {
        "a.b": [0.0] * 2, "a.b~": [1.0] * 3, "1": [2.0] * 4, "1~": [3.0] * 5
    }  # fmt: skip
    verify.pull(LocalStorage(tmp_path), commit, "plain", tmp_path / "plain.safetensors", ignore)
    assert list(safetensors.torch.load_file(tmp_path / "plain.safetensors")) == ["__metadata__~"]


def test_a_flipped_bit_is_detected_and_leaves_no_file(tmp_path: Path) -> None:
    storage, found = saved(tmp_path / "state", steps=2)
    damage(tmp_path / "state", found[0], ".safetensors", -20)
    assert [finding.damage for finding in verify.findings(storage)] == ["", ""], (
        "the quick check does not read the data"
    )
    verify.verify(storage, found[1], ignore)
    with pytest.raises(DamagedError, match="checksum does not match"):
        verify.verify(storage, found[0], ignore)
    target = tmp_path / "model.safetensors"
    target.write_text("the one before")
    with pytest.raises(DamagedError):
        verify.pull(storage, found[0], "model", target, ignore)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert target.read_text() == "the one before"


def test_damage_in_transit_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, (commit,) = saved(tmp_path / "state")
    read_into, calls = LocalStorage.read_into, list[str]()

    def noisy(self: LocalStorage, key: str, start: int, into: memoryview) -> None:
        read_into(self, key, start, into)
        calls.append(key)
        if len(calls) == 1:
            into[-1] ^= 1

    monkeypatch.setattr(LocalStorage, "read_into", noisy)
    verify.pull(storage, commit, "model", tmp_path / "model.safetensors", ignore)
    assert len(calls) == 2
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["large"], model_state()["large"])


def test_a_quick_check_detects_missing_and_truncated_objects(tmp_path: Path) -> None:
    storage, found = saved(tmp_path, steps=3)
    damage(tmp_path, found[0], ".json", 5)
    file = next((tmp_path / found[1].folder).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    next((tmp_path / found[2].folder).glob("*.safetensors")).unlink()
    assert [finding.commit for finding in verify.findings(storage)] == found
    first, second, third = (finding.damage for finding in verify.findings(storage))
    assert "checksum does not match" in first
    assert "ends at byte" in second
    assert "is not there" in third
    with pytest.raises(MissingError):
        verify.verify(storage, found[2], ignore)


def test_a_damaged_journal_entry_is_a_finding(tmp_path: Path) -> None:
    storage, found = saved(tmp_path, steps=2)
    entry = next(path for path in sorted((tmp_path / "journal").iterdir()))
    entry.write_bytes(b"{}")
    first, second = verify.findings(storage)
    assert (first.commit, first.position) == (None, found[0].position)
    assert "journal entry" in first.damage
    assert second.commit == found[1]


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes in a tensor, with at least one element."""
    spans = [
        st.integers(0, n - 1).flatmap(lambda at, n=n: st.tuples(st.just(at), st.integers(1, n - at))) for n in shape
    ]
    return st.tuples(*spans).map(lambda found: Box(tuple(at for at, _ in found), tuple(n for _, n in found)))


@given(st.data(), st.integers(1, 40))
@settings(max_examples=40)
def test_a_box_is_written_to_its_place(data: st.DataObject, chunk: int) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    box = data.draw(boxes_of(shape))
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    cut = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
    piece = Piece("w", "int16", box, 0)
    content = memoryview(np.ascontiguousarray(whole[cut]).tobytes())
    assert len(content) == piece.size_bytes
    target = np.full(shape, -1, dtype=np.int16)
    raw = bytearray(target.tobytes())
    for at in range(0, len(content), chunk):
        for start, run in verify.runs(piece, shape, at, content[at : at + chunk]):
            raw[start : start + len(run)] = run
    target[cut] = whole[cut]
    assert bytes(raw) == target.tobytes()


def test_a_sharded_tensor_is_assembled(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    seeded = torch.Generator().manual_seed(1)
    large = {
        "rows": torch.randn(3000, 500, generator=seeded),
        "row": torch.randn(1, 1_000_000, generator=seeded),
        "odd": torch.randn(3, 7, 50_001, generator=seeded).bfloat16(),
    }
    write_shares(storage, {"model": large}, [{}, {}, {}])
    commit = gather_shares(storage, 3)
    pieces = [piece for share in read_contents(storage, commit).shares for piece in share.pieces]
    assert len(pieces) > 3
    verify.verify(storage, commit, ignore)
    verify.pull(storage, commit, "model", tmp_path / "model.safetensors", ignore)
    pulled = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(pulled[name], tensor) for name, tensor in large.items())


def test_it_does_not_need_torch() -> None:
    probe = "import sys, elasticctl_store.checkpoints.verify; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", probe], check=True)
