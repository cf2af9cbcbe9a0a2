"""Tries several contexts for one job, cheapest first, and the next if its workers do not start; never two at once.

Before the next context is tried, the job is cancelled and its workers are gone. If that cannot be confirmed, no other
context is tried: one job that waits is better than two that train.
"""

from __future__ import annotations

import dataclasses
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticctl.api.errors import (
    ClusterError,
    ConflictError,
    CredentialsError,
    ElasticctlError,
    ForbiddenError,
    JobStorageError,
    NotFoundError,
    UsageError,
)
from elasticctl.api.text import plural, span
from elasticctl.cli.framework.output import say
from elasticctl.cli.framework.target import Target
from elasticctl.cluster.base import Cluster, Manifest

if TYPE_CHECKING:
    from elasticctl.cli.submit.draft import Draft
    from elasticctl.cli.submit.flags.job_flags import JobFlags
    from elasticctl.cli.submit.training_command import Command
    from elasticctl.settings.contexts import Context


CAPACITY_TIMEOUT_S = 600
"""How long each of several contexts has to bring the job's minimum of workers."""
_REFUSALS = (UsageError, JobStorageError, NotFoundError, ConflictError, CredentialsError, ForbiddenError)
"""After any other error to a create the job may be there."""

Create = Callable[[Target, "Draft"], Manifest]
Plan = Callable[["Context"], tuple["Draft", float | None]]
"""The job as it would be in a context, and its price there in US dollars an hour; UsageError where it cannot be."""


@dataclass(frozen=True, slots=True)
class PricedContext:
    """A context that the job could run in; `hourly_usd` is None if no price is known."""

    context: Context
    draft: Draft
    hourly_usd: float | None

    @property
    def told(self) -> str:
        """The context with its price."""
        price = "no known price" if self.hourly_usd is None else f"${self.hourly_usd:,.2f} an hour"
        return f"{self.context.name} ({price})"


