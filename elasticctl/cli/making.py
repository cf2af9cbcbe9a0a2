"""Make a manifest to submit: from a script and flags through a template, or from a file."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticctl import specfile
from elasticctl.cli import plan
from elasticctl.cli.output import say
from elasticctl.cli.settings import set_field
from elasticctl.cli.target import templates_folder
from elasticctl.cluster.base import Manifest
from elasticctl.config import LOCAL, Context
from elasticctl.errors import TemplateError, UsageError
from elasticctl.podtemplate import WORKSPACE_VARIABLE, hardware
from elasticctl.spec import ElasticJob, JobSpec
from elasticctl.wording import did_you_mean, shown

if TYPE_CHECKING:
    from elasticctl.cli.luggage import Luggage

Settings = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A job to be: its name, whether we made that up (another will do), and its manifest under a given name.

    `deliver` sends what goes along with the job of a manifest, or, told not to send, only says what that is.
    """

    name: str
    name_is_ours: bool
    make: Callable[[str], Manifest]
    deliver: Callable[[Manifest, bool], None]


def from_script(
    script: str, args: Sequence[str], request: plan.Request, context: Context, settings: Settings, *, template: str
) -> Draft:
    """A job that runs `script`; says the plan. Raises UsageError, SpecError or TemplateError."""
    from elasticctl.cli.money import plan_line, rate_of_spec
    from elasticctl.manifests import render
    from elasticctl.templates import find

    size = plan.size_of(request, context, _machine_gpus(context))
    spec = plan.job_spec(request, context, size, ())
    name = plan.check_name(request.name) if request.name else plan.name_from(script)
    shape = find(template, templates_folder())
    _check_secrets(spec, context)
    luggage = _luggage(script, request, context)
    spec = dataclasses.replace(spec, command=_command(script, args, context, luggage))
    if luggage is not None:
        spec = dataclasses.replace(spec, workspace=luggage.reference, workspace_from=str(luggage.folder))
    if size.note:
        say(size.note)

    def make(final_name: str) -> Manifest:
        final = _placed(dataclasses.replace(spec, name=final_name), request, context)
        say(plan.summary(final, context))
        one = rate_of_spec(final)
        if one is not None:
            say(plan_line(one, final.workers))
        return with_settings(render(final, shape), settings)

    return Draft(name, not request.name, make, _delivery(luggage, context, shape.name))


def from_file(path: str, settings: Settings, name: str, namespace: str, context: Context) -> Draft:
    """The job that a manifest file describes (`-`: stdin), under another name or in another namespace if one is given.

    Raises UsageError or SpecError.
    """
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    document = specfile.parse(text, "stdin" if path == "-" else path)
    if isinstance(document.data, dict) and isinstance(document.data.get("metadata"), dict):
        metadata = document.data["metadata"]
        if name:
            metadata["name"] = plan.check_name(name)
        metadata["namespace"] = namespace or metadata.get("namespace", context.namespace)
    if not settings:
        specfile.validate(document)
    manifest = with_settings(document.data, settings)

    def deliver(manifest: Manifest, send: bool) -> None:
        if send and hardware(ElasticJob.from_manifest(manifest)).env.get(WORKSPACE_VARIABLE):
            from elasticctl.cli.luggage import deliver_named

            deliver_named(manifest)

    return Draft(manifest["metadata"]["name"], False, lambda _: manifest, deliver)


def with_settings(manifest: Manifest, settings: Settings) -> Manifest:
    """The manifest with --set applied, checked again."""
    if settings:
        if not isinstance(manifest, dict):
            raise UsageError("--set needs a manifest that is a mapping")
        for path, value in settings:
            set_field(manifest, path, value)
        specfile.validate(specfile.Document(manifest, {}, "with --set"))
    return manifest


def _machine_gpus(context: Context) -> int:
    if context.provider != LOCAL:
        return 0
    from elasticctl.cluster.local.gpus import discover

    return len(discover(os.environ))


