"""A job's phase in the words that TorchElastic's users and `kubectl wait` know: `status.conditions`."""

from __future__ import annotations

from dataclasses import replace

from elasticctl.codec import Timestamp
from elasticctl.status import Condition, ConditionType, Phase

# Running and Restarting replace each other; the others stay once set.
_EXCLUSIVE = {ConditionType.RUNNING: ConditionType.RESTARTING, ConditionType.RESTARTING: ConditionType.RUNNING}
# Cancelled has no type of its own there: tools that wait for an end know only Succeeded and Failed.
_TYPE = {
    Phase.RUNNING: ConditionType.RUNNING,
    Phase.RESTARTING: ConditionType.RESTARTING,
    Phase.SUSPENDED: ConditionType.SUSPENDED,
    Phase.SUCCEEDED: ConditionType.SUCCEEDED,
    Phase.FAILED: ConditionType.FAILED,
    Phase.CANCELLED: ConditionType.FAILED,
}


def express(conditions: tuple[Condition, ...], phase: Phase, message: str, now: float) -> tuple[Condition, ...]:
    """Return the conditions of a job in this phase, unchanged where they say so already."""
    if not _has(conditions, ConditionType.CREATED):
        conditions = _put(conditions, ConditionType.CREATED, "True", "ElasticJobCreated", "", now)
    kind, reason = _TYPE.get(phase), f"ElasticJob{phase.value}"
    if phase is not Phase.SUSPENDED and _has(conditions, ConditionType.SUSPENDED, "True"):
        conditions = _put(conditions, ConditionType.SUSPENDED, "False", "ElasticJobResumed", "", now)
    if phase is Phase.SUSPENDED or phase.terminal:
        for going in (ConditionType.RUNNING, ConditionType.RESTARTING):
            if _has(conditions, going, "True"):
                conditions = _put(conditions, going, "False", reason, "", now)
    if kind is None:
        return conditions
    opposite = _EXCLUSIVE.get(kind)
    conditions = tuple(item for item in conditions if item.type != opposite)
    return _put(conditions, kind, "True", reason, message if phase.terminal else "", now)


def has_run(conditions: tuple[Condition, ...]) -> bool:
    """True when the job has been running before."""
    return _has(conditions, ConditionType.RUNNING) or _has(conditions, ConditionType.RESTARTING)


def _has(conditions: tuple[Condition, ...], kind: ConditionType, status: str = "") -> bool:
    return any(item.type == kind and (not status or item.status == status) for item in conditions)


def _put(
    conditions: tuple[Condition, ...], kind: ConditionType, status: str, reason: str, message: str, now: float
) -> tuple[Condition, ...]:
    at = Timestamp(now)
    old = next((item for item in conditions if item.type == kind), None)
    new = Condition(kind.value, status, reason, message, at, at)
    if old is None:
        return (*conditions, new)
    if (old.status, old.reason, old.message) == (status, reason, message):
        return conditions
    if old.status == status:
        new = replace(new, last_transition_time=old.last_transition_time)
    return tuple(new if item.type == kind else item for item in conditions)
