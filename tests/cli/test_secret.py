"""`secret`, and `submit --secret` and `--mount`: values from a pipe, a file or a prompt; references in the manifest."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.local.paths import local_paths
from elasticctl.cluster.local.secrets import Secrets
from elasticctl.diagnosis import diagnose
from elasticctl.diagnosis.findings import Case
from tests.support import job_samples
from tests.support.cli import Run

PLANTED = "planted-77aa"


class Pipe:
    """A standard input that is no terminal."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, private_home: Path) -> Any:
    """`pipe(b"…")` is what the next command reads."""
    return lambda data: monkeypatch.setattr(sys, "stdin", Pipe(data))


def kept(name: str, namespace: str = "default") -> Any:
    return Secrets(local_paths()).read(namespace, name)


def test_a_value_is_read_from_a_pipe(run: Run, pipe: Any) -> None:
    pipe(f"{PLANTED}\n".encode())
    done = run("secret", "set", "hub", "HF_TOKEN")
    assert (done.code, done.out, done.err) == (0, "", "secret hub: 1 key set (HF_TOKEN)\n")
    pipe(b"jo")
    run("secret", "set", "hub", "USER")
    assert kept("hub") == {"HF_TOKEN": PLANTED, "USER": "jo"}
    run("secret", "set", "hub", "USER", "-n", "ml")
    assert kept("hub", "ml") is None  # the pipe was empty


def test_windows_line_endings_are_read(run: Run, pipe: Any, tmp_path: Path) -> None:
    pipe(f"\ufeff{PLANTED}\r\n".encode())
    assert run("secret", "set", "hub", "HF_TOKEN").code == 0
    (tmp_path / "keys.env").write_bytes(f"\ufeffA={PLANTED}\r\nB=2\r\n".encode())
    assert run("secret", "set", "hub", "--from-env-file", str(tmp_path / "keys.env")).code == 0
    assert kept("hub") == {"HF_TOKEN": PLANTED, "A": PLANTED, "B": "2"}


def test_values_are_typed_unseen(run: Run, private_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    asked: list[str] = []
    monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or f"{PLANTED}{len(asked)}")
    assert run("secret", "set", "hub", "A", "B").code == 0
    assert asked == ["A: ", "B: "]
    assert kept("hub") == {"A": f"{PLANTED}1", "B": f"{PLANTED}2"}


def test_a_file_has_many(run: Run, pipe: Any, tmp_path: Path) -> None:
    text = f"# keys\n\nA={PLANTED}\nexport B='two words'\nC=\"q\"\nD=a=b\n"
    (tmp_path / "keys.env").write_text(text)
    wanted = {"A": PLANTED, "B": "two words", "C": "q", "D": "a=b"}
    assert run("secret", "set", "one", "--from-env-file", str(tmp_path / "keys.env")).code == 0
    pipe(text.encode())
    assert run("secret", "set", "two", "--from-env-file", "-").err == "secret two: 4 keys set (A, B, C, D)\n"
    assert kept("one") == kept("two") == wanted


def test_a_list_has_no_values(run: Run, private_home: Path) -> None:
    Secrets(local_paths()).write("default", "hub", {"HF_TOKEN": PLANTED, "A": PLANTED})
    table = run("secret", "list").out
    assert table.splitlines()[0] == "NAME\tKEYS\tAGE"
    assert table.splitlines()[1].startswith("hub\tA, HF_TOKEN\t")
    data = json.loads(run("secret", "list", "-o", "json").out)
    assert (data["kind"], data["secrets"][0]["keys"]) == ("SecretList", ["A", "HF_TOKEN"])
    assert run("secret", "list", "-o", "name").out == "hub\n"
    assert PLANTED not in table + json.dumps(data)
    assert run("secret", "delete", "hub").err == "secret hub: deleted\n"
    assert "no secrets in namespace default" in run("secret", "list").err


@pytest.mark.parametrize(
    ("words", "data", "code", "said"),
    [
        (("set", "hub"), b"", 2, "no keys given. FIX: name the keys, or give --from-env-file FILE"),
        (("set", "hub", "A", "--from-env-file", "x"), b"", 2, "no keys given"),
        (("set", "hub", f"A={PLANTED}"), b"", 2, "a value on the command line can be read"),
        (("set", "hub", "a-b"), b"x", 2, '"a-b" cannot be the name of a variable'),
        (
            ("set", "hub", "A", "B"),
            b"x",
            2,
            "a pipe holds the value of one key. FIX: give several with --from-env-file -",
        ),
        (("set", "hub", "A"), b"", 2, "the value of A is empty"),
        (("set", "hub", "A"), f"{PLANTED}\xff".encode("latin-1"), 2, "stdin is not UTF-8 text"),
        (("set", "Hub", "A"), b"x", 2, '"Hub" is not a valid name of a secret'),
        (("set", "hub", "--from-env-file", "-"), f"A=1\n{PLANTED}\n".encode(), 2, "-:2: not of the form KEY=VALUE"),
        (("set", "hub", "--from-env-file", "-"), b"# none\n", 2, "- has no line of KEY=VALUE"),
        (("set", "hub", "--from-env-file", "nowhere"), b"", 2, "cannot read nowhere: No such file"),
        (("delete", "hub"), b"", 3, 'there is no secret "hub" in namespace "default". FIX: see'),
    ],
)
def test_mistakes_are_one_line_without_values(
    run: Run, pipe: Any, words: tuple[str, ...], data: bytes, code: int, said: str
) -> None:
    pipe(data)
    done = run("secret", *words)
    assert (done.code, done.err.count("\n"), done.out) == (code, 1, "")
    assert said in done.err
    assert PLANTED not in done.err
    assert kept("hub") is None


# Jobs that name them.


