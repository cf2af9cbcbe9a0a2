"""`secret` on a cluster: set without being read, listed without values, and only what was set from here."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticctl.cluster.kube.client import LABEL_SECRET
from tests.support.cli import Run
from tests.support.fakeapi import FakeApi
from tests.support.kube import WriteKubeconfig

PLANTED = "planted-c0ffee"
COLLECTION = "/api/v1/namespaces/ml/secrets"


@pytest.fixture
def lab(run: Run, private_home: Path, api: FakeApi, kubeconfig: WriteKubeconfig) -> None:
    """A context of the fake API server."""
    kubeconfig(api.url)
    words = ("--provider", "kubernetes", "--kube-context", "lab", "--namespace", "ml")
    assert run("config", "set-context", "lab", *words).code == 0
    assert run("config", "use-context", "lab").code == 0


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`pipe("…")` is what the next command reads."""

    def give(text: str) -> None:
        stdin = SimpleNamespace(buffer=io.BytesIO(text.encode()), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)

    return give


def values(api: FakeApi, name: str) -> dict[str, str]:
    return {key: base64.b64decode(text).decode() for key, text in api.objects[f"{COLLECTION}/{name}"]["data"].items()}


@pytest.mark.usefixtures("lab")
def test_keys_are_set_and_others_stay(run: Run, api: FakeApi, pipe: Any) -> None:
    pipe(f"{PLANTED}\n")
    done = run("secret", "set", "hub", "HF_TOKEN")
    assert (done.code, done.err) == (0, "secret hub: 1 key set (HF_TOKEN)\n")
    pipe("jo")
    assert run("secret", "set", "hub", "USER").code == 0
    assert values(api, "hub") == {"HF_TOKEN": PLANTED, "USER": "jo"}
    made = api.objects[f"{COLLECTION}/hub"]
    assert (made["kind"], made["type"], made["metadata"]["namespace"]) == ("Secret", "Opaque", "ml")


@pytest.mark.usefixtures("lab")
def test_one_that_kubectl_made_is_added_to(run: Run, api: FakeApi, pipe: Any) -> None:
    metadata = {"name": "s3", "namespace": "ml"}
    api.put(f"{COLLECTION}/s3", {"kind": "Secret", "metadata": metadata, "data": {"id": "aQ=="}})
    pipe(PLANTED)
    assert run("secret", "set", "s3", "key").code == 0
    assert values(api, "s3") == {"id": "i", "key": PLANTED}


@pytest.mark.usefixtures("lab")
def test_a_list_has_no_values_and_no_other_secrets(run: Run, api: FakeApi, pipe: Any) -> None:
    api.put(f"{COLLECTION}/token", {"kind": "Secret", "metadata": {"name": "token", "namespace": "ml"}, "data": {}})
    pipe(PLANTED)
    run("secret", "set", "hub", "HF_TOKEN")
    assert api.objects[f"{COLLECTION}/hub"]["metadata"]["labels"] == {LABEL_SECRET: "of-jobs"}
    listed = run("secret", "list", "-o", "json")
    (one,) = json.loads(listed.out)["secrets"]
    assert (one["name"], one["keys"]) == ("hub", ["HF_TOKEN"])
    encoded = base64.b64encode(PLANTED.encode()).decode()
    assert PLANTED not in listed.out
    assert encoded not in listed.out
    assert run("secret", "delete", "hub").err == "secret hub: deleted\n"
    assert f"{COLLECTION}/hub" not in api.objects
    gone = run("secret", "delete", "hub")
    assert (gone.code, gone.err.count("\n")) == (3, 1)


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("name", ["../nodes", "a/b", "..", ""])
def test_a_name_leads_nowhere_else(run: Run, api: FakeApi, pipe: Any, name: str) -> None:
    pipe(PLANTED)
    done = run("secret", "set", name, "A")
    assert done.code in (2, 3)
    assert done.err.count("\n") == 1
    assert PLANTED not in done.err
    assert api.objects == {}
