"""The flags for a job's goal: its deadline and its budget."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import UsageError
from elasticctl.api.goal import MAX_USD, Prefer
from elasticctl.api.text import quote
from elasticctl.cli.framework import options

_ZONE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_ZONES = 16


def _dollars(text: str) -> float:
    """200, 37.50 or $200."""
    try:
        amount = float(text.removeprefix("$"))
    except ValueError:
        amount = math.nan
    if not 0.01 <= amount <= MAX_USD:
        raise typer.BadParameter(f"{quote(text)} is not an amount in US dollars such as 200 or 37.50.")
    return round(amount, 2)


def _prefer(text: str) -> Prefer:
    """cost or time."""
    try:
        return Prefer(text)
    except ValueError as e:
        raise typer.BadParameter(f"{quote(text)} is neither cost nor time.") from e


def zones_of(text: str) -> tuple[str, ...]:
    """us-east-1a,us-east-1b. Raises UsageError."""
    found = tuple(dict.fromkeys(text.split(",")))
    if len(found) > _MOST_ZONES or not all(map(_ZONE.fullmatch, found)):
        raise UsageError(f"--zones {quote(text)} is not a list of zones such as us-east-1a,us-east-1b")
    return found


def budget_option(about: str) -> Any:
    """An option that takes US dollars."""
    return typer.Option(parser=_dollars, metavar="USD", help=about, show_default=False)


@dataclass(frozen=True, slots=True)
class ChangedGoal:
    """The flags that can be changed while a job runs."""

    finish_by: Annotated[str, options.text("Finish by this time: 36h, 18:00, 'Fri 18:00'.", "TIME")] = ""
    budget: Annotated[float | None, budget_option("The most to spend, in US dollars.")] = None
    prefer: Annotated[
        Prefer | None,
        typer.Option(
            "--prefer",
            parser=_prefer,
            metavar="<cost|time>",
            show_default=False,
            help="As cheap as possible (the default), or as early as possible.",
        ),
    ] = None

    def as_spec(self) -> dict[str, Any]:
        """The flags as in `spec.goal`. Raises UsageError for an invalid or past time."""
        found: dict[str, Any] = {}
        if self.finish_by:
            from elasticctl.cli.views.deadlines import seconds_until

            now = datetime.now().astimezone()
            found["finishBy"] = to_rfc3339(round(now.timestamp() + seconds_until(self.finish_by, now)))
        if self.budget is not None:
            found["budget"] = self.budget
        if self.prefer is not None:
            found["prefer"] = self.prefer.value
        return found


@dataclass(frozen=True, slots=True)
class GoalFlags(ChangedGoal):
    """The flags of `submit`."""

    work: Annotated[
        int | None,
        options.time(
            "With --finish-by or --budget: the expected training time at the largest size, until it is measured."
        ),
    ] = None
    zones: Annotated[
        str,
        options.text(
            "With --finish-by or --budget: use spot machines in one of these zones at a time.", "ZONE,ZONE..."
        ),
    ] = ""

    @property
    def has_goal(self) -> bool:
        """True if the number of workers is to be chosen for a deadline or a budget."""
        return bool(self.finish_by) or self.budget is not None
