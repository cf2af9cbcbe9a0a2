"""The limits that an administrator sets for the jobs of a project (`spec.allowed` of its ElasticQuota), and breaches.

The same rules are in `deploy/limits.yaml`, for API servers that check them when a job is created or changed. An
empty list allows everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from elasticctl.api.errors import SpecError
from elasticctl.api.goal import MAX_USD
from elasticctl.api.gpu_types import INSTANCE_LABEL
from elasticctl.api.objects import as_list, as_mapping, as_text, at
from elasticctl.api.spec import MAX_PRIORITY, ElasticJob
from elasticctl.api.text import did_you_mean, join_or, quote
from elasticctl_protocol import variables
from elasticctl_protocol.codec import camel

DEFAULT_ACCOUNT = "default"
_ELSEWHERE = re.compile(r"(^|/)(\.|%2[eE]){2}(/|$)|[$][(]")
"""Parts of a URL that lead out of the folder that it seems to be in: `..`, and Kubernetes' references to variables."""
_CONTAINERS = ("initContainers", "containers")


@dataclass(frozen=True, slots=True)
class AllowedJobs:
    """The most that jobs of a project may request; empty or None: anything.

    `images` are names, or beginnings of names that end in `*`. `storage` are URLs; whatever is below one is allowed
    too. `node_types` are values of the label node.kubernetes.io/instance-type. `usd_per_day` is in US dollars per day
    (UTC), of the whole project.
    """

    priority: int | None = None
    priority_classes: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] = ()
    storage: tuple[str, ...] = ()
    node_types: tuple[str, ...] = ()
    usd_per_day: float | None = None

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> AllowedJobs:
        """Read the `spec` of an ElasticQuota, whatever it contains; never raises.

        A list without a usable entry allows nothing, since a damaged limit is still a limit.
        """
        allowed = as_mapping(spec.get("allowed"))
        priority, usd = allowed.get("priority"), allowed.get("usdPerDay")
        lists = {name: _strings(allowed.get(camel(name))) for name in _LISTS}
        return cls(
            priority=priority if isinstance(priority, int) and not isinstance(priority, bool) else None,
            usd_per_day=float(usd) if _is_amount(usd) and usd is not None else None,
            **lists,
        )

    def to_spec(self) -> dict[str, Any]:
        """Return `spec.allowed` as it is stored, with only the limits that are set."""
        given: dict[str, Any] = {camel(name): list(getattr(self, name)) for name in _LISTS if getattr(self, name)}
        if self.priority is not None:
            given["priority"] = self.priority
        if self.usd_per_day is not None:
            given["usdPerDay"] = self.usd_per_day
        return given

    def breaches(self, job: ElasticJob) -> tuple[str, ...]:
        """The breaches of a job, one clause each: `its image x is not one of y`; empty if everything is allowed."""
        return tuple(self._breaches(job))

    def _breaches(self, job: ElasticJob) -> Iterator[str]:
        pod = as_mapping(job.template.get("spec"))
        if self.priority is not None and job.sharing.priority > self.priority:
            yield f"its priority is {job.sharing.priority}, and {self.priority} is the most"
        for name in (as_text(pod.get("priorityClassName")), job.priority_class):
            if name and self.priority_classes and name not in self.priority_classes:
                yield f"its priority class {quote(name)} is not {join_or(self.priority_classes)}"
        for image in _images(pod):
            if self.images and not any(_matches(image, allowed) for allowed in self.images):
                yield f"its image {quote(image)} is not {join_or(self.images)}"
        account = as_text(pod.get("serviceAccountName")) or as_text(pod.get("serviceAccount")) or DEFAULT_ACCOUNT
        if self.service_accounts and account not in self.service_accounts:
            yield f"its service account {quote(account)} is not {join_or(self.service_accounts)}"
        for url in _storages(pod):
            if self.storage and not any(_is_below(url, allowed) for allowed in self.storage):
                said = quote(url) if url else "given by reference"
                yield f"its storage, {said}, is not below {join_or(self.storage)}"
        if self.node_types:
            yield from self._breaches_of_nodes(pod)

    def _breaches_of_nodes(self, pod: Mapping[str, Any]) -> Iterator[str]:
        if pod.get("nodeName"):
            yield f"it names the node {quote(pod['nodeName'])}, whose type would not be checked"
        wanted = at(pod, "nodeSelector", INSTANCE_LABEL)
        if wanted is not None and wanted not in self.node_types:
            yield f"its node type {quote(wanted)} is not {join_or(self.node_types)}"