@pytest.fixture
def script(tmp_path: Path, private_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path / "train.py"


def container(text: str) -> Any:
    return yaml.safe_load(text)["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def test_a_manifest_has_names_alone(run: Run, script: Path) -> None:
    Secrets(local_paths()).write("default", "hub", {"HF_TOKEN": PLANTED})
    Secrets(local_paths()).write("default", "s3", {"id": PLANTED})
    refs = ("--secret", "hub", "--secret", "hub:HF_TOKEN", "--secret", "s3:id=AWS_ACCESS_KEY_ID", "--secret", "hub")
    done = run("submit", "train.py", "--dry-run", *refs)
    assert done.code == 0, done.err
    made = container(done.out)
    assert made["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert made["env"][-2:] == [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}},
        {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "id"}}},
    ]
    assert PLANTED not in done.out + done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--secret", "no"), "--secret: there is no secret no. FIX: elasticctl secret set no KEY"),
        (("--secret", "hub:NO"), '--secret: the secret hub has no key "NO". FIX: elasticctl secret set hub NO'),
        (("--secret", "hub:A", "--env", "A=1"), '--secret: "A" is given twice'),
        (("--secret", "hub:A", "--secret", "hub:B=A"), '--secret: "A" is given twice'),
        (("--secret", "hub:a.b"), '"a.b" cannot be the name of a variable; give one: hub:a.b=VARIABLE.'),
        (("--secret", "hub=A"), '"hub=A" is not of the form NAME, NAME:KEY or NAME:KEY=VARIABLE.'),
        (("--mount", "data:/data"), "--mount is for clusters: on this machine a job sees every folder where it is"),
        (("--mount", "data"), '"data" is not of the form CLAIM:/path.'),
        (("--storage", f"s3://key:{PLANTED}@bucket/p"), "--storage: the URL has something before an '@'"),
        (("--storage", f"s3://key:a/{PLANTED}@bucket/p"), "--storage: the URL has something before an '@'"),
        (("--storage", f"ftp://key:{PLANTED}@host/p"), "--storage: the URL has something before an '@'"),
    ],
)
def test_an_impossible_secret_or_mount_is_a_one_line_error(
    run: Run, script: Path, words: tuple[str, ...], said: str
) -> None:
    Secrets(local_paths()).write("default", "hub", {"A": "1", "B": "2", "a.b": "3"})
    done = run("submit", "train.py", "--dry-run", *words)
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
    assert said in done.err
    assert PLANTED not in done.err


def test_a_context_takes_no_credentials(run: Run, private_home: Path) -> None:
    done = run("config", "set-context", "local", "--storage", f"s3://key:{PLANTED}@bucket/p")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "pass credentials through the environment" in done.err
    assert PLANTED not in done.err
    assert not (private_home / "config.yaml").exists()


def test_a_cluster_mounts_claims_and_is_not_asked_for_its_secrets(run: Run, script: Path) -> None:
    run("config", "set-context", "prod", "--provider", "kubernetes", "--storage", "s3://b/p", "--image", "i")
    submit = ("submit", "train.py", "--context", "prod", "--dry-run")
    done = run(*submit, "--secret", "hub", "--mount", "data:/data", "--mount", "models.v1:/srv/models")
    assert done.code == 0, done.err
    pod = yaml.safe_load(done.out)["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["volumes"][1:] == [
        {"name": "claim-1", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "claim-2", "persistentVolumeClaim": {"claimName": "models.v1"}},
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"shared-memory": "/dev/shm", "claim-1": "/data", "claim-2": "/srv/models"}
    assert container(done.out)["envFrom"] == [{"secretRef": {"name": "hub"}}]
    twice = run(*submit, "--mount", "data:/data", "--mount", "data:/other")
    assert twice.err == 'error: --mount: "data" is given twice\n'


def test_secrets_that_are_kept_elsewhere_are_mounted_by_their_class(run: Run, script: Path) -> None:
    run("config", "set-context", "prod", "--provider", "kubernetes", "--storage", "s3://b/p", "--image", "i")
    submit = ("submit", "train.py", "--context", "prod", "--dry-run")
    done = run(*submit, "--mount", "data:/data", "--mount", "secrets:hub.v1:/run/hub", "--mount", "secrets:/own")
    assert done.code == 0, done.err
    pod = yaml.safe_load(done.out)["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    attributes = {"secretProviderClass": "hub.v1"}
    csi = {"driver": "secrets-store.csi.k8s.io", "readOnly": True, "volumeAttributes": attributes}
    assert pod["volumes"][1:] == [
        {"name": "claim-1", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "claim-2", "csi": csi},
        {"name": "claim-3", "persistentVolumeClaim": {"claimName": "secrets"}},
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"shared-memory": "/dev/shm", "claim-1": "/data", "claim-2": "/run/hub", "claim-3": "/own"}
    wrong = run(*submit, "--mount", "vault:hub:/run/hub")
    assert (wrong.code, "is not of the form CLAIM:/path" in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ('secret "hub" not found', "hub"),
        ("couldn't find key TOKEN in Secret ml/hub.v2", "hub.v2"),
        ('secret "hub" has no key "TOKEN"', "hub"),
    ],
)
def test_explain_says_which_secret_is_missing(message: str, name: str) -> None:
    manifest = job_samples.job(phase="Pending", active=0)
    status = {"phase": "Pending", "reason": "CreateContainerConfigError", "message": message}
    pod = {"metadata": {"name": "digits-worker-0"}, "status": status}
    first = diagnose(Case(ElasticJob.from_manifest(manifest), (pod,), job_samples.AT))[0]
    assert (first.rule, first.text) == ("secret-missing", f"worker-0 cannot start: {message}.")
    assert first.mends[0].command == f"elasticctl secret set {name} KEY"
