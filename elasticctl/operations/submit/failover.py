"""Tries several contexts for one job, cheapest first, and the next if its workers do not start; never two at a time.

Before the next context is tried, the job is cancelled and its workers are gone. If that cannot be confirmed, no other
context is tried: one job that waits is better than two that train.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from elasticctl.cluster.base import Cluster, Manifest
from elasticctl.operations.observer import Observer
from elasticctl.operations.submit.create import CommandDraft, Draft, create
from elasticctl.operations.target import ENDED, Target, live_pods
from elasticctl.settings.contexts import Context

CAPACITY_TIMEOUT_S = 600
"""How long each of several contexts has to bring the job's minimum of workers."""
_REFUSALS = (UsageError, JobStorageError, NotFoundError, ConflictError, CredentialsError, ForbiddenError)
"""After any other error to a create the job may be there."""

Plan = Callable[[Context], Draft]
"""Plans the job in a context. Raises UsageError if it cannot run there."""


@dataclass(frozen=True, slots=True)
class PricedContext:
    """A context that the job could run in; `hourly_usd` is None if no price is known."""

    context: Context
    draft: Draft
    hourly_usd: float | None

    @property
    def with_price(self) -> str:
        """The context with its price."""
        price = "no known price" if self.hourly_usd is None else f"${self.hourly_usd:,.2f} an hour"
        return f"{self.context.name} ({price})"


@dataclass(slots=True)
class Search:
    """The search through the contexts. `passed` has each context that was given up, and why."""

    connect: Callable[[Context], Target]
    timeout_s: float
    observer: Observer
    passed: list[tuple[str, ElasticctlError]] = field(default_factory=list)

    def first(self, contexts: Sequence[Context], plan: Plan) -> tuple[Target, Manifest]:
        """Create the job in the first context that starts its minimum of workers; return that context and the job.

        Raises the error with which all contexts refuse the job, or ClusterError if none has capacity; then nothing is
        left anywhere. Ctrl-C removes what was created.
        """
        candidates = self.candidates(contexts, plan)
        if len(candidates) > 1:
            order = ", ".join(one.with_price for one in candidates)
            self.observer.report(f"in this order, by price: {order}; up to {span(self.timeout_s)} each")
        for candidate in candidates:
            try:
                found = self._try(candidate)
            except _NoCapacityError as e:
                self.observer.report(f"{candidate.context.name}: skipped: {e}")
                self.passed.append((candidate.context.name, e))
            else:
                self._report_where(candidate, found[1])
                return found
        raise self._nowhere()

    def candidates(self, contexts: Sequence[Context], plan: Plan) -> list[PricedContext]:
        """The contexts that can run the job, cheapest first, those without a price last."""
        found = []
        for context in contexts:
            try:
                found.append(_price_in(context, plan(context)))
            except UsageError as e:
                self.passed.append((context.name, e))
        for name, error in self.passed if found else ():
            self.observer.report(f"{name}: skipped: {error}")
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
            self.observer.report(f"{context.name}: waiting for workers")
            why_not = attempt.wait(manifest, self.timeout_s)
            if not why_not:
                return target, manifest
            self.observer.report(f"{context.name}: {why_not}; withdrawing it")
            attempt.withdraw()
            raise _NoCapacityError(why_not)
        except KeyboardInterrupt:
            self.observer.report(f"\n{context.name}: interrupted; withdrawing it")
            attempt.withdraw()
            raise

    def _create(self, target: Target, candidate: PricedContext, attempt: Attempt) -> Manifest:
        """Raises _NoCapacityError if nothing was created, and ClusterError if that is uncertain."""
        try:
            target.cluster.list_jobs(target.namespace)  # a cluster that does not answer now has received nothing
        except ElasticctlError as e:
            raise _NoCapacityError(str(e)) from e
        try:
            return create(target, candidate.draft, prepare=attempt.mark)
        except ElasticctlError as e:
            if not isinstance(e, _REFUSALS):  # an answer that got lost
                attempt.withdraw()
            raise _NoCapacityError(str(e)) from e

    def _report_where(self, candidate: PricedContext, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        before = "; ".join(f"not in {context}: {error}" for context, error in self.passed)
        self.observer.report(f"{name} runs in {candidate.with_price}" + (f"; {before}" if before else ", the cheapest"))

    def _nowhere(self) -> ElasticctlError:
        errors = [error for _, error in self.passed]
        if all(isinstance(error, UsageError) for error in errors) and len({str(error) for error in errors}) == 1:
            return errors[0]
        reasons = "; ".join(f"{context}: {error}" for context, error in self.passed)
        return ClusterError(f"no context could run the job, and nothing was left behind: {reasons}")


class _NoCapacityError(ElasticctlError):
    """The workers did not start in this context, and nothing is left there."""


def _price_in(context: Context, draft: Draft) -> PricedContext:
    """The context with the job's price there. Raises UsageError if the job is probably not meant for it."""
    if draft.doubt:
        raise UsageError(draft.doubt)
    usd = draft.request.hourly_usd if isinstance(draft, CommandDraft) else _hourly_usd_of(draft.manifest())
    return PricedContext(context, draft, usd)


def _hourly_usd_of(manifest: Manifest) -> float | None:
    from elasticctl.api.goal import ON_DEMAND
    from elasticctl.api.observed.cost import rate_of
    from elasticctl.api.podtemplate import capacity
    from elasticctl.api.spec import ElasticJob
    from elasticctl.operations.prices import with_live_spot

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


GONE_WITHIN_S = 120.0
_POLL_EVERY_S = 0.25
_UNCONTROLLED_S = 15.0
"""A job without a controller has no phase; one without workers counts as such after this long."""
_LATE_S = 2.0
"""A request to create a job is carried out within this time, answered or not."""


class Attempt:
    """One attempt in one place; the job is marked, so that another one is not mistaken for it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._mark = secrets.token_hex(8)
        self._created: list[tuple[str, str]] = []
        self._sure = False

    def mark(self, manifest: Manifest) -> Manifest:
        """The manifest with the mark; its name is tried from now on."""
        from elasticctl.api.spec import ANNOTATION_ATTEMPT

        metadata = manifest["metadata"]
        self._created.append((metadata["namespace"], metadata["name"]))
        annotations = {**(metadata.get("annotations") or {}), ANNOTATION_ATTEMPT: self._mark}
        return {**manifest, "metadata": {**metadata, "annotations": annotations}}

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

        Ctrl-C meanwhile deletes it immediately.
        """
        for namespace, name in dict.fromkeys(self._created):
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

        if not self._turned_up(namespace, name):
            return
        self._cluster.patch_job(namespace, name, {"spec": {"cancel": True, "cleanPodPolicy": "All"}})
        began = time.monotonic()
        while True:
            phase = at(self._cluster.get_job(namespace, name), "status", "phase")
            live = live_pods(self._cluster, namespace, name)
            waited_s = time.monotonic() - began
            if not live and (phase in ENDED or waited_s > _UNCONTROLLED_S):
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
