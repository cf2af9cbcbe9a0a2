"""Shares: written by each rank, gathered by rank 0, read by any number of ranks."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import entries, tensor_boxes
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.errors import DamagedError, FencedError, MissingError, SaveError, StateError
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint import plans, rank_shares
from tests.support.train.checkpoints import FOLDER, gather_shares, make_share, read_alone, write_shares
from tests.support.train.states import same, trees


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path)


names = st.text(max_size=5).filter(lambda name: not name.startswith("$"))


@given(st.dictionaries(names, trees, max_size=4), st.lists(trees, min_size=1, max_size=3))
@settings(max_examples=20)
def test_a_state_is_restored_at_any_world_size(state: dict[str, Any], own: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(Path(folder))
        locals_ = [{"own": value} for value in own]
        write_shares(storage, state, locals_)
        commit = gather_shares(storage, len(own))
        for rank in range(len(own) + 1):
            read, local = read_alone(storage, commit, rank)
            assert same(read, state)
            assert same(local, locals_[rank] if rank < len(own) else None)


def test_each_rank_writes_its_part_of_the_bytes(storage: Storage) -> None:
    state = {"model": {str(i): torch.full((1000,), float(i)) for i in range(8)}}
    write_shares(storage, state, [{}, {}, {}, {}])
    sizes = [len(storage.get(key)) for key in all_keys(storage, FOLDER) if key.endswith(".safetensors")]
    assert len(sizes) == 4
    assert all(8000 < size < 8500 for size in sizes)
    assert gather_shares(storage, 4).size_bytes == sum(len(storage.get(key)) for key in all_keys(storage, FOLDER))


def test_parts_of_rank_0_are_written_by_rank_0(storage: Storage) -> None:
    for rank in range(2):
        state = {"model": {"w": torch.ones(9), "mean": torch.tensor(float(rank))}, "ema": torch.tensor(float(rank))}
        share = make_share(state, {}, rank, 2, rank_0_only={"model/mean", "ema"})
        share.write(storage, entries.share_key(FOLDER, rank, 2))
    read, _ = read_alone(storage, gather_shares(storage, 2), 1)
    assert same(read, {"model": {"w": torch.ones(9), "mean": torch.tensor(0.0)}, "ema": torch.tensor(0.0)})


def test_different_states_of_ranks_are_detected(storage: Storage) -> None:
    for rank in range(2):
        share = make_share({"model": torch.ones(3 + rank)}, {}, rank, 2)
        share.write(storage, entries.share_key(FOLDER, rank, 2))
    with pytest.raises(SaveError, match="the ranks' states differ"):
        gather_shares(storage, 2)


def test_a_missing_share_is_named(storage: Storage) -> None:
    make_share({}, {}, 0, 3).write(storage, entries.share_key(FOLDER, 0, 3))
    make_share({}, {}, 2, 3).write(storage, entries.share_key(FOLDER, 2, 3))
    abandon = threading.Event()
    abandon.set()
    with pytest.raises(SaveError, match="given up: the share of rank 1"):
        rank_shares.gather(storage, FOLDER, 3, abandon)


def fenced() -> None:
    raise FencedError("a newer run has taken over")


def test_a_share_lost_by_the_storage_is_detected(storage: Storage) -> None:
    key = entries.share_key(FOLDER, 1, 2)
    make_share({"model": {}}, {}, 1, 2).write(storage, key)
    rank_shares.check_stored(storage, key)
    storage.delete([key])
    with pytest.raises(MissingError, match=r"has lost .*share-00001-of-00002\.json"):
        rank_shares.check_stored(storage, key)


@pytest.mark.parametrize(("check_fence", "raised"), [(fenced, FencedError), (lambda: None, SaveError)])
@pytest.mark.parametrize("when", ["before it is read", "after"])
def test_a_share_deleted_meanwhile_fails_the_save(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, check_fence: Any, raised: type[Exception], when: str
) -> None:
    make_share({}, {}, 0, 2).write(storage, entries.share_key(FOLDER, 0, 2))
    get = storage.get

    def get_and_sweep(key: str) -> bytes:
        if when == "after":
            data = get(key)
            storage.delete([key])
            return data
        storage.delete([key])
        return get(key)

    monkeypatch.setattr(storage, "get", get_and_sweep)
    with pytest.raises((raised, MissingError) if raised is SaveError else raised):
        rank_shares.gather(storage, FOLDER, 2, threading.Event(), check_fence)


def test_a_plan_fits_only_states_of_the_same_kinds() -> None:
    flat = plans.flatten({"w": torch.zeros(5)}, {"own": torch.zeros(1)})
    plan = plans.plan(flat, 0, 1)
    assert plan.fits(plans.flatten({"w": torch.ones(5)}, {"own": torch.ones(1)}), ())
    assert not plan.fits(flat, {"w"})
    for other in (torch.zeros(6), torch.zeros(5).double(), torch.zeros(5, 1)):
        assert not plan.fits(plans.flatten({"w": other}, {"own": torch.zeros(1)}), ())
    assert not plan.fits(plans.flatten({"v": torch.zeros(5)}, {"own": torch.zeros(1)}), ())


def test_a_large_tensor_is_written_by_all_ranks_and_assembled(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_boxes, "CUT_BYTES", 100)
    state = {"model": {"embedding": torch.randn(1, 90, 4).half(), "bias": torch.randn(7).t()}}
    write_shares(storage, state, [{}, {}, {}])
    sizes = [len(storage.get(key)) for key in all_keys(storage, FOLDER) if key.endswith(".safetensors")]
    assert max(sizes) - min(sizes) <= 128  # the headers are not of one length
    read, _ = read_alone(storage, gather_shares(storage, 3))
    assert same(read, state)


def test_the_reference_implementation_reads_the_file(tmp_path: Path) -> None:
    table = {"w": torch.randn(3, 2), "n": torch.arange(4), "half": torch.ones(3).bfloat16()}
    write_shares(LocalStorage(tmp_path), {"model": table}, [{}])
    read = safetensors.torch.load_file(next(tmp_path.glob("data/*/*.safetensors")))
    assert {name.removeprefix("model/"): tensor for name, tensor in read.items()}.keys() == table.keys()
    assert all(same(read[f"model/{name}"], tensor) for name, tensor in table.items())


def test_the_name_of_the_ranks_own_part_is_reserved() -> None:
    for name in ("$rank", "$rank/a", "$tuple", "$"):
        with pytest.raises(StateError, match="needs another name"):
            plans.flatten({name: torch.ones(1)}, {})


@pytest.fixture
def commit(storage: Storage) -> Commit:
    write_shares(storage, {"model": {"w": torch.arange(40.0)}}, [{"rng": torch.ones(3)}, {"rng": torch.zeros(3)}])
    return gather_shares(storage, 2)


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_every_damaged_byte_is_detected(storage: Storage, commit: Commit) -> None:
    for key in list(all_keys(storage, FOLDER)):
        whole = storage.get(key)
        for at in range(0, len(whole), 13):
            storage.put(key, [flip(whole, at)])
            with pytest.raises(DamagedError):
                read_alone(storage, commit, 0)
        storage.put(key, [whole])
    read_alone(storage, commit, 0)


@pytest.mark.parametrize("left", [0, 4, 8, 100, -1])
def test_a_truncated_or_missing_file_is_detected(storage: Storage, commit: Commit, left: int) -> None:
    for key in list(all_keys(storage, FOLDER)):
        whole = storage.get(key)
        storage.put(key, [whole[:left]])
        with pytest.raises(DamagedError):
            read_alone(storage, commit, 0)
        storage.delete([key])
        with pytest.raises((DamagedError, MissingError)):
            read_alone(storage, commit, 0)
        storage.put(key, [whole])


def test_a_share_document_is_plain_json(storage: Storage, commit: Commit) -> None:
    document = json.loads(storage.get(commit.shares[0].key))
    assert document["state"]["model"]["w"] == {"$tensor": "model/w", "dtype": "float32", "shape": [40]}
