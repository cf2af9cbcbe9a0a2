"""What events say of a pod that has not started."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.observed.pod_events import COMES_WITHIN_S, wait_by_events
from elasticctl.api.observed.workers import PodWait

NOW = 1_700_000_000.0


def event(reason: str, message: str = "words", ago_s: float = 10, who: str = "kubelet") -> dict[str, Any]:
    return {
        "reason": reason,
        "message": message,
        "source": {"component": who},
        "lastTimestamp": to_rfc3339(NOW - ago_s),
    }


def test_the_newest_event_of_the_kubelet_decides() -> None:
    failed = event("FailedMount", 'configmap "conf"\nnot found.', 20)
    assert wait_by_events([failed], placed=True, now=NOW) == PodWait("FailedMount", 'configmap "conf" not found')
    assert wait_by_events([event("Pulling"), failed], placed=True, now=NOW) is None, "it was mounted since"
    again = event("FailedCreatePodSandBox", "no network", 5)
    assert wait_by_events([again, event("Pulling"), failed], placed=True, now=NOW) == PodWait(
        "FailedCreatePodSandBox", "no network"
    )


def test_the_newest_event_of_an_autoscaler_decides() -> None:
    scheduler = event("FailedScheduling", "0/3 nodes", 1, "default-scheduler")
    none = event("NotTriggerScaleUp", "max node group size reached", 50, "cluster-autoscaler")
    found = wait_by_events([none, scheduler], placed=False, now=NOW)
    assert found == PodWait("NotTriggerScaleUp", "the autoscaler adds no node: max node group size reached")
    coming = event("Nominated", "Pod should schedule on: nodeclaim/default-x", 20, "karpenter")
    found = wait_by_events([coming, none, scheduler], placed=False, now=NOW)
    assert found == PodWait("Nominated", "the autoscaler adds a node: Pod should schedule on: nodeclaim/default-x")
    assert wait_by_events([scheduler], placed=False, now=NOW) is None
    assert wait_by_events([coming], placed=False, now=NOW + COMES_WITHIN_S) is None
    assert wait_by_events([coming], placed=True, now=NOW) is None


@pytest.mark.parametrize("odd", [{}, {"reason": 3}, {"reason": "FailedMount", "message": 7, "lastTimestamp": []}])
@pytest.mark.parametrize("placed", [True, False])
def test_events_of_any_content_are_read(odd: dict[str, Any], placed: bool) -> None:
    wait_by_events([odd], placed=placed, now=NOW)
