"""`elasticctl-launch`: run a training command as the ranks of one worker of an elastic job.

    elasticctl-launch --nproc-per-node 4 -- python train.py --epochs 90

The script's environment is torchrun's. Which job this is, who the worker is and where the rendezvous service answers
comes from the `ELASTICCTL_*` variables that the controller gives every worker.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from elasticctl_launcher import spot_notice, worker_output, workspace
from elasticctl_launcher.failure import APPLICATION, WorkerFailure
from elasticctl_launcher.rank_processes import PythonCommand, RankStarter, common_environment, installed_imports
from elasticctl_launcher.worker_output import WorkerOutput
from elasticctl_store import storage
from elasticctl_store.errors import TrainError

EXIT_FAILED, EXIT_USAGE = 1, 2
REQUIRED = ("ELASTICCTL_JOB", "ELASTICCTL_POD_UID", "ELASTICCTL_RDZV_ENDPOINT", "ELASTICCTL_RDZV_TOKEN_FILE")


def main(argv: list[str] | None = None) -> int:
    """Run the launcher; returns the worker's exit code: 0, the failed rank's, or 143 after SIGTERM."""
    options = _parser().parse_args(argv)
    output = WorkerOutput()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[output.handler()])
    for noisy in ("torch", "torch.distributed.elastic", "botocore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        sys.stderr.write("elasticctl-launch: no command given; usage: elasticctl-launch [options] -- python train.py\n")
        return EXIT_USAGE
    missing = [name for name in REQUIRED if not os.environ.get(name)]
    if missing:
        sys.stderr.write(f"elasticctl-launch: {missing[0]} is not set; run it as a worker of an elasticctl job\n")
        return EXIT_USAGE
    shipper = worker_output.create_uploader(options.log_upload, os.environ)
    if shipper is None:
        return _run(command, options, output, lambda: None)
    output.keep = shipper.add
    with contextlib.closing(shipper):
        return _run(command, options, output, shipper.hurry)


def _run(command: list[str], options: argparse.Namespace, output: WorkerOutput, on_notice: Callable[[], None]) -> int:
    """Run the command in this worker's copy of the job's workspace, if it has one; see `_train`."""
    try:
        copy = workspace.unpack_workspace(os.environ)
    except TrainError as error:
        output.say(str(error))
        WorkerFailure(APPLICATION, os.environ.get("ELASTICCTL_WORKER", ""), 0, EXIT_FAILED, error=str(error)).write()
        return EXIT_FAILED
    if copy is None:
        return _train(command, options, output, on_notice)
    with contextlib.closing(copy):
        return _train(copy.enter(command, os.environ), options, output, on_notice)


def _train(command: list[str], options: argparse.Namespace, output: WorkerOutput, on_notice: Callable[[], None]) -> int:
    """`on_notice` is called, from a signal's handler, once this worker has to go."""
    starter = RankStarter(command, common_environment(), _preload(options.preload, command))
    starter.warm(options.nproc_per_node)
    # Imported here: a wrong call is answered, and the ranks' own import is under way, before the seconds torch takes.
    from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
    from torch.distributed.elastic.rendezvous import RendezvousError

    from elasticctl_launcher.rendezvous import handler_from_environment
    from elasticctl_launcher.restart_ranks import Agent, Limits

    handler = handler_from_environment("", options.nproc_per_node, options.join_timeout)
    spec = WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=handler,
        max_restarts=0,
    )
    agent = Agent(spec, handler, starter, output, Limits(options.stop_grace, options.hang_timeout))

    def on_signal(number: int, frame: FrameType | None) -> None:
        on_notice()
        agent.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if options.notice != spot_notice.OFF:
        spot_notice.NoticeWatch(
            spot_notice.make_source(options.notice, options.metadata_url), agent.give_notice
        ).start()
    outcome: WorkerFailure | None
    with contextlib.closing(agent):
        try:
            result = agent.run()
            outcome = agent.outcome
            if outcome is None and result.state is not WorkerState.SUCCEEDED:
                outcome = WorkerFailure(
                    APPLICATION, handler.identity.name, handler.generation, 1, error=str(result.state)
                )
        except (RendezvousError, OSError) as error:
            output.say(str(error))
            outcome = WorkerFailure(APPLICATION, handler.identity.name, handler.generation, 1, error=str(error))
        if outcome is not None:
            outcome.write()  # ahead of all that may take a moment: a worker that has to go may not have it
    return 0 if outcome is None else outcome.exit_code


def _preload(wanted: str, command: list[str]) -> list[str]:
    """The modules a spare imports; see --preload."""
    if wanted == "none":
        return []
    if wanted != "auto":
        return wanted.split(",")
    python = PythonCommand.parse(command)
    # torch imports torch._dynamo at the first use of an optimizer, which takes as long as torch itself.
    ours = [
        "torch",
        "torch._dynamo",
        "elasticctl_train.run",
        *storage.modules(os.environ.get("ELASTICCTL_STORAGE", "")),
    ]
    return [*ours, *(installed_imports(python.argv[0]) if python else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elasticctl-launch", description=__doc__.split("\n\n")[0])
    parser.add_argument("--nproc-per-node", type=_positive, default=1, metavar="N", help="ranks of this worker")
    parser.add_argument(
        "--stop-grace", type=float, default=5.0, metavar="S", help="seconds between SIGTERM and SIGKILL for ranks"
    )
    parser.add_argument(
        "--join-timeout", type=float, default=600.0, metavar="S", help="seconds to wait for a group to form"
    )
    parser.add_argument(
        "--hang-timeout",
        type=float,
        default=float(os.environ.get("ELASTICCTL_HANG_TIMEOUT_S") or 0),
        metavar="S",
        help="seconds without a sign of life from ranks that use the training library, before the group starts again "
        "from the last checkpoint; 0: never",
    )
    parser.add_argument(
        "--preload",
        default="auto",
        metavar="MODULES",
        help="what a warm spare process per rank imports ahead, so that a restart is fast: names with commas, "
        "'auto' for torch and the installed packages that the script imports, 'none' for no spares",
    )
    parser.add_argument(
        "--notice",
        type=_notice,
        default=os.environ.get("ELASTICCTL_NOTICE_SOURCE") or spot_notice.OFF,
        metavar="CLOUD",
        help=f"whose notice that this machine will be taken away to listen to: {', '.join(spot_notice.CHOICES)}",
    )
    parser.add_argument(
        "--metadata-url",
        type=_metadata_url,
        default=os.environ.get("ELASTICCTL_METADATA_URL") or spot_notice.DEFAULT_URL,
        metavar="URL",
        help=f"where the cloud's metadata service answers, if not at {spot_notice.DEFAULT_URL}",
    )
    parser.add_argument(
        "--log-upload",
        type=_log_upload,
        default=os.environ.get("ELASTICCTL_LOG_UPLOAD") or worker_output.AUTO,
        metavar="WHEN",
        help="whether what is printed is kept in the job's storage too, to be read when this machine is gone: on, off, "
        "or auto, which is on unless that is a folder of this machine's own local cluster",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the training command, after --")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def _notice(text: str) -> str:
    return _one_of(spot_notice.CHOICES, text)


def _log_upload(text: str) -> str:
    return _one_of(worker_output.CHOICES, text)


def _one_of(choices: Sequence[str], text: str) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
    return text


def _metadata_url(text: str) -> str:
    try:
        return spot_notice.check_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
