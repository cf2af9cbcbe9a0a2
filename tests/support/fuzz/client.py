"""What the command line reads: kubeconfig, contexts, job files, templates, YAML, manifests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from elasticctl.api.errors import ConfigError, ElasticctlError, SpecError
from elasticctl.api.spec import JobSpec
from elasticctl.api.validation import load_manifest
from elasticctl.api.yamltext import parse_yaml
from elasticctl.settings.contexts import load_config
from elasticctl.settings.kubeconfig import read_contexts
from elasticctl.templates import Template, find_template, render_manifest
from tests.support.fuzz.inputs import as_json, changed, changed_bytes
from tests.support.jobs import GOOD

KUBECONFIG: dict[str, Any] = {
    "current-context": "eks",
    "contexts": [
        {"name": "eks", "context": {"cluster": "c.eksctl.io", "user": "u", "namespace": "team"}},
        {"name": "arn:aws:eks:r:1:cluster/x", "context": {"cluster": "gke_a_b_c", "user": "u"}},
    ],
    "clusters": [
        {"name": "c.eksctl.io", "cluster": {"server": "https://h:6443", "certificate-authority-data": "AA=="}}
    ],
    "users": [{"name": "u", "user": {"exec": {"command": "/usr/bin/aws", "args": ["eks"], "env": None}}}],
}
CONTEXTS = {
    "currentContext": "prod",
    "contexts": [
        {"name": "prod", "provider": "aws", "kubeContext": "eks", "namespace": "team", "storage": "s3://b/j",
         "gpuType": "t4", "gpusPerNode": 4},
    ],
}  # fmt: skip
SHIPPED = find_template("default", Path("/nowhere")).text.encode()
ALPHABET = "ab:-[]{}&*!|>'\"#%@`?,\n \t1"
YAML = st.text(alphabet=ALPHABET, max_size=60) | changed_bytes(GOOD.encode())
MANIFESTS = changed(parse_yaml(GOOD).data).map(as_json) | changed_bytes(GOOD.encode())
TEMPLATES = changed_bytes(
    SHIPPED, b"{% for a in job.command %}{{ a | upper }}{% endfor %}", b"{{ job.env['a'] ~ range(3) | list }}"
)
KUBECONFIGS = changed(KUBECONFIG).map(as_json) | changed_bytes(as_json(KUBECONFIG))
CONFIGS = changed(CONTEXTS).map(as_json) | changed_bytes(as_json(CONTEXTS))
SPEC = JobSpec("digits", ("python", "train.py"))


def _complaint(read: Callable[[], object], of: type[ElasticctlError]) -> str:
    """What is wrong with it in the reader's own words; "" if nothing is."""
    try:
        read()
    except of as e:
        return str(e) or "\0"
    return ""


def check_yaml(text: str | bytes) -> None:
    """Data, or a SpecError of one line."""
    assert _complaint(lambda: parse_yaml(text, "x.yaml"), SpecError).isprintable()


def check_manifest(text: bytes) -> None:
    """A manifest, or a SpecError of one line."""
    assert _complaint(lambda: load_manifest(text, "x.yaml"), SpecError).isprintable()


def check_template(text: bytes) -> None:
    """A manifest, or an error in words."""
    template = Template("x", text.decode("utf-8", "replace"))
    assert _complaint(lambda: render_manifest(SPEC, template), ElasticctlError) != "\0"


def check_kubeconfig(text: bytes) -> None:
    """Contexts that become ours, or a ConfigError."""
    file = Path("kube")
    file.write_bytes(text)

    def adopt() -> None:
        found = read_contexts([file])
        for context in found.values():
            assert context.provider
            context.as_context(taken=found)

    assert _complaint(adopt, ConfigError) != "\0"


def check_config(text: bytes) -> None:
    """Contexts, or an error in words."""
    file = Path("config")
    file.write_bytes(text)
    assert _complaint(lambda: load_config(file).context(), ElasticctlError) != "\0"
