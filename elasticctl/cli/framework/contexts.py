"""The contexts of this user, and the names that completion offers. Imports little: every `--help` imports it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from elasticctl.api.errors import ElasticctlError

if TYPE_CHECKING:
    from elasticctl.settings.contexts import Config


def contexts_file() -> Path:
    """The contexts file of this user."""
    from elasticctl.settings import contexts as settings

    return settings.contexts_file()


def templates_folder() -> Path:
    """The folder of this user's own job templates."""
    return contexts_file().with_name("templates")


def contexts() -> Config:
    """The contexts of this user."""
    from elasticctl.settings.contexts import load_config

    return load_config(contexts_file())


def complete_context(incomplete: str) -> list[str]:
    """The contexts whose names have this prefix; none if the contexts file cannot be read."""
    try:
        return [context.name for context in contexts().contexts if context.name.startswith(incomplete)]
    except ElasticctlError:
        return []


def complete_gpu_type(incomplete: str) -> list[str]:
    """The GPU types whose names begin like this."""
    from elasticctl.api.gpu_types import GPU_TYPES

    return [name for name in GPU_TYPES if name.startswith(incomplete)]


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """The jobs whose names have this prefix; none if the cluster does not answer."""
    try:
        names = _job_names(ctx.params.get("context") or "", ctx.params.get("namespace") or "")
        return [name for name in names if name.startswith(incomplete)]
    except ElasticctlError:
        return []


def _job_names(context_name: str, namespace: str) -> list[str]:
    """The names of the jobs; none if the local cluster is not running, as completion does not start it."""
    from elasticctl.cluster import connect
    from elasticctl.settings.contexts import LOCAL, check_namespace

    context = contexts().context(context_name)
    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths
        from elasticctl.cluster.local.supervisor import supervisor_info

        if supervisor_info(local_paths()) is None:
            return []
    jobs = connect(context).list_jobs(check_namespace(namespace or context.namespace))
    return [job["metadata"]["name"] for job in jobs]
