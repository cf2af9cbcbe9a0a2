"""The environment variables of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import Worker

from elasticctl_launcher.ranks.local_ranks import provisional_environments, rank_environments

REPORTS: Any = SimpleNamespace(path="/a", notice_file=lambda generation: "/n", error_file=lambda generation, rank: "/e")


def test_the_run_id_stays_and_attempts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_JOB_UID", "the-uid")
    worker = Worker(local_rank=0, global_rank=0, role_rank=0, world_size=1, role_world_size=1)
    spec = SimpleNamespace(local_world_size=1, role="default")
    group: Any = SimpleNamespace(
        group_rank=0, group_world_size=1, master_addr="a", master_port=1, spec=spec, workers=[worker]
    )
    for generation in (1, 7):
        ((rank, found),) = rank_environments(group, "ns.job", generation, REPORTS)
        assert rank == 0
        assert (found["ELASTICCTL_RUN_ID"], found["ELASTICCTL_ATTEMPT"]) == ("the-uid", str(generation))
    ((_, early),) = provisional_environments(2, 1, "ns.job", REPORTS, "[]")
    assert early["ELASTICCTL_RUN_ID"] == "the-uid"
    assert early["ELASTICCTL_EXAMPLE_INPUTS"] == "[]"


def test_without_a_job_the_run_id_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTICCTL_JOB_UID", raising=False)
    ((_, found),) = provisional_environments(0, 1, "ns.job", REPORTS)
    assert (found["ELASTICCTL_RUN_ID"], found["ELASTICCTL_ATTEMPT"]) == ("ns.job", "0")
