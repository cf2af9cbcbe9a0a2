"""Makes the manifest to submit: from a script and flags through a template, or from a file."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from elasticctl.api import notifications, validation
from elasticctl.api.errors import TemplateError, UsageError
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import WORKSPACE_VARIABLE, hardware
from elasticctl.api.spec import ANNOTATION_NOTIFY, ElasticJob, JobSpec
from elasticctl.api.text import did_you_mean, quote
from elasticctl.api.yamltext import parse_yaml
from elasticctl.cli.framework.contexts import templates_folder
from elasticctl.cli.framework.output import say
from elasticctl.cli.submit import spec_from_flags
from elasticctl.cli.submit.check_module import check_module
from elasticctl.cli.submit.flags.job_flags import JobFlags
from elasticctl.cli.submit.flags.set_fields import Settings, with_settings
from elasticctl.cluster.base import Manifest
from elasticctl.settings.contexts import LOCAL, Context

if TYPE_CHECKING:
    from elasticctl.cli.submit.training_command import Command
    from elasticctl.cli.submit.upload.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Draft:
    """A planned job: its name, whether that was generated (and may change), and its manifest for a given name.

    `deliver` uploads the workspace of a manifest's job or, if told not to send, only describes it. `doubt` is why the
    job is probably not what was meant, with the command to type instead; the user has to confirm it.
    """

    name: str
    name_is_ours: bool
    make: Callable[[str], Manifest]
    deliver: Callable[[Manifest, bool], None]
    doubt: str = ""


def from_command(command: Command, request: JobFlags, context: Context, settings: Settings, *, template: str) -> Draft:
    """A job that runs a command; prints the plan. Raises UsageError, SpecError or TemplateError."""
    from elasticctl.cli.submit.goals import check_goal, price_goal
    from elasticctl.cli.views.cost import plan_line, rate_of_spec
    from elasticctl.templates import find_template, render_manifest

    request = spec_from_flags.with_asked(request, command.options, command.env)
    size = spec_from_flags.size_of(request, context, _machine_gpus(context))
    spec = spec_from_flags.job_spec(request, context, size, ())
    name = spec_from_flags.check_name(request.name) if request.name else spec_from_flags.name_from(command.named_after)
    shape = find_template(template, templates_folder())
    _check_secrets(spec, context)
    warnings = _check_script(command, request, ranks=size.workers * size.ranks_per_worker)
    workspace = _plan_workspace(command, request, context)
    spec = dataclasses.replace(spec, command=_words(command, context, workspace))
    if not command.script and "PYTHONPATH" not in spec.env and (workspace is not None or context.provider == LOCAL):
        folder = workspace.folder if workspace is not None else Path.cwd()
        check_module(spec.command, folder, on_this_python=context.provider == LOCAL and not request.setup)
    if workspace is not None:
        spec = dataclasses.replace(spec, workspace=workspace.reference, workspace_from=str(workspace.folder))
    doubt = spec_from_flags.doubt_of(size, request)
    notes = (*command.notes, *warnings, "" if doubt else size.note, spec_from_flags.unused_note(request, context))
    for note in notes:
        if note:
            say(note)

    def make(final_name: str) -> Manifest:
        final = _with_storage(dataclasses.replace(spec, name=final_name), request, context)
        say(spec_from_flags.plan_summary(final, context))
        one = rate_of_spec(final)
        if one is not None:
            say(plan_line(one, final.workers))
        if final.goal:
            final = dataclasses.replace(final, goal=price_goal(final))
        manifest = with_settings(render_manifest(final, shape), settings)
        for line in check_goal(manifest, datetime.now().astimezone()):
            say(line)
        return manifest

    return Draft(name, not request.name, make, _delivery_of(workspace, context, shape.name), doubt)


def _check_script(command: Command, request: JobFlags, *, ranks: int) -> tuple[str, ...]:
    """What is to be said about a script before it runs on several ranks. Raises UsageError for what cannot run so."""
    from elasticctl.cli.submit.flags.script_warnings import (
        lines_of_bad_syntax,
        lines_of_lone_ranks,
        lines_without_checkpoints,
    )
    from elasticctl.cli.submit.training_command import refuse_notebook, refuse_other_groups

    refuse_notebook(command)
    if request.launcher:
        spec_from_flags.check_launcher(request)
        return (spec_from_flags.LAUNCHER_NOTE,)
    refuse_other_groups(command)
    return lines_of_bad_syntax(command) or lines_of_lone_ranks(command, ranks) or lines_without_checkpoints(command)


def from_file(
    path: str, settings: Settings, name: str, namespace: str, context: Context, *, same_code: bool = False
) -> Draft:
    """The job that a manifest file describes (`-`: stdin), under another name or in another namespace if one is given.

    Its workspace is the folder as it is now, if that exists, unless `same_code`.

    Raises UsageError or SpecError.
    """
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    document = parse_yaml(text, "stdin" if path == "-" else path)
    if isinstance(document.data, dict) and isinstance(document.data.get("metadata"), dict):
        metadata = document.data["metadata"]
        if name:
            metadata["name"] = spec_from_flags.check_name(name)
        metadata["namespace"] = namespace or metadata.get("namespace", context.namespace)
    if not settings:
        validation.validate_manifest(document)
    manifest, workspace = with_settings(document.data, settings), None
    if not same_code and hardware(ElasticJob.from_manifest(manifest)).env.get(WORKSPACE_VARIABLE):
        from elasticctl.cli.submit.renew_workspace import renew_workspace  # what packs a folder

        here = [Path.cwd()] if path == "-" else [Path.cwd(), Path(os.path.abspath(path))]
        manifest, workspace = renew_workspace(manifest, here)

    def deliver(manifest: Manifest, send: bool) -> None:
        if workspace is not None:
            workspace.send() if send else workspace.say_plan()
        elif send and hardware(ElasticJob.from_manifest(manifest)).env.get(WORKSPACE_VARIABLE):
            from elasticctl.cli.submit.upload.workspace import send_named_workspace

            send_named_workspace(manifest)

    return Draft(manifest["metadata"]["name"], False, lambda _: manifest, deliver)


def _machine_gpus(context: Context) -> int:
    if context.provider != LOCAL:
        return 0
    from elasticctl.cluster.local.capacity import discover_gpus

    return len(discover_gpus(os.environ))


def _check_secrets(spec: JobSpec, context: Context) -> None:
    """Raise UsageError for a secret that this machine lacks; a cluster checks its own."""
    wanted = [*((name, "") for name in spec.secrets), *spec.secret_env.values()]
    if context.provider != LOCAL or not wanted:
        return
    from elasticctl.cluster.local.paths import local_paths
    from elasticctl.cluster.local.secrets import Secrets

    kept = Secrets(local_paths())
    for name, key in wanted:
        values = kept.read(spec.namespace, name)
        if values is None or (key and key not in values):
            lacks = f"the secret {name} has no key {quote(key)}" if values is not None else f"there is no secret {name}"
            raise UsageError(f"--secret: {lacks}. FIX: elasticctl secret set {name} {key or 'KEY'}")


def _plan_workspace(command: Command, request: JobFlags, context: Context) -> Workspace | None:
    """The workspace of the job; None if it has none."""
    if not request.no_workspace:
        from elasticctl.cli.submit.upload.workspace import (
            plan_workspace,  # the rules of ignoring, and more that other verbs need not
        )

        return plan_workspace(_existing_script(command.script) if command.script else Path.cwd(), request, context)
    if request.workspace:
        raise UsageError("--workspace and --no-workspace cannot be used together. FIX: give one of them")
    return None


def _delivery_of(workspace: Workspace | None, context: Context, template: str) -> Callable[[Manifest, bool], None]:
    """See Draft.deliver."""

    def deliver(manifest: Manifest, send: bool) -> None:
        if workspace is None:
            return
        if WORKSPACE_VARIABLE in hardware(ElasticJob.from_manifest(manifest)).env:
            workspace.send() if send else workspace.say_plan()
        elif context.provider == LOCAL:
            say(f"no workspace is sent: the template {template} has no job.workspace; the script runs where it is")
        else:
            raise TemplateError(
                f"the template {template} has no job.workspace, so the script would not get there: take the lines of"
                f" {WORKSPACE_VARIABLE} from `elasticctl template show default`, or give --no-workspace"
            )

    return deliver


def _words(command: Command, context: Context, workspace: Workspace | None) -> tuple[str, ...]:
    """The command that the launcher starts; on this machine, with this Python, and a script or program that exists."""
    from elasticctl.cli.submit.training_command import interpreter_of

    local, args = context.provider == LOCAL, command.args
    if not command.script:
        return _program_here(args, workspace) if local else args
    if not local and workspace is None:
        return ("python", command.script, *args)
    path = _existing_script(command.script)
    named = str(path) if local else workspace.within(path) if workspace is not None else command.script
    if _is_program(path):
        return (named if local else f"./{named}", *args)
    interpreter = interpreter_of(path)
    if interpreter and workspace is not None:  # in the copy, whose files it names by their relative paths
        return (*interpreter, workspace.within(path), *args)
    return (*(interpreter or (sys.executable if local else "python",)), named, *args)


def _program_here(words: tuple[str, ...], workspace: Workspace | None) -> tuple[str, ...]:
    """A command with the path of its program on this machine. Raises UsageError if it does not exist."""
    if words[0] in ("python", "python3"):
        return (sys.executable, *words[1:])
    if shutil.which(words[0]) is None:
        where = f" in {workspace.folder}" if workspace is not None and os.sep in words[0] else ""
        raise UsageError(f"there is no program {quote(words[0])}{where}. FIX: give a script, or a command after `--`")
    return words


def _existing_script(script: str) -> Path:
    """The script's absolute path. Raises UsageError if it does not exist."""
    path = Path(os.path.abspath(script))
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        near = did_you_mean(path.name, (found.name for found in path.parent.glob("*.py")))
        raise UsageError(f"the script {quote(script)} {what}{near or '. FIX: correct its path'}")
    return path


