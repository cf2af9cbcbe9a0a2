"""`doctor`: is a context ready for jobs, and how to fix what is not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import Table, emit, on_terminal, print_data, tabbed
from elasticctl.cli.framework.target import locate
from elasticctl.settings.contexts import LOCAL, Context

if TYPE_CHECKING:
    from elasticctl.doctor import Check

_MARKS = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "-"}
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_OUTCOME_WIDTH, _NAME_WIDTH = 7, 10

app = new_app()


@verb(app, "doctor")
def doctor(
    *,
    storage: Annotated[str, options.text("Try this storage; the context's own by default.", "URL")] = "",
    controller_namespace: Annotated[str, options.text("Where the controller was installed.")] = "",
    output: Annotated[Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="How to print.")] = "table",
    where: Where,
) -> int:
    """Check a context: the cluster, your rights in it, its GPUs and spot nodes, and the storage of checkpoints.

    Each check that does not pass says what to do. The exit code is 1 when one failed. Nothing is changed, but for an
    object in the storage that is written and deleted again.

    \b
      elasticctl doctor
      elasticctl doctor --context prod --storage s3://bucket/jobs
    """
    context, namespace = locate(where)
    checks = []
    for check in _checks(context, namespace, storage or context.storage, controller_namespace):
        checks.append(check)
        if output == "table" and on_terminal():
            _show(check)
    if output != "table":
        found = [dataclasses.asdict(item) for item in checks]
        print_data("Checkup", {"context": context.name, "checks": found}, output)
    elif not on_terminal():
        rows = [(item.name, item.outcome.value, item.says, item.mend) for item in checks]
        emit(tabbed(Table(("CHECK", "OUTCOME", "FOUND", "FIX"), rows)))
    return int(any(item.outcome == "failed" for item in checks))


def _checks(context: Context, namespace: str, storage: str, system: str) -> Iterator[Check]:
    """All checks of a context, as they are made."""
    from elasticctl.cli.submit.plan import storage_url
    from elasticctl.doctor import Check, CheckOutcome
    from elasticctl.doctor.machine import check_storage

    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.doctor.machine import check_machine

        paths = local_paths()
        yield from check_machine(paths)
        yield check_storage(storage_url(storage, os.getcwd()) if storage else paths.storage.as_uri())
        return
    from elasticctl.doctor.cluster import check_cluster
    from elasticctl.kubeapi.connection import connect
    from elasticctl.kubeapi.installation import NAMESPACE

    yield from check_cluster(connect(context.kube_context), context, namespace, system or NAMESPACE)
    if storage:
        yield check_storage(storage)
    else:
        mend = f"elasticctl config set-context {context.name} --storage URL"
        yield Check("storage", CheckOutcome.WARNING, "none is set: every submit has to name one", mend)


def _show(check: Check) -> None:
    """One check for a person, as soon as it is made."""
    from rich.text import Text

    from elasticctl.cli.framework.output import console

    screen = console()
    outcome = check.outcome.value
    line = Text.assemble(
        (_MARKS[outcome].ljust(_OUTCOME_WIDTH), _STYLES[outcome]), "  ", check.name.ljust(_NAME_WIDTH), "  ", check.says
    )
    screen.print(line)
    if check.mend:
        screen.print(Text(" " * (_OUTCOME_WIDTH + _NAME_WIDTH + 4) + f"-> {check.mend}"))
