"""Several ranks: real processes, gloo on the loopback interface."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from tests.support.train import programs, ranks
from tests.support.train.programs import trained

SAMPLES, GLOBAL_BATCH = 101, 8
ONE_EPOCH = {"epochs": 1, "samples": SAMPLES, "global_batch": GLOBAL_BATCH}


def incarnations(folder: Path, url: str, plan: Sequence[tuple[int, dict[str, Any]]]) -> list[Path]:
    """Train with several world sizes in turn; return the folder of notes of each incarnation."""
    folder.mkdir(exist_ok=True)
    notes = [folder / f"incarnation-{index}" for index in range(len(plan))]
    for note, (world_size, end) in zip(notes, plan, strict=True):
        codes = ranks.run(programs.train, world_size, url, str(note), ONE_EPOCH | end)
        assert None not in codes
        if "kill" not in end:
            assert codes == [0] * world_size
    return notes


def weights(note: Path) -> torch.Tensor:
    values = json.loads(note.with_name(f"{note.name}-weights.json").read_text())
    return torch.tensor([*values[0][0], *values[1]], dtype=torch.float64)


def test_the_world_changes_size_twice_in_one_epoch(tmp_path: Path) -> None:
    plan: list[tuple[int, dict[str, Any]]] = [(2, {"kill": 3}), (1, {"stop": 5}), (3, {"kill": 9}), (2, {})]
    notes = incarnations(tmp_path, str(tmp_path / "state"), plan)
    steps = trained(notes)
    assert Counter(number for samples in steps.values() for number in samples) == Counter(range(SAMPLES))
    alone = incarnations(tmp_path / "alone", "", [(1, {})])
    expected, expected_weights = trained(alone), weights(alone[0])
    assert {step: sorted(samples) for step, samples in steps.items()} == {s: sorted(x) for s, x in expected.items()}
    torch.testing.assert_close(weights(notes[-1]), expected_weights, rtol=1e-9, atol=1e-12)


def test_a_stream_is_read_once_while_the_world_changes_size(tmp_path: Path) -> None:
    plan: list[tuple[int, dict[str, Any]]] = [(2, {"stop": 4}), (1, {"stop": 7}), (3, {})]
    notes = incarnations(tmp_path, str(tmp_path / "state"), [(size, {"stream": True} | end) for size, end in plan])
    steps = trained(notes)
    assert {step: sorted(samples) for step, samples in steps.items()} == {
        step: list(range(step * GLOBAL_BATCH - GLOBAL_BATCH, min(step * GLOBAL_BATCH, SAMPLES)))
        for step in range(1, 14)
    }


def test_a_last_batch_smaller_than_the_world_is_trained_on_once(tmp_path: Path) -> None:
    small = {"samples": 10, "global_batch": 4}
    alone, together = (incarnations(tmp_path / str(size), "", [(size, small)]) for size in (1, 3))
    assert Counter(number for samples in trained(together).values() for number in samples) == Counter(range(10))
    torch.testing.assert_close(weights(together[0]), weights(alone[0]), rtol=1e-9, atol=1e-12)


def test_a_rank_that_dies_during_a_save_leaves_no_commit_and_no_hang(tmp_path: Path) -> None:
    codes = ranks.run(programs.lose_a_rank_in_mid_save, 2, str(tmp_path))
    assert codes[1] == -9
    assert codes[0] not in (0, None)
    storage = LocalStorage(tmp_path)
    assert [commit.step for commit in read_commits(storage)] == [4]
    restored = Checkpointer(storage).restore()
    assert restored is not None
    assert restored.commit.step == 4


def ends(tmp_path: Path, failing: list[int]) -> list[str]:
    """How a run of 20 steps that saves each step ends on each of two ranks, when rank 1 fails in these saves."""
    outcome = tmp_path / "outcome"
    assert ranks.run(programs.fail_saves_on_rank_1, 2, str(tmp_path / "state"), failing, str(outcome)) == [0, 0]
    return [Path(f"{outcome}-{rank}").read_text() for rank in range(2)]


def test_a_share_that_cannot_be_written_fails_only_that_save(tmp_path: Path) -> None:
    assert ends(tmp_path, failing=[2]) == ["finished", "finished"]
    assert next(read_commits(LocalStorage(tmp_path / "state"))).step >= 20


def test_a_failed_last_save_is_an_error_on_every_rank(tmp_path: Path) -> None:
    first, second = ends(tmp_path, failing=list(range(1, 100)))
    assert "the last checkpoint was not committed: " in first
    assert "the disk is full" in second
    assert list(read_commits(LocalStorage(tmp_path / "state"))) == []


def test_random_numbers_continue_per_rank_and_newcomers_get_their_own(tmp_path: Path) -> None:
    url = str(tmp_path / "state")

    def numbers(name: str, world_size: int) -> list[list[float]]:
        assert ranks.run(programs.note_random_numbers, world_size, url, str(tmp_path / name)) == [0] * world_size
        return [json.loads((tmp_path / f"{name}-{rank}").read_text()) for rank in range(world_size)]

    first = numbers("first", 2)
    second = numbers("second", 2)
    third = numbers("third", 3)
    flat = [tuple(pair) for pair in first[:1] + second[:1] + third]
    assert len(set(flat)) == len(flat)


def test_buffers_are_saved_by_rank_0(tmp_path: Path) -> None:
    assert ranks.run(programs.save_differing_buffers, 2, str(tmp_path)) == [0, 0]
    restored = Checkpointer(LocalStorage(tmp_path)).restore()
    assert restored is not None
    assert restored.state["model"]["running_mean"].tolist() == [1.0, 1.0, 1.0]


def test_a_checkpoint_fits_a_wrapped_and_a_plain_model(tmp_path: Path) -> None:
    parallel, compiled, bare = "DistributedDataParallel", "OptimizedModule", "Linear"
    ours = "ResumableDataParallel"
    plan = [
        (2, "bare", [ours, bare]),
        (2, "parallel", [parallel, bare]),
        (1, "compiled", [compiled, bare]),
        (2, "compiled parallel", [compiled, parallel, compiled, bare]),
        (1, "bare", [bare]),
    ]
    for step, (world_size, how, layers) in enumerate(plan):
        outcome = str(tmp_path / "outcome")
        assert ranks.run(programs.step_wrapped, world_size, str(tmp_path / "state"), how, outcome) == [0] * world_size
        assert json.loads(Path(outcome).read_text()) == [step + 1, 3 + 4 * step, layers]


def test_a_weight_average_is_saved_by_rank_0(tmp_path: Path) -> None:
    for _ in range(2):
        outcome = str(tmp_path / "outcome")
        assert ranks.run(programs.average_on_rank_0, 2, str(tmp_path / "state"), outcome) == [0, 0]
    assert [json.loads(Path(f"{outcome}-{rank}").read_text()) for rank in range(2)] == [8.0, 8.0]
