"""`config` and `template`: the contexts that jobs run in, and the templates that they are made from."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from elasticctl.api.errors import NotFoundError, TemplateError, UsageError
from elasticctl.api.goal import parse_order
from elasticctl.api.gpu_types import gpu_type, place
from elasticctl.api.text import did_you_mean, quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import add_group, new_app, verb
from elasticctl.cli.framework.completion import complete_context
from elasticctl.cli.framework.output import Table, emit, hint, print_data, print_plain, print_table
from elasticctl.operations.storage_urls import storage_url
from elasticctl.settings import contexts as configuration
from elasticctl.settings.contexts import Context, contexts_file, templates_folder, user_config
from elasticctl.terminal import say

app = new_app()
config = add_group(app, "config", "Manage contexts: the clusters that jobs run in.")

_COLUMNS = ("CURRENT", "NAME", "PROVIDER", "NAMESPACE", "STORAGE")
_WIDE = ("KUBE CONTEXT", "IMAGE", "GPUS")

Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete_context)]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a context to set; None: unchanged."""

    provider: Annotated[
        Literal["local", "aws", "gcp", "kubernetes"] | None,
        typer.Option("--provider", help="The provider of the machines."),
    ] = None
    kube_context: Annotated[str | None, options.described("The kubeconfig context that reaches the cluster.")] = None
    namespace: Annotated[str | None, options.described("The namespace for jobs.")] = None
    storage: Annotated[
        str | None,
        options.described("Jobs keep their state below this: s3://bucket/prefix, gs://bucket/prefix, a folder.", "URL"),
    ] = None
    image: Annotated[str | None, options.described("The container image of jobs.", "IMAGE")] = None
    service_account: Annotated[
        str | None,
        options.described("The Kubernetes service account of the workers, which gives them their cloud permissions."),
    ] = None
    gpu_type: Annotated[
        str | None, options.described("The GPU type that jobs use: t4, v100, a10g, l4, a100 or h100.", "TYPE")
    ] = None
    gpus_per_node: Annotated[int | None, options.count("GPUs per node; 0: the smallest node type.", low=0)] = None
    pools: Annotated[
        str | None,
        options.described("The pools that jobs ask for machines in, the best first: spot,on-demand.", "POOL,POOL..."),
    ] = None
    pool_wait: Annotated[
        int | None, options.time("How long workers wait in one pool before the next is asked; 10m by default.")
    ] = None
    notify_url_from: Annotated[
        str | None, options.described("Notify the webhook whose URL is in secret:KEY, file:PATH or env:NAME.", "REF")
    ] = None


@verb(config, "get-contexts")
def get_contexts(
    output: options.Output = "table",
) -> None:
    """List the contexts; * marks the current one."""
    found = user_config()
    if output == "name":
        for context in found.contexts:
            emit(context.name)
    elif output in ("table", "wide"):
        rows = [_row(each, each.name == found.current, wide=output == "wide") for each in found.contexts]
        print_table(Table((*_COLUMNS, *(_WIDE if output == "wide" else ())), rows))
        hint(
            "Next: add one: elasticctl config set-context NAME --provider aws   use one: elasticctl"
            " config use-context NAME"
        )
    else:
        print_data("ContextList", configuration.encode_config(found), output)


def _row(context: Context, current: bool, *, wide: bool) -> tuple[str, ...]:
    gpus = f"{context.gpu_type} {context.gpus_per_node or ''}".strip()
    more = (context.kube_context, context.image, gpus) if wide else ()
    return ("*" if current else "", context.name, context.provider, context.namespace, context.storage, *more)


@verb(config, "use-context")
def use_context(name: Name) -> None:
    """Set the current context, which is used unless you give --context."""
    changed = user_config().using(name)
    configuration.save_config(changed, contexts_file())
    say(f"jobs now run in context {changed.current}")


@verb(config, "set-context")
def set_context(name: Name, given: Fields) -> None:
    """Add a context or change some of its fields.

    An empty value removes a field: --pools ''.

    \b
      elasticctl config set-context prod --provider aws --storage s3://bucket/jobs
      elasticctl config set-context prod --gpu-type t4 --gpus-per-node 4
      elasticctl config set-context prod --pools spot,on-demand --pool-wait 5m
    """
    known = user_config()
    fields: dict[str, Any] = {field: value for field, value in dataclasses.asdict(given).items() if value is not None}
    if fields.get("gpu_type"):
        fields["gpu_type"] = gpu_type(fields["gpu_type"]).name
    if "pool_wait" in fields:
        fields["pool_wait_s"] = fields.pop("pool_wait")
    if fields.get("pools"):
        parse_order(fields["pools"])
    if fields.get("storage"):
        fields["storage"] = storage_url(fields["storage"], os.getcwd())
    if "namespace" in fields:
        configuration.check_namespace(fields["namespace"])
    old = next((context for context in known.contexts if context.name == name), None)
    if old is None and not re.fullmatch(r"[^\s,]+", name):
        raise UsageError(f"{quote(name)} cannot be the name of a context: names have no spaces and no commas")
    if old is None and "provider" not in fields:
        raise UsageError(f"context {name} is new. FIX: add --provider aws, gcp or kubernetes")
    context = dataclasses.replace(old, **fields) if old else Context(name, **fields)
    if context.gpu_type:
        kind = gpu_type(context.gpu_type)
        each = context.gpus_per_node or min(kind.nodes(context.provider), default=1)
        place(context.provider, kind, each, spot=True)
    if fields.get("notify_url_from"):
        from elasticctl.operations.manifest_changes import (
            notification_reference,  # not needed to read contexts
        )

        url_from = notification_reference(fields["notify_url_from"], context.provider)
        context = dataclasses.replace(context, notify_url_from=url_from)
    configuration.save_config(known.having(context), contexts_file())
    say(f"context {name} {'changed' if old else 'added'}")
    hint(f"Next: use it: elasticctl config use-context {name}")


