"""`scale`: how many workers a job should have, or which ones it should lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from elasticctl.cli import options
from elasticctl.cli.command import new_app, verb
from elasticctl.cli.options import Where
from elasticctl.cli.output import hint, say
from elasticctl.cli.target import reach
from elasticctl.errors import UsageError

app = new_app()


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for; exactly one field is set."""

    auto: Annotated[bool, typer.Option("--auto", help="As many as there is room for, within the job's bounds.")] = False

    to: Annotated[int | None, options.count("N workers in all.")] = None
    gpus: Annotated[int | None, options.count("N GPUs in all.")] = None
    add: Annotated[int | None, options.count("K workers more.", letter="K")] = None
    remove: Annotated[int | None, options.count("K workers fewer: those of the highest number.", letter="K")] = None
    remove_worker: Annotated[
        tuple[str, ...],
        typer.Option("--remove-worker", metavar="NAME", help="This very worker: its name or number."),
    ] = ()

    @property
    def clear(self) -> bool:
        """True when one thing was asked for, and no other."""
        return sum(map(bool, (self.auto, self.to, self.gpus, self.add, self.remove, self.remove_worker))) == 1


@verb(app, "scale")
def scale(
    *,
    job: options.Job,
    wish: Wish,
    wait: Annotated[bool, typer.Option("--wait", help="Return when that many workers run.")] = False,
    timeout: options.Timeout = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="With --timeout: go back to the size before when the time is up.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would change, or why it is refused.")
    ] = False,
    where: Where,
) -> int:
    """Change the number of workers of a running job; it goes on from where it is.

    \b
      elasticctl scale digits --to 4
      elasticctl scale digits --remove-worker 2 --wait
      elasticctl scale digits --add 4 --timeout 10m --rollback
      elasticctl scale digits --auto
    """
    _check(wish, wait, timeout, rollback)
    from elasticctl.cli import scaling

    target = reach(where)
    name = target.find(job)["metadata"]["name"]
    if dry_run:
        say(f"{name}: {scaling.foreseen(target, name, wish).words} (dry run: nothing is changed)")
        return 0
    change = scaling.apply(target, name, wish)
    say(f"{name}: {change.words}")
    if wait or rollback:
        code = scaling.await_workers(target, name, change.after, timeout, goes_on=not rollback)
        return scaling.roll_back(target, name, change) if rollback and code == scaling.TIMED_OUT else code
    hint(f"live: elasticctl status -w {name}")
    return 0


def _check(wish: Wish, wait: bool, timeout: int | None, rollback: bool) -> None:
    """Refuse what contradicts itself; UsageError."""
    if not wish.clear:
        raise UsageError("say how: one of --to N, --gpus N, --add K, --remove K, --remove-worker NAME, --auto")
    if rollback and timeout is None:
        raise UsageError("--rollback needs a time after which to go back: --timeout 10m")
    if timeout is not None and not (wait or rollback):
        raise UsageError("--timeout says how long to wait: add --wait, or --rollback to go back when the time is up")
    if wish.auto and (wait or rollback):
        raise UsageError("--auto takes what there is, now and later: there is no number to wait for")
