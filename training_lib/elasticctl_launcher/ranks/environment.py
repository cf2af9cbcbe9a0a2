"""The environment of a rank: torchrun's variables, and the launcher's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from elasticctl_launcher.rank_reports import RankReports


def rank_environments(
    group: WorkerGroup, run_id: str, generation: int, reports: RankReports, shared: Mapping[str, str]
) -> Sequence[tuple[int, Mapping[str, str]]]:
    """(global rank, environment) of every rank of this worker; `shared` is what they have in common beside this."""
    common = {
        **shared,
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "ROLE_NAME": group.spec.role,
        "TORCHELASTIC_MAX_RESTARTS": "0",  # torch makes none
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ELASTICCTL_GENERATION": str(generation),
        "ELASTICCTL_AGENT_SOCKET": reports.path,
        "ELASTICCTL_NOTICE_FILE": reports.notice_file(generation),
    }
    return [(worker.global_rank, {**common, **_of_rank(worker, generation, reports)}) for worker in group.workers]


def _of_rank(worker: Worker, generation: int, reports: RankReports) -> Mapping[str, str]:
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "ROLE_RANK": str(worker.role_rank),
        "WORLD_SIZE": str(worker.world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "TORCHELASTIC_ERROR_FILE": reports.error_file(generation, worker.global_rank),
    }
