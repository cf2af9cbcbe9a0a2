"""What a group of workers is doing, as `status.activity` shows it, from the reports of its launchers and ranks."""

from __future__ import annotations

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import Activity
from elasticctl.api.text import plural
from elasticctl_controller.core.group.group_states import FormingGroup, GroupState
from elasticctl_controller.core.group.membership import Group
from elasticctl_protocol.reports import describe_hang
from elasticctl_protocol.requests import Doing


def describe_activity(group: Group) -> Activity | None:
    """What the group is doing and since when; None before any worker has called."""
    match group.state:
        case GroupState.OVER:
            return Activity("finishing")
        case GroupState.BREAKING:
            return Activity(Doing.STOPPING, detail="after a failure")
        case GroupState.DRAINING:
            return Activity("draining", detail=group.drain.reason if group.drain else "")
        case GroupState.TRAINING:
            return _of_training(group)
    return _of_waiting(group)


def _of_training(group: Group) -> Activity:
    for doing in (Doing.HUNG, Doing.EXPORTING):
        since = _doing_since(group, doing)
        if since is not None:
            return Activity(doing, Timestamp(since), describe_hang(group.reports.places) if doing is Doing.HUNG else "")
    if group.reports.obstacle:
        return Activity("waiting", detail=f"for {group.reports.obstacle}")
    newest = group.history.newest
    if newest is None:
        return Activity("running")
    if newest.first_step_at is not None:
        return Activity(
            "training",
            newest.first_step_at,
            f"nothing is saved: {group.reports.unsaved}" if group.reports.unsaved else "",
        )
    if newest.resumed_step is not None:
        return Activity("first step", newest.formed_at)
    if not group.history.reports or newest.formed_at is None:  # a restarted service does not know about steps
        return Activity("running", newest.formed_at)
    step = group.history.checkpoint.step
    return Activity("starting" if step is None else "loading", newest.formed_at, "" if step is None else f"step {step}")


def _of_waiting(group: Group) -> Activity | None:
    if not group.signs.newest:
        return None
    stopping = _doing_since(group, Doing.STOPPING)
    if stopping is not None:
        return Activity(Doing.STOPPING, Timestamp(stopping))
    missing = group.members.minimum - len(group.next_generation.joined)
    if missing > 0:
        return Activity("waiting", _waits_since(group), f"for {plural(missing, 'worker')} to join")
    preparing = _doing_since(group, Doing.PREPARING)
    if preparing is not None:
        return Activity(Doing.PREPARING, Timestamp(preparing))
    return Activity("waiting", _waits_since(group), "for the others to join")


def _waits_since(group: Group) -> Timestamp | None:
    """Since when the group forms; in a job that was suspended, not before there were workers again."""
    since = group.situation.since if isinstance(group.situation, FormingGroup) else group.next_generation.first_join_at
    if since is None:
        return None
    return Timestamp(max(since, min((sign.since for sign in group.signs.newest.values()), default=since)))


def _doing_since(group: Group, doing: str) -> float | None:
    """Since when (seconds since the epoch) one of the live workers has been doing this; None if none is."""
    return min((sign.since for sign in group.signs.newest.values() if sign.doing == doing), default=None)
