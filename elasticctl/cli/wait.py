"""`wait`: until a job has ended, as an exit code."""

from __future__ import annotations

import click

from elasticctl.cli import options
from elasticctl.cli.outcome import await_end
from elasticctl.cli.target import Where, reach


@click.command()
@options.JOB
@click.option("--for", "until", type=click.Choice(["done", "running"]), default="done", help="What to wait for.")
@options.TIMEOUT
@options.target
def wait(where: Where, job: str, until: str, timeout: int | None) -> int:
    """Wait until a job has ended.

    The exit code tells how: 0 succeeded, 1 failed, 3 not found or unreachable, 4 cancelled, 124 timed out.
    """
    target = reach(where)
    name = target.find(job)["metadata"]["name"]
    return await_end(target, name, timeout_s=timeout, running=until == "running")
