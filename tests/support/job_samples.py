"""Jobs as a cluster reports them, for tests that need no cluster."""

from __future__ import annotations

import io
from typing import Any

from elasticctl.cli.framework.output import Table, fit_table, rich_table
from elasticctl.terminal import console

AT = 1_700_000_000.0


def at(seconds: float) -> str:
    """AT + seconds as it stands in a status."""
    from elasticctl.api.codec import to_rfc3339

    return to_rfc3339(AT + seconds)


def job(name: str = "digits", **status: Any) -> dict[str, Any]:
    """A job that has been interrupted and scaled; `status` fields go over it."""
    return {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": "7",
            "creationTimestamp": at(0),
        },
        "spec": {
            "minReplicas": 1,
            "maxReplicas": 4,
            "backoffLimit": 3,
            "replicaSpecs": {
                "Worker": {
                    "replicas": 4,
                    "template": {
                        "spec": {
                            "containers": [
                                {
                                    "name": "elasticjob-worker",
                                    "env": [{"name": "ELASTICCTL_STORAGE", "value": "file:///state/digits"}],
                                }
                            ]
                        }
                    },
                }
            },
        },
        "status": {
            "phase": "Running",
            "active": 4,
            "startTime": at(1),
            "restarts": {"Preempted": 1, "Completed": 2},
            "progress": {
                "step": 120,
                "totalSteps": 560,
                "epoch": 2,
                "totalEpochs": 8,
                "samplesPerS": 8123.4,
                "metrics": {"loss": 0.21},
            },
            "checkpoint": {"step": 100, "at": at(57), "committed": 6, "url": "file:///state/digits"},
            "interruptions": [
                {
                    "at": at(20),
                    "worker": "digits-worker-1",
                    "uid": "uid-of-the-lost-one",
                    "cause": "Preempted",
                    "recoveredAt": at(22.5),
                    "recoveryS": 2.5,
                    "stepsRedone": 12,
                }
            ],
            "scalings": [{"at": at(30), "fromWorkers": 3, "toWorkers": 4, "by": "user", "recoveryS": 1.25}],
            **status,
        },
    }


CURVE: dict[str, Any] = {
    "since": at(2),
    "atS": [0, 20, 40, 60],
    "step": [0, 40, 80, 120],
    "samplesPerS": [8000, 8100, 8050, 8123],
    "metrics": {"loss": [2.3, 0.9, 0.4, 0.21], "accuracy": [0.1, 0.95]},
}
FAILED: dict[str, Any] = {
    "phase": "Failed",
    "active": 0,
    "reason": "BackoffLimitExceeded",
    "message": "4 failures, 3 allowed",
    "failures": 4,
    "completionTime": at(100),
    "firstFailure": {
        "worker": "digits-worker-1",
        "rank": 1,
        "exitCode": 1,
        "error": "ValueError: bad learning rate",
        "lastLines": ["Traceback (most recent call last):", "ValueError: bad learning rate"],
    },
}


def cloud_job(name: str = "resnet", **status: Any) -> dict[str, Any]:
    """A job on spot instances with a known price, in the middle of its epochs: four workers of four T4 each."""
    found = job(
        name,
        activity={"doing": "training", "since": at(30)},
        generations=[
            {
                "generation": 3,
                "workers": [f"{name}-worker-{index}" for index in range(4)],
                "formedAt": at(29),
                "firstStepAt": at(30),
                "resumedStep": 59,
                "lastStep": 120,
            }
        ],
        workerSeconds={"spot": 7200.0},
        restarts={"Preempted": 2, "NodeLost": 1},
        **status,
    )
    found["status"]["progress"]["at"] = at(60)
    template = found["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    template["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 4}}
    template["containers"][0]["env"][0]["value"] = f"s3://team/runs/{name}"
    template["nodeSelector"] = {
        "node.kubernetes.io/instance-type": "g4dn.12xlarge",
        "karpenter.sh/capacity-type": "spot",
    }
    return found


def drawn(table: Table, width: int) -> list[str]:
    """A table as a terminal of that width shows it, without colours."""
    stream = io.StringIO()
    console(stream, width).print(rich_table(fit_table(table, width)))
    return [line.rstrip() for line in stream.getvalue().splitlines()]
