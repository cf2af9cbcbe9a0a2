"""A scenario for any cluster: two projects share four slots, by the API alone, and no step is lost."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl.cluster.base import Cluster
from tests.support import waiting
from tests.support.jobs import LIGHT, shell_job

TRAIN = Path(__file__).with_name("simple_train.py")
LAUNCH = str(Path(sys.executable).with_name("elasticctl-launch"))
ENDLESS = 100_000
GUEST_EPOCHS = 16  # ten steps of an eighth of a second each: it stays until its host has trained without the slots
PATIENCE_S = 240.0
AUTOMATIC = {"sharing": {"automatic": True}, "minReplicas": 2, "maxReplicas": 4}

wait_until = partial(waiting.wait_until, every_s=0.1)  # a real API server may have two processors for this and all else


def training(name: str, namespace: str, storage: str, *, epochs: int = ENDLESS, **spec: Any) -> Manifest:
    """A job of which two workers take an eighth of a second a step, and four half of that."""
    container = {
        "command": [LAUNCH, *LIGHT, "--nproc-per-node", "1", "--"],
        "args": [sys.executable, str(TRAIN), "--epochs", str(epochs), "--sample-s", "0.004"],
        "env": [
            {"name": "ELASTICCTL_STORAGE", "value": f"{storage}/{name}"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
    }
    workers = spec.pop("workers", spec.get("maxReplicas", 1))
    return shell_job(name, "", workers, namespace=namespace, container=container, grace_s=20, **spec)


def status(cluster: Cluster, namespace: str, name: str) -> JobStatus:
    return ElasticJob.from_manifest(cluster.get_job(namespace, name)).status


def trains(found: JobStatus, workers: int) -> bool:
    """True once a group of that many has taken a step, and no other workers are there."""
    newest = found.generations[-1:]
    return bool(newest and newest[0].first_step_at and len(newest[0].workers) == workers == found.active)


def give_way_and_grow_back(cluster: Cluster, submit: Callable[[Manifest], object], storage: str) -> None:
    """Projects a and b are guaranteed two slots each of four; jobs are handed to `submit`.

    A's job grows to four, b's takes its two, a's shrinks to two and trains on; b's ends, and a's is back at four.
    """
    submit(training("elastic", "a", storage, **AUTOMATIC))

    def elastic() -> JobStatus:
        return status(cluster, "a", "elastic")

    def guest() -> JobStatus:
        return status(cluster, "b", "guest")

    wait_until(lambda: trains(elastic(), 4), PATIENCE_S)
    assert _borrowed(elastic()) == 2
    committed = wait_until(lambda: elastic().checkpoint.step, PATIENCE_S)

    submit(training("guest", "b", storage, workers=2, epochs=GUEST_EPOCHS, minReplicas=2))
    wait_until(lambda: trains(elastic(), 2) and _borrowed(elastic()) == 0, PATIENCE_S)
    resumed = elastic().generations[-1].resumed_step
    assert resumed is not None
    assert committed is not None
    assert resumed >= committed
    wait_until(lambda: trains(guest(), 2) or guest().phase is Phase.SUCCEEDED, PATIENCE_S)
    wait_until(lambda: guest().phase is Phase.SUCCEEDED, PATIENCE_S)
    wait_until(lambda: trains(elastic(), 4), PATIENCE_S)

    end = elastic()
    assert end.steps_redone == 0, "every change of size was made at a committed step"
    assert end.interruptions == ()
    steps = [(group.resumed_step, group.last_step) for group in end.generations]
    assert all(after[0] == before[1] for before, after in itertools.pairwise(steps)), steps
    first, *later = [item for item in end.scalings if item.from_workers]  # its start is none if it never waited
    assert (first.from_workers, first.to_workers, first.by) == (4, 2, "sharing")
    assert "b/guest" in first.message
    sizes = [(item.from_workers, item.to_workers) for item in later]
    assert sizes in ([(2, 4)], [(2, 3), (3, 4)]), "as the guest's workers end"
    assert {item.by for item in later} == {"sharing"}
    assert guest().failures == 0


def _borrowed(found: JobStatus) -> int | None:
    return None if found.share is None else found.share.borrowed