@dataclass(slots=True)
class Search:
    """The search through the contexts. `passed` has each context that was given up, and why."""

    connect: Callable[[Context], Target]
    create: Create
    timeout_s: float
    passed: list[tuple[str, ElasticctlError]] = field(default_factory=list)

    def first(self, contexts: Sequence[Context], plan: Plan) -> tuple[Target, Manifest]:
        """Create the job in the first context that starts its minimum of workers; return that context and the job.

        Raises the error with which all contexts refuse the job, or ClusterError if none has capacity; then nothing is
        left anywhere. Ctrl-C removes what was created.
        """
        candidates = self.candidates(contexts, plan)
        if len(candidates) > 1:
            order = ", ".join(one.told for one in candidates)
            say(f"in this order, by price: {order}; up to {span(self.timeout_s)} each")
        with _interruptible():
            for candidate in candidates:
                try:
                    found = self._try(candidate)
                except _NoCapacityError as e:
                    say(f"{candidate.context.name}: skipped: {e}")
                    self.passed.append((candidate.context.name, e))
                else:
                    self._say_where(candidate, found[1])
                    return found
        raise self._nowhere()

    def candidates(self, contexts: Sequence[Context], plan: Plan) -> list[PricedContext]:
        """The contexts that can run the job, cheapest first, those without a price last."""
        found = []
        for context in contexts:
            try:
                found.append(PricedContext(context, *plan(context)))
            except UsageError as e:
                self.passed.append((context.name, e))
        for name, error in self.passed if found else ():
            say(f"{name}: skipped: {error}")
        return sorted(found, key=lambda one: (one.hourly_usd is None, one.hourly_usd or 0.0))

    def cheapest(self, contexts: Sequence[Context], plan: Plan) -> Context:
        """The context that is tried first."""
        found = self.candidates(contexts, plan)
        if not found:
            raise self._nowhere()
        return found[0].context

    def _try(self, candidate: PricedContext) -> tuple[Target, Manifest]:
        """Raises _NoCapacityError once nothing of the job is left, and ClusterError if that is uncertain."""
        context = candidate.context
        try:
            target = self.connect(context)
        except ElasticctlError as e:
            raise _NoCapacityError(str(e)) from e
        attempt = Attempt(target)
        try:
            manifest = self._create(target, candidate, attempt)
            say(f"{context.name}: waiting for workers")
            why_not = attempt.wait(manifest, self.timeout_s)
            if not why_not:
                return target, manifest
            say(f"{context.name}: {why_not}; withdrawing it")
            attempt.withdraw()
            raise _NoCapacityError(why_not)
        except KeyboardInterrupt:
            say(f"\n{context.name}: interrupted; withdrawing it")
            attempt.withdraw()
            raise

    def _create(self, target: Target, candidate: PricedContext, attempt: Attempt) -> Manifest:
        """Raises _NoCapacityError if nothing was created, and ClusterError if that is uncertain."""
        try:
            target.cluster.list_jobs(target.namespace)  # who does not answer now has been given nothing
        except ElasticctlError as e:
            raise _NoCapacityError(str(e)) from e
        try:
            return self.create(target, attempt.marked(candidate.draft))
        except ElasticctlError as e:
            if not isinstance(e, _REFUSALS):  # an answer that got lost
                attempt.withdraw()
            raise _NoCapacityError(str(e)) from e

    def _say_where(self, candidate: PricedContext, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        before = "; ".join(f"not in {context}: {error}" for context, error in self.passed)
        say(f"{name} runs in {candidate.told}" + (f"; {before}" if before else ", the cheapest"))

    def _nowhere(self) -> ElasticctlError:
        errors = [error for _, error in self.passed]
        if all(isinstance(error, UsageError) for error in errors) and len({str(error) for error in errors}) == 1:
            return errors[0]
        reasons = "; ".join(f"{context}: {error}" for context, error in self.passed)
        return ClusterError(f"no context could run the job, and nothing was left behind: {reasons}")


class _NoCapacityError(ElasticctlError):
    """The workers did not start in this context, and nothing is left there."""


def planner(request: JobFlags, command: Command | None, draft_in: Callable[[Context], Draft]) -> Plan:
    """A function that plans the job in a context, with its price there; `command` is None for a job from a file."""

    from elasticctl.cli.submit.spec_from_flags import with_asked

    def plan(context: Context) -> tuple[Draft, float | None]:
        draft = draft_in(context)
        if draft.doubt:
            raise UsageError(draft.doubt)
        if command is None:
            return draft, _hourly_usd_of(draft.make(draft.name))
        return draft, _hourly_usd(with_asked(request, command.options, ()), context)

    return plan


def _hourly_usd(request: JobFlags, context: Context) -> float | None:
    """US dollars per hour; None if no price is known. Raises UsageError."""
    from elasticctl.cli.submit import spec_from_flags
    from elasticctl.cli.views.cost import rate_of_spec
    from elasticctl.settings.contexts import LOCAL

    if context.provider == LOCAL:
        return None
    spec = spec_from_flags.job_spec(request, context, spec_from_flags.size_of(request, context, 0), ())
    one = rate_of_spec(spec)
    if one is None:
        return None
    return spec.workers * (one.spot_range[0] if spec.spot else one.low)


def _hourly_usd_of(manifest: Manifest) -> float | None:
    from elasticctl.api.goal import ON_DEMAND
    from elasticctl.api.observed.cost import rate_of
    from elasticctl.api.podtemplate import capacity
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.cost import with_live_spot

    job = ElasticJob.from_manifest(manifest)
    one = with_live_spot(rate_of(job))
    if one is None:
        return None
    return job.desired * (one.low if capacity(job.template) == ON_DEMAND else one.spot_range[0])


def split_contexts(contexts: str) -> tuple[str, ...]:
    """`aws,gcp` -> the names without duplicates, in order. Raises UsageError for an empty one."""
    names = tuple(dict.fromkeys(part.strip() for part in contexts.split(",")))
    if "" in names and "," in contexts:
        raise UsageError(f"--context {contexts}: a name is missing between commas; give them as aws,gcp")
    return names


@contextmanager
def _interruptible() -> Iterator[None]:
    """A closed terminal and SIGTERM end the search as Ctrl-C does, unless they are ignored (nohup)."""
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, signal.default_int_handler) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


GONE_WITHIN_S = 120.0
_POLL_EVERY_S = 0.25
_UNCONTROLLED_S = 15.0
"""A job that nobody looks after has no phase; one without workers is taken to be such after so long."""
_LATE_S = 2.0
"""A create that was sent is carried out within this, answered or not."""
_LIVE = ("Pending", "Running", "Unknown")


