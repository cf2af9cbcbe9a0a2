"""What ranks find in their environment: torchrun's variables, so that a script needs no change (docs/launcher.md)."""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup


def torchrun_environment(group: WorkerGroup, worker: Worker) -> dict[str, str]:
    """One rank's place in its group. The store is the agent's; no restart is torch's to make."""
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": group.spec.role,
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
