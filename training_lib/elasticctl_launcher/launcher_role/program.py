"""A worker in the launcher role: the first worker of the group runs the launcher program, the others its commands.

The rendezvous service forms the group, as in training. A change of the group stops nothing here: the files that name
the workers are replaced, and the program reads them when it needs to. If the first worker is lost, another one starts
the program again.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.elastic.rendezvous import RendezvousError

from elasticctl_launcher.agent_events import (
    Notification,
    RankExited,
    ServiceAnnounced,
    ServiceAnswered,
    SigtermReceived,
)
from elasticctl_launcher.failure import WorkerFailure
from elasticctl_launcher.launcher_role.commands import CommandServer
from elasticctl_launcher.launcher_role.hosts import HostFiles
from elasticctl_launcher.launcher_states import LauncherEvent
from elasticctl_launcher.rank_processes import Rank, RankGroup
from elasticctl_launcher.ranks.warm_spares import RankStarter
from elasticctl_launcher.rendezvous import Connect, GroupChange, GroupFinished, Readiness, WorkerRemoved
from elasticctl_launcher.service.questions import Inquiries, Instruction, Question
from elasticctl_launcher.worker_output import WorkerOutput
from elasticctl_protocol.failures import FailureVerdict
from elasticctl_protocol.requests import Doing

log = logging.getLogger(__name__)


class WorkerLeaves(Exception):
    """This worker has to leave; the text is the reason."""


class LauncherRole:
    """One worker, which runs the command of `starter` while it is the first of its group.

    `server` runs commands of the program, `files` show the program where the other workers are, and `environment` is
    the program's environment.
    """

    def __init__(
        self,
        connect: Connect,
        starter: RankStarter,
        environment: Mapping[str, str],
        output: WorkerOutput,
        server: CommandServer,
        files: HostFiles,
    ) -> None:
        self._server, self._files = server, files
        self._environment = environment
        self._notifications: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        notify = self._notifications.put
        self._handler = handler = connect(lambda: Readiness(serves_commands=True), self._announce)
        self._program = RankGroup(
            starter, output.print_rank_line, lambda rank: notify(RankExited(rank)), reword=output.reword
        )
        self._service = Inquiries(
            handler.client, handler.poll, handler.identity.uid, lambda question: notify(ServiceAnswered(question))
        )
        self._got_sigterm = self._is_joining = False
        self._first = ""
        self._has_succeeded = False
        self._question: Question | None = None
        self._failure: WorkerFailure | None = None

    def terminate(self) -> None:
        """Handle SIGTERM, from the signal handler: leave the group, and end."""
        is_news, self._got_sigterm = not self._got_sigterm, True
        self._notifications.put(SigtermReceived())
        if is_news and self._is_joining:
            raise WorkerLeaves

    def _announce(self, generation: int, change: GroupChange) -> None:
        leaves = change is GroupChange.LEAVE
        event = LauncherEvent.LEAVE_DUE if leaves else LauncherEvent.GENERATION_STALE
        self._notifications.put(ServiceAnnounced(generation, event))

    def own_pids(self) -> set[int]:
        """Return the ids of the processes that this worker has started and waits for."""
        return self._program.own_pids() | self._server.own_pids()

    def run(self, stop_grace_s: float) -> WorkerFailure | None:
        """Take part until the launcher program has succeeded, or this worker ends for another reason.

        Returns None on success, and the failure otherwise. Processes that still run then have `stop_grace_s` seconds
        between SIGTERM and SIGKILL.
        """
        try:
            while True:
                self._join_group()
                if self._take_part():
                    return self._failure
        except GroupFinished:
            return None
        except WorkerRemoved as error:
            log.warning("%s", error)
            return WorkerFailure.of_sigterm(*self._place(), str(error))
        except WorkerLeaves as error:
            self._service.report_leaving(str(error) or "SIGTERM")
            return WorkerFailure.of_sigterm(*self._place(), str(error))
        except (RendezvousError, OSError) as error:
            log.error("%s", error)
            self._service.report_leaving(str(error))
            return WorkerFailure(FailureVerdict.APPLICATION, *self._place(), 1, error=str(error))
        finally:
            self._program.stop(stop_grace_s)
            self._server.close()

    def _join_group(self) -> None:
        """Join the next generation, and write its members to the files."""
        self._is_joining = True
        try:
            if self._got_sigterm:
                raise WorkerLeaves
            self._handler.join_group(self._server.port)
        finally:
            self._is_joining = False
        members, mine = self._handler.members, self._handler.identity.uid
        if self._handler.heartbeat is not None:
            self._handler.heartbeat.say(Doing.RUNNING, self._handler.generation)
        self._files.write(members)
        log.info("%d workers: %s", len(members), ", ".join(each.name for each in members))
        before, self._first = self._first, members[0].uid
        if before not in ("", self._first):
            self._server.end_commands()  # commands of a program that is gone
        if self._first != mine:
            self._program.stop(0.0)
        elif self._has_succeeded:
            self._ask_to_finish()
        elif not self._program.ranks:
            log.info("%s runs the launcher program", self._handler.identity.name)
            self._program.start([(0, self._environment)])

    def _take_part(self) -> bool:
        """Wait until this generation ends here; return True if this worker ends with it."""
        while True:
            match self._notifications.get():
                case SigtermReceived():
                    raise WorkerLeaves
                case ServiceAnnounced(self._handler.generation, LauncherEvent.LEAVE_DUE):
                    raise WorkerLeaves(self._handler.stale_reason)
                case ServiceAnnounced(self._handler.generation) if self._failure is None:
                    if self._question is not None:
                        self._question.withdraw()
                    return False
                case RankExited(rank) if rank in self._program.ranks:
                    self._handle_exit(rank)
                case ServiceAnswered(question) if question is self._question:
                    if question.instruction is not Instruction.REJOIN:
                        return True
                    self._failure = None
                    return False

    def _handle_exit(self, rank: Rank) -> None:
        self._program.stop(0.0)  # processes that the program has left running
        if rank.code == 0:
            self._has_succeeded = True
            self._ask_to_finish()
            return
        failure = replace(WorkerFailure.of_rank(*self._place(), rank), rank=None)
        if failure.verdict is FailureVerdict.COLLATERAL:
            failure = replace(
                failure, verdict=FailureVerdict.APPLICATION
            )  # the service need not wait for other workers' ends
        log.warning("the launcher program failed: %s", failure.describe())
        self._failure = failure
        self._question = self._service.ask_for_verdict(failure.to_report)

    def _ask_to_finish(self) -> None:
        self._question = self._service.wait_for_peers(self._handler.generation, for_all=True)

    def _place(self) -> tuple[str, int]:
        return self._handler.identity.name, self._handler.generation