def _is_program(path: Path) -> bool:
    """True if it is started directly, without Python."""
    return path.suffix != ".py" and os.access(path, os.X_OK)


def _with_storage(spec: JobSpec, request: JobFlags, context: Context) -> JobSpec:
    """The job with the fields that depend on its name and on the current folder."""
    storage = choose_storage(spec.name, request.storage, context)
    if not storage:
        raise spec_from_flags.needed_error("--storage", context)
    return dataclasses.replace(spec, storage=storage, working_dir=os.getcwd() if context.provider == LOCAL else "")


def choose_storage(name: str, given: str, context: Context) -> str:
    """Where a new job called `name` keeps its state: the given place, or a new one below the context's storage.

    "" if neither is given. Raises UsageError for a URL of an unknown kind.
    """
    here = os.getcwd()
    unique = f"{name}-{secrets.token_hex(4)}"
    if given:
        return spec_from_flags.storage_url(given, here)
    if context.storage:
        return spec_from_flags.child_url(spec_from_flags.storage_url(context.storage, here), unique)
    if context.provider == LOCAL:
        from elasticctl.cluster.local.paths import local_paths

        return (local_paths().storage / unique).as_uri()
    return ""


NO_NOTIFICATIONS = "none"


def notification_reference(text: str, provider: str) -> str:
    """The reference as it is stored, with an absolute path. Raises UsageError for an invalid one."""
    kind, _, name = text.partition(":")
    if kind == "file" and name:
        text = f"file:{os.path.abspath(os.path.expanduser(name))}"
    found = notifications.parse_reference(text)
    if found.local_only and provider != LOCAL:
        raise UsageError(
            f"{found.kind}: is for the local cluster: on Kubernetes give the KEY of the secret"
            f" {notifications.SECRET} that holds the URL"
            f" (kubectl create secret generic {notifications.SECRET} --from-file=KEY=FILE)"
        )
    return str(found)


