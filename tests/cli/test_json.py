"""What programs get is what docs/cli.md and its schemas say: no less, and nothing that they leave out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from elasticctl.api import validation
from elasticctl.api.spec import ElasticJob
from elasticctl.cli.framework.output import DATA_VERSION
from elasticctl.cli.verbs.see_what_jobs_do.top import usage_data
from elasticctl.cluster.local.client import LocalCluster
from elasticctl_store.storage.local import LocalStorage
from tests.support.cli import Run
from tests.support.jobs import shell_job
from tests.support.train.checkpoints import damage_step, fill
from tests.support.usage_samples import BARE, BUSY, IDLE, sample
from tests.support.verbs import FAMILIES, VERBS
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cli.md").read_text("utf-8").partition("## JSON\n")[2].partition("\n## ")[0]
SCHEMAS: dict[str, Any] = {path.stem: json.loads(path.read_text("utf-8")) for path in ROOT.glob("docs/schemas/*.json")}
KINDS = {"List": "ElasticJobList"}
"""Kinds whose schema goes by another name."""
FORMS = re.compile(r"-o, --output <([a-z|]+)>")


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name: programs must accept new ones, the docs must not."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema and "additionalProperties" not in schema else {}
    return {**{key: closed(value) for key, value in schema.items()}, **more}


REGISTRY: Registry[Any] = Registry().with_resources(
    (f"{name}.json", Resource.from_contents(closed(schema))) for name, schema in SCHEMAS.items()
)


def check(text: str) -> Any:
    """The data, after it has been held against the schema of its kind."""
    data = json.loads(text)
    schema = closed(SCHEMAS[KINDS.get(data["kind"], data["kind"])])
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, registry=REGISTRY, format_checker=formats).validate(data)
    return data


def check_job(job: Any) -> None:
    """A job is also what the CRD says."""
    version = validation.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    jsonschema.Draft202012Validator(version).validate(job)


@pytest.fixture
def troubled(local_cluster: LocalCluster, tmp_path: Path) -> str:
    """A job that has been interrupted and scaled, and still runs."""
    failed, gate = tmp_path / "failed", tmp_path / "gate"
    once = f"[ -e {failed} ] || {{ touch {failed}; echo no luck; exit 3; }}"
    script = f"{once}; until [ -e {gate} ]; do sleep 0.05; done"
    local_cluster.create_job(shell_job("digits", script, 1, maxReplicas=3))

    def status() -> Any:
        return ElasticJob.from_manifest(local_cluster.get_job("default", "digits")).status

    wait_until(lambda: status().active == 1 and status().interruptions)
    local_cluster.patch_job("default", "digits", {"spec": {"replicaSpecs": {"Worker": {"replicas": 2}}}})
    wait_until(lambda: status().active == 2 and status().scalings)
    return "digits"


def test_reading_a_job(run: Run, troubled: str) -> None:
    listed, shown = check(run("list", "-o", "json").out), check(run("status", troubled, "-o", "json").out)
    assert [job["metadata"]["name"] for job in listed["items"]] == [shown["metadata"]["name"]] == [troubled]
    assert check(run("status", "-o", "json").out)["kind"] == "List"
    check_job(shown)
    assert check(run("describe", troubled, "-o", "json").out)["object"]["kind"] == "ElasticJob"
    assert check(run("explain", troubled, "-o", "json").out)["findings"]
    assert check(run("events", troubled, "-o", "json").out)["events"]
    history = check(run("history", troubled, "-o", "json").out)
    assert (len(history["interruptions"]), len(history["scalings"])) == (1, 1)
    for verb in ("status", "describe", "explain", "events", "history"):
        assert yaml.safe_load(run(verb, troubled, "-o", "yaml").out)["kind"]
    assert check(run("top", troubled, "-o", "json").out)["jobs"][0]["measured"] == 0
    compared = check(run("compare", troubled, troubled, "-o", "json").out)
    assert (len(compared["jobs"]), compared["settings"]) == (2, [])
    assert run("cancel", troubled).code == 0
    assert run("wait", troubled).code == 4
    pruned = check(run("prune", "--older-than", "0s", "--dry-run", "-o", "json").out)
    assert [job["name"] for job in pruned["jobs"]] == [troubled]


def test_machines_in_use() -> None:
    jobs = [ElasticJob.from_manifest(sample(BUSY, IDLE, BARE))]
    check(json.dumps({"apiVersion": DATA_VERSION, "kind": "Usage", **usage_data(jobs)}))


@pytest.mark.usefixtures("idle_jobs")
def test_a_job_that_was_just_made(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('done')\n")
    for words in (["--dry-run"], ["--dry-run=server"], ["-d"]):
        made = run("submit", str(script), "--name", "tiny", *words, "-o", "json")
        assert made.code == 0, made.err
        if "-d" in words:
            check_job(check(made.out))
        else:
            assert json.loads(made.out)["kind"] == "ElasticJob"


def test_checkpoints(run: Run, tmp_path: Path) -> None:
    fill(LocalStorage(tmp_path / "state"))
    damage_step(tmp_path / "state", 20)
    listed = check(run("checkpoints", str(tmp_path / "state"), "-o", "json").out)
    verified = check(run("checkpoints", "verify", str(tmp_path / "state"), "-o", "json").out)
    assert [found["whole"] for found in verified["checkpoints"]] == [True, True, False, True]
    assert len(listed["checkpoints"]) == 4
    assert run("checkpoints", "list", str(tmp_path / "state"), "-o", "name").out.split() == ["40", "30", "20", "10"]


@pytest.mark.usefixtures("private_home")
def test_places_and_templates(run: Run) -> None:
    fields = ("--provider", "aws", "--gpu-type", "t4", "--gpus-per-node", "4", "--storage", "s3://b/p", "--image", "i")
    assert run("config", "set-context", "prod", *fields, "--kube-context", "eks").code == 0
    listed = check(run("config", "get-contexts", "-o", "json").out)
    assert [context["name"] for context in listed["contexts"]] == ["local", "prod"]
    assert run("config", "get-contexts", "-o", "wide").out.splitlines()[2].split("\t")[-3:] == ["eks", "i", "t4 4"]
    assert run("template", "new", "mine").code == 0
    templates = check(run("template", "list", "-o", "json").out)["templates"]
    assert {each["name"]: "path" in each for each in templates}["mine"] is True
    assert "mine" in run("template", "list", "-o", "name").out.split()
    assert check(run("local", "status", "-o", "json").out)["running"] is False


def test_simulation_output(run: Run, private_home: Path, tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("4,100\n8,190\n")
    for priced in ((), ("--gpu-type", "t4", "--context", "prod")):
        if priced:
            assert run("config", "set-context", "prod", "--provider", "aws").code == 0
        done = run("simulate", "--table", str(tmp_path / "rates.csv"), "--gpus", "4,16", *priced, "-o", "json")
        assert [each["gpus"] for each in check(done.out)["outlooks"]] == [4, 16], done.err


def test_secrets_and_quotas(run: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.env").write_text("TOKEN=x\n")
    assert run("secret", "set", "hub", "--from-env-file", str(tmp_path / "keys.env")).code == 0
    assert [each["name"] for each in check(run("secret", "list", "-o", "json").out)["secrets"]] == ["hub"]
    assert run("quota", "set", "vision", "--guaranteed", "cpu=2").code == 0
    assert run("quota", "set", "vision", "--allow-image", "a/*", "--usd-per-day", "5").code == 0
    listed = check(run("quota", "list", "-o", "json").out)
    assert [each["project"] for each in listed["holdings"]] == ["vision"]
    assert listed["allowed"] == [{"project": "vision", "images": ["a/*"], "usdPerDay": 5.0, "usdToday": 0.0}]


def test_a_context_that_was_checked(run: Run, home: Path, local_cluster: LocalCluster) -> None:
    assert check(run("doctor", "-o", "json").out)["context"] == "local"
    assert check(json.dumps(yaml.safe_load(run("doctor", "-o", "yaml").out)))["context"] == "local"
    local_cluster.list_jobs(None)
    assert check(run("local", "status", "-o", "json").out)["running"] is True


def test_every_kind_has_its_schema_on_the_page() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "elasticctl").rglob("*.py")]
    kinds = {kind for text in sources for kind in re.findall(r'print_data\(\s*"(\w+)"', text)}
    assert "Explanation" in kinds
    assert kinds <= SCHEMAS.keys()
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert f"(schemas/{name}.json)" in PAGE


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_prints_json_is_on_the_page(verb: str, run: Run) -> None:
    asked: list[tuple[str, ...]] = [(verb,), *((verb, inner) for inner in FAMILIES.get(verb, []))]
    for words in asked:
        forms = FORMS.search(run(*words, "--help").out)
        if forms and "json" in forms[1]:
            assert "yaml" in forms[1], f"{words} prints json and not yaml"
            assert re.search(rf"`{' '.join(words)}[` ]", PAGE), f"docs/cli.md does not name {' '.join(words)}"
