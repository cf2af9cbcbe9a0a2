"""A job template's values come out unchanged, whatever they are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import ElasticctlError, SpecError, TemplateError
from elasticctl.api.gpu_types import gpu_type, place
from elasticctl.api.spec import ElasticJob, JobSpec, Policy
from elasticctl.api.yamltext import dump_yaml, parse_yaml
from elasticctl.templates import Template, escape_expansion, find_template, render_manifest, shipped_template_names
from elasticctl_protocol.variables import OnNan

HOSTILE = st.sampled_from(
    [
        "{{ job.name }}",
        "{% raw %}",
        "{#",
        "a: b",
        "- a",
        "&anchor x",
        "*anchor",
        "!!python/object:os.system x",
        '"',
        "'",
        '"}, evil: {a: "',
        "]\nevil: true",
        "\n---\n",
        "# no comment",
        "yes",
        "~",
        "0644",
        "1e3",
        "$(HOME)",
        "$$",
        "\u2028\u2029\u0085\x7f\ufeff",
        "\ue0000\ue001",
        "\ue000",
        "😀",
        "",
    ]
)
VALUES = HOSTILE | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
VALUES |= st.builds(lambda a, b: a + b, HOSTILE, HOSTILE)
ENV_NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="="), min_size=1, max_size=8)
SPEC = JobSpec("digits", ("python", "train.py"))


def default() -> Template:
    return find_template("default", Path("/nonexistent"))


def worker(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return found


def expand(text: str) -> str:
    """What Kubernetes makes of args and variables: $$ is one $, and $(NAME) the value of a variable."""
    return re.sub(r"\$(?:(\$)|\([^)]*\))", lambda found: "$" if found[1] else "EXPANDED", text)


@given(
    command=st.lists(VALUES, min_size=1, max_size=4).map(tuple),
    env=st.dictionaries(ENV_NAMES, VALUES, max_size=3),
    working_dir=VALUES,
    image=VALUES,
    service_account=VALUES,
    storage=VALUES,
    provider=st.sampled_from(["local", "aws"]),
)
@settings(max_examples=40)
def test_hostile_values_come_back_as_they_were(provider: str, **fields: Any) -> None:
    manifest = render_manifest(dataclasses.replace(SPEC, provider=provider, **fields), default())
    for reader in (lambda text: parse_yaml(text).data, yaml.safe_load):
        container = worker(reader(dump_yaml(manifest)))
        assert tuple(map(expand, container["args"])) == fields["command"]
        env = {item["name"]: expand(item["value"]) for item in container.get("env", [])}
        assert env == {
            **({"ELASTICCTL_STORAGE": fields["storage"]} if fields["storage"] else {}),
            **({} if provider == "local" else {"HOME": "/tmp", "USER": "elasticjob"}),
            **({} if provider == "local" else {"ELASTICCTL_NOTICE_SOURCE": provider}),
            **fields["env"],
        }
        assert container.get("workingDir", "") == fields["working_dir"]
        assert container.get("image", "") == fields["image"]
        account = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"].get("serviceAccountName", "")
        assert account == ("" if provider == "local" else fields["service_account"])
        assert container["command"] == ["elasticctl-launch", "--nproc-per-node", "1", "--"]
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}


@given(VALUES)
@settings(max_examples=20)
def test_a_users_template_may_put_values_anywhere(value: str) -> None:
    """Inside quotes, in a longer text, as a key, in a flow mapping, in a captured block, through a filter."""
    text = default().text.replace(
        "spec:\n  minReplicas",
        "  annotations:\n"
        '    a: "{{ job.image }}"\n'
        "    b: x {{ job.image }} y\n"
        "    k{{ job.image }}: c\n"
        "    d: {% set held %}<{{ job.image }}>{% endset %}{{ held }}\n"
        "    e: '{% macro m(x) %}{{ x }}{% endmacro %}{{ m(job.image) }}'\n"
        "    f: {{ job.image | upper }}\n"
        "    g: |\n      {{ job.image }}\n"
        "spec:\n  minReplicas",
        1,
    )
    annotations = render_manifest(dataclasses.replace(SPEC, image=value), Template("own", text))["metadata"][
        "annotations"
    ]
    assert annotations == {
        "a": value,
        "b": f"x {value} y",
        f"k{value}": "c",
        "d": f"<{value}>",
        "e": value,
        "f": value.upper(),
        "g": f"{value}\n",
    }


@given(VALUES)
@settings(max_examples=20)
def test_a_hostile_name_is_itself_or_refused(name: str) -> None:
    try:
        manifest = render_manifest(dataclasses.replace(SPEC, name=name), default())
    except SpecError as e:
        wrong_field = e.path
    else:
        wrong_field = ""
        assert manifest["metadata"] == {"name": name, "namespace": "default"}
    assert wrong_field in ("", "metadata.name")


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(SpecError, match="not Unicode text"):
        render_manifest(dataclasses.replace(SPEC, command=("python", "\udcff")), default())


def test_the_controller_reads_back_what_was_asked_for() -> None:
    spec = dataclasses.replace(
        SPEC,
        workers=3,
        min_workers=2,
        max_workers=4,
        backoff_limit=7,
        deadline_s=60,
        ttl_s=0,
        hang_timeout_s=90,
        on_nan=OnNan.STOP,
        labels={"team": "vision"},
    )
    manifest = render_manifest(spec, default())
    job = ElasticJob.from_manifest(manifest)
    assert (job.desired, job.min, job.max) == (3, 2, 4)
    assert (job.backoff_limit, job.deadline_s, job.ttl_s) == (7, 60, 0)
    assert job.policy == Policy(hang_timeout_seconds=90, on_nan=OnNan.STOP)
    assert "policy" not in render_manifest(SPEC, default())["spec"]
    assert manifest["metadata"]["labels"] == {"team": "vision"}


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_a_cloud_job_is_restricted_and_placed(provider: str) -> None:
    placement = place(provider, gpu_type("t4"), 4, spot=True)
    spec = dataclasses.replace(
        SPEC,
        provider=provider,
        image="example/train:1",
        gpus_per_worker=4,
        ranks_per_worker=4,
        node_terms=placement.terms,
        tolerations=placement.tolerations,
        secrets=("token",),
        secret_env={"AWS_ACCESS_KEY_ID": ("s3", "id")},
        mounts={"data": "/data"},
        workspace="s3://b/w?endpoint=http://x#abc",
        workspace_from="/home/$(me)",
    )
    manifest = render_manifest(spec, default())
    pod = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    container = worker(manifest)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert container["command"][2] == "4"
    assert container["envFrom"] == [{"secretRef": {"name": "token"}}]
    env = {item["name"]: item.get("value") or item.get("valueFrom") for item in container["env"]}
    assert env["AWS_ACCESS_KEY_ID"] == {"secretKeyRef": {"name": "s3", "key": "id"}}
    assert env["ELASTICCTL_WORKSPACE"] == "s3://b/w?endpoint=http://x#abc"
    assert env["ELASTICCTL_WORKSPACE_FROM"] == "/home/$$(me)"  # as Kubernetes hands it on
    assert pod["volumes"][-1] == {"name": "claim-1", "persistentVolumeClaim": {"claimName": "data"}}
    assert container["volumeMounts"][-1] == {"name": "claim-1", "mountPath": "/data"}
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [
        {item["key"]: tuple(item.get("values", ())) for item in term["matchExpressions"]}
        for term in affinity["nodeSelectorTerms"]
    ]
    assert terms == [dict(term) for term in placement.terms]
    assert pod["tolerations"] == [dict(toleration) for toleration in placement.tolerations]


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"provider": "aws"}, "aws"),
        ({"provider": "gcp"}, "gcp"),
        ({"provider": "gcp", "spot": False}, None),
        ({"provider": "local"}, None),
        ({"provider": "aws", "env": {"ELASTICCTL_NOTICE_SOURCE": "off"}}, "off"),
    ],
)
def test_workers_on_spot_machines_listen_to_their_cloud(fields: dict[str, Any], source: str | None) -> None:
    env = worker(render_manifest(dataclasses.replace(SPEC, image="i", **fields), default())).get("env", [])
    assert [e["value"] for e in env if e["name"] == "ELASTICCTL_NOTICE_SOURCE"] == ([source] if source else [])


def test_on_demand_forbids_what_spot_asks_for() -> None:
    terms = place("gcp", None, 0, spot=False).terms
    manifest = render_manifest(dataclasses.replace(SPEC, provider="gcp", image="i", node_terms=terms), default())
    affinity = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["affinity"]["nodeAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "cloud.google.com/gke-spot", "operator": "DoesNotExist"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n{{ job.nam }}", "template t:2: 'elasticctl.api.spec.JobSpec object' has no attribute 'nam'"),
        ("{% include '/etc/passwd' %}", "template t:1: no files can be included"),
        ("{{ ''.__class__ }}", "template t:1: access to attribute '__class__'"),
        ("{{ job.env.update({}) }}", "template t:1: "),
        ("{{ 1 / 0 }}", "template t:1: division by zero"),
        ("a:\n{% if %}", "template t:2: Expected an expression"),
        ("a: {{ job }}", "template t:1: a template can print text"),
        ("{{ job.command }}: 1", 'template t: a list (["python", "train.py"]) cannot stand inside a text'),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "template t:1: more than"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "template t:1: "),
        ("{% for i in range(99999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}", "template t: it renders to more than"),
        ("a: [", "template t, as rendered:1: not YAML"),
        ("a: 1", "template t, as rendered:1: a: unknown field"),
    ],
)
def test_a_faulty_template_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ElasticctlError) as caught:
        render_manifest(SPEC, Template("t", text))
    assert isinstance(caught.value, TemplateError | SpecError)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_every_shipped_template_renders() -> None:
    assert "default" in shipped_template_names()
    for name in shipped_template_names():
        assert render_manifest(SPEC, find_template(name, Path("/nonexistent")))["metadata"]["name"] == "digits"


def test_dollars_survive_kubernetes() -> None:
    assert escape_expansion("$(A) $$ $x $$(") == "$$(A) $$$ $x $$$$("
    for text in ("$(A)", "$$(A)", "$$$(A)$$", "$x", "$$", "$", "$("):
        assert expand(escape_expansion(text)) == text
