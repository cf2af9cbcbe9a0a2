"""`stacks`: where all ranks of a job are, by their Python stacks."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from elasticctl.api.errors import ElasticctlError, NotFoundError, UsageError
from elasticctl.api.objects import as_list, as_mapping
from elasticctl.api.text import plural, shorten, visible
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import say
from elasticctl.cli.framework.target import reach
from elasticctl.cli.verbs.enter.worker import running_workers
from elasticctl.cluster import inside_of

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest
    from elasticctl.cluster.inside import Inside

AT_ONCE = 16
"""Workers that are asked at the same time."""

app = new_app()


@verb(app, "stacks")
def stacks(
    *, job: options.Job, rank: Annotated[int | None, options.count("Only rank N.", low=0)] = None, where: Where
) -> int:
    """Print the Python stacks of all ranks, the innermost call first; nothing is stopped.

    \b
      elasticctl stacks train
      elasticctl stacks train --rank 3
    """
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob

    target = reach(where)
    found = ElasticJob.from_manifest(target.find(job))
    made = hardware(found)
    if not made.launched:
        raise UsageError(f"{found.name} does not run under elasticctl-launch, which knows its ranks")
    workers = running_workers(target, found)
    inside = inside_of(target.context)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looks = list(pool.map(lambda worker: look(inside, worker, made.command[0]), workers))
    shown, troubled = 0, False
    for worker, seen in zip(workers, looks, strict=True):
        name = worker["metadata"]["name"]
        for one in map(as_mapping, as_list(seen.get("ranks"))):
            if rank is None or one.get("rank") == rank:
                shown += 1
                for line in lines_of(name, one):
                    sys.stdout.write(visible(line) + "\n")
        if seen.get("trouble"):
            troubled = True
            say(f"{name}: {seen['trouble']}")
    if rank is not None and not shown and not troubled:
        raise NotFoundError(f"no rank {rank} runs in the {plural(len(workers), 'worker')} of {found.name}")
    return 1 if troubled else 0


def look(inside: Inside, worker: Manifest, launcher: str) -> Mapping[str, Any]:
    """What the launcher's own look at the ranks of a worker has found; `trouble` where it could not look."""
    from elasticctl.cluster.inside import Streams

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            code = inside.run(worker, [launcher, "--stacks"], Streams(None, out.fileno(), err.fileno()))
        except ElasticctlError as e:
            return {"trouble": str(e)}
        out.seek(0)
        err.seek(0)
        try:
            return as_mapping(json.loads(out.read()))
        except ValueError:
            said = shorten(err.read(4096).decode("utf-8", "replace"))
            return {"trouble": f"its launcher cannot look at ranks (exit code {code}: {said})"}


def lines_of(worker: str, rank: Mapping[str, Any]) -> Iterator[str]:
    """A rank and the stacks of its threads; processes that it has started are named by their pid."""
    threads = [as_mapping(thread) for thread in as_list(rank.get("stacks"))]
    yield f"rank {rank.get('rank')}, {worker}" + ("" if threads else ": no Python stack can be read")
    for thread in threads:
        process = "" if thread.get("pid") == threads[0].get("pid") else f" of process {thread.get('pid')}"
        yield f"  {thread.get('thread')}{process}:"
        for frame in map(as_mapping, as_list(thread.get("frames"))):
            yield f"    {frame.get('function')} ({frame.get('file')}:{frame.get('line')})"
