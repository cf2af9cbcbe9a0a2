"""The names that completion offers. Imports little: every `--help` imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from elasticctl.api.errors import ElasticctlError

if TYPE_CHECKING:
    from elasticctl.api.codec import Manifest
    from elasticctl.cluster.base import Cluster


def complete_context(incomplete: str) -> list[str]:
    """The contexts whose names have this prefix; none if the contexts file cannot be read."""
    from elasticctl.settings.contexts import user_config

    try:
        return [context.name for context in user_config().contexts if context.name.startswith(incomplete)]
    except ElasticctlError:
        return []


def complete_gpu_type(incomplete: str) -> list[str]:
    """The GPU types whose names begin like this."""
    from elasticctl.api.gpu_types import GPU_TYPES

    return [name for name in GPU_TYPES if name.startswith(incomplete)]


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """The jobs whose names have this prefix; none if the cluster does not answer."""
    try:
        cluster, namespace = _place(ctx)
        jobs = cluster.list_jobs(namespace) if cluster is not None else []
    except ElasticctlError:
        return []
    return _names(jobs, incomplete)


def complete_worker(ctx: typer.Context, incomplete: str) -> list[str]:
    """The workers of the job that is named before whose names have this prefix; none if the cluster does not answer."""
    try:
        cluster, namespace = _place(ctx)
        # While the value of an option is missing, Click leaves arguments here, and not in `params`.
        pods = cluster.list_pods(namespace, ctx.args[0]) if cluster is not None and ctx.args else []
    except ElasticctlError:
        return []
    return _names(pods, incomplete)


def _names(objects: list[Manifest], incomplete: str) -> list[str]:
    names = [str(found["metadata"]["name"]) for found in objects]
    return [name for name in names if name.startswith(incomplete)]


def _place(ctx: typer.Context) -> tuple[Cluster | None, str]:
    """The cluster that the options name, and the namespace; None if it is the local one and does not run.

    Completion does not start it.
    """
    from elasticctl.cluster import connect
    from elasticctl.settings.contexts import LOCAL, check_namespace, user_config

    context = user_config().context(ctx.params.get("context") or "")
    namespace = check_namespace(ctx.params.get("namespace") or context.namespace)
    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.cluster.local.supervisor_client import supervisor_info

        if supervisor_info(local_paths()) is None:
            return None, namespace
    return connect(context), namespace