def with_notifications(draft: Draft, wanted: str, context: Context) -> Draft:
    """The draft with its notifications set as `manifest_with_notifications` describes. Raises UsageError."""
    if wanted not in ("", NO_NOTIFICATIONS):
        notification_reference(wanted, context.provider)  # refused before anything is packed or sent
    return dataclasses.replace(draft, make=lambda name: manifest_with_notifications(draft.make(name), wanted, context))


def manifest_with_notifications(manifest: Manifest, wanted: str, context: Context) -> Manifest:
    """The manifest with notifications to `wanted`, or else its own, or else the context's.

    Raises UsageError.
    """
    value = ""
    if wanted != NO_NOTIFICATIONS:
        given = notification_reference(wanted, context.provider) if wanted else ""
        value = given or at(manifest, "metadata", "annotations", ANNOTATION_NOTIFY) or context.notify_url_from
    metadata = manifest["metadata"]
    others = {key: item for key, item in (metadata.get("annotations") or {}).items() if key != ANNOTATION_NOTIFY}
    annotations = {**others, **({ANNOTATION_NOTIFY: value} if value else {})}
    kept = {key: item for key, item in metadata.items() if key != "annotations"}
    return {**manifest, "metadata": {**kept, **({"annotations": annotations} if annotations else {})}}
