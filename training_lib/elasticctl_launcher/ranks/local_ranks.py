"""The ranks of this worker, generation after generation: starts, watches, drains and stops them.

Their environment consists of torchrun's variables and the launcher's own. Their events are put into the agent's
notifications, from threads.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

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
from elasticctl_launcher.hangs.stacks import write_rank_list
from elasticctl_launcher.hangs.watch_ranks import HangWatch
from elasticctl_launcher.leaving import Drain, TimeLimits
from elasticctl_launcher.peers.copy_holder import CopyHolder, peer_of
from elasticctl_launcher.peers.copy_protocol import read_peer_key
from elasticctl_launcher.rank_processes import Rank, RankGroup
from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.ranks.rank_links import HandledSignals, RankLinks
from elasticctl_launcher.ranks.warm_spares import RankStarter
from elasticctl_launcher.service.client import ServiceClient
from elasticctl_launcher.usage import StepTimeShares
from elasticctl_launcher.worker_output import WorkerOutput
from elasticctl_launcher.workspace import create_folder_for_sockets, create_shared_memory_folder
from elasticctl_protocol import variables
from elasticctl_protocol.local import COPIES_FOLDER, PLACE_LATER
from elasticctl_protocol.reports import DrainedReport, MetricRows, ProgressReport, Report
from elasticctl_protocol.requests import Member

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
        limits: TimeLimits,
        notify: Callable[[Notification], None],
        host: str,
    ) -> None:
        self._starter, self._output, self._limits, self._notify = starter, output, limits, notify
        self._folder = create_folder_for_sockets()
        self._local_tier = create_shared_memory_folder()
        self.reports = RankReports(
            client,
            self._folder.path,
            self._handle_report,
            on_finished=lambda generation, is_over: notify(TrainingDone(generation, is_over)),
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
        self._hangs = HangWatch(
            limits.hang_timeout_s,
            output.print_rank_line,
            self.reports.send,
            on_still=lambda generation, still: notify(RanksStandStill(generation, still)),
            on_hang=lambda hang: notify(RanksHung(hang)),
            collective_of=lambda local_rank: read_collective(self._folder.path / f"c10d.{local_rank}"),
            known_path=output.known_path,
        )
        self.step_times = StepTimeShares()
        self._signals = HandledSignals(self._folder.path)
        self._group = RankGroup(starter, self._print_line, self._handle_exit, reword=output.reword)
        self.drain = Drain(0, self.reports)

    def _handle_report(self, report: Report) -> None:
        """Respond to a report of a rank; called from a thread, while there are ranks."""
        if isinstance(report, MetricRows):
            self._output.store_metrics(report.rows)
            return
        self._hangs.record_report(report)
        if report.generation is None or report.rank is None:
            return
        if isinstance(report, ProgressReport) and report.times is not None:
            self.step_times.add(report.generation, report.rank, report.times)
        if isinstance(report, DrainedReport):
            self._notify(RankDrained(report.generation, report.rank))

    @property
    def running(self) -> list[Rank]:
        """The ranks of the newest generation, including those that have ended; empty once they have been stopped."""
        return self._group.ranks

    def _hold_copies(self, host: str) -> CopyHolder | None:
        """The holder of copies in memory; None if there is no shared memory for them."""
        if self._local_tier is None:
            return None
        path, folder = str(self._folder.path / "copies.sock"), self._local_tier.path / COPIES_FOLDER
        try:
            return CopyHolder(host, path, folder, read_peer_key)
        except OSError as error:
            log.warning("no copies of ranks' state are kept in this worker's memory: %s", error)
            return None

    def start(self, group: WorkerGroup, members: Sequence[Member], run_id: str, generation: int) -> None:
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
            self._record_start(is_first=group.group_rank == 0)
            self._start_processes(places)
        pids = {rank.rank: rank.process.pid for rank in self._group.ranks}
        write_rank_list(self._folder.path, pids, self._output.workspace)
        store: Any = group.store  # not in torch's annotations
        if self._copies is not None:
            self._copies.join_group(peer_of(self._copies, members, group.group_rank or 0, store))
        self._hangs.watch_generation(generation, self._group.ranks, store, group.group_world_size or 1)

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

    def _record_start(self, *, is_first: bool) -> None:
        """Record that the ranks start from the beginning; `is_first`: rank 0, which represents all, is among them."""
        self._began = time.monotonic()
        if is_first and self._unreported_s and self.reports.newest_generation < 0:
            log.info(
                "the script has reported no steps or checkpoints: unless it loads one of its own, it starts from the"
                " beginning again (training repeated so far: %s)",
                timedelta(seconds=round(self._unreported_s)),
            )

    def _start_processes(self, places: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        shared = {**self._starter.environment, variables.LINK_SOCKET: self._links.path}
        shared[COLLECTIVES_VARIABLE] = str(self._folder.path)
        if self._local_tier is not None:
            shared[variables.LOCAL_TIER] = str(self._local_tier.path)
        if self._copies is not None:
            shared[variables.COPIES_SOCKET] = self._copies.path
        for local_rank in range(len(places)):
            self._signals.expect(local_rank)
        self._group.start([(number, {**shared, **place}) for number, place in places])

    def keep_for_next(self) -> bool:
        """Keep the ranks after the end of their generation, which is reported to them; return False if one
        cannot stay.
        """
        if not self.can_stay():
            return False
        self._hangs.stop_watching()
        self._links.report_end(self._generation)
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
        self._hangs.stop_watching()
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

    def _handle_exit(self, rank: Rank) -> None:
        handled = self._signals.read(rank.local_rank)
        if rank.code == 0 and signal.SIGTERM in handled and signal.SIGTERM not in rank.signals:
            rank.record_termination()
        self._notify(RankExited(rank))

    def _print_line(self, rank: int, text: str) -> None:
        self._hangs.count_line(rank)
        self._output.print_rank_line(rank, text)


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
        variables.GENERATION: str(generation),
        **run_identity(run_id, generation),
        variables.REPORTS_SOCKET: reports.path,
        variables.NOTICE_FILE: reports.notice_file(generation),
    }
    return [(worker.global_rank, {**common, **_of_rank(worker, generation, reports)}) for worker in group.workers]


def run_identity(run_id: str, generation: int) -> Mapping[str, str]:
    """Return the variables by which experiment trackers continue one run.

    They are its id, which stays the same for as long as the job exists, and the number of this attempt.
    """
    return {variables.RUN_ID: os.environ.get(variables.JOB_UID) or run_id, variables.ATTEMPT: str(generation)}


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
        variables.GENERATION: "0",
        **run_identity(run_id, 0),
        variables.REPORTS_SOCKET: reports.path,
        variables.PLACE: PLACE_LATER,
        variables.EXAMPLE_INPUTS: examples,
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
