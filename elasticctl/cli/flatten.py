"""Dataclasses as options: Typer makes an option of each parameter of a function, and a verb may have thirty.

Here a parameter may be a dataclass, whose annotated fields are the options; the verb gets it filled in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

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
