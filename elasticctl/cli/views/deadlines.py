"""The output of `simulate --finish-by`: deadlines and budgets, replayed on recorded spot machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elasticctl.api.errors import UsageError
from elasticctl.api.text import dollars, plural, span
from elasticctl.cli.framework.output import Table
from elasticctl.cli.views.simulation import Basis
from elasticctl.planning.situation import Costs, Speeds
from elasticctl.simulation.forecast import interval_s
from elasticctl.simulation.replay import Prospect, ReplayedJob, prospects
from elasticctl.simulation.traces import Recording, parse_trace
from elasticctl_protocol.codec import camel

STARTS, STARTS_WITH_BUDGETS = 16, 8
"""For each deadline and budget; with budgets there are three times as many of those."""
LATER, RICHER = (1.0, 1.5, 2.0), (0.5, 1.0, 2.0)
"""The table's deadlines and budgets, as multiples of those asked for."""
_FINEST_S, _LOOKS = 600.0, 100


def recording_from(folder: Path, workers: int, usd_per_h: float, longest_s: float) -> Recording:
    """Every trace of a folder, one per zone. Raises UsageError and SpecError."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UsageError(f"--traces {folder}: there is no *.json file")
    traces = []
    for file in files:
        try:
            traces.append(parse_trace(file.read_text("utf-8"), file.name))
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"cannot read {file}: {getattr(e, 'strerror', None) or 'it is not text'}") from e
    shortest = min(traces, key=lambda trace: trace.lasts_s)
    if shortest.lasts_s < 1.1 * longest_s:
        raise UsageError(
            f"{shortest.name} lasts {span(shortest.lasts_s)}, too short for a deadline of {span(longest_s)}."
            " FIX: give longer traces or an earlier --finish-by"
        )
    gap_s = max(_FINEST_S, longest_s / _LOOKS / LATER[-1])
    return Recording.of([trace.at_gap(max(gap_s, trace.gap_s)) for trace in traces], workers, usd_per_h)


def prospects_of(
    basis: Basis, gpus: Sequence[int], folder: Path, finish_by_s: float, budget_usd: float | None
) -> list[Prospect]:
    """Prospects for the given deadline and later ones, each without a budget, or with some around the given one."""
    each = basis.conditions.gpus_per_node
    speeds = Speeds.of({size // each: basis.curve.rate(size) for size in gpus})
    if budget_usd is not None and basis.price is None:
        raise UsageError("--budget: no price is known. FIX: give --gpu-type with a table, or use a context with prices")
    on_demand = basis.price.low if basis.price else 1.0
    spot = basis.price.spot(on_demand) if basis.price else basis.conditions.spot_share
    conditions = basis.conditions
    costs = Costs(
        start_s=conditions.away_s,
        reform_s=conditions.recovery_s,
        loss_s=conditions.recovery_s,
        save_every_s=interval_s(conditions, conditions.between_s / speeds.most),
    )
    recording = recording_from(folder, speeds.most, spot, finish_by_s * LATER[-1])
    budgets = [None] if budget_usd is None else [budget_usd * times for times in RICHER]
    limits = [(finish_by_s * times, budget) for times in LATER for budget in budgets]
    return prospects(
        ReplayedJob(basis.work, speeds, costs, on_demand, blind=True),
        recording,
        limits,
        STARTS if budget_usd is None else STARTS_WITH_BUDGETS,
    )


def table(basis: Basis, found: Sequence[Prospect]) -> Table:
    """A row for each deadline and budget."""
    header = ("FINISH BY", "BUDGET", "PROMISED", "IN TIME", "COST", "95 %", "DONE AFTER", "ON DEMAND")
    rows = [
        (
            span(one.finish_by_s),
            "" if one.budget_usd is None else dollars(one.budget_usd),
            f"{one.promised:.0%}",
            f"{one.in_time:.0%}",
            _paid(basis, one.usd),
            _paid(basis, one.usd_p95),
            "never" if one.finish_s is None else span(one.finish_s),
            f"{one.on_demand:.0%}",
        )
        for one in found
    ]
    return Table(header, rows, spare=("95 %", "DONE AFTER", "ON DEMAND"))


def notes(basis: Basis, found: Sequence[Prospect], folder: Path) -> Iterator[str]:
    """The assumptions behind the table."""
    yield f"replayed on {folder} from {plural(found[0].starts, 'start')}, by the policy that plans for deadlines"
    yield "promised: on-demand machines alone can meet it, even if all spot machines are lost"
    if basis.price is None:
        yield "no price is known: cost is in hours of one node on demand"
    yield from basis.about


def as_data(found: Sequence[Prospect]) -> list[dict[str, Any]]:
    """The same for programs."""
    rows = [{camel(name): value for name, value in asdict(one).items()} for one in found]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def _paid(basis: Basis, usd: float) -> str:
    return f"{usd:,.3g} h" if basis.price is None else dollars(usd)
