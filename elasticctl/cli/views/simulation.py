"""The output of `simulate`: a table, a plot, and which of the numbers were measured or assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elasticctl.api.errors import UsageError
from elasticctl.api.observed.cost import Rate
from elasticctl.api.spec import MAX_WORKERS
from elasticctl.api.text import dollars, join_and, plural, span
from elasticctl.cli.framework.output import Table
from elasticctl.operations.prices import spot_basis
from elasticctl.planning.scaling_curve import ASSUMED_FROM, ASSUMED_SPEEDUP, ASSUMED_TO
from elasticctl.simulation import Conditions, Evidence, Forecast, Point, ScalingCurve, forecast_for
from elasticctl_protocol.codec import camel

DEFAULT_WORK_S = 86_400
_WIDER_THAN_MEASURED, _WIDER_THAN_ONE = 2, 16
_BAR = 22
_HEADER = (
    "GPUS", "NODES", "RATE", "SPEEDUP", "LOSS EVERY", "SAVE EVERY", "GOODPUT", "TIME", "SPOT", "ON DEMAND", "SAVED",
    "SCALING",
)  # fmt: skip
_SPARE = ("SAVE EVERY", "NODES", "LOSS EVERY", "RATE", "SCALING", "ON DEMAND")


@dataclass(frozen=True, slots=True)
class Basis:
    """The basis of forecasts. `work` is in units of the curve; `about` has the source of each part.

    `reference_gpus` is the smallest known size, `price` that of one node (None: unknown), and `noun` the unit of
    sizes.
    """

    job: str
    curve: ScalingCurve
    work: float
    conditions: Conditions
    reference_gpus: int
    price: Rate | None
    about: tuple[str, ...]
    noun: str = "GPU"


def basis_of_table(
    points: Sequence[Point], work_s: int | None, given: Mapping[str, float], price: Rate | None
) -> Basis:
    """The basis from a table of rates."""
    curve = ScalingCurve.through(points)
    base = curve.points[0]
    conditions, about = _conditions(given, {}, price)
    worth_s = DEFAULT_WORK_S if work_s is None else work_s
    work = f"work: what takes {span(worth_s)} on {plural(base.gpus, 'GPU')} undisturbed{_assumed(work_s is None)}"
    return Basis("", curve, base.rate * worth_s, conditions, base.gpus, price, (_scaling(curve, "GPU"), work, *about))


def basis_of_job(
    name: str, evidence: Evidence, work_s: int | None, given: Mapping[str, float], price: Rate | None
) -> Basis:
    """The basis from a job's measurements."""
    curve, noun = ScalingCurve.through(evidence.points), "GPU" if evidence.on_gpus else "CPU rank"
    base = curve.points[0]
    if evidence.steps_left is not None and work_s is None:
        amount, work = float(evidence.steps_left), f"work: {plural(evidence.steps_left, 'step')}, as the job says"
    else:
        worth_s = DEFAULT_WORK_S if work_s is None else work_s
        amount = base.rate * worth_s
        work = f"work: what takes {span(worth_s)} on {plural(base.gpus, noun)} undisturbed{_assumed(work_s is None)}"
    conditions, about = _conditions(given, _measured(evidence), price)
    return Basis(name, curve, amount, conditions, base.gpus, price, (_scaling(curve, noun), work, *about), noun)


