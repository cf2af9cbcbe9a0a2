"""Flags -> size, name, storage of a job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import UsageError
from elasticctl.api.spec import MAX_WORKERS
from elasticctl.operations.job_names import check_name, name_from
from elasticctl.operations.option_values import Assignment
from elasticctl.operations.storage_urls import storage_url
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.operations.submit.job_request import JobSize, doubt_of, job_spec, plan_summary, request_of
from elasticctl.operations.submit.job_size import size_of
from elasticctl.settings.contexts import Context

LOCAL = Context("local", "local")
AWS = Context("prod", "aws", image="example/train:1", storage="s3://b/j", gpu_type="t4", gpus_per_node=4)
ON_CPU = "this machine has no GPU: the job runs on 4 CPU ranks instead"
CPU_CLOUD = Context("cpu", "gcp", image="i", storage="gs://b/j")


@pytest.mark.parametrize(
    ("context", "machine_gpus", "said", "size"),
    [
        (LOCAL, 0, {}, JobSize(1, 1, None, 0, 1)),
        (LOCAL, 2, {}, JobSize(1, 1, None, 1, 1)),
        (LOCAL, 0, {"workers": 3, "min_workers": 2, "max_workers": 4}, JobSize(3, 2, 4, 0, 1)),
        (LOCAL, 8, {"workers": 3}, JobSize(3, 1, None, 0, 1)),
        (LOCAL, 8, {"gpus": 4}, JobSize(4, 1, None, 1, 1)),
        (LOCAL, 8, {"gpus": 4, "workers": 2}, JobSize(2, 1, None, 2, 2)),
        (LOCAL, 8, {"gpus": 8, "gpus_per_node": 4, "min_gpus": 4, "max_gpus": 8}, JobSize(2, 1, 2, 4, 4)),
        (LOCAL, 8, {"gpus": 0}, JobSize(1, 1, None, 0, 1)),
        (LOCAL, 8, {"gpus": 0, "workers": 2}, JobSize(2, 1, None, 0, 1)),
        (LOCAL, 0, {"gpus": 4}, JobSize(4, 1, None, 0, 1, ON_CPU)),
        (LOCAL, 0, {"gpus": 4, "gpus_per_node": 2}, JobSize(2, 1, None, 0, 2, ON_CPU)),
        (AWS, 0, {"gpus": 16}, JobSize(4, 1, None, 4, 4)),
        (AWS, 0, {"gpus": 16, "gpus_per_node": 1, "min_gpus": 4}, JobSize(16, 4, None, 1, 1)),
        (AWS, 0, {"workers": 2}, JobSize(2, 1, None, 4, 4)),
        (AWS, 0, {"gpus": 0, "workers": 2}, JobSize(2, 1, None, 0, 1)),
        (AWS, 0, {"min_gpus": 8, "max_gpus": 16}, JobSize(4, 2, 4, 4, 4, automatic=True)),
        (LOCAL, 0, {"min_workers": 2, "max_workers": 4}, JobSize(4, 2, 4, 0, 1, automatic=True)),
        (LOCAL, 0, {"min_gpus": 2, "max_gpus": 4}, JobSize(4, 2, 4, 0, 1, ON_CPU, automatic=True)),
        (LOCAL, 2, {"min_gpus": 1, "max_gpus": 16}, JobSize(2, 1, 2, 1, 1, automatic=True)),
        (LOCAL, 8, {"max_gpus": 4}, JobSize(1, 1, 4, 1, 1)),
        (CPU_CLOUD, 0, {"workers": 2}, JobSize(2, 1, None, 0, 1)),
        (CPU_CLOUD, 0, {"gpus": 2, "gpu_type": "l4"}, JobSize(2, 1, None, 1, 1)),
    ],
)  # fmt: skip
def test_sizes(context: Context, machine_gpus: int, said: dict[str, Any], size: JobSize) -> None:
    assert size_of(JobFlags(**said), context, machine_gpus) == size


@pytest.mark.parametrize(
    ("context", "machine_gpus", "said", "message"),
    [
        (LOCAL, 2, {"gpus": 4}, "4 GPUs are wanted, but this machine has 2 GPUs. FIX: give --gpus 2"),
        (
            LOCAL,
            2,
            {"min_gpus": 4, "max_gpus": 8},
            "4 GPUs are wanted, but this machine has 2 GPUs. FIX: give --min-gpus 2",
        ),
        (LOCAL, 8, {"gpus": 3, "gpus_per_node": 2}, "--gpus 3: each worker has 2 GPUs, so it must be a multiple of 2"),
        (LOCAL, 8, {"gpus": 4, "workers": 3}, "--gpus 4 cannot be shared evenly by --workers 3"),
        (LOCAL, 8, {"gpus": 4, "gpus_per_node": 2, "workers": 4}, "--gpus 4 and 4 workers with 2 GPUs each disagree"),
        (LOCAL, 0, {"workers": 2, "min_gpus": 2}, "--min-gpus 2: each worker has no GPUs"),
        (LOCAL, 0, {"min_workers": 4, "max_workers": 2}, "the minimum of 4 workers is more than the maximum of 2"),
        (LOCAL, 0, {"workers": 1, "min_workers": 2}, "1 worker is fewer than the minimum of 2"),
        (LOCAL, 0, {"workers": 5, "max_workers": 4}, "5 workers are more than the maximum of 4"),
        (LOCAL, 0, {"workers": MAX_WORKERS + 1}, f"{MAX_WORKERS + 1} workers are more than elasticctl can manage"),
        (CPU_CLOUD, 0, {"gpus": 2}, "--gpu-type is needed with --gpus in context cpu"),
        (CPU_CLOUD, 0, {"gpus": 2, "gpu_type": "h10"}, 'unknown GPU type "h10" (did you mean "h100"?)'),
    ],
)
def test_numbers_that_contradict_each_other(
    context: Context, machine_gpus: int, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        size_of(JobFlags(**said), context, machine_gpus)
    assert str(caught.value).startswith(message)


COUNT = st.none() | st.integers(0, 20)


@given(
    st.fixed_dictionaries(
        dict.fromkeys(("gpus", "gpus_per_node", "workers", "min_gpus", "max_gpus", "min_workers", "max_workers"), COUNT)
    ),
    st.sampled_from([LOCAL, AWS, CPU_CLOUD]),
    st.integers(0, 8),
)
@settings(max_examples=80)
def test_any_numbers_give_a_size_within_its_bounds_or_one_line(
    said: dict[str, Any], context: Context, machine_gpus: int
) -> None:
    said = {name: value or None if name != "gpus" else value for name, value in said.items()}
    try:
        size = size_of(JobFlags(**said), context, machine_gpus)
    except UsageError:
        return
    assert 1 <= size.min_workers <= size.workers <= (size.max_workers or MAX_WORKERS)
    assert size.ranks_per_worker >= max(1, size.gpus_per_worker)
    if said["gpus"] and not size.note:
        assert size.workers * size.gpus_per_worker == said["gpus"]
    if said["workers"]:
        assert size.workers == said["workers"]


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("a/b/My_Train.v2.py", "my-train"),
        ("0_start.py", "start"),
        ("...", "job"),
        ("Ünïcode.py", "unicode"),
        ("x" * 90 + ".py", "x" * 40),
    ],
)
def test_names_are_made_from_scripts(script: str, name: str) -> None:
    assert name_from(script) == name


@given(st.text(max_size=80))
@settings(max_examples=60)
def test_every_made_name_is_a_name(script: str) -> None:
    assert check_name(name_from(script)) == name_from(script)


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "1a", "a\n", "a" * 52, "a.b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        check_name(name)


def test_storage_is_a_url() -> None:
    assert storage_url("out dir", "/home/me") == "file:///home/me/out%20dir"
    assert storage_url("/data", "/home/me") == "file:///data"
    assert storage_url("~/runs", "/elsewhere") == (Path.home() / "runs").as_uri()
    assert storage_url("s3://b/p", "/home/me") == "s3://b/p"
    for wrong in ("ftp://x/y", "s3://", "://"):
        with pytest.raises(UsageError, match="give a folder"):
            storage_url(wrong, "/home/me")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("s3:/bucket", "s3://bucket"),
        ("s3:bucket/p", "s3://bucket/p"),
        ("s3:///bucket", "s3://bucket"),
        ("s3//bucket", "s3://bucket"),
        ("S3://bucket", "s3://bucket"),
        ("gs:/x", "gs://x"),
        ("file:/data", "file:///data"),
        ("file://data", "file:///data"),
        ("nfs:data", "./nfs:data is a folder"),
    ],
)
def test_a_misspelt_url_is_no_folder(given: str, meant: str) -> None:
    with pytest.raises(UsageError, match="is not the URL of a storage") as refused:
        storage_url(given, "/home/me")
    assert meant in str(refused.value)


@pytest.mark.parametrize("given", ["./s3:/x", "out", "/a:b", "s3", "s3/x", "~/x", "file://localhost/x", "gs://b"])
def test_nothing_else_is_taken_for_one(given: str) -> None:
    assert "://" in storage_url(given, "/home/me")


def test_many_ranks_on_a_machine_without_gpus_need_confirmation() -> None:
    def doubt(machine_gpus: int, **said: Any) -> str:
        flags = JobFlags(**said)
        return doubt_of(size_of(flags, LOCAL, machine_gpus), flags)

    assert doubt(0, gpus=16) == (
        "this machine has no GPU, and 16 ranks would share its CPUs. FIX: choose a cluster with --context,"
        " or give --workers 16 without GPUs for CPU ranks"
    )
    assert doubt(0, gpus=1) == ""
    assert doubt(0, workers=16) == ""
    assert doubt(0, gpus_per_node=2) == ""  # as a line of torchrun says it, which knows no GPUs
    assert doubt(16, gpus=16) == ""


@pytest.mark.parametrize("name", ["STORAGE", "START_FROM", "WORKSPACE", "WORKSPACE_FROM"])
def test_variables_of_options_are_refused(name: str, tmp_path: Path) -> None:
    """The job would be given both, and what has been printed of it would not be so."""
    file = tmp_path / "of-mine.env"
    file.write_text(f"ELASTICCTL_{name}=/elsewhere\n")
    asked = JobFlags(env=(Assignment(f"ELASTICCTL_{name}", "/elsewhere"),)), JobFlags(env_file=str(file))
    for flags in asked:
        with pytest.raises(UsageError, match=f"ELASTICCTL_{name}: elasticctl sets this variable itself. FIX: "):
            request_of(flags, LOCAL, 0, name="train")


def test_a_cloud_job_needs_an_image() -> None:
    context = Context("bare", "aws")
    with pytest.raises(UsageError, match="--image is needed in context bare"):
        request_of(JobFlags(), context, 0, name="train")


def test_workers_get_the_service_account_that_is_named_or_the_contexts_own() -> None:
    context = dataclasses.replace(AWS, service_account="bucket-user")
    for flags, account in ((JobFlags(), "bucket-user"), (JobFlags(service_account="other"), "other")):
        spec = job_spec(request_of(flags, context, 0, name="train"))
        assert spec.service_account == account


def test_the_plan_says_what_and_where() -> None:
    flags = JobFlags(name="digits", gpus=16, min_gpus=4)
    spec = job_spec(request_of(flags, AWS, 0, name="digits"))
    assert plan_summary(dataclasses.replace(spec, storage="s3://b/j/digits"), AWS) == (
        "digits: 4 workers with 4 t4 GPUs each (1 to any number), context prod, spot, state in s3://b/j/digits"
    )


def test_an_automatic_size_is_planned_and_requested() -> None:
    flags = JobFlags(min_gpus=8, max_gpus=16, priority=5)
    spec = job_spec(request_of(flags, AWS, 0, name="digits"))
    assert (spec.automatic, spec.priority, spec.workers) == (True, 5, 4)
    said = plan_summary(dataclasses.replace(spec, name="digits", storage="s3://b/j"), AWS)
    assert said.startswith("digits: 2 to 4 workers with 4 t4 GPUs each, as many as fit, priority 5, ")


def test_a_job_for_a_queue_waits_to_be_admitted() -> None:
    flags = JobFlags(gpus=4, queue="team-a")
    spec = job_spec(request_of(flags, AWS, 0, name="digits"))
    assert (spec.labels["kueue.x-k8s.io/queue-name"], spec.suspend) == ("team-a", True)
    with pytest.raises(UsageError, match="--queue is for clusters with Kueue"):
        job_spec(request_of(flags, LOCAL, 4, name="digits"))
