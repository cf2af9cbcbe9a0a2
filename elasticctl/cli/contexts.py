"""`config`: the places jobs can run at."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from elasticctl import config as configuration
from elasticctl.catalog import gpu_type
from elasticctl.cli import options
from elasticctl.cli.output import Table, emit, hint, print_table, say
from elasticctl.cli.target import contexts, contexts_file
from elasticctl.config import PROVIDERS, Context
from elasticctl.errors import UsageError

NAME = click.argument("name", shell_complete=options.complete_context)


@click.group()
@options.bare
def config() -> None:
    """Choose and describe the places to run jobs at."""


@config.command("get-contexts")
@click.option("-o", "--output", "form", type=click.Choice(["table", "json", "yaml", "name"]), default="table")
@options.bare
def get_contexts(form: str) -> None:
    """List the contexts; * marks the one that is used when none is named."""
    found = contexts()
    if form == "name":
        for context in found.contexts:
            emit(context.name)
    elif form == "table":
        rows = [
            ("*" if each.name == found.current else "", each.name, each.provider, each.namespace, each.storage)
            for each in found.contexts
        ]
        print_table(Table(("CURRENT", "NAME", "PROVIDER", "NAMESPACE", "STORAGE"), rows))
        hint(
            "another one: elasticctl config set-context NAME --provider aws; use it: elasticctl config use-context NAME"
        )
    else:
        _print_data(configuration.encode(found), form)


@config.command("use-context")
@NAME
@options.bare
def use_context(name: str) -> None:
    """Run jobs there from now on, unless --context says otherwise."""
    changed = contexts().using(name)
    configuration.save(changed, contexts_file())
    say(f"jobs now run in context {changed.current}")


@config.command("set-context")
@NAME
@click.option("--provider", type=click.Choice(PROVIDERS), help="Whose machines these are.")
@click.option("--kube-context", metavar="NAME", help="The context of kubeconfig that reaches the cluster.")
@click.option("--namespace", metavar="NAME", help="The namespace for jobs.")
@click.option("--storage", metavar="URL", help="Where jobs keep their state: s3://bucket/prefix, gs://bucket/prefix")
@click.option("--image", metavar="IMAGE", help="The container image of jobs.")
@click.option("--gpu-type", metavar="TYPE", help="The GPUs jobs use: t4, v100, a10g, l4, a100, h100")
@click.option("--gpus-per-node", type=options.Whole(0), metavar="N", help="How many GPUs a node has.")
@options.bare
def set_context(name: str, **given: Any) -> None:
    """Add a context or change some of its fields."""
    known = contexts()
    fields = {field: value for field, value in given.items() if value is not None}
    if fields.get("gpu_type"):
        fields["gpu_type"] = gpu_type(fields["gpu_type"]).name
    old = next((context for context in known.contexts if context.name == name), None)
    if old is None and "provider" not in fields:
        raise UsageError(f"context {name} is new: say --provider aws or --provider gcp")
    context = dataclasses.replace(old, **fields) if old else Context(name, **fields)
    configuration.save(known.having(context), contexts_file())
    say(f"context {name} {'changed' if old else 'added'}")
    hint(f"use it: elasticctl config use-context {name}")


@config.command("delete-context")
@NAME
@options.bare
def delete_context(name: str) -> None:
    """Forget a context; its jobs are left alone."""
    configuration.save(contexts().without(name), contexts_file())
    say(f"context {name} deleted")


@config.command("view")
@click.option("-o", "--output", "form", type=click.Choice(["yaml", "json"]), default="yaml")
@options.bare
def view(form: str) -> None:
    """Print the contexts file and where it is."""
    say(f"# {contexts_file()}")
    _print_data(configuration.encode(contexts()), form)


def _print_data(data: Any, form: str) -> None:
    if form == "json":
        import json

        emit(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        from elasticctl.yamltext import dump

        emit(dump(data))