@verb(config, "import")
def import_contexts(
    names: Annotated[tuple[str, ...], typer.Argument(metavar="KUBE_CONTEXT...")] = (),
) -> None:
    """Add contexts of kubeconfig: the named ones, or all new ones.

    \b
      elasticctl config import
      elasticctl config import my-eks-cluster
    """
    from elasticctl.settings.kubeconfig import kubeconfig_paths, read_contexts

    known = user_config()
    found = read_contexts(kubeconfig_paths())
    missing = [name for name in names if name not in found]
    if missing:
        near = did_you_mean(missing[0], found)
        paths = os.pathsep.join(map(str, kubeconfig_paths()))
        fix = "" if near else ". FIX: see `kubectl config get-contexts`"
        raise NotFoundError(f"no context {quote(missing[0])}{near} in {paths}{fix}")
    there = {context.kube_context for context in known.contexts}
    wanted = [found[name] for name in dict.fromkeys(names or found) if name not in there]
    for each in wanted:
        context = each.as_context({context.name for context in known.contexts})
        known = known.having(context)
        say(f"context {context.name} added: {context.provider}, namespace {context.namespace}")
    if not wanted:
        files = os.pathsep.join(map(str, kubeconfig_paths()))
        say("nothing to add: the contexts of kubeconfig are known already" if found else f"no contexts in {files}")
        return
    configuration.save_config(known, contexts_file())
    hint(
        "Next: set where checkpoints go: elasticctl config set-context NAME --storage s3://bucket/prefix --image IMAGE"
    )


@verb(config, "delete-context")
def delete_context(name: Name) -> None:
    """Delete a context; its jobs are not affected."""
    configuration.save_config(user_config().without(name), contexts_file())
    say(f"context {name} deleted")


@verb(config, "view")
def view(
    output: Annotated[Literal["yaml", "json"], typer.Option("-o", "--output", help="Output format.")] = "yaml",
) -> None:
    """Print the contexts file and where it is."""
    say(f"# {contexts_file()}")
    print_plain(configuration.encode_config(user_config()), output)


template = add_group(app, "template", "Manage the templates that jobs are rendered from: shipped ones, and your own.")


@verb(template, "list")
def list_templates(
    output: Annotated[
        Literal["table", "json", "yaml", "name"], typer.Option("-o", "--output", help="Output format.")
    ] = "table",
) -> None:
    """List the templates; your own template overrides a shipped one with the same name."""
    from elasticctl.templates import available_templates  # and with it Jinja, which `config` need not wait for

    found = available_templates(templates_folder())
    if output == "name":
        for each in found:
            emit(each.name)
        return
    if output != "table":
        known = [{"name": each.name, **({"path": str(each.path)} if each.path else {})} for each in found]
        print_data("TemplateList", {"templates": known}, output)
        return
    print_table(Table(("NAME", "FROM"), [(each.name, str(each.path or "shipped")) for each in found]))
    hint("Next: make your own: elasticctl template new NAME")


@verb(template, "show")
def show(name: Annotated[str, typer.Argument(metavar="NAME")] = "default") -> None:
    """Print a template."""
    from elasticctl.templates import find_template

    emit(find_template(name, templates_folder()).text)


@verb(template, "new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    base: Annotated[str, typer.Option("--from", metavar="NAME", help="The template to copy.")] = "default",
) -> None:
    """Copy a template to your own folder, to edit it there.

    \b
      elasticctl template new mine
      elasticctl submit train.py --template mine
    """
    from elasticctl.templates import SUFFIX, find_template

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}", name):
        raise UsageError(f"{quote(name)}: a template's name is letters, digits, '-' and '_'")
    text = find_template(base, templates_folder()).text
    path = templates_folder() / f"{name}{SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as e:
        raise TemplateError(f"{path} exists. FIX: edit it, or choose another name") from e
    emit(str(path))
    say(f"Next: edit it, then: elasticctl submit train.py --template {name}")
