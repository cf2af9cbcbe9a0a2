"""`install` and `doctor`: make a Kubernetes cluster ready for jobs, and check that a context is."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.api.text import join_or, plural, quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.output import Table, emit, format_tabs, hint, on_terminal, print_data
from elasticctl.cli.framework.place import Where, locate
from elasticctl.operations.option_values import Assignment
from elasticctl.settings.contexts import LOCAL, Context
from elasticctl.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from elasticctl.api.codec import Manifest
    from elasticctl.cluster.kube.install import Installed, Installer
    from elasticctl.doctor import Check
    from elasticctl.kubeapi.features import Feature


app = new_app()

TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class InstallOptions:
    """What to install, and how."""

    image: Annotated[
        str, options.described("The controller's image; required the first time, then unchanged by default.", "IMAGE")
    ] = ""
    sharing: Annotated[
        bool | None,
        typer.Option("--sharing/--no-sharing", help="Share GPUs by quotas and priorities; unchanged by default."),
    ] = None
    capacity: Annotated[
        tuple[Assignment, ...],
        options.assignments(
            "--capacity", "KIND=N", "With --sharing: the number of GPUs of a type that an autoscaler can provision."
        ),
    ] = ()
    webhook_to: Annotated[
        tuple[str, ...],
        typer.Option(
            "--webhook-to",
            metavar="HOST",
            help="Call webhooks of this host, *.DOMAIN or network only; any: every public host.",
        ),
    ] = ()
    namespace_only: Annotated[
        bool,
        typer.Option("--namespace-only", help="Run only the jobs of its own namespace, with no permissions elsewhere."),
    ] = False
    feature: Annotated[
        tuple[str, ...],
        typer.Option("--feature", metavar="NAME", help="Grant it the permissions of a feature (docs/security.md)."),
    ] = ()
    no_feature: Annotated[
        tuple[str, ...],
        typer.Option("--no-feature", metavar="NAME", help="Remove the permissions of a feature."),
    ] = ()
    dashboard: Annotated[str, options.described("Also run a dashboard for a team, with this image.", "IMAGE")] = ""
    dashboard_changes: Annotated[
        bool, typer.Option("--dashboard-changes", help="Let people change jobs there, with their own permissions.")
    ] = False
    dashboard_proxy: Annotated[
        bool, typer.Option("--dashboard-proxy", help="A proxy in front of it logs people in (docs/dashboard.md).")
    ] = False
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Remove the dashboard for a team.")] = False
    replicas: Annotated[
        int, options.count("The number of controllers to run; one of them is active.", default=True)
    ] = 2
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be applied, or removed.")] = False
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the controller runs.")] = False
    timeout: Annotated[int, options.time("How long to wait; 5m by default.")] = TIMEOUT_S
    uninstall: Annotated[
        bool, typer.Option("--uninstall", help="Remove everything, including the records of jobs.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Uninstall even if jobs are running, which ends them.")] = False


@dataclass(frozen=True, slots=True)
class System(Where):
    """The cluster, and the namespace for the controller."""

    namespace: Annotated[
        str,
        options.namespace("The controllers' namespace; elasticctl-system, or with --namespace-only the context's own."),
    ] = ""


@verb(app, "install")
def install(*, how: InstallOptions, yes: options.Yes = False, where: System) -> None:
    """Install the controller into a context's cluster, or upgrade it.

    \b
      elasticctl install --context prod --image REGISTRY/controller:0.1.0
      elasticctl install --context prod --feature kueue --feature notifications
      elasticctl install --context prod --namespace-only -n ml
      elasticctl install --context prod --uninstall
    """
    from elasticctl.kubeapi.features import ALL
    from elasticctl.kubeapi.installation import (
        NAMESPACE,
        dashboard_manifests,
        features_of,
        manifests,
        sharing_of,
        webhooks_of,
    )

    context, own = locate(where)
    namespace = own if how.namespace_only else where.namespace or NAMESPACE
    if context.provider == LOCAL:
        raise UsageError("the local cluster needs no installation. FIX: choose a cluster with --context NAME")
    if how.namespace_only and how.sharing:
        raise UsageError("--sharing divides a whole cluster. FIX: leave out --sharing, or --namespace-only")
    webhooks = _webhooks(how)
    if not how.uninstall:
        how = replace(how, image=_pin(how.image), dashboard=_pin(how.dashboard))
    flags = [*_flags(how, None), *webhooks]
    dashboard = _dashboard(how, namespace)
    render = functools.partial(manifests, namespace=namespace, replicas=how.replicas, confined=how.namespace_only)
    if how.dry_run and not how.uninstall:
        _print([*render(image=how.image, flags=flags, features=_features(how, ())), *dashboard])
        return
    from elasticctl.cluster.kube.install import Installer
    from elasticctl.kubeapi.connection import connect

    installer = Installer(connect(context.kube_context), say)
    running = installer.deployment(namespace)
    _check_scope(installer, running, namespace, how)
    if how.uninstall:
        _uninstall(installer, [*render(features=ALL), *dashboard_manifests(namespace)], how, namespace, yes=yes)
        return
    image = how.image or _current_image(running)
    if running and not how.webhook_to:
        webhooks = webhooks_of(running)
    flags = [*_flags(how, sharing_of(running) if running else []), *webhooks]
    features = _features(how, features_of(running) if running else ())
    wanted = render(image=image, flags=flags, features=features)
    gone = [item for item in render(features=ALL - features) if _is_of_feature(item)]
    gone += dashboard_manifests(namespace) if how.no_dashboard else []
    _roll_out(installer, [*wanted, *dashboard], gone, how, namespace)
    hint(f"Next: try it: elasticctl submit train.py --context {context.name}")


def _current_image(running: Manifest | None) -> str:
    """The image of the controller that is installed. Raises UsageError if there is none."""
    from elasticctl.kubeapi.installation import image_of

    image = image_of(running) if running else ""
    if not image:
        raise UsageError("--image is needed the first time. FIX: build it as docs/kubernetes.md says")
    if "@" not in image:
        _point_out_tag(image)
    return image


def _pin(image: str) -> str:
    """The image with its digest; unchanged, with a hint, if its registry does not answer."""
    from elasticctl.kubeapi.registry import RegistryError, pin

    try:
        return pin(image) if image else ""
    except RegistryError as e:
        _point_out_tag(image, f" ({e})")
        return image


def _point_out_tag(image: str, why_not: str = "") -> None:
    fix = "name it by its digest: IMAGE@sha256:…"
    hint(f"{image} is named by a tag, which can be moved to another image{why_not}. Next: {fix}")


def _roll_out(
    installer: Installer, wanted: list[Manifest], gone: list[Manifest], how: InstallOptions, namespace: str
) -> None:
    """Apply the objects, remove those that are no longer wanted, and wait for the rollout."""
    from elasticctl.kubeapi.installation import DASHBOARD, DEPLOYMENT

    left = installer.apply(wanted, confined=how.namespace_only)
    installer.remove(installer.present(gone))
    if left:
        say("Next: have an administrator of the cluster run this command once, unless one has, for what was left out")
    if not how.no_wait:
        for name in (DEPLOYMENT, DASHBOARD) if how.dashboard else (DEPLOYMENT,):
            installer.await_available(namespace, how.timeout, name)


def _dashboard(how: InstallOptions, namespace: str) -> list[Manifest]:
    """The objects of the shared dashboard, if requested. Raises UsageError for options that need it."""
    from elasticctl.kubeapi.installation import dashboard_manifests

    given = {"--allow-changes": how.dashboard_changes, "--behind-proxy": how.dashboard_proxy}
    if how.dashboard and how.no_dashboard:
        raise UsageError("--dashboard and --no-dashboard cannot be used together. FIX: leave one out")
    if not how.dashboard and any(given.values()):
        raise UsageError("--dashboard-changes and --dashboard-proxy are for the dashboard. FIX: add --dashboard IMAGE")
    flags = [flag for flag, wanted in given.items() if wanted]
    return dashboard_manifests(namespace, how.dashboard, flags) if how.dashboard else []


def _check_scope(installer: Installer, running: Manifest | None, namespace: str, how: InstallOptions) -> None:
    """Raise ConflictError if two controllers would run the same jobs, or one would change its scope."""
    from elasticctl.kubeapi.installation import watched_by

    if running and bool(watched_by(running)) is not how.namespace_only:
        is_for = f"for {namespace} alone" if watched_by(running) else "for the whole cluster"
        change = "add --namespace-only" if watched_by(running) else "leave out --namespace-only"
        raise ConflictError(f"the controller in {namespace} is {is_for}. FIX: {change}")
    if how.uninstall and how.namespace_only:
        return
    other = installer.other(namespace, confined=how.namespace_only)
    if other:
        raise ConflictError(
            f"a controller in {other} already runs the jobs that this one would run. FIX: uninstall it first: "
            f"elasticctl install --uninstall -n {other}"
        )


def _features(how: InstallOptions, running: Collection[Feature]) -> frozenset[Feature]:
    """The features to install: the `running` ones, unless others are given. Raises UsageError for an unknown one."""
    from elasticctl.kubeapi.features import FOR_THE_CLUSTER, RETIRED, Feature

    for name in (*how.feature, *how.no_feature):
        if name in RETIRED:
            raise UsageError(RETIRED[name])
        if name not in set(Feature):
            raise UsageError(f"there is no feature {quote(name)}. FIX: name one of {join_or(tuple(Feature))}")
    wanted = frozenset({*running, *map(Feature, how.feature)} - set(how.no_feature))
    if not how.namespace_only:
        return wanted | FOR_THE_CLUSTER
    if Feature.LIMITS in wanted and Feature.NODES not in wanted:
        raise UsageError("what a project spends is counted by its nodes' prices. FIX: add --feature nodes")
    return wanted


def _is_of_feature(manifest: Manifest) -> bool:
    from elasticctl.kubeapi.features import LABEL_FEATURE

    return LABEL_FEATURE in manifest["metadata"].get("labels", {})


def _webhooks(how: InstallOptions) -> list[str]:
    """The controller's flags for webhooks. Raises UsageError for an invalid network."""
    import ipaddress

    from elasticctl.kubeapi.installation import webhook_flags

    for host in how.webhook_to:
        try:
            ipaddress.ip_network(host if "/" in host else "::")
        except ValueError as e:
            raise UsageError(f"--webhook-to {host}: {e}. FIX: give a host, *.DOMAIN or a network") from e
    return webhook_flags([host for host in how.webhook_to if host != "any"])


