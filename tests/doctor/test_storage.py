"""The storage check, of real storages and of faulty ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elasticctl.doctor import CheckOutcome
from elasticctl.doctor import machine as checkup
from elasticctl.doctor.machine import check_storage
from elasticctl_store.storage import Patience, Storage
from elasticctl_store.storage.local import LocalStorage


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = check_storage(str(tmp_path / "state"))
    assert found.outcome is CheckOutcome.OK
    assert found.says.startswith(f"file://{tmp_path}/state: writes, reads, lists, refuses to overwrite, deletes; ")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("url", "says"),
    [("ftp://x/y", "is not a supported storage"), ("", "the storage URL is empty"), ("/dev/null/x", "/dev/null")],
)
def test_one_that_cannot_be_used_says_why(url: str, says: str) -> None:
    found = check_storage(url)
    assert found.outcome is CheckOutcome.FAILED
    assert says in found.says
    assert found.mend


class Overwriting(LocalStorage):
    """A store that ignores the condition of a write, as some servers do."""

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        return super().put(key, parts)


class Forgetful(LocalStorage):
    """A store whose listings come late."""

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        return []


class Corrupting(LocalStorage):
    """A store that gives back something else."""

    def get(self, key: str) -> bytes:
        return super().get(key)[::-1]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Overwriting, "it does not support conditional writes"),
        (Forgetful, "a new object is not listed"),
        (Corrupting, "what is read differs from what was written"),
    ],
)
def test_one_that_does_not_do_as_it_should_is_found_out(
    kind: type[LocalStorage], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_it(url: str, patience: Patience) -> Storage:
        return kind(Path(url))

    monkeypatch.setattr(checkup.storage, "open", open_it)
    found = check_storage(str(tmp_path))
    assert found.outcome is CheckOutcome.FAILED
    assert says in found.says
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
