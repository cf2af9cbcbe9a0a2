"""`simulate`: forecast time, cost and goodput of a job on other numbers of GPUs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.text import quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.output import emit, on_terminal, print_data, print_table
from elasticctl.cli.framework.place import Where, locate, reach
from elasticctl.operations.option_values import duration
from elasticctl.operations.submit.job_flags import seconds_until
from elasticctl.terminal import say

if TYPE_CHECKING:
    from elasticctl.api.observed.cost import Rate
    from elasticctl.cli.views.simulation import Basis
    from elasticctl.simulation import Forecast

app = new_app()


def parse_gpu_counts(text: str) -> tuple[int, ...]:
    """`4,8,16` -> the numbers in ascending order, 64 at most. Raises UsageError."""
    parts = text.split(",")
    if len(parts) > 64 or not all(part.isascii() and part.isdigit() and 0 < int(part) <= 100_000 for part in parts):
        raise UsageError(f"--gpus {quote(text)} is not a list of numbers of GPUs. FIX: give one such as 4,8,16")
    return tuple(sorted(set(map(int, parts))))


def parse_pause(text: str) -> float:
    """`250ms` or a duration -> seconds."""
    number = text.removesuffix("ms")
    if number != text and number.isascii() and number.isdigit() and len(number) < 10:
        return int(number) / 1000
    return float(duration(text))


@dataclass(frozen=True, slots=True)
class SimulatedSizes:
    """The sizes to consider, and the amount of work."""

    table: Annotated[str, options.described("A file with a line for each size: number of GPUs, rate.", "FILE")] = ""
    gpus: Annotated[str, options.described("The numbers of GPUs to consider: 4,8,16.", "N,N...")] = ""
    gpus_per_node: Annotated[int | None, options.count("GPUs per node.")] = None
    gpu_type: Annotated[str, options.described("t4, v100, a10g, l4, a100 or h100: for the price.", "TYPE")] = ""
    work: Annotated[
        int | None,
        options.time("How long the job takes without interruptions at the smallest known size; 1d by default."),
    ] = None


@dataclass(frozen=True, slots=True)
class Assumed:
    """Assumptions for what is not measured; given options take precedence over measurements."""

    interrupted_every: Annotated[
        int | None, options.time("How long one spot node lasts on average; 24h by default.")
    ] = None
    recovery: Annotated[int | None, options.time("The time from a loss to the next step; 30s by default.")] = None
    replacement: Annotated[int | None, options.time("The time until a replacement node starts; 5m by default.")] = None
    save_cost: Annotated[
        float | None,
        typer.Option(parser=parse_pause, metavar="TIME", help="How long a save stops training; 100ms by default."),
    ] = None
    save_every: Annotated[int | None, options.time("The time between saves; by default chosen as in training.")] = None


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline, the budget, and the recorded spot machines."""

    finish_by: Annotated[
        str, options.described("Replay this deadline on --traces: 36h, 18:00, 'Fri 18:00'.", "TIME")
    ] = ""
    budget: Annotated[float | None, typer.Option(metavar="USD", help="The most to spend, in US dollars.")] = None
    traces: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Recorded availability of spot machines, one file per zone.")
    ] = None


@verb(app, "simulate")
def simulate(
    *,
    job: options.MaybeJob = None,
    size: SimulatedSizes,
    assumed: Assumed,
    deadline: Deadline,
    output: Annotated[
        Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format.")
    ] = "table",
    where: Where,
) -> None:
    """Forecast time, cost and goodput of a job on other numbers of GPUs, on spot and on demand.

    The scaling curve comes from measurements of JOB's groups of different sizes, or from a table. Below the result,
    the output says what was measured and what is assumed.

    \b
      elasticctl simulate digits
      elasticctl simulate --table rates.csv --gpus 4,16,64 --gpu-type t4
      elasticctl simulate digits --finish-by 'Fri 18:00' --traces traces/
    """
    from elasticctl.cli.views import simulation

    if size.work == 0:
        raise UsageError("--work 0s: must be longer than 0s")
    if (job is None) == (not size.table):
        raise UsageError("give either a job or a scaling curve with --table FILE")
    if bool(deadline.finish_by) != (deadline.traces is not None) or (deadline.budget and not deadline.finish_by):
        raise UsageError("--finish-by and --traces go together, and --budget with both")
    if deadline.budget is not None and not 0 < deadline.budget < math.inf:
        raise UsageError(f"--budget {deadline.budget:g}: must be above 0")
    basis = _basis_of_table(size, assumed, where) if job is None else _basis_of_job(job, size, assumed, where)
    outlooks = simulation.outlooks(basis, parse_gpu_counts(size.gpus) if size.gpus else ())
    if deadline.finish_by:
        _replay(basis, outlooks, deadline, output)
        return
    if output != "table":
        print_data("Simulation", simulation.as_data(basis, outlooks), output)
        return
    print_table(simulation.table(basis, outlooks))
    if on_terminal():
        bar = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
        emit("\n" + "\n".join(simulation.plot(basis, outlooks, bar)) + "\n\n")
    for line in simulation.notes(basis, outlooks):
        say(line)


