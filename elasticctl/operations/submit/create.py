"""Plans a new job, from a command or from a manifest, and creates it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from elasticctl.api import validation
from elasticctl.api.errors import ConflictError, ForbiddenError, TemplateError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.yamltext import parse_yaml
from elasticctl.cluster.base import Manifest
from elasticctl.operations.job_names import check_name, name_with_suffix, refuse_taken_name, taken_names
from elasticctl.operations.manifest_changes import (
    NO_NOTIFICATIONS,
    Settings,
    notification_reference,
    with_notifications,
    with_settings,
)
from elasticctl.operations.observer import SILENT, Observer
from elasticctl.operations.submit.goals import check_goal
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.operations.submit.job_request import JobRequest, job_spec, plan_lines, resolve
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import LOCAL, Context, templates_folder
from elasticctl_protocol import variables

if TYPE_CHECKING:
    from elasticctl.operations.submit.training_command import TrainingCommand
    from elasticctl.operations.workspace.workspace import Workspace
    from elasticctl.templates import Template

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class ManifestChanges:
    """What the user changes in a manifest: `settings` as of --set, and whom to notify ("": as the context says)."""

    settings: Settings = ()
    notify: str = ""


@dataclass(frozen=True, slots=True)
class CommandDraft:
    """A planned job that runs a command, rendered from its template."""

    request: JobRequest
    template: Template
    changes: ManifestChanges

    @property
    def name(self) -> str:
        """The job's name."""
        return self.request.name

    @property
    def name_is_made(self) -> bool:
        """True if the name may change if it is taken."""
        return self.request.name_is_made

    @property
    def doubt(self) -> str:
        """Why the job is probably not what was meant, and the command to type instead; the user has to confirm it."""
        return self.request.doubt

    def named(self, name: str) -> CommandDraft:
        """The same job under another name."""
        return dataclasses.replace(self, request=self.request.named(name))

    def manifest(self) -> Manifest:
        """The manifest to create. Raises SpecError, TemplateError."""
        from elasticctl.templates import render_manifest

        rendered = with_settings(render_manifest(job_spec(self.request), self.template), self.changes.settings)
        return with_notifications(rendered, self.changes.notify, self.request.context)

    def plan(self, manifest: Manifest) -> tuple[str, ...]:
        """What is going to run, and whether it meets its goal. Raises UsageError if it cannot."""
        return (*plan_lines(self.request), *check_goal(manifest, datetime.now().astimezone()))

    def workspace_of(self, manifest: Manifest, observer: Observer) -> Workspace | None:
        """The folder to send. Raises TemplateError if the template cannot bring it to the workers."""
        workspace = self.request.workspace
        if workspace is None or variables.WORKSPACE in hardware(ElasticJob.from_manifest(manifest)).env:
            return workspace
        name = self.template.name
        if self.request.context.provider == LOCAL:
            observer.report(
                f"no workspace is sent: the template {name} has no job.workspace; the script runs where it is"
            )
            return None
        raise TemplateError(
            f"the template {name} has no job.workspace, so the script would not get there: take the lines of"
            f" {variables.WORKSPACE} from `elasticctl template show default`, or give --no-workspace"
        )

    def send_workspace(self, manifest: Manifest, observer: Observer) -> None:
        """Upload the folder, unless it is there already."""
        workspace = self.workspace_of(manifest, observer)
        if workspace is not None:
            workspace.send(observer)

    def describe_workspace(self, manifest: Manifest, observer: Observer) -> None:
        """Report what would be uploaded."""
        workspace = self.workspace_of(manifest, observer)
        for line in workspace.plan_lines() if workspace is not None else ():
            observer.report(line)


@dataclass(frozen=True, slots=True)
class ManifestDraft:
    """A planned job whose manifest the user has written. `workspace` is its folder as it is now, if that is used."""

    written: Manifest
    workspace: Workspace | None = None
    name_is_made: bool = False
    doubt: str = ""

    @property
    def name(self) -> str:
        """The job's name."""
        name: str = self.written["metadata"]["name"]
        return name

    def named(self, name: str) -> ManifestDraft:
        """The same job: its name is not ours to change."""
        return self

    def manifest(self) -> Manifest:
        """The manifest to create."""
        return self.written

    def plan(self, manifest: Manifest) -> tuple[str, ...]:
        """Nothing: its author knows what is in it."""
        return ()

    def send_workspace(self, manifest: Manifest, observer: Observer) -> None:
        """Upload the folder, or the one that the manifest names, unless it is there already."""
        if self.workspace is not None:
            self.workspace.send(observer)
        elif hardware(ElasticJob.from_manifest(manifest)).env.get(variables.WORKSPACE):
            from elasticctl.operations.workspace.workspace import send_named_workspace

            send_named_workspace(manifest, observer)

    def describe_workspace(self, manifest: Manifest, observer: Observer) -> None:
        """Report what would be uploaded."""
        for line in self.workspace.plan_lines() if self.workspace is not None else ():
            observer.report(line)


