"""Current spot prices at AWS: queried if there are credentials, cached for an hour, and never waited for long.

Nothing depends on the answer: without it, spot is estimated as a share of the list price.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticctl.api.observed.cost import SpotPrices
from elasticctl.settings import contexts
from elasticctl_protocol import variables

KEPT_S = 3600.0
TRIED_AGAIN_S = 600.0
"""After a failure."""
LIMIT_S = 3.0
"""For everything, including the import of boto3."""
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_FILES = (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"))

log = logging.getLogger(__name__)


def spot_prices(instances: Sequence[str], now: float) -> SpotPrices | None:
    """The spot prices of these instance types, at most an hour old; `now` is seconds since the epoch.

    None, after `LIMIT_S` at the latest, if they cannot be queried; that is cached too, for `TRIED_AGAIN_S`.
    """
    if not instances or not _may_have_credentials(os.environ):
        return None
    file, key = _cache_path(), cache_key(instances, os.environ)
    kept = _read_cache(file).get(key)
    if isinstance(kept, dict) and _is_fresh(kept, now):
        return _decode_prices(kept)
    found = ask_within_limit(instances, now)
    fresh = {"at": now} if found is None else {"at": found.at, "region": found.region, "perHour": dict(found.per_hour)}
    _write_cache(
        file, {**{old: value for old, value in _read_cache(file).items() if _is_fresh(value, now)}, key: fresh}
    )
    return found


def cheapest(history: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Instance type -> the lowest of its zones' newest prices, from a `SpotPriceHistory`."""
    newest: dict[tuple[str, str], tuple[Any, float]] = {}
    for item in history:
        place, at = (item["InstanceType"], item["AvailabilityZone"]), item["Timestamp"]
        if place not in newest or at > newest[place][0]:
            newest[place] = (at, float(item["SpotPrice"]))
    found: dict[str, float] = {}
    for (instance, _), (_, price) in newest.items():
        found[instance] = min(price, found.get(instance, price))
    return found


def ask_within_limit(instances: Sequence[str], now: float) -> SpotPrices | None:
    """Query in a thread of its own, which may be abandoned: finding credentials has no time limit."""
    answers: list[SpotPrices] = []

    def ask() -> None:
        try:
            answers.append(_ask(instances, now))
        except Exception as e:  # noqa: BLE001 - on any error, spot is estimated
            log.info("no spot prices: %s", e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return answers[0] if answers else None


def _ask(instances: Sequence[str], now: float) -> SpotPrices:
    from datetime import UTC, datetime

    import boto3
    from botocore.config import Config

    session = boto3.session.Session()
    region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
    limits = Config(connect_timeout=1, read_timeout=2, retries={"total_max_attempts": 1})
    client = session.client("ec2", region_name=region, config=limits)
    answer = client.describe_spot_price_history(
        InstanceTypes=list(instances), ProductDescriptions=["Linux/UNIX"], StartTime=datetime.fromtimestamp(now, UTC)
    )
    return SpotPrices(region, now, cheapest(answer["SpotPriceHistory"]))


def _may_have_credentials(environ: Mapping[str, str]) -> bool:
    """True if there is a sign of credentials; otherwise boto3, which takes a second to import, need not look."""
    if any(environ.get(name) for name in _CREDENTIALS):
        return True
    for variable, name in _FILES:
        with suppress(OSError, RuntimeError):  # no such file, no home
            if Path(environ.get(variable) or Path.home() / ".aws" / name).expanduser().stat().st_size:
                return True
    return False


def cache_key(instances: Sequence[str], environ: Mapping[str, str]) -> str:
    """What the answer depends on: the types, and what selects the region."""
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_CONFIG_FILE")
    return "|".join([*(environ.get(name, "") for name in names), ",".join(sorted(instances))])


def _cache_path() -> Path:
    if os.environ.get(variables.HOME):
        return contexts.config_folder() / "cache" / "spot-prices.json"
    import platformdirs

    return platformdirs.user_cache_path("elasticctl") / "spot-prices.json"


def _read_cache(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _write_cache(file: Path, data: Mapping[str, Any]) -> None:
    """Replace the file; failing to write it does no harm."""
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        contexts.write_atomically(file, json.dumps(data))


def _is_fresh(kept: Any, now: float) -> bool:
    at = kept.get("at") if isinstance(kept, dict) else None
    limit_s = KEPT_S if isinstance(kept, dict) and isinstance(kept.get("perHour"), dict) else TRIED_AGAIN_S
    return isinstance(at, int | float) and 0 <= now - at < limit_s


def _decode_prices(kept: Mapping[str, Any]) -> SpotPrices | None:
    prices = kept.get("perHour")
    if not isinstance(prices, dict):
        return None
    per_hour = {str(name): float(price) for name, price in prices.items() if isinstance(price, int | float)}
    return SpotPrices(str(kept.get("region", "")), float(kept["at"]), per_hour)
