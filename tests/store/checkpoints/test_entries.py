"""Names and format of journal entries, and retention."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_store.checkpoints import entries as commits
from elasticctl_store.checkpoints.entries import Commit, Generation, ObjectRef, Retention
from elasticctl_store.errors import DamagedError

SHARE = ObjectRef("data/g000001-n000001-step000000010-ab/share-00000-of-00001.json", 10, "crc32:00000000")
BASE = "base/g000001-n000001-step000000010-ab/"


def a_commit(position: int, step: int = 10) -> Commit:
    return Commit(position, 1, position, step, 0, (SHARE,), 1000, 12.5, {"loss": 0.5})


entries = st.one_of(
    st.builds(Generation, st.integers(1, 10**11), st.integers(1, 10**6), st.text(), st.text(), st.floats(0, 1e10)),
    st.builds(a_commit, st.integers(1, 10**11), st.integers(0, 10**9)),
    st.builds(lambda position: replace(a_commit(position), bases=(BASE,)), st.integers(1, 10**11)),
)


@given(entries)
@settings(max_examples=30)
def test_an_entry_survives_its_encoding(entry: commits.Entry) -> None:
    assert commits.decode(commits.encode(entry), entry.position) == entry


@given(entries, st.data())
@settings(max_examples=60)
def test_every_changed_byte_and_truncation_is_detected(entry: commits.Entry, data: st.DataObject) -> None:
    encoded = commits.encode(entry)
    at = data.draw(st.integers(0, len(encoded) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != encoded[at]))
    for damaged in (encoded[:at] + bytes([other]) + encoded[at + 1 :], encoded[:at]):
        with pytest.raises(DamagedError):
            commits.decode(damaged, entry.position)


def test_an_equivalent_json_encoding_is_detected() -> None:
    encoded = commits.encode(replace(a_commit(1), metrics={"\ud7ff": 1.0}))
    assert b"\\ud7ff" in encoded
    with pytest.raises(DamagedError):
        commits.decode(encoded.replace(b"\\ud7ff", b"\\uD7ff"), 1)


def test_an_entry_at_another_position_is_damaged() -> None:
    with pytest.raises(DamagedError, match="journal entry 8"):
        commits.decode(commits.encode(a_commit(7)), 8)


def test_a_newer_format_is_named() -> None:
    body = {"format": commits.FORMAT_WITH_PATCHES + 1, "kind": "commit"}
    body["sha256"] = commits.digest_of(body)
    with pytest.raises(DamagedError, match="another version"):
        commits.decode(json.dumps(body).encode(), 1)


def test_a_generation_is_not_a_commit() -> None:
    entry = Generation(3, 1, "ab")
    with pytest.raises(DamagedError, match="not a commit"):
        commits.decode_commit(commits.encode(entry), 3)


@given(st.integers(1, 10**11), st.integers(1, 10**11))
@settings(max_examples=30)
def test_newer_entries_sort_first(a: int, b: int) -> None:
    assert (commits.key_of(a) < commits.key_of(b)) == (a > b)
    assert commits.position_of(commits.key_of(a)) == a


@pytest.mark.parametrize(
    "key", ["journal/", "journal/1.json", "journal/99999999999x.json", "data/999999999998.json",
            "journal/999999999998.json.ab12cd34.partial", "journal/９９９９９９９９９９９９.json"]  # noqa: RUF001
)  # fmt: skip
def test_foreign_keys_have_no_position(key: str) -> None:
    assert commits.position_of(key) is None


def test_the_names_of_a_save_belong_together() -> None:
    folder = commits.save_folder(3, 2, 120, "ab12cd34")
    share = commits.share_key(folder, 1, 3)
    assert share == "data/g000003-n000002-step000000120-ab12cd34/share-00001-of-00003.json"
    assert commits.tensors_key(share).endswith("share-00001-of-00003.safetensors")
    assert commits.folder_of(share) == commits.folder_of(commits.tensors_key(share)) == folder
    assert commits.number_of(folder) == 2
    assert commits.number_of(commits.save_folder(3, 12_345_678, 1, "ab12cd34")) == 12_345_678
    assert commits.number_of("data/mnist/") is None


histories = st.lists(
    st.tuples(st.floats(0.5, 20), st.one_of(st.none(), st.integers(0, 5).map(float), st.just(math.nan))), min_size=1
).map(
    lambda rows: [
        replace(a_commit(position), at=at, metrics={} if metric is None else {"loss": metric})
        for position, (at, (_, metric)) in enumerate(zip(accumulate(gap for gap, _ in rows), rows, strict=True), 1)
    ]
)
retentions = st.builds(
    Retention,
    st.integers(-1, 5),
    st.one_of(st.none(), st.floats(1, 50)),
    st.integers(0, 4),
    st.just("loss"),
    st.sampled_from(["min", "max"]),
)


@given(histories, retentions)
def test_retention_keeps_exactly_what_it_promises(history: list[Commit], keep: Retention) -> None:
    gone = commits.commits_to_delete(list(reversed(history)), keep)
    assert gone == sorted(gone, key=lambda commit: commit.position)
    kept = [commit for commit in history if commit not in gone]
    last = history[-max(1, keep.last) :]
    assert all(commit in kept for commit in last)
    others = [commit for commit in kept if commit not in last]
    if keep.every_s is None:
        assert len(others) <= keep.best
    else:
        times = [commit.at for commit in kept]
        for commit in history:  # each has one that was kept at most an interval before it
            assert any(0 <= commit.at - at < keep.every_s or at == commit.at for at in times)
    measured = [commit.metrics["loss"] for commit in history if math.isfinite(commit.metrics.get("loss", math.nan))]
    best = sorted(measured, reverse=keep.mode == "max")[: keep.best]
    values = [commit.metrics.get("loss", math.nan) for commit in kept]
    assert all(values.count(value) >= best.count(value) for value in best)


@given(histories, retentions)
@settings(max_examples=50)
def test_earlier_deletions_do_not_change_what_is_kept(history: list[Commit], keep: Retention) -> None:
    kept: list[Commit] = []
    for commit in history:
        kept.append(commit)
        for old in commits.commits_to_delete(kept, keep):
            kept.remove(old)
    together = commits.commits_to_delete(history, keep)
    assert kept == [commit for commit in history if commit not in together]


def test_a_clock_that_was_ahead_does_not_disable_retention_by_age() -> None:
    year_s = 3.2e7
    history = [replace(a_commit(n), at=at) for n, at in enumerate([year_s, year_s + 5, 0.0, 5.0, 10.0, 15.0, 20.0], 1)]
    gone = commits.commits_to_delete(history, Retention(1, every_s=10.0))
    assert [commit.position for commit in history if commit not in gone] == [1, 3, 5, 7]


def test_of_two_equal_metrics_the_newer_commit_is_kept() -> None:
    history = [replace(a_commit(n), metrics={"loss": value}) for n, value in enumerate([0.5, 0.1, 0.1, 0.7, 0.9], 1)]
    gone = commits.commits_to_delete(history, Retention(1, None, 1, "loss", "min"))
    assert [commit.position for commit in gone] == [1, 2, 4]


def test_commits_list_only_parameters_that_are_not_finite() -> None:
    commit = Commit(3, 1, 3, 3, 0, (SHARE,), 1000, 12.5, {"loss": 0.5}, ("model/w",))
    assert commits.decode(commits.encode(commit), 3) == commit
    assert b"not_finite" in commits.encode(commit)
    assert b"not_finite" not in commits.encode(replace(commit, not_finite=()))


def test_only_a_commit_that_needs_base_files_or_patches_is_of_a_newer_format() -> None:
    plain, newer = commits.encode(a_commit(1)), commits.encode(replace(a_commit(1), bases=(BASE,)))
    assert b'"format":2' in plain
    assert b"bases" not in plain
    assert b'"format":3' in newer
    patched = commits.encode(replace(a_commit(1), bases=(BASE, commits.folder_of(commits.patch_key(SHARE.key)))))
    assert b'"format":4' in patched
    for data, bases in ((plain, [BASE]), (newer, [])):
        body = {**json.loads(data), "bases": bases}
        del body["sha256"]
        body["sha256"] = commits.digest_of(body)
        with pytest.raises(DamagedError):
            commits.decode(json.dumps(body, sort_keys=True, separators=(",", ":")).encode(), 1)


@pytest.mark.parametrize(
    "bases", [("data/g000001-n000001-step000000010-ab/",), ("base/x/",), (BASE, BASE), (f"{BASE}x/",), (7,), ("base/",)]
)
def test_an_invalid_folder_of_base_files_is_damage(bases: tuple[Any, ...]) -> None:
    with pytest.raises(DamagedError):
        commits.decode(commits.encode(replace(a_commit(1), bases=bases)), 1)


def test_keys_of_base_files() -> None:
    key = commits.base_key(SHARE.key)
    assert key == f"{BASE}share-00000-of-00001.safetensors"
    assert commits.is_base_file(key)
    assert commits.folder_of(key) == BASE
    for other in (SHARE.key, commits.tensors_key(SHARE.key), f"{BASE}x", f"base/../{key}", f"{BASE}../x", BASE):
        assert not commits.is_base_file(other)


def test_keys_of_tables_and_patches() -> None:
    table, patch = commits.table_key(SHARE.key), commits.patch_key(SHARE.key)
    assert len({table, patch, commits.base_key(SHARE.key)}) == 3
    assert (commits.is_base_file(table), commits.is_patch(table)) == (True, False)
    assert (commits.is_base_file(patch), commits.is_patch(patch)) == (False, True)
    saves = {commits.save_of(commits.folder_of(key)) for key in (SHARE.key, table, patch)}
    assert len(saves) == 1
    assert len({commits.run_of(commits.folder_of(key)) for key in (SHARE.key, table, patch)}) == 1


def test_older_versions_do_not_delete_patches() -> None:
    theirs = re.compile(r"(?:data/|base/)g(\d{6,18})-n(\d{6,18})-step(\d{9,18})-([^/]+)/", re.ASCII)
    assert not theirs.fullmatch(commits.folder_of(commits.patch_key(SHARE.key)))
    assert theirs.fullmatch(commits.folder_of(commits.table_key(SHARE.key)))