def outlooks(basis: Basis, wanted: Sequence[int]) -> list[Forecast]:
    """A forecast for each number of GPUs, or for default ones. Raises UsageError for impossible ones."""
    each = basis.conditions.gpus_per_node
    if wanted and (wrong := [gpus for gpus in wanted if gpus % each or gpus // each > MAX_WORKERS]):
        most = each * MAX_WORKERS
        raise UsageError(f"--gpus {wrong[0]}: with {each} on each node it must be a multiple of that, {most} at most")
    counts = wanted or _sizes(basis.curve, each)
    return [forecast_for(gpus, basis.work, basis.curve, basis.conditions, basis.reference_gpus) for gpus in counts]


def table(basis: Basis, found: Sequence[Forecast]) -> Table:
    """A row for each number of GPUs; time and goodput are for spot machines."""
    rows = [
        (
            str(item.gpus),
            str(item.nodes),
            f"{item.rate:,.3g}/s" if item.rate < 1000 else f"{item.rate:,.0f}/s",
            f"{item.speedup:.1f}x",
            span(item.between_s),
            span(item.interval_s),
            f"{100 * item.goodput:.1f} %",
            _time(item.spot_s),
            _paid(basis.price, item.spot_node_hours, spot=True),
            _paid(basis.price, item.on_demand_node_hours, spot=False),
            "" if item.saved is None else f"{100 * item.saved:.0f} %",
            "known" if item.measured else ("assumed" if basis.curve.assumed else "fitted"),
        )
        for item in found
    ]
    return Table((_plural(basis.noun), *_HEADER[1:]), rows, spare=_SPARE)


def plot(basis: Basis, found: Sequence[Forecast], bar: str = "█") -> Iterator[str]:
    """Time and cost on spot as bars, scaled to the available width."""
    longest = max((item.spot_s for item in found if item.spot_s is not None), default=0.0)
    most = max((item.spot_node_hours for item in found if item.spot_node_hours is not None), default=0.0)
    yield f"{_plural(basis.noun):>6}  {'TIME':<{_BAR + 10}}COST ON SPOT"
    for item in found:
        time_bar = _bar(item.spot_s, longest, bar, _time(item.spot_s))
        cost_bar = _bar(item.spot_node_hours, most, bar, _paid(basis.price, item.spot_node_hours, spot=True))
        yield f"{item.gpus:>6}  {time_bar:<{_BAR + 10}}{cost_bar}".rstrip()


def notes(basis: Basis, found: Sequence[Forecast]) -> Iterator[str]:
    """A recommendation, and the assumptions behind it."""
    yield from recommendation(basis, found)
    yield f"saved: on spot, against the same work on {plural(basis.reference_gpus, basis.noun)} on demand"
    yield from basis.about


def recommendation(basis: Basis, found: Sequence[Forecast]) -> Iterator[str]:
    """The cheapest size, the fastest, and the best of both; none if no size finishes."""
    ending = [(item.spot_s, item.spot_node_hours, item) for item in found]
    sure = [(time_s, hours, item) for time_s, hours, item in ending if time_s is not None and hours is not None]
    if not sure:
        yield "it would never end at any of these sizes: interruptions come faster than it recovers"
        return
    picks = {
        "cheapest": min(sure, key=lambda one: (one[1], one[0])),
        "fastest": min(sure, key=lambda one: (one[0], one[1])),
        "best per dollar (least time x cost)": min(sure, key=lambda one: one[0] * one[1]),
    }
    yield "; ".join(
        f"{what}: {plural(item.gpus, basis.noun)} ({span(time_s)}, {_paid(basis.price, hours, spot=True)})"
        for what, (time_s, hours, item) in picks.items()
    )


def as_data(basis: Basis, found: Sequence[Forecast]) -> dict[str, Any]:
    """The forecasts as data: times in seconds, money in US dollars (null: no price is known)."""
    one = basis.price
    rows = []
    for item in found:
        row = {camel(name): value for name, value in asdict(item).items()}
        spot, on_demand = item.spot_node_hours, item.on_demand_node_hours
        row["spotUsd"] = None if one is None or spot is None else round(one.spot(one.low * spot), 4)
        row["onDemandUsd"] = None if one is None else round(one.low * on_demand, 4)
        rows.append(row)
    return {
        **({"job": basis.job} if basis.job else {}),
        "work": basis.work,
        "counts": basis.noun,
        "referenceGpus": basis.reference_gpus,
        "conditions": {camel(name): value for name, value in asdict(basis.conditions).items()},
        "points": [asdict(point) for point in basis.curve.points],
        "basis": list(basis.about),
        "outlooks": rows,
    }


def _conditions(
    given: Mapping[str, float], measured: Mapping[str, tuple[float, str]], price: Rate | None
) -> tuple[Conditions, tuple[str, ...]]:
    """Options take precedence over measurements, and those over assumptions; with a line for each."""
    values: dict[str, Any] = {key: value for key, (value, _) in measured.items()} | dict(given)
    if price is not None:
        values["spot_share"] = price.spot(1.0)
    found = Conditions(**values)

    def source(key: str) -> str:
        if key in given:
            return " (given)"
        return f" ({measured[key][1]})" if key in measured else " (assumed)"

    saves = "chosen as in training" if found.interval_s is None else f"every {span(found.interval_s)} (given)"
    lines = (
        f"interruptions: a spot node lasts {span(found.between_s)}{source('between_s')}, without notice; one on demand"
        " lasts",
        f"recovery: {span(found.recovery_s)} until the next step{source('recovery_s')}, and again when another node"
        f" joins, after {span(found.away_s)}{source('away_s')}",
        f"saves: {saves}, each stops training for {found.save_s * 1000:.0f} ms{source('save_s')}",
        _prices(price, found),
    )
    return found, lines


def _measured(evidence: Evidence) -> dict[str, tuple[float, str]]:
    """Measurements of a job by the names of `Conditions`. The lifetime of nodes combines them with an assumption."""
    found: dict[str, tuple[float, str]] = {}
    if evidence.gpus_per_node > 0:
        found["gpus_per_node"] = (evidence.gpus_per_node, "measured")
    if evidence.recovery_s is not None:
        found["recovery_s"] = (evidence.recovery_s, "measured")
    if evidence.write_s is not None:
        found["write_s"] = (evidence.write_s, "measured")
    if evidence.worker_s > 0:
        prior_s = Conditions().between_s
        seen = f"measured: {plural(evidence.interruptions, 'interruption')} in {span(evidence.worker_s)} of nodes"
        between_s = (prior_s + evidence.worker_s) / (1 + evidence.interruptions)
        found["between_s"] = (between_s, f"{seen}, and one in {span(prior_s)} assumed")
    return found


def _plural(noun: str) -> str:
    """The header of the column of sizes."""
    return f"{noun.split()[-1]}s".upper()


def _scaling(curve: ScalingCurve, noun: str) -> str:
    sizes = join_and(str(point.gpus) for point in curve.points)
    if curve.assumed:
        shape = f"{ASSUMED_SPEEDUP:.0f} times from {ASSUMED_FROM} to {ASSUMED_TO} GPUs"
        return f"scaling: known at {sizes} {noun}s only; for the others assumed to be as published: {shape}"
    share = curve.shrinks_s * curve.points[0].rate / curve.points[0].gpus
    return f"scaling: known at {sizes} {noun}s; of a step at the smallest size {share:.0%} shrinks (Amdahl's law)"


def _prices(price: Rate | None, conditions: Conditions) -> str:
    if price is None:
        share = f"{conditions.spot_share:.0%} of on demand (assumed)"
        return f"prices: none is known, so node hours are shown; spot at {share}"
    lists = f"list prices of {price.prices.region}, {price.prices.date}"
    return f"prices: {price.instances[0]} at {lists}; spot at {conditions.spot_share:.0%} of them ({spot_basis(price)})"


def _sizes(curve: ScalingCurve, each: int) -> list[int]:
    """The known sizes that fill nodes, and doublings of the smallest up to and beyond the largest."""
    known = {point.gpus for point in curve.points if not point.gpus % each}
    first = min(known, default=-(-curve.points[0].gpus // each) * each)
    wider = _WIDER_THAN_ONE if curve.assumed else _WIDER_THAN_MEASURED
    top = min(max(wider * curve.points[-1].gpus, first), each * MAX_WORKERS)
    doubled, size = set(), first
    while size <= top:
        doubled.add(size)
        size *= 2
    return sorted(known | doubled)


def _bar(value: float | None, most: float, bar: str, text: str) -> str:
    length = 0 if value is None or most <= 0 else max(1, round(_BAR * value / most))
    return f"{bar * length} {text}".lstrip()


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else span(seconds)


def _paid(price: Rate | None, node_hours: float | None, *, spot: bool) -> str:
    if node_hours is None:
        return ""
    if price is None:
        return f"{node_hours:,.3g} h" if node_hours < 1000 else f"{node_hours:,.0f} h"
    on_demand = price.low * node_hours
    return dollars(price.spot(on_demand) if spot else on_demand)


def _assumed(yes: bool) -> str:
    return " (assumed)" if yes else " (given)"
