"""The ranks of this worker, generation after generation: started, heard, watched, drained and stopped.

Everything that happens to them is put into the agent's notifications, from threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from elasticctl_launcher.hangs.watch import HangWatch
from elasticctl_launcher.notifications import (
    Notification,
    RankDrained,
    RankExited,
    RanksHung,
    RanksStandStill,
    TrainingDone,
)
from elasticctl_launcher.rank_processes import Rank, RankGroup
from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.ranks.drain import Drain, Limits
from elasticctl_launcher.ranks.environment import rank_environments
from elasticctl_launcher.ranks.starter import RankStarter
from elasticctl_launcher.service.client import ServiceClient
from elasticctl_launcher.worker_output import WorkerOutput
from elasticctl_launcher.workspace import create_folder_for_sockets, create_shared_memory_folder


class LocalRanks:
    """What `starter` starts, once per local rank. What they print goes to `output`, what they report to the service.

    `drain` is that of the newest generation. Raises OSError if there is no room for the folders it needs.
    """

    def __init__(
        self,
        client: ServiceClient,
        starter: RankStarter,
        output: WorkerOutput,
        limits: Limits,
        notify: Callable[[Notification], None],
    ) -> None:
        self._starter, self._output, self._limits = starter, output, limits
        self._folder = create_folder_for_sockets()
        self._local_tier = create_shared_memory_folder()
        self.reports = RankReports(
            client, self._folder.path, lambda generation, rank: notify(RankDrained(generation, rank))
        )
        self.reports.on_finished = lambda generation: notify(TrainingDone(generation))
        self._hangs = HangWatch(
            limits.hang_timeout_s,
            output.print_rank_line,
            self.reports.send,
            on_still=lambda generation, still: notify(RanksStandStill(generation, still)),
            on_hang=lambda hang: notify(RanksHung(hang)),
        )
        self.reports.on_report = self._hangs.note_report
        self._group = RankGroup(starter, self._print_line, lambda rank: notify(RankExited(rank)))
        self.drain = Drain(0, self.reports)

    @property
    def running(self) -> list[Rank]:
        """The ranks of the newest generation, those included that have ended; none once they have been stopped."""
        return self._group.ranks

    def start(self, group: WorkerGroup, run_id: str, generation: int) -> None:
        """Start those of a generation, from the main thread. Raises OSError."""
        self.drain = Drain(generation, self.reports)
        shared = dict(self._starter.environment)
        if self._local_tier is not None:
            shared["ELASTICCTL_LOCAL_TIER"] = str(self._local_tier.path)
        self._group.start(rank_environments(group, run_id, generation, self.reports, shared))
        store: Any = group.store  # torch's annotations know none
        self._hangs.begin(generation, self._group.ranks, store, group.group_world_size or 1)

    def suspended(self) -> list[Rank]:
        """Those that were stopped by SIGSTOP."""
        return self._group.suspended()

    def have_drained(self) -> bool:
        """True once all of them have committed the step that they agreed on."""
        return self.drain.is_done(rank.rank for rank in self._group.ranks)

    def stop(self) -> list[Rank]:
        """Stop them, those that have drained at once; returns all, in the order in which they ended."""
        self._hangs.end()
        stopped = self._group.stop(0.0 if self.have_drained() else self._limits.stop_grace_s)
        self.reports.flush()
        return stopped

    def own_pids(self) -> set[int]:
        """The processes that somebody here waits for."""
        return self._group.own_pids() | self._starter.own_pids()

    def close(self) -> None:
        """Send their last reports, stop listening for more, and remove the folders."""
        self.reports.close()
        self._folder.close()
        if self._local_tier is not None:
            self._local_tier.close()

    def _print_line(self, rank: int, text: str) -> None:
        self._hangs.note_line(rank)
        self._output.print_rank_line(rank, text)
