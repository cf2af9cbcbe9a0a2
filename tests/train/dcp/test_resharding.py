"""`dcp.save` at one world size and sharding, `dcp.load` at another, by real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.reader import read_contents
from elasticctl_store.storage.local import LocalStorage
from tests.support.train import dcp_programs, ranks
from tests.support.train.dcp_programs import only_if


@pytest.mark.parametrize(
    ("ranks_then", "how_then", "ranks_now", "how_now"),
    [(2, "rows", 3, "columns"), (3, "some", 1, "plain")],
)
def test_a_state_is_loaded_at_another_world_size(
    tmp_path: Path, ranks_then: int, how_then: str, ranks_now: int, how_now: str
) -> None:
    url, outcome = str(tmp_path / "run"), str(tmp_path / "compared")
    assert ranks.run(dcp_programs.save, ranks_then, url, how_then) == [0] * ranks_then
    (commit,) = read_commits(LocalStorage(tmp_path / "run"))
    assert len(read_contents(LocalStorage(tmp_path / "run"), commit).shares) == ranks_then
    assert ranks.run(dcp_programs.load, ranks_now, url, how_now, outcome) == [0] * ranks_now
    assert [Path(f"{outcome}-{rank}").read_text() for rank in range(ranks_now)] == ["6"] * ranks_now


def test_sharded_and_plain_tensors_are_loaded_as_each_other(tmp_path: Path) -> None:
    assert ranks.run(dcp_programs.exchange_sharded_tensors, 2, str(tmp_path)) == [0, 0]


@only_if(dcp.async_save, "async_checkpointer_type")
@pytest.mark.timeout(900)
def test_a_process_without_a_group_can_save(tmp_path: Path) -> None:
    assert ranks.run(dcp_programs.save_in_process, 1, str(tmp_path)) == [0]
    assert [commit.step for commit in read_commits(LocalStorage(tmp_path))] == [2, 1]


@only_if(DefaultSavePlanner, "enable_plan_caching")
def test_a_plan_of_an_earlier_save_is_refused(tmp_path: Path) -> None:
    url, outcome = str(tmp_path / "run"), str(tmp_path / "said")
    assert ranks.run(dcp_programs.save_with_cached_plans, 2, url, outcome) == [0, 0]
    assert "DefaultSavePlanner(enable_plan_caching=False)" in Path(f"{outcome}-1").read_text()
    (commit,) = read_commits(LocalStorage(tmp_path / "run"))
    read_contents(LocalStorage(tmp_path / "run"), commit)