class Attempt:
    """One attempt in one place; the job is marked, so that another one is not mistaken for it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._mark = secrets.token_hex(8)
        self._made: list[tuple[str, str]] = []
        self._sure = False

    def marked(self, draft: Draft) -> Draft:
        """The draft, whose manifest has the mark."""
        from elasticctl.api.spec import ANNOTATION_ATTEMPT

        def make(name: str) -> Manifest:
            manifest = draft.make(name)
            metadata = manifest["metadata"]
            self._made.append((metadata["namespace"], metadata["name"]))
            annotations = {**(metadata.get("annotations") or {}), ANNOTATION_ATTEMPT: self._mark}
            return {**manifest, "metadata": {**metadata, "annotations": annotations}}

        return dataclasses.replace(draft, make=make)

    def wait(self, manifest: Manifest, timeout_s: float) -> str:
        """Wait for the minimum of workers or the end. Returns "", or what happened instead. Raises NotFoundError."""
        from elasticctl.api.observed.workers import count_workers
        from elasticctl.api.spec import ElasticJob

        self._sure = True
        metadata, deadline = manifest["metadata"], time.monotonic() + timeout_s
        placed, wanted, trouble = 0, 1, ""
        while True:
            try:
                job = ElasticJob.from_manifest(self._cluster.get_job(metadata["namespace"], metadata["name"]))
            except NotFoundError:
                raise
            except ClusterError as e:
                trouble = f" ({e})"
            else:
                placed, wanted, trouble = count_workers(job.status).placed, max(1, job.min), ""
                if placed >= wanted or job.status.phase.terminal:
                    return ""
            if time.monotonic() >= deadline:
                return f"{placed} of {plural(wanted, 'worker')} within {span(timeout_s)}{trouble}"
            time.sleep(_POLL_EVERY_S)

    def withdraw(self) -> None:
        """Cancel the job, wait until its workers are gone, and delete it. Raises ClusterError if that is uncertain.

        Ctrl-C meanwhile deletes it at once.
        """
        for namespace, name in dict.fromkeys(self._made):
            try:
                try:
                    self._end(namespace, name)
                finally:
                    self._delete(namespace, name)
            except NotFoundError:
                continue
            except ClusterError as e:
                where = self._target.context.name
                raise ClusterError(
                    f"{name} may still be in context {where}, so no other was tried: {e}. FIX:"
                    f" `elasticctl delete {name} --context {where}`"
                ) from e

    @property
    def _cluster(self) -> Cluster:
        return self._target.cluster

    def _is_mine(self, namespace: str, name: str) -> bool:
        from elasticctl.api.objects import at
        from elasticctl.api.spec import ANNOTATION_ATTEMPT

        manifest = self._cluster.get_job(namespace, name)
        return bool(at(manifest, "metadata", "annotations", ANNOTATION_ATTEMPT) == self._mark)

    def _turned_up(self, namespace: str, name: str) -> bool:
        """True if our job exists; if its creation was never answered, it may appear a moment later."""
        deadline = time.monotonic() + (0.0 if self._sure else _LATE_S)
        while True:
            try:
                return self._is_mine(namespace, name)
            except NotFoundError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_EVERY_S)

    def _end(self, namespace: str, name: str) -> None:
        """Cancel the job, and wait until no worker is left. Raises NotFoundError."""
        from elasticctl.api.objects import at
        from elasticctl.api.status import Phase

        if not self._turned_up(namespace, name):
            return
        self._cluster.patch_job(namespace, name, {"spec": {"cancel": True, "cleanPodPolicy": "All"}})
        ended = tuple(phase.value for phase in Phase if phase.terminal)
        began = time.monotonic()
        while True:
            phase = at(self._cluster.get_job(namespace, name), "status", "phase")
            live = [pod for pod in self._cluster.list_pods(namespace, name) if at(pod, "status", "phase") in _LIVE]
            waited_s = time.monotonic() - began
            if not live and (phase in ended or waited_s > _UNCONTROLLED_S):
                return
            if waited_s > GONE_WITHIN_S:
                raise ClusterError(f"its workers have not ended within {span(GONE_WITHIN_S)}")
            time.sleep(_POLL_EVERY_S)

    def _delete(self, namespace: str, name: str) -> None:
        """Delete the job, if it exists and is ours, and wait until it is gone."""
        try:
            if not self._is_mine(namespace, name):
                return
            self._cluster.delete_job(namespace, name)
            deadline = time.monotonic() + GONE_WITHIN_S
            while self._is_mine(namespace, name):
                if time.monotonic() > deadline:
                    raise ClusterError(f"it has not been deleted within {span(GONE_WITHIN_S)}")
                time.sleep(_POLL_EVERY_S)
        except NotFoundError:
            return
