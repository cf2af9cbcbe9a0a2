"""`rerun`: run a job again, from step 0 or from one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import described, flag
from elasticctl.cli.framework.output import print_objects
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cli.verbs.start_jobs.submit import NOTIFY_OPTION, DryRunVerb, SubmitOptions, follow_up
from elasticctl.operations import rerun as reruns
from elasticctl.operations.rerun import RerunChanges

_CHANGES: Mapping[str, Any] = {
    "name": described("The new job's name; by default the old one's with a number.", "NAME"),
    "from_checkpoint": typer.Option(metavar="STEP|latest", help="Continue from this step of the old job."),
    "storage": described("Where to keep its state; by default a new location.", "URL"),
    "same_code": flag("Run the code that was submitted, not the folder as it is now.", "--same-code"),
    "settings": typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a field of the manifest: spec.backoffLimit=10"
    ),
    "notify": NOTIFY_OPTION,
}

app = new_app()


@verb(app, "rerun", cls=DryRunVerb)
def rerun(*, job: options.Job, changes: Annotated[RerunChanges, _CHANGES], how: SubmitOptions, where: Where) -> int:
    """Run a job again: a new job with the same command, from step 0, with its own state.

    Its folder is uploaded as it is now, if it exists; --same-code runs the code that was submitted. With
    --from-checkpoint, the job continues from a checkpoint of the old job, which is only read. If --name is the old
    job's own name, that job must have ended, and is deleted; its checkpoints stay.

    \b
      elasticctl rerun digits
      elasticctl rerun digits --from-checkpoint latest --set spec.backoffLimit=10
    """
    how.check()
    target = reach(where)
    plan = reruns.plan_rerun(target, target.find(job), changes)
    if how.dry_run == "client":
        print_objects([plan.made], how.output or "yaml", one=True)
        return 0
    made = reruns.rerun(target, plan, dry_run=how.dry_run is not None)
    if how.dry_run:
        print_objects([made], how.output or "yaml", one=True)
        return 0
    return follow_up(target, made, how)
