"""Follow a job's logs until it has ended; Ctrl-C lets go of it and leaves it running."""

from __future__ import annotations

from elasticctl.cli.logs import print_lines
from elasticctl.cli.outcome import await_end
from elasticctl.cli.output import say
from elasticctl.cli.target import Target
from elasticctl.cluster.base import LogQuery

INTERRUPTED = 130


def attach(target: Target, name: str) -> int:
    """Print a job's logs as they come, then how it ended; returns the exit code of `wait`, 130 after Ctrl-C."""
    try:
        print_lines(target.cluster.logs(target.namespace, name, LogQuery(follow=True)), name)
        return await_end(target, name)
    except KeyboardInterrupt:
        say(f"\ndetached: {name} goes on. Come back: elasticctl logs -f {name}   Stop it: elasticctl cancel {name}")
        return INTERRUPTED