Draft = CommandDraft | ManifestDraft


def plan_command(
    command: TrainingCommand,
    flags: JobFlags,
    context: Context,
    changes: ManifestChanges,
    *,
    template: str = "default",
    observer: Observer = SILENT,
) -> CommandDraft:
    """Plan a job that runs a command. Raises UsageError, SpecError or TemplateError."""
    from elasticctl.templates import find_template

    _check_notify(changes, context)
    shape = find_template(template, templates_folder())
    return CommandDraft(resolve(command, flags, context, observer), shape, changes)


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """The text of a manifest, and the file that it was read from; `-` is stdin.

    `name` and `namespace` replace those of the manifest unless they are blank. `same_code`: run the code that the
    manifest names, not that of its folder as it is now.
    """

    text: bytes
    path: str
    name: str = ""
    namespace: str = ""
    same_code: bool = False


def plan_manifest(
    file: ManifestFile, context: Context, changes: ManifestChanges, observer: Observer = SILENT
) -> ManifestDraft:
    """Plan the job that a manifest describes. Raises UsageError or SpecError."""
    _check_notify(changes, context)
    stdin = file.path == "-"
    document = parse_yaml(file.text, "stdin" if stdin else file.path)
    if isinstance(document.data, dict) and isinstance(document.data.get("metadata"), dict):
        metadata = document.data["metadata"]
        if file.name:
            metadata["name"] = check_name(file.name)
        metadata["namespace"] = file.namespace or metadata.get("namespace", context.namespace)
    if not changes.settings:
        validation.validate_manifest(document)
    manifest, workspace = with_settings(document.data, changes.settings), None
    if not file.same_code and hardware(ElasticJob.from_manifest(manifest)).env.get(variables.WORKSPACE):
        from elasticctl.operations.workspace.workspace import renew_workspace  # what packs a folder

        here = [Path.cwd()] if stdin else [Path.cwd(), Path(os.path.abspath(file.path))]
        manifest, workspace = renew_workspace(manifest, here, observer)
    return ManifestDraft(with_notifications(manifest, changes.notify, context), workspace)


def _check_notify(changes: ManifestChanges, context: Context) -> None:
    """Raise UsageError for an invalid reference before anything is packed or sent."""
    if changes.notify not in ("", NO_NOTIFICATIONS):
        notification_reference(changes.notify, context.provider)


def preview(draft: Draft, observer: Observer = SILENT) -> Manifest:
    """The manifest that would be created; reports the plan. Nothing is sent anywhere."""
    manifest = draft.manifest()
    for line in draft.plan(manifest):
        observer.report(line)
    draft.describe_workspace(manifest, observer)
    return manifest


def create(
    target: Target, draft: Draft, *, dry_run: bool = False, prepare: Callable[[Manifest], Manifest] | None = None
) -> Manifest:
    """Create the job, under another name if a generated one is taken; reports the plan.

    `prepare` changes each manifest before it is created. Raises ConflictError for a taken name.
    """
    taken = taken_names(target) if draft.name_is_made else set[str]()
    for left in reversed(range(_ATTEMPTS)):
        tried = draft
        if draft.name in taken:
            tried = draft.named(name_with_suffix(draft.name))
            target.observer.report(f"the name {draft.name} is taken: this job is named {tried.name}")
        try:
            return _create_as(target, tried, dry_run=dry_run, prepare=prepare)
        except ConflictError:
            # Someone else may have been faster.
            if not (draft.name_is_made and left):
                raise
            taken.add(tried.name)
    raise AssertionError("unreachable")


def _create_as(
    target: Target, draft: Draft, *, dry_run: bool, prepare: Callable[[Manifest], Manifest] | None
) -> Manifest:
    manifest = draft.manifest()
    for line in draft.plan(manifest):
        target.observer.report(line)
    if prepare is not None:
        manifest = prepare(manifest)
    if not draft.name_is_made:
        refuse_taken_name(target, manifest)
    _refuse_over_limit(target, manifest)
    if dry_run:
        draft.describe_workspace(manifest, target.observer)
    else:
        draft.send_workspace(manifest, target.observer)
    return target.cluster.create_job(manifest, dry_run=dry_run)


def _refuse_over_limit(target: Target, manifest: Manifest) -> None:
    """Raise SpecError for a job that its project does not allow, before anything is uploaded.

    If the user may not read quotas, the cluster refuses the job instead.
    """
    from elasticctl.api.quota import Quota, refuse_over_limit

    project = manifest["metadata"].get("namespace") or target.namespace
    try:
        quotas = target.cluster.list_quotas()
    except ForbiddenError:
        return
    known = {quota.project: quota for quota in map(Quota.from_manifest, quotas)}
    refuse_over_limit(manifest, known.get(project))