def _replay(basis: Basis, outlooks: Sequence[Forecast], deadline: Deadline, output: str) -> None:
    from datetime import datetime

    from elasticctl.cli.views import deadlines, simulation

    folder = deadline.traces or Path()
    finish_by_s = seconds_until(deadline.finish_by, datetime.now().astimezone())
    gpus = [item.gpus for item in outlooks]
    found = deadlines.prospects_of(basis, gpus, folder, finish_by_s, deadline.budget)
    if output != "table":
        data = simulation.as_data(basis, outlooks) | {"deadlines": deadlines.as_data(found)}
        print_data("Simulation", data, output)
        return
    print_table(deadlines.table(basis, found))
    for line in deadlines.notes(basis, found, folder):
        say(line)


def _basis_of_table(size: SimulatedSizes, assumed: Assumed, where: Where) -> Basis:
    from elasticctl.api.gpu_types import gpu_type
    from elasticctl.api.observed.cost import rate
    from elasticctl.cli.views.simulation import basis_of_table
    from elasticctl.operations.prices import with_live_spot
    from elasticctl.simulation import scaling

    try:
        text = Path(size.table).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read {size.table}: {getattr(e, 'strerror', None) or 'it is not text'}") from e
    points = scaling.parse_points(text, size.table)
    context, _ = locate(where)
    price: Rate | None = None
    each = size.gpus_per_node or context.gpus_per_node or 1
    name = size.gpu_type or context.gpu_type
    if name:
        kind = gpu_type(name)
        shapes = kind.nodes(context.provider)
        if not size.gpus_per_node and not context.gpus_per_node and shapes:
            each = min(shapes)
        price = with_live_spot(rate(context.provider, shapes.get(each, ()), kind.name, each))
    return basis_of_table(points, size.work, _given_conditions(assumed, each), price)


def _basis_of_job(name: str, size: SimulatedSizes, assumed: Assumed, where: Where) -> Basis:
    from elasticctl.api.observed.cost import rate_of
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.simulation import basis_of_job
    from elasticctl.operations.prices import with_live_spot
    from elasticctl.simulation import evidence_of

    if size.gpu_type or size.gpus_per_node:
        flag = "--gpu-type" if size.gpu_type else "--gpus-per-node"
        raise UsageError(f"{flag} goes with --table: a job knows its own nodes")
    job = ElasticJob.from_manifest(reach(where).find(name))
    evidence = evidence_of(job, time.time())
    if not evidence.points:
        raise UsageError(f"{job.name} has no measured rate yet: that takes 10 steps. FIX: wait, or give --table FILE")
    return basis_of_job(
        job.name, evidence, size.work, _given_conditions(assumed, evidence.gpus_per_node), with_live_spot(rate_of(job))
    )


def _given_conditions(assumed: Assumed, gpus_per_node: int) -> dict[str, float]:
    """The assumptions on the command line, by the names of `Conditions`."""
    said = {
        "gpus_per_node": gpus_per_node,
        "between_s": assumed.interrupted_every,
        "recovery_s": assumed.recovery,
        "away_s": assumed.replacement,
        "save_s": assumed.save_cost,
        "interval_s": assumed.save_every,
    }
    for flag, key in (("--interrupted-every", "between_s"), ("--save-every", "interval_s")):
        if said[key] == 0:
            raise UsageError(f"{flag} 0s: must be longer than 0s")
    return {key: value for key, value in said.items() if value is not None}
