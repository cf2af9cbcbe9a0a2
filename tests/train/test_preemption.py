"""Notice: all ranks stop behind the same step, and that step is committed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.launcher_reports import NoticeFile
from tests.support.train import programs, ranks
from tests.support.train.launcher import Launcher
from tests.support.train.programs import trained

END = {"epochs": 200, "samples": 1000, "global_batch": 8, "every_steps": 100_000}
"""More than can be done in the time, saved too rarely to matter: only notice commits a step."""


@pytest.mark.parametrize(("world_size", "noticed"), [(1, 0), (3, 1)])
def test_all_ranks_stop_behind_the_same_committed_step(
    tmp_path: Path, launcher: Launcher, world_size: int, noticed: int
) -> None:
    url = str(tmp_path / "state")
    arguments = (url, str(tmp_path / "before"), END, str(launcher.folder))
    processes = ranks.start(programs.train_until_notice, world_size, *arguments)
    launcher.hear("progress", world_size)
    launcher.give_notice(noticed)
    drained = launcher.hear("drained", world_size)
    for process in processes:
        assert process.is_alive(), "a drained rank waits to be stopped"
        process.kill()
        process.join()
    (step,) = set(drained.values())
    newest = next(iter(read_commits(LocalStorage(Path(url)))))
    assert newest.step == step
    per_epoch = 1000 // 8
    rest = {**END, "epochs": step // per_epoch + 1}
    assert ranks.run(programs.train, 1, url, str(tmp_path / "after"), rest) == [0]
    samples = [n for s in trained([tmp_path / "before", tmp_path / "after"]).values() for n in s]
    assert Counter(samples) == Counter(dict.fromkeys(range(1000), rest["epochs"]))


def test_without_storage_the_ranks_still_stop_together(tmp_path: Path, launcher: Launcher) -> None:
    processes = ranks.start(programs.train_until_notice, 2, "", str(tmp_path / "notes"), END, str(launcher.folder))
    launcher.hear("progress", 2)
    launcher.give_notice(0)
    assert len(set(launcher.hear("drained", 2).values())) == 1
    for process in processes:
        process.kill()
        process.join()


def test_without_a_launcher_there_is_no_notice(tmp_path: Path) -> None:
    assert not NoticeFile.from_environment({}).possible
    notice = NoticeFile.from_environment({"ELASTICCTL_NOTICE_FILE": str(tmp_path / "n")})
    assert notice.possible
    assert not notice.given()
    (tmp_path / "n").touch()
    assert notice.given()