def _flags(how: InstallOptions, running: Sequence[str] | None) -> list[str]:
    """The controller's flags for sharing: the `running` ones (None: unknown), unless others are given.

    Raises UsageError for capacities that are invalid or without effect.
    """
    from elasticctl.api.quota import POOLS
    from elasticctl.kubeapi.installation import capacity_of, sharing_flags

    for kind, slots in how.capacity:
        if kind not in POOLS or not (slots.isascii() and slots.isdigit()):
            raise UsageError(f"--capacity {kind}={slots}: KIND=N is needed, with a KIND of {join_or(POOLS)}")
    shares = bool(running) if how.sharing is None else how.sharing
    if how.capacity and not shares and (running is not None or how.sharing is False):
        raise UsageError("--capacity is for a cluster that shares. FIX: add --sharing")
    if not shares and not how.capacity:
        return []
    capacity = capacity_of(running or ()) | {kind: int(slots) for kind, slots in how.capacity}
    return sharing_flags({kind: slots for kind, slots in capacity.items() if slots})


def _uninstall(installer: Installer, wanted: list[Manifest], how: InstallOptions, namespace: str, *, yes: bool) -> None:
    from elasticctl.cluster.kube.install import name_of

    found = installer.inspect(wanted, confined=namespace if how.namespace_only else "")
    if not found.objects:
        say("elasticctl is not installed there")
        return
    if found.living and not (how.force or how.dry_run):
        what = "would be left without a controller" if how.namespace_only else "would end"
        raise ConflictError(
            f"{plural(len(found.living), 'job')} {what}: {', '.join(found.living[:3])}"
            f"{', …' if len(found.living) > 3 else ''}. FIX: cancel them first, or add --force"
        )
    for item in found.objects:
        emit(name_of(item))
    say("jobs and their definition stay" if how.namespace_only else _removal_line(found))
    if how.dry_run:
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("--uninstall removes all of this. FIX: add --yes to confirm")
        typer.confirm("Remove all of this?", abort=True, err=True)
    installer.remove(found.objects)


