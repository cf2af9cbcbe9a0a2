"""torch.distributed.elastic's agent interface, for local ranks and a group that the rendezvous service forms."""

from __future__ import annotations

import logging
import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from elasticctl_launcher.ranks.local_ranks import LocalRanks
from elasticctl_launcher.ranks.warm_spares import RankStarter
from elasticctl_launcher.rendezvous import ServiceRendezvous

log = logging.getLogger(__name__)


class TorchAgent(SimpleElasticAgent):
    """The methods that torch requires of an agent, except its loop."""

    def __init__(
        self, ranks_per_worker: int, handler: ServiceRendezvous, starter: RankStarter, ranks: LocalRanks
    ) -> None:
        spec = WorkerSpec("default", ranks_per_worker, handler, entrypoint=starter.command[0], max_restarts=0)
        super().__init__(spec)
        self._handler, self._starter, self._ranks = handler, starter, ranks

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks from the list of members, so that no exchange over the store is needed."""
        slots = [member.slots for member in self._handler.members]
        base, total = sum(slots[:group_rank]), sum(slots)
        return [
            Worker(local, global_rank=base + local, role_rank=base + local, world_size=total, role_world_size=total)
            for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = self._handler
        if handler.restarts_all and self._ranks.can_stay():
            log.warning("the group has hung twice without a step in between: the ranks start again")
            self._ranks.stop()
        self._ranks.start(worker_group, handler.members, handler.get_run_id(), handler.generation)
        return {rank.local_rank: rank.process.pid for rank in self._ranks.running}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._ranks.stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Not used by the launcher's loop, which is notified of every exit; kept correct for torch's callers."""
        codes = [rank.code for rank in self._ranks.running]
        if any(codes):
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.SUCCEEDED if codes and None not in codes else WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._ranks.stop()
        self._starter.close()
        self._handler.shutdown()
