"""Live spot prices: from a real EC2 interface, kept for an hour, and never waited for long."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.observed.cost import Rate, SpotPrices, rate
from elasticctl.operations.prices import plan_line
from elasticctl.settings import spot_prices as module
from elasticctl.settings.spot_prices import cheapest, spot_prices
from tests.support import servers
from tests.support.cli import Run

TYPES = ("g4dn.xlarge", "g4dn.2xlarge")


@pytest.fixture
def keys(private_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Credentials, and a cache of one's own."""
    for name, value in servers.KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    return private_home / "cache" / "spot-prices.json"


@pytest.fixture
def ec2(keys: Path, server_ports: servers.Ports, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Moto's EC2, once it has read what instances there are, which takes seconds."""
    import boto3

    url = f"http://127.0.0.1:{server_ports.s3}"
    boto3.client("ec2", "us-west-2", endpoint_url=url).describe_spot_price_history(InstanceTypes=["t2.micro"])
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", url)
    monkeypatch.setattr(module, "LIMIT_S", 30.0)  # importing boto3 may take longer on a busy machine
    return keys


def test_prices_come_from_ec2_and_are_kept_for_an_hour(ec2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    found = spot_prices(TYPES, now)
    assert found is not None
    assert (found.region, found.at) == ("us-west-2", now)
    assert set(found.per_hour) == set(TYPES)
    assert all(price > 0 for price in found.per_hour.values())
    assert stat.S_IMODE(ec2.stat().st_mode) == 0o600
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:9")
    assert spot_prices(TYPES, now + 3599) == found
    assert spot_prices(tuple(reversed(TYPES)), now + 3599) == found
    assert spot_prices(TYPES, now + 3601) is None
    assert spot_prices(("p3.2xlarge",), now) is None


def test_the_plan_says_where_spot_is_from(run: Run, ec2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    assert (
        run("config", "set-context", "prod", "--provider", "aws", "--storage", str(tmp_path), "--image", "i").code == 0
    )
    order = ("submit", str(tmp_path / "src" / "train.py"), "--context", "prod", "--gpus", "4", "--gpu-type", "t4")
    done = run(*order, "--no-workspace", "--dry-run")
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    assert f"an hour on spot (cheapest zone of us-west-2, {today}" in done.err
    assert "$2.10 to $17.41 on demand; list prices of us-east-1, 2025-07-01" in done.err
    rates = tmp_path / "rates.csv"
    rates.write_text("4,1000\n")
    simulated = run("simulate", "--table", str(rates), "--gpu-type", "t4", "--context", "prod")
    assert "of them (cheapest zone of us-west-2, " in simulated.err


def never(*args: object) -> None:
    """Stands in for a question that must not be asked."""
    raise AssertionError


def test_a_silent_service_does_not_block(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(module, "LIMIT_S", 0.1)
        assert spot_prices(TYPES, now) is None
        monkeypatch.setattr(module, "ask_within_limit", never)
        assert spot_prices(TYPES, now + 1) is None  # remembered
    assert list(json.loads(keys.read_text()).values()) == [{"at": now}]


def test_without_credentials_no_query_is_made(private_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_within_limit", never)
    assert spot_prices(TYPES, 0.0) is None
    assert spot_prices((), 0.0) is None
    assert not private_home.exists()


def test_a_profile_is_a_sign_of_credentials(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "ask_within_limit", lambda *args: asked.append(args))
    (tmp_path / "credentials").write_text("[default]\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert spot_prices(TYPES, 1000.0) is None
    assert len(asked) == 1
    assert spot_prices(TYPES, 1500.0) is None
    assert len(asked) == 1
    assert spot_prices(TYPES, 1601.0) is None
    assert len(asked) == 2


def test_without_boto3_spot_is_estimated(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert spot_prices(TYPES, time.time()) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"x": 1}', '{"K": {"at": "soon"}}', '{"K": {"at": 5, "perHour": 1}}']
)
def test_a_cache_that_is_no_cache_is_replaced(keys: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SpotPrices("us-west-2", 10.0, {"g4dn.xlarge": 0.2})
    monkeypatch.setattr(module, "ask_within_limit", lambda *args: found)
    keys.parent.mkdir(parents=True)
    keys.write_text(content.replace("K", module.cache_key(TYPES, os.environ)))
    assert spot_prices(TYPES, 10.0) in (found, None)
    assert spot_prices(TYPES, 10.0 + module.TRIED_AGAIN_S) == found


def test_a_cache_that_cannot_be_written_is_no_loss(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SpotPrices("us-west-2", 10.0, {"g4dn.xlarge": 0.2})
    monkeypatch.setattr(module, "ask_within_limit", lambda *args: found)
    keys.parent.parent.mkdir(parents=True)
    keys.parent.touch()
    assert spot_prices(TYPES, 10.0) == found


def test_the_cheapest_of_the_newest_prices_per_zone_counts() -> None:
    def row(instance: str, zone: str, hour: int, price: str) -> dict[str, Any]:
        at = datetime(2026, 1, 1, hour, tzinfo=UTC)
        return {"InstanceType": instance, "AvailabilityZone": zone, "Timestamp": at, "SpotPrice": price}

    history = [
        row("a", "1", 1, "0.10"),  # cheap, but over
        row("a", "1", 3, "0.40"),
        row("a", "2", 2, "0.30"),
        row("b", "1", 1, "1.50"),
    ]
    assert cheapest(history) == {"a": 0.3, "b": 1.5}
    assert cheapest([]) == {}


def test_a_rate_takes_live_prices_where_there_are_any() -> None:
    one = rate("aws", ("g4dn.2xlarge", "g4dn.xlarge"), "t4", 1)
    assert one is not None
    estimated = plan_line(one, 2)
    assert "on spot (estimated)" in estimated
    live = Rate(one.instances, one.low, one.high, one.prices, SpotPrices("eu-west-1", 0.0, {"g4dn.xlarge": 0.263}))
    assert live.spot(one.low) == pytest.approx(0.263)
    assert live.spot_range == (0.263, 0.263)
    assert plan_line(live, 2) == (
        "2 x g4dn.xlarge to g4dn.2xlarge: $0.53 an hour on spot (cheapest zone of eu-west-1, 1970-01-01 00:00 UTC),"
        " $1.05 to $1.50 on demand; list prices of us-east-1, 2025-07-01"
    )
    other = Rate(one.instances, one.low, one.high, one.prices, SpotPrices("eu-west-1", 0.0, {"p3.2xlarge": 1.0}))
    assert plan_line(other, 2) == estimated