_LISTS = ("priority_classes", "images", "service_accounts", "storage", "node_types")
_NAMES = tuple(camel(field.name) for field in fields(AllowedJobs))


def check_limits(allowed: object) -> AllowedJobs:
    """Check `spec.allowed` before it is stored. Raises SpecError with the field, the value and what is possible."""
    path = "spec.allowed"
    if not isinstance(allowed, Mapping):
        raise SpecError(f"must be a mapping, not {quote(allowed)}", path=path)
    for name in allowed:
        if name not in _NAMES:
            raise SpecError(f"{quote(name)} is not {join_or(_NAMES)}{did_you_mean(str(name), _NAMES)}", path=path)
    _check_lists(allowed, path)
    priority, usd = allowed.get("priority", 0), allowed.get("usdPerDay", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise SpecError(
            f"must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {quote(priority)}",
            path=f"{path}.priority",
        )
    if not _is_amount(usd):
        raise SpecError(f"must be an amount in US dollars, 0 or more, not {quote(usd)}", path=f"{path}.usdPerDay")
    return AllowedJobs.from_spec({"allowed": allowed})


def _check_lists(allowed: Mapping[str, Any], path: str) -> None:
    for name in map(camel, _LISTS):
        given = allowed.get(name, [])
        if not isinstance(given, list) or not all(isinstance(item, str) and item.strip() for item in given):
            raise SpecError(f"must be a list of names, not {quote(given)}", path=f"{path}.{name}")
    for pattern in allowed.get("images", []):
        if "*" in pattern.removesuffix("*"):
            raise SpecError(f"{quote(pattern)} has a * that is not at its end", path=f"{path}.images")
    for url in allowed.get("storage", []):
        if "://" not in url:
            raise SpecError(f"{quote(url)} is not a URL such as s3://bucket/folder", path=f"{path}.storage")


def _strings(given: object) -> tuple[str, ...]:
    found = tuple(item for item in as_list(given) if isinstance(item, str))
    return found or (("",) if given else ())


def _is_amount(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= MAX_USD  # type: ignore[operator]


def _images(pod: Mapping[str, Any]) -> Sequence[str]:
    """All images that a pod runs or mounts. A container without an image cannot start, and is no breach."""
    containers = [item for part in _CONTAINERS for item in as_list(pod.get(part))]
    found = [at(item, "image") for item in containers]
    found += [at(volume, "image", "reference") for volume in as_list(pod.get("volumes"))]
    return tuple(dict.fromkeys(str(image) for image in found if image))


def _storages(pod: Mapping[str, Any]) -> Sequence[str]:
    """The storage URLs of the containers; "" for one whose value comes from another object and cannot be checked."""
    items = [
        one
        for part in _CONTAINERS
        for container in as_list(pod.get(part))
        for one in as_list(at(container, "env"))
        if at(one, "name") == variables.STORAGE
    ]
    found = ["" if at(one, "valueFrom") else as_text(at(one, "value")) for one in items]
    return tuple(dict.fromkeys(found))


def _matches(image: str, allowed: str) -> bool:
    return image.startswith(allowed[:-1]) if allowed.endswith("*") else image == allowed


def _is_below(url: str, allowed: str) -> bool:
    """True if this URL is the allowed one or below it. The query says where the storage is, and must be the same."""
    (path, _, query), (base, _, base_query) = url.partition("?"), allowed.partition("?")
    base = base.rstrip("/")
    below = path.rstrip("/") == base or path.startswith(base + "/")
    return below and query == base_query and not _ELSEWHERE.search(path)
