"""`stacks`: where all ranks of a job are, by their Python stacks."""

from __future__ import annotations

from typing import Annotated

from elasticctl.api.errors import NotFoundError
from elasticctl.api.text import plural
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.output import emit
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cluster import worker_access_of
from elasticctl.operations.workers import running_workers
from elasticctl.terminal import say

app = new_app()


@verb(app, "stacks")
def stacks(
    *, job: options.Job, rank: Annotated[int | None, options.count("Only rank N.", low=0)] = None, where: Where
) -> int:
    """Print the Python stacks of all ranks, innermost call first, without stopping them.

    If training hangs, they show which rank waits where. They are read with py-spy; the exit code is 1 if the kernel or
    a security profile does not allow that.

    \b
      elasticctl stacks train
      elasticctl stacks train --rank 3
    """
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.stacks import read_stacks

    target = reach(where)
    found = ElasticJob.from_manifest(target.find(job))
    shown, troubled = 0, False
    workers = running_workers(target, found)
    for seen in read_stacks(worker_access_of(target.context), found, workers):
        for line in seen.lines(rank):
            shown += 1
            emit(line)
        if seen.trouble:
            troubled = True
            say(f"{seen.worker}: {seen.trouble}")
    if rank is not None and not shown and not troubled:
        raise NotFoundError(f"no rank {rank} runs in the {plural(len(workers), 'worker')} of {found.name}")
    return 1 if troubled else 0
