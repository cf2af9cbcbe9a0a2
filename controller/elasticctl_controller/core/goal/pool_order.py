"""A job with an order of pools: which pool its workers ask for machines, when they try the next one, and when they move
back.

Workers that have waited as long as the order allows ask in the next pool. That costs nothing, because they have no
machine yet. Moving back is voluntary, make before break: replacements ask in the better pool while the workers in worse
pools keep training, and replace these once they are ready. It is tried now and then, and only if it pays off. After the
last pool, the one that was given up longest ago is next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticctl.api.codec import Timestamp, from_rfc3339, to_rfc3339
from elasticctl.api.goal import PoolOrder, PoolsStatus, PoolStatus, type_of
from elasticctl.api.objects import at
from elasticctl.api.observed.cost import usd_per_h
from elasticctl.api.observed.history import remaining_s
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl.planning.deadline_policy import HOLD_H
from elasticctl.planning.situation import Costs
from elasticctl_controller.core.goal.pools import (
    Present,
    has_stepped,
    is_placed,
    measured_costs,
    placed,
    present_workers,
)
from elasticctl_controller.core.manifests import grace_s
from elasticctl_controller.core.observation import Observed, WorkerMoves

PREFERENCE = 0.1
"""If prices show no saving, a better place in the order is assumed to be worth this share of a machine's price."""
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
NOT_WORTH_IT = "a move would cost more than it saves"
NOT_TO_DISRUPT = f"its pods say {DO_NOT_DISRUPT}"
OWN_RENDEZVOUS = "it brings its own rendezvous, so the controller cannot hand over to replacements"
SHARED = "a shared cluster has no room for replacements"


@dataclass(frozen=True, slots=True)
class _View:
    """What one pass knows: `names` are the allowed pools in order; `pools` is the pool of each worker that stays, by
    uid.

    `placed` have a machine, ordered by which to give up first: in the worst pool, not ready, highest index.
    """

    job: ElasticJob
    order: PoolOrder
    names: tuple[str, ...]
    status: JobStatus
    present: Present
    pools: Mapping[str, str]
    placed: tuple[Pod, ...]
    waiting: tuple[Pod, ...]
    is_shared: bool
    now: float

    def rank(self, pod: Pod) -> int:
        """The position of its pool in the order; after all others if it is not in it."""
        return _rank(self.names, self.pools[pod.uid])

    def worse(self, pool: str) -> tuple[Pod, ...]:
        """The workers with a machine in a worse pool than this one."""
        return tuple(pod for pod in self.placed if self.rank(pod) > self.names.index(pool))

    @property
    def missing(self) -> int:
        """How many wanted workers have not been created yet."""
        return max(0, self.job.desired - len(self.placed) - len(self.waiting))

    @property
    def is_ready(self) -> bool:
        """Are all workers with a machine in the group, or ready to be?"""
        return all(pod.uid in self.present.ready for pod in self.placed)

    def without(self, uids: Collection[str]) -> _View:
        """The same without some workers."""
        placed, waiting = (tuple(p for p in pods if p.uid not in uids) for pods in (self.placed, self.waiting))
        return replace(self, placed=placed, waiting=waiting)


def _view(job: ElasticJob, order: PoolOrder, observed: Observed, reported: JobStatus, now: float) -> _View:
    present = present_workers(job, observed, reported, now)
    allowed = tuple(name for name in order.order if not job.node_types or type_of(name) in ("", *job.node_types))
    names = allowed or order.order
    pools = {pod.uid: pool for pool, pods in present.pods.items() for pod in pods}
    staying = [pod for pod in present.all() if pod.uid not in observed.cluster.notices]
    staying.sort(key=lambda p: (-_rank(names, pools[p.uid]), p.uid in present.ready, -(p.index or 0), p.uid))
    waiting = tuple(pod for pod in staying if not is_placed(pod))
    return _View(
        job, order, names, reported, present, pools, tuple(placed(staying)), waiting, observed.share is not None, now
    )


def _rank(names: Sequence[str], pool: str) -> int:
    return names.index(pool) if pool in names else len(names)


