"""`elasticctl-launch`: run a training command as the ranks of one worker of an elastic job.

    elasticctl-launch --nproc-per-node 4 -- python train.py --epochs 90

The ranks get the same environment variables as under torchrun. The launcher reads the job, the worker's identity and
the address of the rendezvous service from the `ELASTICCTL_*` variables, which the controller sets in every worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from elasticctl_launcher import spot_notice, worker_output
from elasticctl_launcher.bootstrap import imports_that_stay
from elasticctl_launcher.failure import WorkerFailure
from elasticctl_launcher.hangs.stacks import stacks_of_ranks
from elasticctl_launcher.launcher_states import LauncherState
from elasticctl_launcher.leaving import DEFAULT_GRACE_S, TimeLimits
from elasticctl_launcher.ranks.setup_command import set_up
from elasticctl_launcher.ranks.warm_spares import PythonCommand, RankStarter, installed_imports, shared_environment
from elasticctl_launcher.service.client import ServiceClient, client_from_environment
from elasticctl_launcher.service.heartbeat import HeartbeatSender
from elasticctl_launcher.system import OrphanReaper, raise_file_limit
from elasticctl_launcher.usage import UsageWatch
from elasticctl_launcher.worker_output import OutputHandler, WorkerOutput
from elasticctl_launcher.workspace import PrivateFolder, unpack_workspace
from elasticctl_protocol import variables
from elasticctl_protocol.failures import EXIT_FAILED, EXIT_USAGE, FailureVerdict
from elasticctl_store import storage
from elasticctl_store.errors import TrainError

if TYPE_CHECKING:
    from elasticctl_launcher.rendezvous import Connect

REQUIRED = (variables.JOB, variables.POD_UID, variables.RENDEZVOUS_ENDPOINT, variables.TOKEN_FILE)


def main(argv: list[str] | None = None) -> int:
    """Run the launcher; return the worker's exit code.

    The exit code is 0 on success, 143 after SIGTERM or a spot notice, 2 for wrong usage, and otherwise that of the rank
    that failed.
    """
    options = _parser().parse_args(argv)
    if options.stacks:
        sys.stdout.write(json.dumps(stacks_of_ranks(os.environ.get(variables.POD_UID, ""))) + "\n")
        return 0
    output = WorkerOutput()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[OutputHandler(output)])
    for noisy in ("torch", "torch.distributed.elastic", "botocore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    missing = [name for name in REQUIRED if not os.environ.get(name)]
    if not command:
        sys.stderr.write("elasticctl-launch: no command. FIX: elasticctl-launch [options] -- python train.py\n")
        return EXIT_USAGE
    if missing:
        sys.stderr.write(f"elasticctl-launch: {missing[0]} is not set. FIX: run it as a worker of an elasticctl job\n")
        return EXIT_USAGE
    raise_file_limit()
    handle_signals(_leave_early)
    with contextlib.ExitStack() as stack:
        uploads = worker_output.start_uploads(options.log_upload, os.environ)
        stack.enter_context(contextlib.closing(uploads))
        output.store_in(uploads)
        heartbeat = HeartbeatSender(client_from_environment(), os.environ[variables.POD_UID])
        heartbeat.start()
        stack.enter_context(contextlib.closing(heartbeat))
        try:
            is_alike = options.launcher and not is_local(heartbeat.client)
            command = _prepare(command, output, stack, workspace_name="workspace" if is_alike else "")
            run = _take_commands if options.launcher else _train
            return run(command, options, output, heartbeat, uploads.hurry)
        except (TrainError, OSError) as error:  # for example, the disk is full
            output.print_message(str(error))
            WorkerFailure(FailureVerdict.APPLICATION, _worker(), 0, EXIT_FAILED, error=str(error)).write()
            return EXIT_FAILED


def _prepare(command: list[str], output: WorkerOutput, stack: contextlib.ExitStack, workspace_name: str) -> list[str]:
    """Unpack the workspace and set it up until `stack` is closed; return the command to run in it."""
    workspace = unpack_workspace(os.environ, workspace_name)
    if workspace is not None:
        stack.enter_context(contextlib.closing(workspace))
        output.show_as_submitted(workspace)
        command = workspace.enter(command, os.environ)
    folder = workspace.folder if workspace is not None else Path.cwd()
    setup = set_up(os.environ, folder, output.print_message)
    if setup is not None:
        stack.enter_context(contextlib.closing(setup))
        command = setup.translate(command)
    return command


def _train(
    command: list[str],
    options: argparse.Namespace,
    output: WorkerOutput,
    heartbeat: HeartbeatSender,
    on_sigterm: Callable[[], None],
) -> int:
    """Run the ranks until the worker ends; return its exit code. The SIGTERM handler calls `on_sigterm`."""
    starter = RankStarter(command, shared_environment(), modules_to_preload(options.preload, command))
    starter.warm(options.nproc_per_node)
    # Importing torch takes seconds: usage errors are reported and the spares' imports are started before that.
    with imports_that_stay():
        from elasticctl_launcher.restart_ranks import Agent

    grace_s = float(os.environ.get(variables.GRACE_S) or DEFAULT_GRACE_S)
    limits = TimeLimits(options.stop_grace, options.hang_timeout, grace_s)
    agent = Agent(_connection(options, heartbeat), starter, options.nproc_per_node, output, limits)

    def terminate() -> None:
        on_sigterm()
        agent.terminate()

    _watch_for_termination(options, terminate, agent.give_notice)
    reaper = OrphanReaper(agent.own_pids)
    reaper.start()
    usage = UsageWatch(agent.report_usage, agent.step_times, alone=not is_local(heartbeat.client))
    usage.start()
    with contextlib.closing(agent), contextlib.closing(reaper), contextlib.closing(usage):
        failure = None
        try:
            agent.run()
            if agent.state is LauncherState.SUCCEEDED:
                return 0
            failure, why = agent.failure, f"the launcher ended in the state {agent.state.value!r}"
        except OSError as error:
            output.print_message(str(error))
            why = str(error)
        if failure is None:
            failure = agent.unexpected_failure(why)
        failure.write()  # first, because a worker with notice may be killed during the cleanup
        return failure.exit_code


def _take_commands(
    command: list[str],
    options: argparse.Namespace,
    output: WorkerOutput,
    heartbeat: HeartbeatSender,
    on_sigterm: Callable[[], None],
) -> int:
    """Run this worker in the launcher role; see `_train` for the arguments and the return value."""
    from elasticctl_launcher.launcher_role.commands import CommandServer
    from elasticctl_launcher.launcher_role.hosts import HostFiles, is_loopback
    from elasticctl_launcher.launcher_role.program import LauncherRole
    from elasticctl_launcher.peers.copy_protocol import read_peer_key

    client = heartbeat.client
    host = os.environ.get(variables.POD_IP, "127.0.0.1")
    with contextlib.ExitStack() as stack:
        name = "" if is_local(client) else "hosts"
        folder = stack.enter_context(contextlib.closing(PrivateFolder(Path(tempfile.gettempdir()), name)))
        files = HostFiles(folder.path)
        environment = files.environment(shared_environment(), on_loopback=is_loopback(host))
        server = CommandServer(host, read_peer_key, environment, Path.cwd(), options.stop_grace)
        connect = _connection(options, heartbeat)
        role = LauncherRole(connect, RankStarter(command, environment, ()), environment, output, server, files)

        def terminate() -> None:
            on_sigterm()
            role.terminate()

        _watch_for_termination(options, terminate, lambda notice: os.kill(os.getpid(), signal.SIGTERM))
        reaper = OrphanReaper(role.own_pids)
        reaper.start()
        stack.enter_context(contextlib.closing(reaper))
        failure = role.run(options.stop_grace)
    if failure is None:
        return 0
    failure.write()
    return failure.exit_code


def _connection(options: argparse.Namespace, heartbeat: HeartbeatSender) -> Connect:
    """Return the function that creates this worker's rendezvous handler."""
    from elasticctl_launcher.rendezvous import handler_from_environment

    return partial(handler_from_environment, heartbeat.client, options.nproc_per_node, options.join_timeout, heartbeat)


