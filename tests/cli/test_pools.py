"""An order of pools on the command line: what `submit` makes of one, and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.errors import UsageError
from elasticctl.api.goal import ON_DEMAND, SPOT, PoolOrder, PoolsStatus, parse_order
from elasticctl.api.observed.plan_text import pools_text
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase, WorkerStatus
from elasticctl.cli.views.job import capacity_text
from elasticctl.diagnosis import Case, diagnose
from elasticctl.operations.moved_manifest import adapt_pools
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.operations.submit.job_request import job_spec, plan_summary, request_of, unused_note
from elasticctl.settings.contexts import LOCAL, Context
from elasticctl.templates import find_template, render_manifest
from tests.support.cli import Run

NOW = 1_800_000_000.0
AWS = Context("prod", "aws", image="image", gpu_type="t4", pools="spot,on-demand", pool_wait_s=300)


def spec_of(context: Context, **flags: Any) -> dict[str, Any]:
    request = JobFlags(gpus=2, name="train", **flags)
    spec = job_spec(request_of(request, context, 0, name="train"))
    made: dict[str, Any] = render_manifest(spec, find_template("default", Path("/nowhere")))["spec"]
    return made


def test_the_order_that_was_typed_comes_before_the_contexts() -> None:
    order = [{"capacity": "spot"}, {"capacity": "onDemand"}]
    assert spec_of(AWS)["pools"] == {"order": order, "waitSeconds": 300}
    typed = spec_of(AWS, pools="spot:g5.xlarge/us-east-1a,on-demand", pool_wait=60)["pools"]
    first = {"capacity": "spot", "instanceType": "g5.xlarge", "zone": "us-east-1a"}
    assert typed == {"order": [first, {"capacity": "onDemand"}], "waitSeconds": 60}
    assert "pools" not in spec_of(AWS, pools="none")
    assert "pools" not in spec_of(replace(AWS, pools=""))


def test_an_option_that_chooses_pools_itself_needs_no_order() -> None:
    for flags in ({"spot": False}, {"queue": "team"}, {"budget": 5.0}):
        assert "pools" not in spec_of(AWS, **flags)
        with pytest.raises(UsageError, match="cannot be used together"):
            spec_of(AWS, pools="spot", **flags)
    with pytest.raises(UsageError, match="--pool-wait goes with an order of pools"):
        spec_of(replace(AWS, pools=""), pool_wait=60)
    local = Context(LOCAL, LOCAL)
    assert unused_note(JobFlags(pools="spot"), local).startswith("--pools: not used on this machine")


def test_an_order_of_on_demand_machines_first_can_still_use_spot_ones() -> None:
    pod = spec_of(Context("gke", "gcp", image="i", gpu_type="t4"), pools="on-demand,spot")["replicaSpecs"]["Worker"]
    assert any(one["key"] == "cloud.google.com/gke-spot" for one in pod["template"]["spec"]["tolerations"])


@pytest.mark.parametrize("text", ["", "spot,", "ondemand", "spot/A", "spot:", "spot/a:b", "spot on", "/"])
def test_an_invalid_pool_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a pool"):
        parse_order(text)


def test_an_order_reads_as_it_was_written() -> None:
    order = parse_order("spot/us-east-1a,:g5.xlarge,/zone-b,on-demand:g5.xlarge,spot/us-east-1a", 90)
    assert order.order == ("spot/us-east-1a", ":g5.xlarge", "/zone-b", "onDemand:g5.xlarge")
    assert PoolOrder.from_spec(order.as_spec()) == order
    assert order.words == (
        "spot in us-east-1a, then any capacity on g5.xlarge, then any capacity in zone-b, then on demand on g5.xlarge"
    )
    assert PoolOrder.from_spec({"order": [{}, 5, {"zone": 3}]}) is None


def test_the_plan_says_where_it_asks() -> None:
    request = JobFlags(gpus=2, name="train")
    spec = job_spec(request_of(request, AWS, 0, name="train"))
    assert "context prod, spot, then on demand, state in" in plan_summary(spec, AWS)


@pytest.mark.usefixtures("private_home")
def test_a_context_keeps_an_order(run: Run) -> None:
    set_context = ("config", "set-context", "prod", "--provider", "aws")
    assert run(*set_context, "--pools", "spot,on-demand", "--pool-wait", "5m").code == 0
    view = run("config", "view").out
    assert "pools: spot,on-demand" in view
    assert "poolWaitS: 300" in view
    refused = run(*set_context, "--pools", "cheap")
    assert refused.code != 0
    assert '"cheap" is not a pool' in refused.err


def test_a_job_that_moves_asks_in_the_pools_of_its_new_place() -> None:
    spec: dict[str, Any] = {"pools": {"order": [{"zone": "us-east-1a"}]}}
    adapt_pools(spec, AWS, AWS)
    assert spec["pools"]["order"] == [{"capacity": "spot"}, {"capacity": "onDemand"}]
    adapt_pools(spec, AWS, replace(AWS, name="gke", provider="gcp", pools=""))
    assert "pools" not in spec


def a_job(pools: PoolsStatus, **held: int) -> ElasticJob:
    workers = tuple(
        WorkerStatus(f"digits-worker-{pool}-{n}", pool=pool, node="node")
        for pool, count in held.items()
        for n in range(count)
    )
    status = JobStatus(phase=Phase.RUNNING, workers=workers, pools=pools)
    return ElasticJob(name="digits", desired=3, max=3, pools=PoolOrder((SPOT, ON_DEMAND)), status=status)


def test_the_capacity_is_what_workers_are_on() -> None:
    assert capacity_text(a_job(PoolsStatus(SPOT), spot=1, onDemand=2)) == "spot, on-demand"
    assert capacity_text(a_job(PoolsStatus(SPOT), onDemand=3)) == "on-demand"


def clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%a %H:%M}"


@pytest.mark.parametrize(
    ("pools", "held", "words"),
    [
        (
            PoolsStatus(SPOT, 2, Timestamp(NOW - 240), ON_DEMAND, Timestamp(NOW + 360)),
            {"spot": 1},
            "1 on spot; 2 wait for spot since {-240}, 4m00s ago; on demand is asked at {360}",
        ),
        (
            PoolsStatus(SPOT, back_to=SPOT, back_at=Timestamp(NOW + 900)),
            {"onDemand": 3},
            "3 on demand; spot is tried again at {900}",
        ),
        (
            PoolsStatus(SPOT, back_to=SPOT, stays="a move would cost more than it saves"),
            {"onDemand": 3},
            "3 on demand; not moved to spot: a move would cost more than it saves",
        ),
        (
            PoolsStatus(SPOT, trying=Timestamp(NOW - 5), then_at=Timestamp(NOW + 300)),
            {"onDemand": 3},
            "3 on demand; spot is tried again until {300}, while the workers elsewhere go on",
        ),
        (PoolsStatus(SPOT), {"spot": 3}, "3 on spot"),
    ],
)
def test_status_and_explain_say_where_workers_are_and_ask(pools: PoolsStatus, held: dict[str, int], words: str) -> None:
    job = a_job(pools, **held)
    for seconds in (-240, 900, 360, 300):
        words = words.replace(f"{{{seconds}}}", clock(NOW + seconds))
    assert pools_text(job, NOW) == words
    said = [finding.text for finding in diagnose(Case(job, (), NOW)) if finding.rule == "pools"]
    outlook = words.partition("; ")[2]
    in_order = "Its workers ask for machines in this order: spot, then on demand. Now: "
    assert said == ([f"{in_order}{outlook}."] if outlook else [])
    assert pools_text(replace(job, suspend=True), NOW) == ""