def follow_order(
    job: ElasticJob, order: PoolOrder, observed: Observed, moves: WorkerMoves, reported: JobStatus, now: float
) -> tuple[WorkerMoves, PoolsStatus | None]:
    """Return `moves` with the pool of new workers and the workers that stop waiting or make room, and the status of the
    pools.

    `reported` is the job's status with what its group has reported since. A job that is over or suspended starts again
    with the first pool.
    """
    phase = job.status.phase
    if phase.terminal or job.suspend or job.cancel or job.held or job.over_limit or not job.desired:
        return moves, None
    view = _view(job, order, observed, reported, now)
    before = job.status.pools or PoolsStatus()
    short = {one.name: one.short_since for one in before.seen if one.short_since is not None}
    short = {name: since for name, since in short.items() if name in view.names} | _given_up(view)
    trying = before.trying if before.pool in view.names else None
    if trying is not None:
        return _go_on_trying(view, moves, before.pool, trying, short)
    if view.waiting or view.missing or observed.cluster.notices:
        return _ask(view, moves, _next_pool(view, before.pool, short), short)
    back_to, stays = _way_back(view)
    if back_to and not stays and view.is_ready and phase is Phase.RUNNING:
        due = [name for name in view.names if view.worse(name) and not _is_short(view, short, name)]
        if due:
            return _go_on_trying(view, moves, due[0], _stamp(now), _without(short, due[0]))
    return _ask(view, moves, _next_pool(view, "", short), short, back_to, stays)


def _go_on_trying(
    view: _View, moves: WorkerMoves, pool: str, trying: Timestamp, short: dict[str, Timestamp]
) -> tuple[WorkerMoves, PoolsStatus]:
    """Replacements ask in a better pool. The workers in the worst pools keep training until those are ready, and leave
    then.
    """
    worse = view.worse(pool)
    more = len(view.placed) - view.job.desired
    all_came = not view.waiting and more >= len(worse)
    until = _stamp(trying + view.order.wait_seconds)
    if view.now >= until and not all_came and pool not in short:
        short = {**short, pool: _stamp(view.now)}  # some could not even be created
    asks = pool not in short and (more > 0 or not _way_back(view)[1])
    if (all_came or not asks) and view.is_ready and has_stepped(view.status):
        moves = _move(moves, [*view.placed[: max(0, more)], *view.waiting])
        view = view.without(moves.moves)
        return _ask(view, moves, _next_pool(view, "", short), short, *_way_back(view))
    making_room = worse if asks else worse[: max(0, more)]
    if not asks:
        moves = _move(moves, view.waiting)
    moves = replace(moves, moves_to={pod.uid: pool for pod in making_room}, pools=_for_all(view, pool))
    return moves, replace(_asking(view, pool, short), trying=trying, then="", then_at=until if asks else None)


def _ask(
    view: _View,
    moves: WorkerMoves,
    pool: str,
    short: dict[str, Timestamp],
    back_to: str = "",
    stays: str = "",
) -> tuple[WorkerMoves, PoolsStatus]:
    """Workers without a machine ask in this pool; workers that wait in another pool are given up there."""
    elsewhere = [pod for pod in view.waiting if view.pools[pod.uid] != pool]
    if view.waiting or view.missing:
        short = _without(short, pool)
    surplus = max(0, len(view.waiting) + len(view.placed) - view.job.desired)
    moves = _move(moves, elsewhere)
    leave = moves.leave | {pod.uid for pod in (*view.waiting, *view.placed)[:surplus]}
    status = _asking(view, pool, short)
    if back_to:
        at_s = min(_tried_again_at(view, short, name) for name in view.names if view.worse(name))
        back_at = None if stays or at_s <= view.now else _stamp(at_s)
        status = replace(status, back_to=back_to, stays=stays, back_at=back_at)
    return replace(moves, leave=leave, pools=_for_all(view, pool)), status