def is_local(client: ServiceClient) -> bool:
    """Return True on the local cluster, where all workers share one machine."""
    return client.endpoint.startswith("unix:")


def _watch_for_termination(
    options: argparse.Namespace, terminate: Callable[[], None], on_notice: Callable[[spot_notice.SpotNotice], None]
) -> None:
    """Call `terminate` on SIGTERM and SIGINT, and `on_notice` on a spot notice if the options ask to watch for one."""
    handle_signals(lambda number, frame: terminate())
    if options.notice != spot_notice.OFF:
        source = spot_notice.make_source(options.notice, options.metadata_url)
        spot_notice.NoticeWatch(source, on_notice).start()


def handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Install `handler` for SIGTERM and SIGINT; call this from the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _leave_early(number: int, frame: FrameType | None) -> None:
    """Exit immediately on SIGTERM while there is no group to leave.

    Without a handler, the kernel would ignore SIGTERM for the first process of a container.
    """
    failure = WorkerFailure.of_sigterm(_worker(), 0)
    failure.write()
    sys.exit(failure.exit_code)


def _worker() -> str:
    return os.environ.get(variables.WORKER, "")


def modules_to_preload(choice: str, command: list[str]) -> list[str]:
    """Return the modules that a spare imports for `choice`, the value of --preload."""
    if choice == "none":
        return []
    if choice != "auto":
        return choice.split(",")
    python = PythonCommand.parse(command)
    return [
        "torch",
        "torch._dynamo",  # torch imports it when an optimizer is first used; this takes as long as importing torch
        "elasticctl_train.run",
        *storage.modules(os.environ.get(variables.STORAGE, "")),
        *(installed_imports(python.argv[0]) if python else []),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elasticctl-launch", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--nproc-per-node", type=_positive, default=1, metavar="N", help="ranks, or slots, of this worker"
    )
    parser.add_argument(
        "--stop-grace",
        type=float,
        default=os.environ.get(variables.STOP_GRACE_S) or 5.0,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL for ranks",
    )
    parser.add_argument(
        "--join-timeout", type=float, default=0.0, metavar="S", help="seconds to wait for a group to form; 0: no limit"
    )
    parser.add_argument(
        "--hang-timeout",
        type=float,
        default=os.environ.get(variables.HANG_TIMEOUT_S) or None,
        metavar="S",
        help="seconds without any progress in the group (no step, no output, no change in a rank's stack, no CPU or "
        "disk use) before it restarts from the last checkpoint; 0: no limit; by default ten times the longest that the "
        "same phase has taken in this job, and only if the ranks are proved to stand still",
    )
    parser.add_argument(
        "--preload",
        default="auto",
        metavar="MODULES",
        help="modules that a warm spare of each rank imports in advance to speed up restarts: names separated by "
        "commas; 'auto': torch and the installed packages that the script imports; 'none': no spares",
    )
    parser.add_argument(
        "--notice",
        type=_one_of(*spot_notice.CHOICES),
        default=os.environ.get(variables.NOTICE_SOURCE) or spot_notice.OFF,
        metavar="CLOUD",
        help=f"the cloud whose spot notices to watch for: {', '.join(spot_notice.CHOICES)}",
    )
    parser.add_argument(
        "--metadata-url",
        type=_metadata_url,
        default=os.environ.get(variables.METADATA_URL) or spot_notice.DEFAULT_URL,
        metavar="URL",
        help=f"the cloud's metadata service, by default {spot_notice.DEFAULT_URL}",
    )
    parser.add_argument(
        "--log-upload",
        type=_one_of(*worker_output.CHOICES),
        default=os.environ.get(variables.LOG_UPLOAD) or worker_output.AUTO,
        metavar="WHEN",
        help="whether to copy the log to the job's storage, where it outlives this machine: on, off, or auto, which is "
        "on unless the job runs on the local cluster and its storage is a folder",
    )
    parser.add_argument(
        "--launcher",
        action="store_true",
        help="run the command on one worker only, because it starts the processes on the other workers itself, as "
        "mpirun and horovodrun do",
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="print the Python stacks of this worker's ranks as JSON, and exit",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the training command, after --")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    """Return an argument type that accepts `choices`.

    Unlike argparse's own `choices`, it also checks a default that comes from the environment.
    """

    def check(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return check


def _metadata_url(text: str) -> str:
    try:
        return spot_notice.check_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
