"""Typer's commands with our manners: dataclasses as options, values converted no more than needed, near misses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.main import get_command

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import add_group, flatten, new_app, verb
from elasticctl.operations.option_values import Assignment


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Paint:
    """A group of options."""

    colour: Annotated[Colour, typer.Option("--colour")] = Colour.RED
    coats: Annotated[int | None, options.count("How many.")] = None
    wet: Annotated[bool, typer.Option("--wet/--dry")] = True
    also: Annotated[tuple[Assignment, ...], options.assignments("--also", "A=B", "More.")] = ()


@dataclass(frozen=True, slots=True)
class Got:
    """What the verb was called with."""

    wall: str
    others: tuple[str, ...]
    paint: Paint
    finish: str | None


def parse(*args: str) -> Any:
    """What a verb with all kinds of parameters is given for `args`."""
    app = new_app()

    @verb(app, "paint")
    def paint(
        wall: Annotated[str, typer.Argument(metavar="WALL")],
        others: Annotated[tuple[str, ...], typer.Argument()] = (),
        finish: Annotated[Literal["matt", "gloss"] | None, typer.Option("--finish")] = None,
        *,
        paint: Paint,
    ) -> Any:
        return Got(wall, others, paint, finish)

    return get_command(app).main(list(args), prog_name="paint", standalone_mode=False)


@pytest.mark.parametrize(
    ("args", "got"),
    [
        (["a"], Got("a", (), Paint(), None)),
        (["a", "b", "c"], Got("a", ("b", "c"), Paint(), None)),
        (["a", "--", "-b", "--wet"], Got("a", ("-b", "--wet"), Paint(), None)),
        (["--coats", "2", "a", "--colour", "blue"], Got("a", (), Paint(Colour.BLUE, 2), None)),
        (["a", "--dry", "--finish=gloss"], Got("a", (), Paint(wet=False), "gloss")),
        (["a", "--also", "x=1", "--also", "y="], Got("a", (), Paint(also=(Assignment("x", "1"), ("y", ""))), None)),
        (["caf\udce9", "\udcff"], Got("caf\udce9", ("\udcff",), Paint(), None)),
        (["", "a b\n"], Got("", ("a b\n",), Paint(), None)),
        (["a", "--debug"], Got("a", (), Paint(), None)),
    ],
)
def test_values_arrive_in_their_types(args: list[str], got: Got) -> None:
    found = parse(*args)
    assert found == got
    assert type(found.paint.colour) is Colour


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Missing argument 'WALL'"),
        (["a", "--coats", "0"], '"0" is not a whole number of at least 1'),
        (["a", "--colour", "green"], "'green' is not one of 'red', 'blue'"),
        (["a", "--finish", "wet"], "'wet' is not one of 'matt', 'gloss'"),
        (["a", "--also", "x"], '"x" is not of the form A=B'),
        (["a", "--coats"], "requires an argument"),
    ],
)
def test_wrong_values_are_usage_errors(args: list[str], message: str) -> None:
    with pytest.raises(typer.TyperException) as caught:
        parse(*args)
    assert message in caught.value.format_message()
    assert caught.value.exit_code == 2


def test_help_comes_before_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--coats", "x", "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: paint [OPTIONS] WALL [OTHERS]")
    assert "--also A=B" in shown
    assert "--debug" not in shown


def test_a_verb_never_sees_debug() -> None:
    def plain(name: str) -> str:
        return name

    assert flatten(plain)(name="a", debug=True) == "a"


def test_a_group_without_a_verb_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app()
    paints = add_group(app, "paints", "Colours.")

    @verb(paints, "mix")
    def mix() -> None:
        """Mix two of the colours that there are into one that has not been there before, which takes a while."""

    assert get_command(app).main(["paints"], prog_name="shop", standalone_mode=False) is None
    shown = " ".join(capsys.readouterr().out.split())
    assert "Usage: shop paints [OPTIONS] VERB [ARGS]..." in shown
    assert "mix Mix two of the colours that there are into one that has not been there before, which takes" in shown
    with pytest.raises(typer.TyperException, match=r'there is no verb "mx" \(did you mean "mix"\?\)'):
        get_command(app).main(["paints", "mx"], prog_name="shop", standalone_mode=False)
