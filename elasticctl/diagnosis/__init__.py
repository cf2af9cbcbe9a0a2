"""Why a job waits, restarts, failed or is slow, and what to type next.

`diagnose` applies the rules of a table in order: the first finding is the first cause. A rule is a function from a
`Case` to one finding or None; to add one, write it in the module it belongs to and add it to `RULES`.
Rules read neither the clock nor the cluster: `now` and all observations are in the case.
"""

from __future__ import annotations

from elasticctl.diagnosis import not_training, starting, step_times, training, waiting
from elasticctl.diagnosis.findings import Case, Finding, NextStep, Observations, Rule, Severity

__all__ = ["RULES", "Case", "Finding", "NextStep", "Observations", "Rule", "Severity", "diagnose"]

RULES: tuple[Rule, ...] = (
    not_training.deadline_exceeded,
    not_training.failed,
    not_training.cancelled,
    not_training.succeeded,
    not_training.out_of_money,
    not_training.over_limit,
    not_training.waiting_for_its_share,
    not_training.moving,
    not_training.suspended,
    not_training.cleaning_up,
    not_training.no_workers_wanted,
    waiting.refused,
    waiting.name_taken,
    waiting.still_ending,
    waiting.no_scheduler,
    waiting.gated,
    waiting.not_startable,
    waiting.not_mounted,
    waiting.initializing,
    waiting.unschedulable,
    not_training.backing_off,
    training.running_out_of_memory,
    training.failing,
    training.stuck,
    training.killed,
    training.hung,
    starting.starting,
    starting.joining,
    starting.before_the_first_step,
    starting.says_nothing,
    training.not_finite,
    training.standstill,
    training.idle_gpus,
    step_times.bound_by,
    training.interrupted,
    training.no_storage,
    training.no_checkpoint,
    training.not_saved,
    training.stale_checkpoint,
    training.much_done_again,
    training.begun_again,
    not_training.why_this_size,
    not_training.which_pool,
    not_training.fewer_than_wanted,
    not_training.waiting_to_grow,
    not_training.borrowing,
    waiting.budget_of_others,
    not_training.not_notified,
)
"""Every rule, in order of precedence."""


def diagnose(case: Case) -> tuple[Finding, ...]:
    """All findings about a job, the first cause first; never empty.

    For a job that neither waits nor has ended, the last finding, after any warnings, says that it trains.
    """
    found = tuple(finding for rule in RULES if (finding := rule(case)) is not None)
    if not any(finding.decisive for finding in found):
        found = (*(f for f in found if f.severity != Severity.INFO), training.training(case),
                 *(f for f in found if f.severity == Severity.INFO))  # fmt: skip
    return found
