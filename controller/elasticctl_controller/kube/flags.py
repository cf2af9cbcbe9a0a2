"""The command line of the controller on Kubernetes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from elasticctl.api.quota import POOLS
from elasticctl.kubeapi.features import ALL, Feature, parse_features
from elasticctl_controller.core.group.worker_tokens import EVERY_S
from elasticctl_controller.kube.nodes import UNKNOWN_GRACE_S
from elasticctl_controller.loop.webhooks import WebhookRules

LEAST_ROTATION_S = 300.0


@dataclass(frozen=True, slots=True)
class Flags:
    """The parsed command line; a port of 0 is chosen by the system."""

    rendezvous_url: str
    token_key_file: Path
    rendezvous_port: int
    metrics_port: int
    health_port: int
    leader_election_namespace: str
    bind: str
    context: str
    api_qps: float
    api_burst: int
    node_grace_s: float
    sharing: bool
    capacity: dict[str, int]
    webhook_to: list[str]
    features: frozenset[Feature]
    watch_namespace: str
    rotate_tokens_s: float

    def has(self, feature: Feature) -> bool:
        """True if the controller has the rights that this feature takes."""
        return feature in self.features


def parse_flags(argv: list[str] | None = None) -> Flags:
    """Parse the command line; exits with 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="elasticctl_controller.kube.manager", description="The controller on Kubernetes."
    )
    add = parser.add_argument
    add("--rendezvous-url", required=True, metavar="URL", help="where workers reach the leader's rendezvous port")
    add("--token-key-file", required=True, type=Path, metavar="FILE", help="the key of the workers' tokens, in hex")
    add("--rendezvous-port", type=int, default=7777, metavar="PORT")
    add("--metrics-port", type=int, default=8080, metavar="PORT", help="serves /metrics")
    add("--health-port", type=int, default=8081, metavar="PORT", help="serves /healthz and /readyz")
    add("--leader-election-namespace", default="elasticctl-system", metavar="NAMESPACE", help="where the Lease is")
    add("--bind", default="", metavar="ADDRESS", help="listen on this address only")
    add(
        "--context",
        default="",
        metavar="NAME",
        help="a context of the kubeconfig; by default the cluster that this runs in",
    )
    add("--api-qps", type=_positive, default=300.0, metavar="N", help="requests a second to the API server")
    add("--api-burst", type=int, default=600, metavar="N", help="requests to the API server in a burst")
    add(
        "--node-grace-s",
        type=_positive,
        default=UNKNOWN_GRACE_S,
        metavar="S",
        help="how long a node may be Unknown before its workers are replaced",
    )
    add("--sharing", action="store_true", help="share GPUs between projects: quotas, priorities, automatic sizes")
    add(
        "--capacity",
        type=_capacity,
        action="append",
        default=[],
        metavar="KIND=N",
        help="an autoscaler can provide up to N GPUs of this type: jobs are given, and wait for, that many",
    )
    add(
        "--webhook-to",
        type=_webhook_host,
        action="append",
        default=[],
        metavar="HOST",
        help="call webhooks of this host, *.DOMAIN or network only; by default every public host",
    )
    add("--features", type=_features, default=ALL, metavar="NAME,...", help="what it has rights for; by default, all")
    add("--watch-namespace", default="", metavar="NAMESPACE", help="run the jobs of this namespace only")
    add(
        "--rotate-tokens-s",
        type=_rotation,
        default=EVERY_S,
        metavar="S",
        help="how often a job's workers get another token; the previous one stays valid for an hour, or half of this",
    )
    given = vars(parser.parse_args(argv))
    if given["sharing"] and given["watch_namespace"]:
        parser.error("--sharing is for a whole cluster, not for one namespace")
    return Flags(**{**given, "capacity": dict(given["capacity"])})


def _capacity(text: str) -> tuple[str, int]:
    kind, _, slots = text.partition("=")
    if kind not in POOLS or not (slots.isascii() and slots.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: must be KIND=N, with a KIND of {', '.join(POOLS)}")
    return kind, int(slots)


def _features(text: str) -> frozenset[Feature]:
    try:
        return parse_features(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{e}: known are {', '.join(Feature)}") from e


def _webhook_host(text: str) -> str:
    try:
        WebhookRules.parse([text])
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    return text


def _rotation(text: str) -> float:
    value = _positive(text)
    if value < LEAST_ROTATION_S:
        raise argparse.ArgumentTypeError(f"{text}: must be {LEAST_ROTATION_S:.0f} or more: pods get it minutes later")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
    return value
