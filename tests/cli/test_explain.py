"""`explain` as it is read: sentences that fit a terminal, and data."""

from __future__ import annotations

from elasticctl.api.spec import ElasticJob
from elasticctl.cli.verbs.find_out_what_is_wrong.explain import explanation_lines
from elasticctl.diagnosis import Case, diagnose
from tests.support.job_samples import AT, FAILED, job


def lines(width: int) -> list[str]:
    case = Case(ElasticJob.from_manifest(job(**FAILED)), (), AT + 200)
    return list(explanation_lines(case, diagnose(case), width))


def test_it_reads_as_sentences_at_80_columns() -> None:
    assert lines(80) == [
        "digits is Failed.",
        "It failed: rank 1 of worker-1 ended with exit code 1: ValueError: bad learning",
        "rate. That was failure 4; --backoff-limit allows 3.",
        "  | Traceback (most recent call last):",
        "  | ValueError: bad learning rate",
        "  see all of its output:  elasticctl logs digits --worker 1",
        "  after fixing that, continue from its last checkpoint:  elasticctl rerun digits --from-checkpoint latest",
    ]


def test_what_else_is_amiss_comes_behind() -> None:
    case = Case(ElasticJob.from_manifest(job(failures=1)), (), AT + 60)
    text = list(explanation_lines(case, diagnose(case), 80))
    assert text[1].startswith("Its script has failed once. 1 of 3")
    assert text[text.index("Also:") + 1].startswith("- It is training: ")
    assert all(len(line) <= 80 for line in text if "elasticctl " not in line)
