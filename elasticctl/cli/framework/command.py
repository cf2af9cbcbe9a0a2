"""How verbs are declared, parsed and found: Typer commands and groups with this project's manners."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from elasticctl.api.text import did_you_mean, shown

if TYPE_CHECKING:
    # Typer hands these to the methods that a subclass overrides, and does not export them.
    from typer._click import Command, Context, HelpFormatter


COMPLETE_VAR = "_ELASTICCTL_COMPLETE"
"""Where the shells' completion scripts put what they ask for."""
_NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class _Option:
    """An option as Typer sees it, and the parameter of the verb that it goes to; "": none."""

    seen: inspect.Parameter
    whose: str
    as_tuple: bool


def flattened(function: Callable[..., Any], common: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` with a parameter for each option, and those of `common` (name -> annotation), which are flags and kept
    from it.

    Values of `tuple[X, ...]`, which Typer only knows as lists, arrive as tuples.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    options = [*_options(function, hints, groups), *(_option(name, hint, False, "") for name, hint in common.items())]

    @functools.wraps(function)
    def called(**given: Any) -> Any:
        own: dict[str, Any] = {}
        fields: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for option in options:
            name = option.seen.name
            value = tuple(given[name] or ()) if option.as_tuple else given[name]
            if option.whose:
                fields.get(option.whose, own)[name] = value
        return function(**own, **{name: kind(**fields[name]) for name, kind in groups.items()})

    called.__signature__ = inspect.Signature([option.seen for option in options])  # type: ignore[attr-defined]
    called.__annotations__ = {option.seen.name: option.seen.annotation for option in options}
    return called


def _options(function: Callable[..., Any], hints: dict[str, Any], groups: dict[str, Any]) -> Iterator[_Option]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            yield _option(name, hints[name], parameter.default, name)
            continue
        inner = typing.get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):
            default = _NO_DEFAULT if field.default is dataclasses.MISSING else field.default
            yield _option(field.name, inner[field.name], default, name)


def _option(name: str, hint: Any, default: Any, whose: str) -> _Option:
    kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    as_tuple = typing.get_origin(kind) is tuple
    if as_tuple:
        items: Any = list[typing.get_args(kind)[0]]  # type: ignore[misc]  # known at run time only
        hint = Annotated[items if default is _NO_DEFAULT else items | None, *notes]
        default = None if default == () else default
    seen = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
    return _Option(seen, whose, as_tuple)


F = TypeVar("F", bound=Callable[..., Any])


def _show_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        typer.echo(ctx.get_help())
        raise typer.Exit


# main() looks for it among the words; this makes it known to every verb.
Debug = Annotated[bool, typer.Option("--debug", hidden=True)]
# Typer's own has no default, and so is converted whenever it is absent: see Verb.parse_args.
Help = Annotated[
    bool,
    typer.Option("-h", "--help", is_eager=True, callback=_show_help, help="Show this message and exit."),
]


class Verb(TyperCommand):
    """A command that converts no more than it must, and whose help says what to type in one line.

    `sections`: of a verb with many options, heading -> the parameters below it, in their order.
    """

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse as Typer does, but take defaults, texts and choices as they are.

        Typer converts every value with pydantic (from its version 0.29). Importing that takes longer than most verbs
        do, and it refuses the file names that are not Unicode.
        """
        try:
            typed, rest, _ = self.make_parser(ctx).parse_args(args=args)
        except typer.TyperException as e:
            error: Any = e  # one about an option without its value does not say whose it is
            error.ctx = getattr(e, "ctx", None) or ctx
            raise
        hints = inspect.signature(self.callback or (lambda: None)).parameters
        for param in sorted(self.get_params(ctx), key=lambda param: not param.is_eager):
            value, source = param.consume_value(ctx, typed)
            given = source.name != "DEFAULT" and value != ()
            if given:
                ready = param.name in hints and _is_right(value, hints[param.name].annotation)
            else:
                ready = ctx.resilient_parsing or not param.required
            if not ready:
                param.handle_parse_result(ctx, typed, rest)
                continue
            ctx.set_parameter_source(param.name, source)
            if param.expose_value:
                ctx.params[param.name] = value
        if rest and not ctx.resilient_parsing:
            ctx.fail(f"unexpected argument {shown(rest[0])}.")
        ctx.args = rest
        return rest

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Arguments as kubectl and gh show them: `JOB`, and `[JOB]` where it may be left out."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        names = [(param.metavar or param.name.upper(), param.required) for param in arguments]
        return ["[OPTIONS]", *(name if required else f"[{name}]" for name, required in names)]

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """The options alone: what the arguments are is said above them, in a sentence."""
        left = {param.name: param for param in self.get_params(ctx) if param.param_type_name == "option"}
        parts = {title: [left.pop(name) for name in names] for title, names in self.sections.items()}
        for title, params in (*parts.items(), ("Options", [*left.values()])):
            records = [param.get_help_record(ctx) for param in params]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])


class Group(TyperGroup):
    """A group that suggests the verb that was meant."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not ctx.resilient_parsing:
            ctx.fail(f"there is no verb {shown(args[0])}{did_you_mean(args[0], known)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Each verb with the whole of its first sentence."""
        verbs = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(verb.name or "", verb.get_short_help_str(limit=200)) for verb in verbs if verb])


def family(name: str, about: str, cls: type[Group] = Group) -> tuple[typer.Typer, typer.Typer]:
    """A Typer app that has one group of verbs, and the group, to which verbs are added."""
    app = new_app()
    group = new_app(cls=cls, help=about, callback=overview, invoke_without_command=True)
    app.add_typer(group, name=name)
    return app, group


def new_app(cls: type[Group] = Group, **given: Any) -> typer.Typer:
    """A Typer app with plain help, quick to show, and without Typer's own way to print errors."""
    return typer.Typer(
        cls=cls,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_help_option=False,
        subcommand_metavar="VERB [ARGS]...",
        **given,
    )


def overview(ctx: typer.Context, debug: Debug = False, wants_help: Help = False) -> None:
    """Show the group's help when no verb is given."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def verb(app: typer.Typer, name: str, cls: type[Verb] = Verb) -> Callable[[F], F]:
    """Add a function to `app` as a verb; see `flattened` for the parameters that it may have."""

    def register(function: F) -> F:
        common = {"debug": Debug, "wants_help": Help}
        app.command(name, cls=cls, add_help_option=False)(flattened(function, common))
        return function

    return register


def _is_right(value: Any, hint: Any) -> bool:
    """True when a value from the command line is what its parameter wants: a text, or one of its choices."""
    kind, *notes = typing.get_args(hint) or (hint,)
    if any(getattr(note, "parser", None) for note in notes):
        return False
    if kind in (str, str | None, list[str], list[str] | None):
        return True
    literals = (kind, *typing.get_args(kind))
    return any(typing.get_origin(part) is Literal and value in typing.get_args(part) for part in literals)
