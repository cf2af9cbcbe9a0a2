"""No credential leaves with the code: by its file's name and by what it looks like, in every way to submit a folder."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import UsageError
from elasticctl.operations.workspace.collect_files import collect_files
from elasticctl.operations.workspace.credentials import ContentScan, by_content, by_name, rule_of
from tests.support.cli import Run
from tests.support.reports import Reports

_RANDOM = random.Random(7)


def letters(count: int, of: str = string.ascii_letters + string.digits) -> str:
    return "".join(_RANDOM.choice(of) for _ in range(count))


BODY = "\n".join(letters(64) for _ in range(6))
# Put together here, so that no scanner stops anybody over this file.
TOKENS = {
    "pem": f"-----BEGIN RSA PRIVATE {'KEY'}-----\n{BODY}\n-----END RSA PRIVATE KEY-----\n",
    "locked": f"-----BEGIN RSA PRIVATE {'KEY'}-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n{BODY}\n",
    "service account": f'{{"type": "service_account", "private_key": "-----BEGIN PRIVATE {"KEY"}-----\\n{BODY[:64]}"}}',
    "pgp": f"-----BEGIN PGP PRIVATE {'KEY'} BLOCK-----\n\n{BODY}\n",
    "aws id": f"key = '{'AKIA'}{letters(16, string.ascii_uppercase + '234567')}'",
    "aws secret": f"AWS_SECRET_ACCESS_{'KEY'}={letters(40)}",
    "aws ini": f"aws_secret_access_{'key'} = {letters(40)}",
    "google": f'key="{"AIza"}{letters(35)}"',
    "azure": f"DefaultEndpointsProtocol=https;AccountName=a;Account{'Key'}={letters(86)}==",
    "github": f"{'ghp_'}{letters(36)}",
    "github url": f"git+https://{letters(40)}:x-oauth-basic-{letters(4)}@github.com/a/b",
    "gitlab": f"{'glpat-'}{letters(20)}",
    "hugging face": f"login(token='{'hf_'}{letters(34)}')",
    "openai": f"{'sk-'}proj-{letters(48)}",
    "anthropic": f"{'sk-'}ant-api03-{letters(93)}",
    "wandb": f"WANDB_API_{'KEY'}={letters(40, '0123456789abcdef')}",
    "comet": f'api_{"key"}: "{letters(25)}9a{letters(20)}"',
    "slack": f"{'xoxb-'}{letters(12, '0123456789')}-{letters(24)}",
    "slack hook": f"https://hooks.slack.com/{'services'}/T{letters(8)}/B{letters(8)}/{letters(24)}",
    "stripe": f"{'sk_live_'}{letters(24)}",
    "npm": f"//registry.npmjs.org/:_auth{'Token'}={letters(36)}",
    "npm, older": f"//registry.corp.example/:_auth={letters(28)}==",
    "npm password": f"//registry.corp.example/:_{'password'}={letters(24)}",
    "google login": f'{{"type": "authorized_user", "refresh_token": "{"1//0"}{letters(90)}"}}',
    "kube token": f"users:\n- name: a\n  user:\n    {'token'}: {letters(60)}\n",
    "wireguard": f"[Interface]\nPrivate{'Key'} = {letters(43)}=\n",
    "header": f"curl -H 'Authorization: {'Bearer'} {letters(40)}'",
    "pypi": f"{'pypi-AgE'}IcHlwaS5vcmc{letters(60)}",
    "docker": f"{'dckr_pat_'}{letters(27)}",
    "databricks": f"{'dapi'}{letters(32, '0123456789abcdef')}",
    "jwt": f"{'eyJ'}hbGciOiJSUzI1NiJ9.{'eyJ'}zdWIiOiJ4In0aaaa.{letters(43)}",
    "kube": f"    client-key-{'data'}: {letters(200)}",
    "registry": f'{{"auths": {{"ghcr.io": {{"{"auth"}": "{letters(40)}"}}}}}}',
    "netrc": f"machine api.wandb.ai login user {'password'} {letters(40)}",
    "database": f"postgres://trainer:{letters(12)}@db.internal:5432/runs",
}
HARMLESS = {
    "header alone": f'if "-----BEGIN RSA PRIVATE {"KEY"}-----" in text:\n    return parse(text)\n',
    "documentation": "aws_access_key_id = AKIAIOSFODNN7EXAMPLE\nsecret = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "stand-in": f"token = '{'hf_'}{'x' * 34}'  # or {'ghp_'}YOUR_TOKEN_HERE_{'0' * 30}",
    "from the environment": "api_key = os.environ['OPENAI_API_KEY']\nsecret_key=${SECRET_KEY}\ntoken: {{ token }}",
    "interpolated": "url = f'postgres://{user}:{password_of_the_database}@{host}/runs'",
    "header of a variable": "headers = {'Authorization': f'Bearer {token_of_the_service_account()}'}",
    "a user of something": "user:\n  name: a\n  email: token@example.org\n",
    "code": "self.key_value_projection_weight = access_key_padding_mask_broadcast_to_heads_2d\nsk-learn-like-name",
    "digest": "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c1573d0f00a08",
    "allowed": f"token = '{'ghp_'}{letters(36)}'  # pragma: allowlist secret",
    "a port and a mail address": "see http://localhost:8080/path and mail me@example.org or ssh://host:22",
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_credential_is_found_wherever_it_lies(name: str) -> None:
    """In a file of any size, across the edges of what is read at once, and in UTF-16."""
    assert list(by_content(TOKENS[name].encode()))
    for before in ("", "x = 1\n" * 100):
        data = f"{before}{TOKENS[name]}\n".encode()
        for size in (257, 4096):
            scan = ContentScan("a.py")
            for start in range(0, len(data), size):
                scan.feed(data[start : start + size])
            first = before.count("\n") + 1
            assert [finding.line in range(first, first + 3) for finding in scan.findings] == [True] * len(scan.findings)
            assert scan.findings, size
    wide = ContentScan("a.txt")
    wide.feed(TOKENS[name].encode("utf-16"))
    assert wide.findings


@pytest.mark.parametrize("name", HARMLESS)
def test_lookalikes_pass(name: str) -> None:
    assert list(by_content(HARMLESS[name].encode())) == []


def test_our_own_code_and_examples_pass() -> None:
    root = Path(__file__).parents[3]
    for folder in ("elasticctl", "examples", "training_lib", "docs"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".yaml", ".json", ".sh"):
                assert list(by_content(path.read_bytes())) == [], path
                assert by_name(path.name) == "", path


@pytest.mark.parametrize(
    "path",
    [
        "id_rsa", "deploy/id_ed25519", "certs/server.key", "store.p12", "prod.env", "conf/.env.local", ".ENV", ".envrc",
        ".aws/credentials", "old/.aws/credentials", "my-service-account.json", "service_account_prod.json",
        "application_default_credentials.json", "client_secret_12.apps.json", "kubeconfig", "prod.kubeconfig",
        ".kube/config", "home/.kube/config", ".git-credentials", ".netrc", "_netrc", ".pypirc", ".docker/config.json",
        "infra/terraform.tfstate", "terraform.tfstate.backup", "prod.tfvars", "kaggle.json", ".pgpass", "wallet.dat",
        "wallets/main.json", ".bash_history", ".streamlit/secrets.toml", "key.ppk", ".ssh/config", "vault.kdbx",
    ],
)  # fmt: skip
def test_a_file_of_credentials_is_known_by_its_name(path: str) -> None:
    assert by_name(path)


@pytest.mark.parametrize(
    "path",
    [
        "train.py", "env.py", "environment.yaml", "conf/env.yaml", ".env.example", "keys.py", "key.py", "tokens.json",
        "credentials.py", "id_rsa.pub", "state.json", "secrets.py", "kube/deploy.yaml", "vocab.txt", "tokens.bin",
        "config.json", "monkey.json", "model.keras", "data/wallet_prices.csv", "gpu.environment", "kubeconfig.md",
    ],
)  # fmt: skip
def test_names_of_code_and_data_pass(path: str) -> None:
    assert by_name(path) == ""


def test_all_are_listed_and_each_can_be_left_out_or_named(tmp_path: Path) -> None:
    reports = Reports()
    (tmp_path / "conf").mkdir()
    (tmp_path / "train.py").write_text(f"a = 1\nlogin('{TOKENS['github']}')\n")
    (tmp_path / "conf/prod [1].env").write_text("A=1\n")
    with pytest.raises(UsageError, match=r"^nothing was sent: 2 files look like credentials in .*") as refused:
        collect_files(tmp_path, None, reports)
    assert '"train.py", line 2: looks like a token of GitHub' in reports.lines
    assert '"conf/prod [1].env": looks like an environment file' in reports.lines
    assert "ghp_" not in "".join(reports.lines) + str(refused.value)  # the value itself is shown nowhere
    rules = tmp_path / ".elasticctlignore"
    rules.write_text("!*.py\n!conf/*\n!conf/\n")  # wildcards and folders name no file
    with pytest.raises(UsageError, match=r"2 files"):
        collect_files(tmp_path, None)
    rules.write_text(f"{rule_of('conf/prod [1].env')}\n!{rule_of('train.py')}\n")
    kept = [item.path for item in collect_files(tmp_path, None).listing.items]
    assert kept == [".elasticctlignore", "conf", "train.py"]
    rules.write_text(f"!{rule_of('conf/prod [1].env')}\n!train.py\n")
    kept = [item.path for item in collect_files(tmp_path, None).listing.items]
    assert kept == [".elasticctlignore", "conf/prod [1].env", "train.py"]


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\r\n", exclude_categories=("Cc", "Zl", "Zp")), min_size=1
).filter(lambda name: name not in (".", ".."))


@settings(max_examples=40)
@given(st.lists(NAMES, min_size=1, max_size=3))
def test_the_rule_that_is_offered_means_the_file_and_no_other(parts: list[str]) -> None:
    from pathspec import GitIgnoreSpec

    path = "/".join(parts)
    spec = GitIgnoreSpec.from_lines([rule_of(path)])
    assert spec.match_file(path)
    assert not spec.match_file(f"other/{path}")
    assert not spec.match_file(f"{path}x")


@given(st.binary(max_size=400))
def test_any_bytes_can_be_searched(data: bytes) -> None:
    list(by_content(data))
    list(by_content(b"-----BEGIN PRIVATE KEY-----eyJ sig= password :// secret" + data))


@pytest.mark.usefixtures("local_cluster", "idle_jobs")
def test_every_way_to_submit_a_folder_is_searched(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (project / "train.py").write_text("print('done')\n")
    first = run("submit", "train.py", "--name", "first", "-d")
    assert first.code == 0, first.err
    dry = run("submit", "train.py", "--dry-run")
    (project / "job.yaml").write_text(dry.out)
    (project / "notes.txt").write_text(TOKENS["aws secret"])
    stored = sorted((home / "local/workspaces").rglob("*"))
    ways: list[tuple[Any, ...]] = [
        ("submit", "train.py", "-d"),
        ("submit", "train.py", "--dry-run"),
        ("submit", "train.py", "--dry-run=server"),
        ("submit", "-f", "job.yaml", "-d"),
        ("rerun", "first", "-d"),
        ("rerun", "first", "--dry-run"),
    ]
    for words in ways:
        refused = run(*words)
        assert refused.code == 2, words
        assert '"notes.txt", line 1: looks like a secret key of AWS' in refused.err, words
        assert "nothing was sent" in refused.err
    assert sorted((home / "local/workspaces").rglob("*")) == stored
    assert run("rerun", "first", "--same-code", "--dry-run").code == 0
    (project / ".elasticctlignore").write_text("/notes.txt\n")
    assert run("submit", "train.py", "--dry-run").code == 0


COPIES = (
    "{}~",
    "{}.bak",
    "{}.old",
    "{}.orig",
    "{} copy",
    "{} copy 2",
    "#{}#",
    "copy of {}",
    "{}.1",
    "{}.bak~",
    "{}_old",
)


@pytest.mark.parametrize(
    "name", [".env", "id_ed25519", ".netrc", "prod.env", "kubeconfig", "secrets.yaml", "a/.aws/credentials"]
)
def test_a_copy_of_a_credential_is_one(name: str) -> None:
    folder, slash, last = name.rpartition("/")
    for copy in COPIES:
        path = f"{folder}{slash}{copy.format(last)}"
        assert by_name(path) == by_name(name) != "", path
    stem, dot, end = last.rpartition(".")
    if stem:
        assert by_name(f"{folder}{slash}{stem} (1){dot}{end}") == by_name(name)


@pytest.mark.parametrize(
    "name", ["model.bak", ".env.example.bak", "id_rsa.pub.old", "train.py~", "environment.1", "key.old.py"]
)
def test_a_copy_of_something_else_is_none(name: str) -> None:
    assert by_name(name) == ""


@pytest.mark.parametrize("part", [".bak", " copy", ".1", "~", "#", " (1)", "_old."])
def test_no_name_takes_forever(part: str) -> None:
    """As long as file systems allow: an expression that tries all combinations would not come to an end."""
    assert by_name((part * 255)[:255] + "!") == ""
