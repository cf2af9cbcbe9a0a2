"""Why a job waits, restarts, failed or is slow, and what to type next.

`diagnose` asks every rule of a table, in order: the first finding is the first cause. A rule is a function from a
`Case` to a finding or None, about one thing; to add one, write it in the module it belongs to and put it into `RULES`.
Pure: no clock, no cluster; `now` and what was seen are in the case.
"""

from __future__ import annotations

from elasticctl.diagnosis import endings, health, waits
from elasticctl.diagnosis.case import Case, Finding, Mend, Rule, Severity

__all__ = ["RULES", "Case", "Finding", "Mend", "Rule", "Severity", "diagnose"]

RULES: tuple[Rule, ...] = (
    endings.deadline_exceeded,
    endings.failed,
    endings.cancelled,
    endings.succeeded,
    waits.waiting_for_its_share,
    waits.suspended,
    waits.no_workers_wanted,
    waits.not_startable,
    waits.unschedulable,
    waits.backing_off,
    health.running_out_of_memory,
    health.failing,
    health.stuck,
    health.killed,
    waits.starting,
    waits.joining,
    waits.before_the_first_step,
    health.standstill,
    health.interrupted,
    health.no_storage,
    health.no_checkpoint,
    health.stale_checkpoint,
    health.much_done_again,
    waits.fewer_than_wanted,
    waits.waiting_to_grow,
    waits.borrowing,
)
"""Every rule; what comes first is the first cause."""


def diagnose(case: Case) -> tuple[Finding, ...]:
    """All findings about a job, the first cause first; never empty.

    A job that neither waits nor has ended is told to be training, behind whatever is amiss with it.
    """
    found = tuple(finding for rule in RULES if (finding := rule(case)) is not None)
    if not any(finding.decisive for finding in found):
        found = (*(f for f in found if f.severity != Severity.INFO), health.training(case),
                 *(f for f in found if f.severity == Severity.INFO))  # fmt: skip
    return found
