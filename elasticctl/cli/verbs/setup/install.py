"""`install`: make a Kubernetes cluster ready for ElasticJobs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.api.text import counted, listed
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Assignment, Where
from elasticctl.cli.framework.output import emit, hint, say
from elasticctl.cli.framework.target import locate
from elasticctl.settings.contexts import LOCAL

if TYPE_CHECKING:
    from elasticctl.api.codec import Manifest
    from elasticctl.cluster.kube.install import Installed, Installer

app = new_app()

TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class How:
    """What to put there, and how far to go."""

    image: Annotated[str, options.text("The controller's image; left out, the one that runs there stays.", "IMAGE")] = (
        ""
    )
    sharing: Annotated[
        bool | None,
        typer.Option(
            "--sharing/--no-sharing", help="Share GPUs by quotas and priorities; left out, it stays as it is."
        ),
    ] = None
    capacity: Annotated[
        tuple[Assignment, ...],
        options.assignments("--capacity", "KIND=N", "With --sharing: GPUs of a type that an autoscaler may go up to."),
    ] = ()
    replicas: Annotated[int, options.count("How many controllers; one of them acts.", default=True)] = 2
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be applied, or removed.")] = False
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the controller runs.")] = False
    timeout: Annotated[int, options.time("How long to wait for it; 5m by default.")] = TIMEOUT_S
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take it all out, the records of jobs too.")] = False
    force: Annotated[bool, typer.Option("--force", help="Uninstall although jobs are running: they end.")] = False


@dataclass(frozen=True, slots=True)
class System(Where):
    """Which cluster, and where in it."""

    namespace: Annotated[str, options.namespace("Where the controllers are put; elasticctl-system by default.")] = ""


@verb(app, "install")
def install(*, how: How, yes: options.Yes = False, where: System) -> None:
    """Put the controller into a context's cluster, or bring it up to date.

    \b
      elasticctl install --context prod --image REGISTRY/controller:0.1.0
      elasticctl install --context prod --dry-run
      elasticctl install --context prod --uninstall
    """
    from elasticctl.kubeapi.installation import NAMESPACE, image_of, manifests, sharing_of

    context, _ = locate(where)
    namespace = where.namespace or NAMESPACE
    if context.provider == LOCAL:
        raise UsageError("the local cluster needs no installation; say --context NAME for one that does")
    wanted = manifests(namespace=namespace, image=how.image, replicas=how.replicas, sharing=_flags(how))
    if how.dry_run and not how.uninstall:
        _print(wanted)
        return
    from elasticctl.cluster.kube.install import Installer
    from elasticctl.kubeapi.connection import connect

    installer = Installer(connect(context.kube_context), say)
    if how.uninstall:
        _uninstall(installer, wanted, how, yes=yes)
        return
    running = installer.running(namespace)
    image = how.image or (image_of(running) if running else "")
    if not image:
        raise UsageError("--image is needed the first time; docs/kubernetes.md says how to build it")
    sharing = sharing_of(running) if how.sharing is None and running else _flags(how)
    installer.apply(manifests(namespace=namespace, image=image, replicas=how.replicas, sharing=sharing))
    if not how.no_wait:
        installer.await_available(namespace, how.timeout)
    hint(f"try it: elasticctl submit train.py --context {context.name}")


def _flags(how: How) -> list[str]:
    """The controller's flags about sharing; UsageError for capacities that are none, or of no use."""
    from elasticctl.api.quota import POOLS
    from elasticctl.kubeapi.installation import sharing_flags

    for kind, slots in how.capacity:
        if not how.sharing:
            raise UsageError("--capacity is for a cluster that shares: add --sharing")
        if kind not in POOLS or not (slots.isascii() and slots.isdigit()):
            raise UsageError(f"--capacity {kind}={slots}: KIND=N is needed, with a KIND of {listed(POOLS)}")
    return sharing_flags({kind: int(slots) for kind, slots in how.capacity}) if how.sharing else []


def _uninstall(installer: Installer, wanted: list[Manifest], how: How, *, yes: bool) -> None:
    from elasticctl.cluster.kube.install import name_of

    found = installer.look(wanted)
    if not found.objects:
        say("nothing of elasticctl is installed there")
        return
    if found.living and not (how.force or how.dry_run):
        raise ConflictError(
            f"{counted(len(found.living), 'job')} would end: {', '.join(found.living[:3])}"
            f"{', …' if len(found.living) > 3 else ''}; cancel them first, or add --force"
        )
    for item in found.objects:
        emit(name_of(item))
    say(_loss(found))
    if how.dry_run:
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("--uninstall removes all of this; add --yes to do so")
        typer.confirm("Remove all of this?", abort=True, err=True)
    installer.remove(found.objects)


def _loss(found: Installed) -> str:
    jobs = f"{counted(len(found.jobs), 'job')}, {len(found.living)} of them living" if found.jobs else "no job"
    return f"with them {jobs}; checkpoints stay where they are"


def _print(manifests: list[Manifest]) -> None:
    from elasticctl.api.yamltext import dump_yaml

    emit("---\n".join(dump_yaml(item) for item in manifests))
