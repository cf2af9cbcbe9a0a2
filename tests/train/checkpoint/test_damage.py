"""Checkpoints damaged in any way: verify and a restore agree on them, and raise our own errors."""

from __future__ import annotations

import logging
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import entries, repair, verify
from elasticctl_store.checkpoints.commits import CommitWriter, read_commits
from elasticctl_store.errors import MissingError, StorageError
from elasticctl_store.storage import all_keys
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from tests.support.train import samples
from tests.support.train.checkpoints import read_alone
from tests.support.train.damage import MemoryStorage, Objects, damage_objects, seal, seal_document

WHOLE = {name: samples.objects(name) for name in samples.NAMES}


def check_agreement(objects: Objects, checkpoints: Checkpointer) -> list[int]:
    """The positions of the intact commits, on which verify, a quick check and a restore agree."""
    storage = MemoryStorage(objects)
    glances = {finding.position: finding for finding in verify.findings(storage)}
    whole = []
    for commit in read_commits(storage):
        try:
            verify.verify(storage, commit, lambda count: None)
            verified = ""
        except StorageError as e:
            verified = str(e) or "refused"
        outcomes = set()
        for rank in range(len(commit.shares)):
            try:
                read_alone(storage, commit, rank)
                outcomes.add("")
            except StorageError:
                outcomes.add("refused")
        assert outcomes == {"refused" if verified else ""}, f"verify says: {verified or 'intact'}"
        if not verified:
            assert not glances[commit.position].damage
            whole.append(commit.position)
    try:
        assert checkpoints.start_from(storage, None).commit.position == whole[0]
    except MissingError:
        assert not whole
    return whole


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpointer:
    return Checkpointer(LocalStorage(tmp_path_factory.mktemp("own")))


@given(st.sampled_from(samples.NAMES), st.integers(0, 2**32))
@settings(max_examples=120)
def test_verify_and_restore_agree(checkpoints: Checkpointer, name: str, seed: int) -> None:
    logging.disable(logging.WARNING)  # each damage is logged
    try:
        check_agreement(damage_objects(WHOLE[name], random.Random(seed)), checkpoints)
    finally:
        logging.disable(logging.NOTSET)


@given(st.sampled_from(samples.NAMES), st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_repaired_commit_is_intact_for_all_readers_or_for_none(
    checkpoints: Checkpointer, name: str, seed: int
) -> None:
    """Forged documents with valid seals, whose journal is lost."""
    logging.disable(logging.WARNING)
    damaged = damage_objects(WHOLE[name], random.Random(seed))
    try:
        with tempfile.TemporaryDirectory() as folder:
            storage = LocalStorage(Path(folder))
            for key, data in damaged.items():
                if not key.startswith(entries.JOURNAL):
                    storage.put(key, [seal_document(data)])
            repair.rebuild(storage, CommitWriter.take_over(storage))
            after = {key: storage.get(key) for key in all_keys(storage, "")}
        check_agreement(after, checkpoints)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", samples.NAMES)
def test_sealing_an_intact_document_changes_nothing(checkpoints: Checkpointer, name: str) -> None:
    objects = dict(WHOLE[name])
    seal(objects)
    assert objects == WHOLE[name]
    assert len(check_agreement(objects, checkpoints)) == (3 if name in ("one-rank", "frozen", "tables") else 1)
