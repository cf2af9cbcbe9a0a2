"""`template`: the shapes that jobs are made in."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

from elasticctl.api.errors import TemplateError, UsageError
from elasticctl.api.manifests import DEFAULT, SUFFIX, available_templates, find_template
from elasticctl.api.text import shown
from elasticctl.cli.framework.command import family, verb
from elasticctl.cli.framework.output import Table, emit, hint, print_data, print_table, say
from elasticctl.cli.framework.target import templates_folder

app, template = family("template", "The shapes that jobs are made in: shipped ones, and your own.")


@verb(template, "list")
def list_templates(
    output: Annotated[
        Literal["table", "json", "yaml", "name"], typer.Option("-o", "--output", help="How to print.")
    ] = "table",
) -> None:
    """List the templates; one of your own hides a shipped one of its name."""
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
    hint("make your own: elasticctl template new NAME")


@verb(template, "show")
def show(name: Annotated[str, typer.Argument(metavar="NAME")] = DEFAULT) -> None:
    """Print a template."""
    emit(find_template(name, templates_folder()).text)


@verb(template, "new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    base: Annotated[str, typer.Option("--from", metavar="NAME", help="The template to begin with.")] = DEFAULT,
) -> None:
    """Copy a template to your own folder, to be changed there.

    \b
      elasticctl template new mine
      elasticctl submit train.py --template mine
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}", name):
        raise UsageError(f"{shown(name)}: a template's name is letters, digits, '-' and '_'")
    text = find_template(base, templates_folder()).text
    path = templates_folder() / f"{name}{SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as e:
        raise TemplateError(f"{path} is there already; change it, or choose another name") from e
    emit(str(path))
    say(f"change it, then: elasticctl submit train.py --template {name}")
