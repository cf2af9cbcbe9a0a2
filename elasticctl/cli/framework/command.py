"""How verbs are declared: Typer commands whose options may come in dataclasses, and groups that suggest near misses.

Such a dataclass may be one of `elasticctl.operations`, which knows nothing of Typer. Its parameter is then annotated
with a table of options: `flags: Annotated[JobFlags, JOB_OPTIONS]`. The table has what a command line needs of each
field, its help above all; the parser of a field's text is in the field's own annotation.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from elasticctl.api.text import did_you_mean, quote

COMPLETE_VAR = "_ELASTICCTL_COMPLETE"
"""The variable through which the shells' completion scripts ask."""
Debug = Annotated[bool, typer.Option("--debug", hidden=True)]
"""Every verb takes it, before or after its arguments; `main` looks for it, and the verb itself never sees it."""
_BEFORE_THE_VERB = ("context", "namespace")
_HELP = {"help_option_names": ["-h", "--help"]}
_NO_DEFAULT = inspect.Parameter.empty

F = TypeVar("F", bound=Callable[..., Any])
# Typer does not export the classes of the contexts and formatters that it hands to the methods below, so these are Any.


class Verb(TyperCommand):
    """A command with a usage line like kubectl's, whose help can list options in sections.

    `sections` maps a heading to the names of its parameters, in order; all others come under "Options". `unlisted`
    names parameters that help does not list, because the verb refuses them.
    """

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    unlisted: ClassVar[Collection[str]] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move options that come before the verb (`elasticctl --context prod list`) after it."""
        return super().parse_args(ctx, [*self._given_before(ctx), *args])

    def _given_before(self, ctx: Any) -> Iterator[str]:
        own = {param.name for param in self.params}
        given = ctx.find_root().params
        for name in _BEFORE_THE_VERB:
            if not given.get(name):
                continue
            if name in own:
                yield f"--{name}={given[name]}"
            elif not ctx.resilient_parsing:
                ctx.fail(f"{ctx.info_name} has no option --{name}.")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[OPTIONS] JOB`, or `[JOB]` where it may be left out."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        names = [(param.metavar or str(param.name).upper(), param.required) for param in arguments]
        return ["[OPTIONS]", *(name if required else f"[{name}]" for name, required in names)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the options only: the verb's description explains its arguments."""
        left = {
            param.name: param
            for param in self.get_params(ctx)
            if param.param_type_name == "option" and param.name not in self.unlisted
        }
        parts = {
            title: [left.pop(name) for name in names if name not in self.unlisted]
            for title, names in self.sections.items()
        }
        for title, params in (*parts.items(), ("Options", [*left.values()])):
            with formatter.section(title):
                formatter.write_dl([record for param in params if (record := _help_record(param, ctx))])


def _help_record(param: Any, ctx: Any) -> tuple[str, str] | None:
    """An option and what it does, and that it may be given several times; None for a hidden one.

    Of several long names, only the first is listed: the others are accepted because they were its names once.
    """
    shown = copy.copy(param)
    former = [name for name in param.opts if name.startswith("--")][1:]
    shown.opts = [name for name in param.opts if name not in former]
    record: tuple[str, str] | None = shown.get_help_record(ctx)
    if record is None or not param.multiple:
        return record
    return record[0], f"{record[1].removesuffix('.')}; repeatable."


class VerbGroup(TyperGroup):
    """A group that suggests a verb for a misspelt one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args[0] not in known and not ctx.resilient_parsing:
            ctx.fail(f"there is no verb {quote(args[0])}{verb_meant(args[0], known)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List each verb with the whole first sentence of its description."""
        verbs = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(verb.name or "", verb.get_short_help_str(limit=200)) for verb in verbs if verb])


def new_app(cls: type[VerbGroup] = VerbGroup, **settings: Any) -> typer.Typer:
    """A Typer app without rich, whose import takes longer than most verbs; `main` prints its errors."""
    return typer.Typer(
        cls=cls,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        subcommand_metavar="VERB [ARGS]...",
        context_settings=_HELP,
        **settings,
    )


def add_group(app: typer.Typer, name: str, about: str, cls: type[VerbGroup] = VerbGroup) -> typer.Typer:
    """Add a group of verbs to `app` and return it; without a verb, it prints its help."""
    group = new_app(cls=cls, help=about, callback=show_overview, invoke_without_command=True)
    app.add_typer(group, name=name)
    return group