def _removal_line(found: Installed) -> str:
    jobs = f"{plural(len(found.jobs), 'job')}, {len(found.living)} of them not finished" if found.jobs else "no job"
    return f"with them {jobs}; checkpoints stay where they are"


def _print(manifests: list[Manifest]) -> None:
    from elasticctl.api.yamltext import dump_yaml

    emit("---\n".join(dump_yaml(item) for item in manifests))


_MARKS = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "-"}
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_OUTCOME_WIDTH, _NAME_WIDTH = 7, 10


@verb(app, "doctor")
def doctor(
    *,
    storage: Annotated[str, options.described("The storage to test; the context's own by default.", "URL")] = "",
    controller_namespace: Annotated[str, options.described("Where the controller was installed.")] = "",
    output: Annotated[
        Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format.")
    ] = "table",
    where: Where,
) -> int:
    """Check a context: the cluster, your permissions, its GPUs and spot nodes, and the storage for checkpoints.

    Each check that does not pass says what to do. The exit code is 1 if a check failed. Nothing is changed, except
    that an object is written to the storage and deleted again.

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
        emit(format_tabs(Table(("CHECK", "OUTCOME", "FOUND", "FIX"), rows)))
    return int(any(item.outcome == "failed" for item in checks))


def _checks(context: Context, namespace: str, storage: str, system: str) -> Iterator[Check]:
    """All checks of a context, as they are completed."""
    from elasticctl.doctor import Check, CheckOutcome
    from elasticctl.doctor.machine import check_storage
    from elasticctl.operations.storage_urls import storage_url

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
        fix = f"elasticctl config set-context {context.name} --storage URL"
        yield Check("storage", CheckOutcome.WARNING, "none is set: every submit has to name one", fix)


def _show(check: Check) -> None:
    """Print one check for a person, as soon as it is completed."""
    from elasticctl.terminal import console

    show_check(console(), check)


def show_check(screen: Console, check: Check) -> None:
    """Print a check, whose words stay in their column, and its fix, which can be copied as one line."""
    from rich.table import Table as RichTable
    from rich.text import Text

    outcome = check.outcome.value
    line = RichTable.grid(padding=(0, 2, 0, 0))
    line.add_column(width=_OUTCOME_WIDTH)
    line.add_column(min_width=_NAME_WIDTH, no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(Text(_MARKS[outcome], _STYLES[outcome]), Text(check.name), Text(check.says))
    screen.print(line)
    if check.mend:
        screen.print(Text(" " * (_OUTCOME_WIDTH + _NAME_WIDTH + 4) + f"-> {check.mend}"), soft_wrap=True)
