"""What only events say about a pod: a mount that fails, an autoscaler that adds a node, a probe that it failed.

Events may contain anything; none of these functions raises.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.objects import as_text, at
from elasticctl.api.observed.workers import MOUNTS, PodWait
from elasticctl.api.text import shorten

COMING, NOT_COMING = ("Nominated", "TriggeredScaleUp"), ("NotTriggerScaleUp", "FailedScheduling")
"""Reasons of the events in which Karpenter and the cluster autoscaler say whether a node comes for a pod."""
COMES_WITHIN_S = 900.0
"""Karpenter gives up a node that has not joined the cluster by then."""
_AUTOSCALERS = ("karpenter", "cluster-autoscaler")
_MOUNTED = ("Pulling", "Pulled", "Created", "Started")
"""Reasons of a kubelet's events once everything has been mounted."""


def failed_mount(events: Iterable[Manifest]) -> Manifest | None:
    """Return the pod's newest event of a mount that failed, unless it succeeded afterwards."""
    ordered = sorted(events, key=lambda event: seen_at(event) or 0.0)
    mounts = [event for event in ordered if at(event, "reason") in (*MOUNTS, *_MOUNTED)]
    return mounts[-1] if mounts and at(mounts[-1], "reason") in MOUNTS else None


def failed_probe(events: Iterable[Manifest], container: str) -> str:
    """Which probe its kubelet has killed this container for, and how it failed; "" if it was not killed for one."""
    known = list(events)
    killed = [as_text(at(event, "message")) for event in known if at(event, "reason") == "Killing"]
    for probe in ("liveness", "startup"):
        if any(text.startswith(f"Container {container} failed {probe} probe") for text in killed):
            unhealthy = [event for event in known if at(event, "reason") == "Unhealthy"]
            said = [event for event in unhealthy if words_of(event).lower().startswith(f"{probe} probe failed")]
            newest = max(said, key=lambda event: seen_at(event) or 0.0, default=None)
            how = "" if newest is None else words_of(newest).partition(":")[2].strip()
            return f"its {probe} probe failed" + (f": {how}" if how else "")
    return ""


def is_of_autoscaler(event: Manifest) -> bool:
    """True for the event of an autoscaler."""
    who = at(event, "source", "component") or at(event, "reportingComponent")
    return who in _AUTOSCALERS


def words_of(event: Manifest) -> str:
    """The message of an event, on one line and without a full stop."""
    return shorten(as_text(at(event, "message"))).removesuffix(".")


def seen_at(event: Manifest) -> float | None:
    """When an event was last seen, in seconds since the epoch."""
    stamps = (at(event, "series", "lastObservedTime"), at(event, "lastTimestamp"), at(event, "eventTime"))
    return next((moment for moment in map(from_rfc3339, stamps) if moment is not None), None)


def wait_by_events(events: Iterable[Manifest], *, placed: bool, now: float) -> PodWait | None:
    """Why a pod has not started, according to its own events; None if they give no reason.

    For a pod that is `placed`, that is a mount that fails; for one without a node, an autoscaler's recent message.
    """
    if placed:
        event = failed_mount(events)
        return None if event is None else PodWait(as_text(at(event, "reason")), words_of(event))
    said = [event for event in events if is_of_autoscaler(event) and at(event, "reason") in (*COMING, *NOT_COMING)]
    recent = [event for event in said if now - (seen_at(event) or 0.0) <= COMES_WITHIN_S]
    if not recent:
        return None
    newest = max(recent, key=lambda event: seen_at(event) or 0.0)
    brings = "adds a node" if at(newest, "reason") in COMING else "adds no node"
    return PodWait(as_text(at(newest, "reason")), f"the autoscaler {brings}: {words_of(newest)}")