def show_overview(ctx: typer.Context, debug: Debug = False) -> None:
    """Print the group's help when no verb is given."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def verb(app: typer.Typer, name: str, cls: type[Verb] = Verb) -> Callable[[F], F]:
    """Add a function to `app` as a verb; its parameters are described at `flatten`."""

    def register(function: F) -> F:
        app.command(name, cls=cls, context_settings=_HELP)(flatten(function))
        return function

    return register


@dataclass(frozen=True, slots=True)
class _Option:
    """An option for Typer, and the dataclass parameter of the verb that it is a field of ("": none)."""

    seen: inspect.Parameter
    owner: str
    as_tuple: bool


def flatten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt `function` to Typer: the fields of its dataclass parameters become options, and --debug is added.

    A parser may raise ValueError with a sentence, or typer.BadParameter.

    Values of `tuple[X, ...]`, which Typer supports only as lists, arrive as tuples.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups = {name: group for name, hint in hints.items() if (group := _group_of(hint)) is not None}
    options = [*_options(function, hints, groups), _option("debug", Debug, False, "")]

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        own: dict[str, Any] = {}
        fields: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for option in options:
            name = option.seen.name
            value = tuple(given[name] or ()) if option.as_tuple else given[name]
            if option.owner:
                fields.get(option.owner, own)[name] = value
        return function(**own, **{name: group.kind(**fields[name]) for name, group in groups.items()})

    call.__signature__ = inspect.Signature([option.seen for option in options])  # type: ignore[attr-defined]
    call.__annotations__ = {option.seen.name: option.seen.annotation for option in options}
    return call


@dataclass(frozen=True, slots=True)
class _OptionGroup:
    """A dataclass whose fields are options, with its table of options, if that is apart."""

    kind: Any
    table: Mapping[str, Any]


def _group_of(hint: Any) -> _OptionGroup | None:
    kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    return _OptionGroup(kind, notes[0] if notes else {}) if dataclasses.is_dataclass(kind) else None


def _options(
    function: Callable[..., Any], hints: dict[str, Any], groups: Mapping[str, _OptionGroup]
) -> Iterator[_Option]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            yield _option(name, hints[name], parameter.default, name)
            continue
        group = groups[name]
        inner = typing.get_type_hints(group.kind, include_extras=True)
        for field in dataclasses.fields(group.kind):
            default = _NO_DEFAULT if field.default is dataclasses.MISSING else field.default
            hint = _with_option(inner[field.name], group.table[field.name]) if group.table else inner[field.name]
            yield _option(field.name, hint, default, name)


def _with_option(hint: Any, option: Any) -> Any:
    """The type of a field with its option, which gets the parser that the field is annotated with."""
    kind, *parsers = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if parsers:
        option = copy.copy(option)
        option.parser = parsers[0]
    return Annotated[kind, option]


def _option(name: str, hint: Any, default: Any, owner: str) -> _Option:
    kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    as_tuple = typing.get_origin(kind) is tuple
    if as_tuple:
        items: Any = list[typing.get_args(kind)[0]]  # type: ignore[misc]  # known at run time only
        kind = items if default is _NO_DEFAULT else items | None
        default = None if default == () else default
    notes = [_with_safe_parser(note) for note in notes]
    annotation = Annotated[kind, *notes] if notes else kind
    seen = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return _Option(seen, owner, as_tuple)


def _with_safe_parser(note: Any) -> Any:
    """An option whose parser reports ValueError in its own words, and leaves defaults alone, which are values."""
    parse = getattr(note, "parser", None)
    if parse is None:
        return note

    def parse_typed(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except ValueError as e:
            raise typer.BadParameter(str(e)) from e

    changed = copy.copy(note)
    changed.parser = parse_typed
    return changed


# What others call it -> what it may be called here; the first that a group has is suggested, or all in a tuple.
_OTHER_WORDS: Mapping[str, tuple[str, ...]] = {
    "apply": ("submit", "set-context"),
    "attach": ("logs",),
    "diff": ("compare",),
    "connect": ("shell",),
    "cost": ("history",),
    "create": ("submit", "set-context", "new", "set"),
    "download": ("pull",),
    "enter": ("shell",),
    "evict": ("preempt",),
    "forward": ("port-forward",),
    "get": ("list", "get-contexts", "show"),
    "info": ("describe", "status", "show"),
    "interrupt": ("preempt",),
    "jobs": ("list",),
    "kill": ("cancel",),
    "launch": ("submit",),
    "log": ("logs",),
    "ls": ("list", "get-contexts"),
    "pause": ("suspend",),
    "ps": ("list",),
    "queue": ("list",),
    "remove": ("delete", "rm", "delete-context"),
    "restart": ("rerun",),
    "retry": ("rerun",),
    "rm": ("delete", "delete-context"),
    "delete": ("rm", "delete-context"),
    "run": ("submit",),
    "sbatch": ("submit",),
    "scancel": ("cancel",),
    "show": ("describe", "view"),
    "ssh": ("shell",),
    "squeue": ("list",),
    "start": ("submit", "status"),
    "stop": ("suspend", "down"),
    "tail": ("logs",),
    "terminate": ("cancel",),
    "nvidia-smi": ("top",),
    "usage": ("top",),
    "train": ("submit",),
    "unpause": ("resume",),
    "upload": ("submit",),
    "use": ("use-context",),
    "why": ("explain",),
}
_DESTRUCTIVE = ("cancel", "delete", "delete-context", "down", "move", "preempt", "prune", "rm")
"""Verbs that are suggested for their own names with a slip of the finger in them, never for another word."""
_A_SLIP = 0.85


def verb_meant(name: str, known: Sequence[str]) -> str:
    """` (did you mean "x"?)` with the verb that was probably meant by `name`, or nothing."""
    import difflib  # slow to import, and few command lines are wrong

    word = name.lower()[:100]
    for other in _OTHER_WORDS.get(word, ()):
        if other in known:
            more = ', or "cancel" to end it for good' if (word, other) == ("stop", "suspend") else ""
            return f' (did you mean "{other}"{more}?)'
    slips = difflib.get_close_matches(word, _DESTRUCTIVE, n=1, cutoff=_A_SLIP)
    if slips and slips[0] in known:
        return f' (did you mean "{slips[0]}"?)'
    return did_you_mean(name, [verb for verb in known if verb not in _DESTRUCTIVE])
