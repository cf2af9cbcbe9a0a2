"""`describe`, `events` and `explain`: pages and sentences that fit a terminal, and data."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import CheckpointStatus, GroupGeneration, JobStatus, ProgressStatus
from elasticctl.api.text import public_value
from elasticctl.cli.framework.output import Table, fit_table, format_aligned
from elasticctl.cli.verbs.find_out_what_is_wrong.describe_explain import explanation_lines
from elasticctl.cli.views.description import describe_job, format_sections, protection
from elasticctl.cli.views.job import on_a_loss
from elasticctl.diagnosis import Case, diagnose
from tests.support.job_samples import AT, FAILED, at, job


def page(manifest: dict[str, Any], width: int | None) -> list[str]:
    case = Case(ElasticJob.from_manifest(manifest), (), AT + 100)
    return list(format_sections(describe_job(case, diagnose(case)), width))


@pytest.mark.usefixtures("utc")
def test_a_page_at_80_columns() -> None:
    worker = {"name": "digits-worker-0", "phase": "Running", "startedAt": at(40), "node": "vm"}
    manifest = job(workers=[worker], generations=[{"generation": 3, "workers": ["a"], "formedAt": at(40)}])
    lines = page(manifest, 80)
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "Name:            digits"
    assert lines[2] == "Created:         2023-11-14 22:13:20 (1m40s ago)"
    assert lines[lines.index("Workers:") : lines.index("Groups:") + 3] == [
        "Workers:",
        "  NAME             PHASE    FOR    NODE  ENDED",
        "  digits-worker-0  Running  1m00s  vm",
        "",
        "Groups:",
        "  NO  FORMED               WORKERS  FROM STEP  TO STEP  REASON",
        "  3   2023-11-14 22:14:00  1",
    ]
    assert "Scalings:" in lines
    assert "Last failure:" not in lines


def test_long_values_are_folded_on_a_terminal_and_whole_in_a_pipe() -> None:
    manifest = job(**FAILED)
    container = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", "a long name.py", *(f"--option-{i}" for i in range(20))]
    assert all(len(line) <= 80 for line in page(manifest, 80))
    (command,) = [line for line in page(manifest, None) if "Command:" in line]
    assert command.endswith("python 'a long name.py' " + " ".join(f"--option-{i}" for i in range(20)))


def test_variables_that_sound_private_are_not_shown() -> None:
    manifest = job()
    container = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "WANDB_API_KEY", "value": "hunter2"}, {"name": "SEED", "value": "7"}]
    text = "\n".join(page(manifest, 80))
    assert "WANDB_API_KEY=(hidden)  SEED=7" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("DB_PASSWD", "x", "(hidden)"),
        ("SEED", "7", "7"),
        ("PIP", "--index-url https://me:t0k@host/simple", "--index-url https://(hidden)@host/simple"),
        ("PROXY", "http://proxy:8080/a@b", "http://proxy:8080/a@b"),
    ],
)
def test_private_values_are_hidden(name: str, value: str, shown: str) -> None:
    assert public_value(name, value) == shown


def test_the_last_of_many_interruptions_are_shown_and_the_others_counted() -> None:
    lines = page(job(interruptions=[{"at": at(i), "worker": f"w-{i}"} for i in range(14)]), 80)
    begin = lines.index("Interruptions:")
    assert lines[begin + 1] == "  (4 before)"
    assert "w-13" in lines[begin + 11]


def test_later_rows_align_with_earlier_ones() -> None:
    first, widths = format_aligned(Table(("A", "B"), [("one", "x")]))
    later, _ = format_aligned(Table(("A", "B"), [("1", "y")]), widths)
    assert (first, later[1:]) == (["A    B", "one  x"], ["1    y"])
    assert format_aligned(Table(("A", "B"), [("one", "x" * 50)]), width=20)[0][1] == "one  " + "x" * 15


def test_wide_characters_take_two_columns_of_a_terminal() -> None:
    lines, widths = format_aligned(Table(("A", "B"), [("日本", "x"), ("one", "y")]))
    assert (widths, lines) == ([4, 1], ["A     B", "日本  x", "one   y"])
    assert format_aligned(Table(("A",), [("日本語" * 10,)]), width=7)[0][1] == "日本語"
    table = fit_table(Table(("NAME", "SAYS"), [("a", "語" * 30)]), 20)
    assert table.rows[0][1] == "語" * 6 + "…"


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({}, "all ranks start again from the last checkpoint: sharded"),
        (
            {"copied_every_steps": 40},
            "all ranks start again from copies in workers' memory, about 40 steps back: sharded",
        ),
        (
            {"copied_every_steps": 40, "copies_lack": "this is the only worker"},
            "all ranks start again from copies in workers' memory, about 40 steps back unless"
            " its memory is lost as well (this is the only worker): sharded",
        ),
        (
            {"copies_lack": "9 MB do not fit"},
            "all ranks start again from the last checkpoint: sharded; no copies in workers' memory: 9 MB do not fit",
        ),
    ],
)
def test_the_cost_of_losing_a_worker_is_shown_in_advance(known: dict[str, Any], said: str) -> None:
    group = GroupGeneration(1, ("w-0",), stays=False, restarts_because="sharded", **known)
    assert protection(JobStatus(generations=(group,))) == said


@pytest.mark.parametrize(("saved", "back"), [(None, 40), (0, 40), (70, 30), (100, 0), (101, 0)])
def test_a_loss_costs_no_more_than_the_steps_since_the_last_checkpoint(saved: int | None, back: int) -> None:
    group = GroupGeneration(1, ("w-0",), stays=False, copied_every_steps=40)
    status = JobStatus(generations=(group,), progress=ProgressStatus(step=100), checkpoint=CheckpointStatus(step=saved))
    assert f"about {back} steps back" in protection(status)
    assert f"about {back} steps back" in on_a_loss(status)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"stays": True}, "others go on in their processes, no step is lost"),
        ({"stays": False}, "all ranks restart from the last checkpoint"),
        (
            {"stays": False, "copied_every_steps": 1},
            "all ranks restart from copies in memory, about 1 step back",
        ),
        (
            {"stays": False, "copied_every_steps": 40, "copies_lack": "this is the only worker"},
            "all ranks restart from copies in memory, about 40 steps back, if those are not lost as well",
        ),
        ({}, ""),
    ],
)
def test_status_says_it_in_a_few_words(known: dict[str, Any], said: str) -> None:
    assert on_a_loss(JobStatus(generations=(GroupGeneration(1, ("w-0",), **known),))) == said


def lines(width: int) -> list[str]:
    case = Case(ElasticJob.from_manifest(job(**FAILED)), (), AT + 200)
    return list(explanation_lines(case, diagnose(case), width))


def test_the_output_reads_as_sentences_at_80_columns() -> None:
    assert lines(80) == [
        "digits is Failed.",
        "It failed: rank 1 of worker-1 ended with exit code 1: ValueError: bad learning",
        "rate. That was failure 4; --backoff-limit allows 3.",
        "  | Traceback (most recent call last):",
        "  | ValueError: bad learning rate",
        "  see all of its output:  elasticctl logs digits --worker 1",
        "  after fixing that, continue from its last checkpoint:  elasticctl rerun digits --from-checkpoint latest",
    ]


def test_other_problems_follow() -> None:
    case = Case(ElasticJob.from_manifest(job(failures=1)), (), AT + 60)
    text = list(explanation_lines(case, diagnose(case), 80))
    assert text[1].startswith("Its script has failed once. 1 of 3")
    assert text[text.index("Also:") + 1].startswith("- It is training: ")
    assert all(len(line) <= 80 for line in text if "elasticctl " not in line)
