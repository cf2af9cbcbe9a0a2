"""The optimum that knows the future against brute force, the published policies by hand, and a small run of it all."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import policy
from benchmarks.deadlines.clairvoyant import with_changes, without_changes
from benchmarks.deadlines.contenders import RIGID
from elasticctl.planning.situation import Costs, Speeds
from elasticctl.simulation.replay import Plan, Replay
from elasticctl.simulation.traces import Recording, Trace

GAP_S = 3600.0
SPEEDS = Speeds.of({1: 1.0, 2: 1.8, 3: 2.4})
SPOT, ON_DEMAND = 0.3, 1.0
CHANGES = Costs(start_s=900.0, reform_s=60.0)
THERE = [(3, 0, 2, 3), (0, 0, 0, 0), (1, 3, 0, 1), (3, 3, 3, 3)]


def offers(count: int) -> list[tuple[float, float]]:
    """(work, dollars) of a tick with each mix of spot and on-demand workers."""
    pairs = [(j, i) for j in range(count + 1) for i in range(4 - j)]
    return [(SPEEDS.rate(j + i) * GAP_S, j * SPOT + i * ON_DEMAND) for j, i in pairs]


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.83, 1.0])
def test_without_changes_it_is_what_trying_everything_gives(there: tuple[int, ...], share: float) -> None:
    """Every mix in every tick, one tick of which is shared between two mixes."""
    work = share * len(there) * GAP_S * SPEEDS.per_s[-1]
    least = float("inf")
    for odd in range(len(there)):
        others = [offers(count) for at, count in enumerate(there) if at != odd]
        pairs = list(itertools.combinations(offers(there[odd]), 2))
        for chosen in itertools.product(*map(set, others)):
            gain, usd = (sum(part) for part in zip(*chosen, strict=True))
            for (low, low_usd), (high, high_usd) in pairs:
                if min(low, high) <= work - gain <= max(low, high) and low != high:
                    least = min(least, usd + low_usd + (high_usd - low_usd) * (work - gain - low) / (high - low))
    found = without_changes(there, GAP_S, work, SPEEDS, SPOT, ON_DEMAND)
    assert found == pytest.approx(least)


def test_what_cannot_be_done_has_no_cost() -> None:
    work = 4.01 * GAP_S * SPEEDS.per_s[-1]
    assert without_changes((3, 3, 3, 3), GAP_S, work, SPEEDS, SPOT, ON_DEMAND) == float("inf")


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.85])
def test_with_changes_no_schedule_costs_less_than_the_bound(there: tuple[int, ...], share: float) -> None:
    work = share * len(there) * GAP_S * SPEEDS.per_s[-1]
    bound = with_changes(there, GAP_S, work, SPEEDS, CHANGES, (SPOT, ON_DEMAND))
    least = min(usd for gain, usd in schedules(there) if gain >= work)
    assert bound <= least + 1e-9
    assert bound >= without_changes(there, GAP_S, work, SPEEDS, SPOT, ON_DEMAND) - 1e-6
    assert bound >= 0.6 * least  # in so few ticks whole ones are far apart


def schedules(there: tuple[int, ...]) -> list[tuple[float, float]]:
    """(work, dollars) of every schedule, with starts that are paid for and groups that stand still."""
    reached = {(0, 0): [(0.0, 0.0)]}
    for count in there:
        later: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for (j, i), ways in reached.items():
            for now in itertools.product(range(count + 1), range(4)):
                if sum(now) > 3:
                    continue
                stay = min(j, now[0]) + min(i, now[1])
                waits_s = CHANGES.start_s if sum(now) > stay else 0.0
                still_s = CHANGES.reform_s if now != (j, i) and sum(now) else 0.0
                gain = SPEEDS.rate(stay) * waits_s + SPEEDS.rate(sum(now)) * (GAP_S - waits_s - still_s)
                usd = now[0] * SPOT + now[1] * ON_DEMAND
                later.setdefault(now, []).extend((done + gain, paid + usd) for done, paid in ways)
        reached = later
    return [way for ways in reached.values() for way in ways]


@pytest.mark.parametrize("name", RIGID)
def test_with_spot_all_the_time_all_but_on_demand_only_cost_its_price(name: str) -> None:
    steady = Recording.of([Trace("a", 300.0, (4,) * 60)], 4, SPOT)
    plan = Plan(3600.0 * 4, Speeds.of({4: 4.0}), Costs(), 1.0, 2.5 * 3600)
    found = Replay(plan, steady, 0, RIGID[name](4)).run()
    price = 1.0 if name == "on demand only" else SPOT
    assert found.finished_s == pytest.approx(3600 + 180, abs=11)
    assert found.usd == pytest.approx(4 * price * (found.finished_s or 0) / 3600)


@pytest.mark.parametrize("name", ["uniform progress", "time-sliced"])
@pytest.mark.parametrize("up", [0, 3, 11])
def test_the_published_policies_are_in_time(name: str, up: int) -> None:
    """Uniform Progress goes on demand when it is behind, not only at the end."""
    ticks = ((4,) * up + (0,) * 5) * 20
    gaps = Recording.of([Trace("a", 300.0, (*ticks, *(0,) * 60)[:60])], 4, SPOT)
    plan = Plan(3600.0 * 4, Speeds.of({4: 4.0}), Costs(), 1.0, 2.5 * 3600)
    found = Replay(plan, gaps, 0, RIGID[name](4)).run()
    assert found.finished_s is not None
    assert found.finished_s <= 2.5 * 3600


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(policy, "SHORTEST_H", 2.0)
    data = ([16] * 12 + [0] * 9) * 8
    for name in ("availability-16-aws-1-us-east-1a_x", "availability-16-aws-1-us-east-1b_x"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": data}))
    out = tmp_path / "found.json"
    given = ["--starts", "2", "--ratio", "2", "--spot-share", "0.3", "--processes", "1", "--json", str(out)]
    assert policy.main([str(tmp_path), *given]) == 0
    rows = {row["contender"]: row for row in json.loads(out.read_text()) if row["spotShare"]}
    assert set(rows) == {policy.OURS, policy.BOUND, policy.FREE, *RIGID}
    assert (rows[policy.OURS]["runs"], rows[policy.OURS]["late"]) == (6, 0)
    assert rows[policy.BOUND]["mean"] == 1.0
    assert rows[policy.FREE]["mean"] <= 1.0 <= rows[policy.OURS]["mean"]
    assert rows["on demand only"]["mean"] > rows["uniform progress"]["mean"]
    assert "not seen" in capsys.readouterr().out
