"""The ranks of this worker, generation after generation: starts, watches, drains and stops them.

Their events are put into the agent's notifications, from threads.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from elasticctl_launcher.agent_events import (
    Notification,
    RankDeclined,
    RankDrained,
    RankExited,
    RankLostPeers,
    RanksHung,
    RanksStandStill,
    TrainingDone,
)
from elasticctl_launcher.bootstrap import COLLECTIVES_VARIABLE
from elasticctl_launcher.hangs.collectives import read_collective
from elasticctl_launcher.hangs.show_stacks import note_ranks
from elasticctl_launcher.hangs.watch_ranks import HangWatch
from elasticctl_launcher.peers.copy_holder import CopyHolder, peer_of
from elasticctl_launcher.peers.copy_protocol import read_peer_key
from elasticctl_launcher.rank_processes import Rank, RankGroup
from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.ranks.drain import Drain, Limits
from elasticctl_launcher.ranks.environment import provisional_environments, rank_environments
from elasticctl_launcher.ranks.rank_links import RankLinks
from elasticctl_launcher.ranks.signals import HandledSignals
from elasticctl_launcher.ranks.warm_spares import RankStarter
from elasticctl_launcher.service.client import ServiceClient
from elasticctl_launcher.usage.step_times import StepTimes
from elasticctl_launcher.worker_output import WorkerOutput
from elasticctl_launcher.workspace import create_folder_for_sockets, create_shared_memory_folder

COPIES = "copies"
"""The folder of copies in the local tier."""
LOOK_S = 0.1
"""How often to check whether a rank has ended while ranks are prepared."""

log = logging.getLogger(__name__)


class LocalRanks:
    """Runs one rank of `starter` per local rank. Output goes to `output`, and reports to the service.

    `drain` is the drain of the newest generation. Raises OSError if the folders it needs cannot be created.
    """

    def __init__(
        self,
        client: ServiceClient,
        starter: RankStarter,
        output: WorkerOutput,
        limits: Limits,
        notify: Callable[[Notification], None],
        host: str,
    ) -> None:
        self._starter, self._output, self._limits, self._notify = starter, output, limits, notify
        self._folder = create_folder_for_sockets()
        self._local_tier = create_shared_memory_folder()
        self.reports = RankReports(
            client, self._folder.path, lambda generation, rank: notify(RankDrained(generation, rank))
        )
        self._links = RankLinks(
            self._folder.path,
            on_lost=lambda generation, why: notify(RankLostPeers(generation, why)),
            on_declined=lambda generation, why: notify(RankDeclined(generation, why)),
        )
        self._copies = self._hold_copies(host)
        self._generation = 0
        self._began: float | None = None
        self._unreported_s = 0.0
        self.reports.on_finished = lambda generation, is_over: notify(TrainingDone(generation, is_over))
        self._hangs = HangWatch(
            limits.hang_timeout_s,
            output.print_rank_line,
            self.reports.send,
            on_still=lambda generation, still: notify(RanksStandStill(generation, still)),
            on_hang=lambda hang: notify(RanksHung(hang)),
            collective_of=lambda local_rank: read_collective(self._folder.path / f"c10d.{local_rank}"),
            known_path=output.known_path,
        )
        self.reports.on_report = self._hangs.note_report
        self.reports.on_metrics = output.store_metrics
        self.step_times = StepTimes()
        self.reports.on_times = self.step_times.note
        self._signals = HandledSignals(self._folder.path)
        self._group = RankGroup(starter, self._print_line, self._note_exit, reword=output.reword)
        self.drain = Drain(0, self.reports)

    @property
    def running(self) -> list[Rank]:
        """The ranks of the newest generation, including those that have ended; empty once they have been stopped."""
        return self._group.ranks

    def _hold_copies(self, host: str) -> CopyHolder | None:
        """The holder of copies in memory; None if there is no shared memory for them."""
        if self._local_tier is None:
            return None
        path, folder = str(self._folder.path / "copies.sock"), self._local_tier.path / COPIES
        try:
            return CopyHolder(host, path, folder, read_peer_key)
        except OSError as error:
            log.warning("no copies of ranks' state are kept in this worker's memory: %s", error)
            return None

    def start(self, group: WorkerGroup, members: Sequence[Mapping[str, Any]], run_id: str, generation: int) -> None:
        """Start the ranks of a generation, or give those that have stayed their places in it. Raises OSError.

        Must be called from the main thread.
        """
        self.drain, self._generation = Drain(generation, self.reports), generation
        places = rank_environments(group, run_id, generation, self.reports)
        if self.can_stay():
            self._group.renumber([number for number, _ in places])
            for local_rank, (_, place) in enumerate(places):
                self._links.give_place(local_rank, place)
        else:
            self.stop()
            self._note_start(is_first=group.group_rank == 0)
            self._start_processes(places)
        pids = {rank.rank: rank.process.pid for rank in self._group.ranks}
        note_ranks(self._folder.path, pids, self._output.workspace)
        store: Any = group.store  # not in torch's annotations
        if self._copies is not None:
            self._copies.join_group(peer_of(self._copies, members, group.group_rank or 0, store))
        self._hangs.begin(generation, self._group.ranks, store, group.group_world_size or 1)

    def suspended(self) -> list[Rank]:
        """Return the ranks that were stopped by SIGSTOP."""
        return self._group.suspended()

    def have_drained(self) -> bool:
        """True once all ranks have committed the step that they agreed on."""
        return self.drain.is_done(rank.rank for rank in self._group.ranks)

    def prepare(self, others: int, local_world_size: int, run_id: str, examples: str) -> bool:
        """Start the ranks before they have a place, and wait until they need one; return False if one ends before that.

        `others` and `examples` are as in `RanksWanted`. Must be called from the main thread. Raises OSError.
        """
        self._generation = 0
        self._start_processes(provisional_environments(others, local_world_size, run_id, self.reports, examples))
        while not self.can_stay():
            if any(rank.code is not None for rank in self._group.ranks):
                self.stop()
                return False
            self._links.wait_for_change(LOOK_S)
        return True

    def _note_start(self, *, is_first: bool) -> None:
        """Record that the ranks start from the beginning; `is_first`: rank 0, which represents all, is among them."""
        self._began = time.monotonic()
        if is_first and self._unreported_s and self.reports.newest_generation < 0:
            log.info(
                "the script has reported no steps or checkpoints: unless it loads one of its own, it starts from the"
                " beginning again (training repeated so far: %s)",
                timedelta(seconds=round(self._unreported_s)),
            )

    def _start_processes(self, places: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        shared = {**self._starter.environment, "ELASTICCTL_LINK": self._links.path}
        shared[COLLECTIVES_VARIABLE] = str(self._folder.path)
        if self._local_tier is not None:
            shared["ELASTICCTL_LOCAL_TIER"] = str(self._local_tier.path)
        if self._copies is not None:
            shared["ELASTICCTL_COPIES"] = self._copies.path
        for local_rank in range(len(places)):
            self._signals.expect(local_rank)
        self._group.start([(number, {**shared, **place}) for number, place in places])

    def release(self) -> bool:
        """Keep the ranks after the end of their generation, and tell them; return False if one of them cannot stay."""
        if not self.can_stay():
            return False
        self._hangs.end()
        self._links.say_over(self._generation)
        self.reports.flush()
        return True

    def can_stay(self) -> bool:
        """True if all ranks can continue in another generation."""
        ranks = self._group.ranks
        alive = bool(ranks) and all(rank.code is None for rank in ranks)
        return alive and not self._group.suspended() and self._links.are_attached(rank.local_rank for rank in ranks)

    def stop(
        self,
        *,
        grace_s: float | None = None,
        peers_ended: bool = False,
        more_s: Callable[[], float] = lambda: 0.0,
    ) -> list[Rank]:
        """Stop the ranks; return them in the order in which they ended.

        `grace_s` is the time between SIGTERM and SIGKILL. The default is the usual one, or 0 for ranks that have
        drained, because others wait for them. `peers_ended` and `more_s` are as in `RankGroup.stop`.
        """
        self._hangs.end()
        if self._began is not None:
            self._unreported_s, self._began = self._unreported_s + time.monotonic() - self._began, None
        if grace_s is None:
            grace_s = 0.0 if self.have_drained() else self._limits.stop_grace_s
        stopped = self._group.stop(grace_s, peers_ended=peers_ended, more_s=more_s)
        self.reports.flush()
        return stopped

    def own_pids(self) -> set[int]:
        """Return the ids of the ranks' and spares' processes."""
        return self._group.own_pids() | self._starter.own_pids()

    def close(self) -> None:
        """Send the ranks' last reports, stop listening, and remove the folders."""
        self.reports.close()
        self._links.close()
        if self._copies is not None:
            self._copies.close()
        self._signals.close()
        self._folder.close()
        if self._local_tier is not None:
            self._local_tier.close()

    def _note_exit(self, rank: Rank) -> None:
        handled = self._signals.read(rank.local_rank)
        rank.terminated = rank.code == 0 and signal.SIGTERM in handled and signal.SIGTERM not in rank.signals
        self._notify(RankExited(rank))

    def _print_line(self, rank: int, text: str) -> None:
        self._hangs.note_line(rank)
        self._output.print_rank_line(rank, text)
