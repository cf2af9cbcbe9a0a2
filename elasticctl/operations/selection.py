"""Selects jobs by labels, phase, owner and age."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from elasticctl.api.errors import NotFoundError, UsageError
from elasticctl.api.text import did_you_mean, join_and, join_or, quote
from elasticctl.operations.option_values import duration, whole
from elasticctl.operations.target import ENDED, Target, phase_of
from elasticctl_protocol import variables

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest

_REQUIREMENT = re.compile(
    r"(?P<not>!)?(?P<key>[A-Za-z0-9][-A-Za-z0-9_./]*)(?:(?P<sign>==|!=|=)(?P<value>[-A-Za-z0-9_.]*))?"
)
_PHASES = ("Pending", "Running", "Restarting", "Suspended", *ENDED)
_GROUPS = {"active": tuple(phase for phase in _PHASES if phase not in ENDED), "ended": ENDED}


class Requirement(NamedTuple):
    """A requirement on the label `key`: it must be `value` (None: exist) or, if `wanted` is False, must not.

    Our own labels need no prefix: `user` is `elastic.pytorch.org/user`.
    """

    key: str
    value: str | None
    wanted: bool

    def holds(self, labels: dict[str, str]) -> bool:
        """True if the labels meet it."""
        from elasticctl.api.spec import GROUP

        found = labels.get(self.key, labels.get(f"{GROUP}/{self.key}"))
        return (found is not None and self.value in (None, found)) == self.wanted


class Selector(NamedTuple):
    """Requirements that must all be met."""

    requirements: tuple[Requirement, ...]


def selector(text: str) -> Selector:
    """KEY=VALUE, KEY!=VALUE, KEY or !KEY, separated by commas."""
    found = []
    for part in text.split(","):
        match = _REQUIREMENT.fullmatch(part.strip())
        if match is None or (match["not"] and match["sign"]):
            raise ValueError(f"{quote(part)} is not of the form KEY=VALUE, KEY!=VALUE, KEY or !KEY.")
        found.append(Requirement(match["key"], match["value"], not match["not"] and match["sign"] != "!="))
    return Selector(tuple(found))


class Phases(NamedTuple):
    """Phases of jobs."""

    names: tuple[str, ...]


def phases(text: str) -> Phases:
    """Phases separated by commas, in any case; `active` and `ended` stand for several."""
    return _phases_among({phase.lower(): (phase,) for phase in _PHASES} | _GROUPS, text)


def final_phases(text: str) -> Phases:
    """The same for jobs that have ended."""
    return _phases_among({phase.lower(): (phase,) for phase in ENDED}, text)


def _phases_among(known: Mapping[str, tuple[str, ...]], text: str) -> Phases:
    found: tuple[str, ...] = ()
    for word in text.split(","):
        if word.strip().lower() not in known:
            near = did_you_mean(word, known)
            raise ValueError(f"{quote(word)} is not {join_or(known)}{near}.")
        found += known[word.strip().lower()]
    return Phases(found)


def fits(job: Manifest, selectors: Sequence[Selector]) -> bool:
    """True if the job's labels meet all of them."""
    labels = job["metadata"].get("labels") or {}
    return all(requirement.holds(labels) for chosen in selectors for requirement in chosen.requirements)


def in_phases(phase: str, chosen: Sequence[Phases]) -> bool:
    """True if the phase is among the chosen ones, or if none were chosen."""
    return not chosen or any(phase in each.names for each in chosen)


def chosen_names(
    target: Target, names: Sequence[str], selectors: Sequence[Selector], among: Sequence[str] = _PHASES
) -> tuple[str, ...]:
    """The jobs that are meant: the named ones, or all with these labels in one of the phases `among`.

    Raises UsageError if neither or both are given, NotFoundError if no job has the labels.
    """
    if bool(names) == bool(selectors):
        what = "job names and --label cannot be used together" if names else "no job given"
        raise UsageError(f"{what}. FIX: give the names of jobs, or select them with --label KEY=VALUE")
    if names:
        return tuple(dict.fromkeys(names))
    with_labels = [job for job in target.cluster.list_jobs(target.namespace) if fits(job, selectors)]
    found = tuple(job["metadata"]["name"] for job in with_labels if phase_of(job) in among)
    if not found:
        states = [f"{job['metadata']['name']} is {phase_of(job)}" for job in with_labels[:3]]
        but = f", but {join_and(states)}" if states else ""
        raise NotFoundError(f"no job with these labels in namespace {target.namespace} qualifies{but}")
    return found


UNENDED = _GROUPS["active"]
SUSPENDED = ("Suspended",)
Order = Literal["age", "newest", "name", "phase", "step", "cost"]


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The jobs that `list` shows, and their order; `since` is in seconds."""

    phase: Annotated[tuple[Phases, ...], phases] = ()
    label: Annotated[tuple[Selector, ...], selector] = ()
    user: str = ""
    since: Annotated[int | None, duration] = None
    limit: Annotated[int | None, whole(1)] = None
    sort: Order = "age"

    def of(self, jobs: list[Manifest], now: float) -> list[Manifest]:
        """The selected jobs, in order; `now` is in seconds since the epoch."""
        wanted = [job for job in jobs if self._wants(job, now)]
        if self.sort == "age":  # as they come
            return wanted[-self.limit :] if self.limit is not None else wanted
        return _sorted(wanted, self.sort, now)[: self.limit]

    def _wants(self, job: Manifest, now: float) -> bool:
        if not in_phases(phase_of(job), self.phase):
            return False
        if self.user:
            from elasticctl.api.spec import USER_LABEL

            name = user_name() if self.user == "me" else self.user
            if (job["metadata"].get("labels") or {}).get(USER_LABEL) != name:
                return False
        return fits(job, self.label) and (self.since is None or _age_s(job, now) <= self.since)


def user_name() -> str:
    """The user's name as a valid label: $ELASTICCTL_USER, or the login name; "" if unknown."""
    import getpass

    try:
        name = os.environ.get(variables.USER) or getpass.getuser()
    except (OSError, KeyError):
        return ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:63].strip("-_.")


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts `run-9` before `run-10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _age_s(job: Manifest, now: float) -> float:
    from elasticctl.api.codec import from_rfc3339

    made = from_rfc3339(job["metadata"].get("creationTimestamp"))
    return 0.0 if made is None else now - made


def _sorted(jobs: list[Manifest], order: Order, now: float) -> list[Manifest]:
    """Sort names and phases in ascending order; otherwise newest, furthest or most expensive first."""
    from elasticctl.api.observed.cost import cost
    from elasticctl.api.spec import ElasticJob

    def dollars(job: Manifest) -> float:
        spent = cost(ElasticJob.from_manifest(job), now)
        return 0.0 if spent is None else -spent.spent

    if order == "newest":
        return jobs[::-1]
    if order == "name":
        return sorted(jobs, key=lambda job: _natural(job["metadata"]["name"]))
    if order == "phase":
        return sorted(jobs, key=lambda job: _PHASES.index(phase_of(job)) if phase_of(job) in _PHASES else len(_PHASES))
    if order == "cost":
        return sorted(jobs, key=dollars)
    return sorted(jobs, key=lambda job: -(ElasticJob.from_manifest(job).status.progress.step or -1))