def _check_secrets(spec: JobSpec, context: Context) -> None:
    """Refuse a secret that this machine does not have; what is in a cluster is the cluster's to say."""
    wanted = [*((name, "") for name in spec.secrets), *spec.secret_env.values()]
    if context.provider != LOCAL or not wanted:
        return
    from elasticctl.cluster.local.paths import local_paths
    from elasticctl.cluster.local.secrets import Secrets

    kept = Secrets(local_paths())
    for name, key in wanted:
        values = kept.read(spec.namespace, name)
        if values is None or (key and key not in values):
            lacks = f"the secret {name} has no key {shown(key)}" if values is not None else f"there is no secret {name}"
            raise UsageError(f"--secret: {lacks}; set it: elasticctl secret set {name} {key or 'KEY'}")


def _luggage(script: str, request: plan.Request, context: Context) -> Luggage | None:
    """What goes along; None: nothing."""
    if not request.no_workspace:
        from elasticctl.cli.luggage import pack  # the rules of ignoring, and more that other verbs need not

        return pack(_existing(script), request, context)
    if request.workspace:
        raise UsageError("--workspace and --no-workspace contradict each other: give one of them")
    return None


def _delivery(luggage: Luggage | None, context: Context, template: str) -> Callable[[Manifest, bool], None]:
    """See Draft.deliver."""

    def deliver(manifest: Manifest, send: bool) -> None:
        if luggage is None:
            return
        if WORKSPACE_VARIABLE in hardware(ElasticJob.from_manifest(manifest)).env:
            luggage.send() if send else luggage.say_plan()
        elif context.provider == LOCAL:
            say(f"nothing goes along: the template {template} has no job.workspace; the script is run where it lies")
        else:
            raise TemplateError(
                f"the template {template} has no job.workspace, so the script would not get there: take the lines of"
                f" {WORKSPACE_VARIABLE} from `elasticctl template show default`, or say --no-workspace"
            )

    return deliver


def _command(script: str, args: Sequence[str], context: Context, luggage: Luggage | None) -> tuple[str, ...]:
    """What the launcher starts. On this machine: this very Python, and a script that exists."""
    if context.provider == LOCAL:
        path = _existing(script)
        return (str(path), *args) if _is_program(path) else (sys.executable, str(path), *args)
    if luggage is None:
        return ("python", script, *args)
    path = _existing(script)
    inside = luggage.within(path)
    return (f"./{inside}", *args) if _is_program(path) else ("python", inside, *args)


def _existing(script: str) -> Path:
    """The script's absolute path; UsageError when there is none."""
    path = Path(os.path.abspath(script))
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        near = did_you_mean(path.name, (found.name for found in path.parent.glob("*.py")))
        raise UsageError(f"the script {shown(script)} {what}{near}")
    return path


def _is_program(path: Path) -> bool:
    """Is it started as it is, and not by Python?"""
    return path.suffix != ".py" and os.access(path, os.X_OK)


def _placed(spec: JobSpec, request: plan.Request, context: Context) -> JobSpec:
    """The job with what depends on its name, and on where it was typed."""
    storage = new_storage(spec.name, request.storage, context)
    if not storage:
        raise UsageError(f"--storage is needed in context {context.name} (or set it: elasticctl config set-context)")
    return dataclasses.replace(spec, storage=storage, working_dir=os.getcwd() if context.provider == LOCAL else "")


def new_storage(name: str, given: str, context: Context) -> str:
    """Where a new job called `name` keeps its state: where it was told, or a new place below the context's own.

    "" where neither says. Raises UsageError for a URL of an unknown kind.
    """
    here = os.getcwd()
    unique = f"{name}-{secrets.token_hex(4)}"
    if given:
        return plan.storage_url(given, here)
    if context.storage:
        return plan.below(plan.storage_url(context.storage, here), unique)
    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths

        return (local_paths().storage / unique).as_uri()
    return ""
