"""Three ways to divide the GPUs: the controller's own core, and two schedulers of jobs of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.sharing_simulation.trace import Settings
from elasticctl_controller.core.sharing.claims import Claim, Node, Pool, Project, SharingRules
from elasticctl_controller.core.sharing.grant_workers import decide

POOL = "gpu"


@dataclass(frozen=True, slots=True)
class Granted:
    """What a job gets, and which of its workers leave."""

    workers: int
    leave: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """All grants by job, and when to ask again if nothing changes."""

    grants: dict[str, Granted]
    wake_at: float | None = None


class Policy(Protocol):
    """A contender. `elastic`: its jobs continue when they lose workers. `queues`: they give up all workers and queue
    again."""

    name: str
    elastic: bool
    queues: bool

    def decide(self, nodes: Sequence[Node], claims: Sequence[Claim], now: float) -> Verdict:
        """Divide these nodes among these claims."""
        ...


class Sharing:
    """The real `decide`; `engine` asks the real `resizing` when a group admits newcomers."""

    name = "elasticctl"
    elastic = True
    queues = False

    def __init__(self, settings: Settings) -> None:
        self.rules = SharingRules()
        self.projects = [Project(name, guaranteed={POOL: settings.guaranteed}) for name in settings.projects]

    def decide(self, nodes: Sequence[Node], claims: Sequence[Claim], now: float) -> Verdict:
        decision = decide([Pool(POOL, tuple(nodes))], self.projects, claims, now, self.rules)
        grants = {key: Granted(grant.workers, grant.leave) for key, grant in decision.grants.items()}
        return Verdict(grants, decision.wake_at)


class Gangs:
    """Jobs of fixed size, in the order of their arrival: all workers of a job or none. `strict`: no job overtakes
    another.

    `queues`: a job that has lost a worker gives up the others, too, and queues again at its place. Otherwise it keeps
    them and waits for a replacement, like a Kubernetes Job with a fixed number of workers.
    """

    elastic = False

    def __init__(self, name: str, strict: bool, queues: bool) -> None:
        self.name = name
        self.strict = strict
        self.queues = queues

    def decide(self, nodes: Sequence[Node], claims: Sequence[Claim], now: float) -> Verdict:
        held = (len(claim.workers) if self.queues else claim.granted for claim in claims)
        free = sum(node.slots for node in nodes) - sum(held)
        grants = {claim.key: Granted(claim.granted) for claim in claims}
        for claim in sorted(claims, key=lambda claim: (claim.submitted_at, claim.key)):
            if claim.granted:
                continue
            if claim.most <= free:
                free -= claim.most
                grants[claim.key] = Granted(claim.most)
            elif self.strict:
                break
        return Verdict(grants)


def contenders(settings: Settings) -> list[Policy]:
    """Return all of them, ours last."""
    return [
        Gangs("fifo gangs", strict=True, queues=True),
        Gangs("fixed size", strict=False, queues=False),
        Sharing(settings),
    ]