def _asking(view: _View, pool: str, short: dict[str, Timestamp]) -> PoolsStatus:
    seen = tuple(PoolStatus(name, since, up=False, short_since=since) for name, since in short.items())
    here = [pod for pod in view.waiting if view.pools[pod.uid] == pool]
    since = min((pod.created_at for pod in here if pod.created_at is not None), default=None)
    if since is None:
        return PoolsStatus(pool=pool, seen=seen)
    then_at = _stamp(since + view.order.wait_seconds) if len(view.names) > 1 else None
    then = _next_pool(replace(view, now=then_at), "", {**short, pool: then_at}) if then_at else ""
    return PoolsStatus(pool=pool, waiting=len(here), since=since, then=then, then_at=then_at, seen=seen)


def _given_up(view: _View) -> dict[str, Timestamp]:
    """The pools in which a worker has waited as long as the order allows; none if there is no other pool."""
    if len(view.names) == 1:
        return {}
    late = [p for p in view.waiting if p.created_at and view.now >= p.created_at + view.order.wait_seconds]
    return {name: _stamp(view.now) for pod in late if (name := view.pools[pod.uid]) in view.names}


def _next_pool(view: _View, current: str, short: dict[str, Timestamp]) -> str:
    """The pool to ask in: the one in which workers wait already, else the first that may have machines, else the one
    that was given up longest ago.
    """
    waits = any(view.pools[pod.uid] == current for pod in view.waiting)
    if waits and current in view.names and current not in short:
        return current
    may_have = [name for name in view.names if not _is_short(view, short, name)]
    return may_have[0] if may_have else min(view.names, key=lambda name: short.get(name) or 0.0)


def _is_short(view: _View, short: dict[str, Timestamp], pool: str) -> bool:
    return _tried_again_at(view, short, pool) > view.now


def _tried_again_at(view: _View, short: dict[str, Timestamp], pool: str) -> float:
    since = short.get(pool)
    return view.now if since is None else since + view.order.retry_seconds


def _way_back(view: _View) -> tuple[str, str]:
    """A pool that is better than that of some workers, and why they stay where they are, if they do."""
    better = next((name for name in view.names if view.worse(name)), "")
    if not better:
        return "", ""
    if view.is_shared:
        return better, SHARED
    if view.job.rdzv_endpoint:
        return better, OWN_RENDEZVOUS
    if str(at(view.job.template, "metadata", "annotations", DO_NOT_DISRUPT)).lower() == "true":
        return better, NOT_TO_DISRUPT
    return better, "" if _pays(view, better) else NOT_WORTH_IT


def _pays(view: _View, pool: str) -> bool:
    """Does a move save more than it costs, given the prices and how long training will still take, if that is known?

    The group stops twice, and each new machine is paid for while it starts.
    """
    costs: Costs = measured_costs(view.status, view.present, None, float(grace_s(view.job)))
    left_s = remaining_s(view.status)
    held_h = HOLD_H if left_s is None else min(HOLD_H, left_s / 3600)
    price, worse = usd_per_h(view.job, pool), view.worse(pool)
    now_usd = {pod.uid: usd_per_h(view.job, view.pools[pod.uid]) for pod in view.placed}
    saved = sum(max(PREFERENCE * price, now_usd[pod.uid] - price) for pod in worse) * held_h
    paid = len(worse) * price * costs.start_s / 3600 + sum(now_usd.values()) * 2 * costs.reform_s / 3600
    return saved > paid


def _move(moves: WorkerMoves, pods: Iterable[Pod]) -> WorkerMoves:
    return replace(moves, moves=moves.moves | {pod.uid for pod in pods})


def _for_all(view: _View, pool: str) -> tuple[str, ...]:
    """One pool for all new workers, including those that replace others."""
    return (pool,) * (2 * view.job.max)


def _without(short: dict[str, Timestamp], pool: str) -> dict[str, Timestamp]:
    return {name: since for name, since in short.items() if name != pool}


def _stamp(moment: float) -> Timestamp:
    """The moment as it will be read back, so that a status at rest does not change."""
    return from_rfc3339(to_rfc3339(moment)) or Timestamp(moment)
