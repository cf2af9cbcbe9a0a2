"""The environment of a rank: torchrun's variables, and the launcher's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from elasticctl_launcher.rank_reports import RankReports

PLACE_VARIABLE, LATER = "ELASTICCTL_PLACE", "later"
"""Tells a rank that it was started before it has a place in a group, and has to wait for one."""


def rank_environments(
    group: WorkerGroup, run_id: str, generation: int, reports: RankReports
) -> Sequence[tuple[int, Mapping[str, str]]]:
    """Return (global rank, environment) for every rank of this worker in this generation."""
    common = {
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "ROLE_NAME": group.spec.role,
        "TORCHELASTIC_MAX_RESTARTS": "0",  # the launcher restarts ranks, not torch
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ELASTICCTL_GENERATION": str(generation),
        **run_identity(run_id, generation),
        "ELASTICCTL_AGENT_SOCKET": reports.path,
        "ELASTICCTL_NOTICE_FILE": reports.notice_file(generation),
    }
    return [(worker.global_rank, {**common, **_of_rank(worker, generation, reports)}) for worker in group.workers]


def run_identity(run_id: str, generation: int) -> Mapping[str, str]:
    """Return the variables by which experiment trackers continue one run.

    They are its id, which stays the same for as long as the job exists, and the number of this attempt.
    """
    return {"ELASTICCTL_RUN_ID": os.environ.get("ELASTICCTL_JOB_UID") or run_id, "ELASTICCTL_ATTEMPT": str(generation)}


def provisional_environments(
    others: int, local_world_size: int, run_id: str, reports: RankReports, examples: str = ""
) -> Sequence[tuple[int, Mapping[str, str]]]:
    """Return the same for ranks that are started before they have a place, numbered after the `others`.

    `examples` is what those call their model with, if known.
    """
    numbers = range(others, others + local_world_size)
    workers = [
        Worker(number - others, number, number, others + local_world_size, others + local_world_size)
        for number in numbers
    ]
    common = {
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ELASTICCTL_GENERATION": "0",
        **run_identity(run_id, 0),
        "ELASTICCTL_AGENT_SOCKET": reports.path,
        PLACE_VARIABLE: LATER,
        "ELASTICCTL_EXAMPLE_INPUTS": examples,
    }
    return [(worker.global_rank, {**common, **_of_rank(worker, 0, reports)}) for worker in workers]


def _of_rank(worker: Worker, generation: int, reports: RankReports) -> Mapping[str, str]:
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "ROLE_RANK": str(worker.role_rank),
        "WORLD_SIZE": str(worker.world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "TORCHELASTIC_ERROR_FILE": reports.error_file(generation, worker.global_rank),
    }
