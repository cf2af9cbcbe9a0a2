"""The command line and Kubernetes: contexts from kubeconfig, and a cluster that answers, or does not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from elasticctl.api.observed.changes import changes_of
from elasticctl.api.spec import API_VERSION, PLURAL
from elasticctl.kubeapi import connection
from tests.support.cli import Run
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job
from tests.support.kube import WriteKubeconfig, add_pod


def test_contexts_are_imported_once(run: Run, private_home: Path, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig("https://ABC.eks.amazonaws.com", cluster={})
    done = run("config", "import")
    assert (done.code, done.out) == (0, "")
    assert done.err == "context lab added: aws, namespace default\n"
    assert run("config", "import").err.startswith("nothing to add")
    run("config", "delete-context", "lab")
    assert run("config", "import", "lab", "lab").err == "context lab added: aws, namespace default\n"
    assert run("config", "get-contexts", "-o", "name").out == "lab\nlocal\n"
    failed = run("config", "import", "lba")
    assert (failed.code, failed.err[:45]) == (3, 'error: no context "lba" (did you mean "lab"?)')


def test_verbs_reach_the_cluster_of_a_context(
    run: Run, private_home: Path, kubeconfig: WriteKubeconfig, api: FakeApi, tmp_path: Path
) -> None:
    kubeconfig(api.url)
    run("config", "import")
    manifest = tmp_path / "job.json"
    manifest.write_text(json.dumps(shell_job("digits", "true", namespace="ml")))
    assert run("submit", "-f", str(manifest), "--context", "lab", "-n", "ml", "--detach").code == 0
    listed = run("list", "--context", "lab", "-A")
    assert (listed.code, "digits" in listed.out) == (0, True)
    assert run("cancel", "digits", "--context", "lab", "-n", "ml").code == 0
    *_, patched, event = api.requests
    assert patched.path == "/apis/elastic.pytorch.org/v1alpha1/namespaces/ml/elasticjobs/digits"
    assert event.body["message"].startswith(f"cancel by {api.user} with elasticctl ")
    assert [change.by for change in changes_of(api.objects[patched.path])] == [api.user, api.user]
    assert patched.body["spec"] == {"cancel": True}
    assert run("status", "digits", "--context", "lab").code == 3


def test_a_view_takes_few_requests(run: Run, private_home: Path, kubeconfig: WriteKubeconfig, api: FakeApi) -> None:
    """One for the jobs and one for the pods of those that wait, however many these are; and events for a single one."""
    kubeconfig(api.url)
    run("config", "import")
    for name in ("a", "b", "c"):
        job = shell_job(name, "true") | {"status": {"phase": "Pending"}}
        add_pod(api, api.put(f"/apis/{API_VERSION}/namespaces/default/{PLURAL}/{name}", job), 0, "Pending")
    for words, reasons, asked in ((("list",), 3, ["pods"]), (("status", "b"), 1, ["pods", "b", "events"])):
        api.requests.clear()
        shown = run(*words, "--context", "lab")
        assert (shown.code, shown.out.count("Its workers are starting")) == (0, reasons), shown
        assert [request.path.rpartition("/")[2] for request in api.requests][1:] == asked


def test_a_dead_server_is_one_line_within_ten_seconds(
    run: Run, private_home: Path, kubeconfig: WriteKubeconfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * connection.CONNECT_TIMEOUT_S < 10  # a name may have two addresses
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # accepts as a stopped process does, and never answers
        kubeconfig(f"https://127.0.0.1:{stopped.getsockname()[1]}")
        run("config", "import")
        done = run("list", "--context", "lab")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: no answer from the cluster at https://127.0.0.1:")
    assert done.err.count("\n") == 1


def test_an_unusable_kubeconfig_context_is_named(run: Run, private_home: Path, kubeconfig: WriteKubeconfig) -> None:
    kubeconfig("http://127.0.0.1:1")
    run("config", "set-context", "prod", "--provider", "kubernetes", "--kube-context", "other")
    done = run("list", "--context", "prod")
    assert done.code == 3
    assert done.err.startswith('error: no usable context "other" in the kubeconfig')


def test_a_plain_cluster_has_no_labels_to_go_by(
    run: Run, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    run("config", "set-context", "lab", "--provider", "kubernetes", "--storage", "s3://b/p", "--image", "i")
    submit = ("submit", "train.py", "--context", "lab", "--dry-run")
    done = run(*submit, "--gpus", "4", "--gpus-per-node", "2")
    assert done.code == 0
    assert "nvidia.com/gpu: 2" in done.out
    assert "nodeAffinity" not in done.out
    assert "NOTICE_SOURCE" not in done.out
    assert run(*submit, "--gpus", "4").out.count("nvidia.com/gpu: 1") == 1
    refused = run(*submit, "--gpus", "4", "--gpu-type", "t4")
    assert (refused.code, refused.err[:22]) == (2, "error: --gpu-type t4: ")
