"""Contexts on disk: whole or not at all, private, and never lost to a mistake in the file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import ConfigError, NotFoundError
from elasticctl.cluster.local.paths import local_paths
from elasticctl.settings.contexts import Config, Context, config_folder, load_config, save_config

AWS = Context(
    "prod", "aws", kube_context="eks", namespace="team", storage="s3://bucket/jobs", gpu_type="t4", gpus_per_node=4
)


def test_a_fresh_install_has_the_local_context(tmp_path: Path) -> None:
    config = load_config(tmp_path / "none" / "config.yaml")
    assert config == Config()
    assert config.context().provider == "local"
    (tmp_path / "empty.yaml").touch()
    assert load_config(tmp_path / "empty.yaml") == Config()


def test_saved_contexts_are_loaded_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.yaml"
    config = Config().having(AWS).using("prod")
    save_config(config, path)
    assert load_config(path) == config
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["config.yaml"]


@given(st.text(st.characters(codec="utf-8"), max_size=20))
@settings(max_examples=20)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    config = Config().having(Context("a", "gcp", storage=text, image=text))
    save_config(config, path)
    assert load_config(path) == config


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    save_config(Config().having(AWS), path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot write .*: No space left on device; the file is unchanged"):
        save_config(Config(), path)
    assert load_config(path) == Config().having(AWS)
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contexts: [", ":1: not YAML"),
        ("currentContext: x", ':1: currentContext: no context "x". FIX: use local'),
        (
            "contexts:\n  - {name: a, provider: asw}",
            ':2: contexts[0].provider: must be local, aws, gcp or kubernetes, not "asw" (did',
        ),
        ("contexts:\n  - {name: a}", ":2: contexts[0].provider: required, but missing"),
        ("contexts:\n  - {name: a, provider: aws, imge: x}", ":2: contexts[0].imge: unknown field (did you mean"),
        ("contexts:\n  - {name: a, provider: aws, gpusPerNode: four}", ":2: contexts[0].gpusPerNode: must be a number"),
        ("contexts:\n- {name: a, provider: aws}\n- {name: a, provider: gcp}", ":3: contexts[1].name: two contexts"),
        ("contexts:\n- {name: local, provider: aws}", ":2: contexts[0]: the context local and the provider local"),
        ("contexts: {}", ":1: contexts: must be a list, not {}"),
        ("- a", ':1: must be a mapping, not ["a"]'),
        (b"\xff\xfe", ":1: not UTF-8 text"),
    ],
)
def test_a_broken_file_is_named_with_its_line_and_kept(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert str(caught.value).endswith(". FIX: correct the file, or move it away to start with the context local only")
    assert path.read_bytes() == content


def test_contexts_are_changed_by_value() -> None:
    config = Config().having(AWS).using("prod")
    assert config.context() is AWS
    assert config.without("prod") == Config()
    with pytest.raises(NotFoundError, match=r'no context "prd" \(did you mean "prod"\?\)'):
        config.using("prd")
    with pytest.raises(ConfigError, match="built in"):
        config.without("local")
    with pytest.raises(ConfigError, match="belong together"):
        config.having(Context("other", "local"))


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ELASTICCTL_HOME", str(tmp_path))
    assert config_folder() == tmp_path
    monkeypatch.delenv("ELASTICCTL_HOME")
    assert config_folder().name == "elasticctl"


@pytest.mark.parametrize("home", ["~/here", "~nobody-of-that-name/here"])
def test_a_tilde_means_the_same_folder_to_contexts_and_to_the_local_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ELASTICCTL_HOME", home)
    assert local_paths().state == config_folder().absolute() / "local"
    assert config_folder() == Path(os.path.expanduser(home))


def test_a_contexts_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    kept, path = tmp_path / "dotfiles" / "config.yaml", tmp_path / "config.yaml"
    kept.parent.mkdir()
    path.symlink_to(kept)
    save_config(Config().having(AWS), path)
    assert path.is_symlink()
    assert load_config(kept) == Config().having(AWS)
