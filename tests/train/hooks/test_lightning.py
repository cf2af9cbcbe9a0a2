"""The callback in the real Lightning."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.checkpoints.entries import Commit
from elasticctl_store.errors import RestoreError
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import ElasticDataLoader
from tests.support.train import hook_programs, ranks
from tests.support.train.hook_programs import GLOBAL_BATCH, SAMPLES, Samples, note_samples
from tests.support.train.launcher import Launcher

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Lightning, also about this version of torch

Seen = list[tuple[int, list[float]]]


def elastic() -> ElasticDataLoader:
    return ElasticDataLoader(Samples(), global_batch=GLOBAL_BATCH, shuffle=True, seed=2)


def torchdatas() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    loader: DataLoader[Any] = StatefulDataLoader(Samples(), GLOBAL_BATCH, shuffle=True, generator=generator)
    return loader


def fit(url: Path, make: Any, **options: Any) -> tuple[Seen, dict[str, torch.Tensor], Any]:
    seen: Seen = []
    weights, trainer = hook_programs.lightning_fit(str(url), make(), lambda *what: seen.append(what), **options)
    return seen, weights, trainer


@pytest.mark.timeout(900)
def test_a_resumed_run_ends_exactly_as_an_uninterrupted_one(tmp_path: Path) -> None:
    seen, weights, _ = fit(tmp_path / "whole", elastic)
    assert len(seen) == 12
    for stop_at in (3, 4, 5):
        before, _, _ = fit(tmp_path / str(stop_at), elastic, stop_at=stop_at)
        after, found, _ = fit(tmp_path / str(stop_at), elastic)
        assert len(after) <= 12 - stop_at + 1, "the last batch of an epoch may be repeated"
        assert before[: 12 - len(after)] + after == seen
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_stateful_data_loader_repeats_and_skips_nothing(tmp_path: Path) -> None:
    before, _, _ = fit(tmp_path, torchdatas, stop_at=6)
    after, _, _ = fit(tmp_path, torchdatas)
    for epoch in range(3):
        steps = range(4 * epoch, 4 * epoch + 4)
        assert sorted(n for step, samples in before + after if step in steps for n in samples) == list(range(SAMPLES))


def test_finished_training_is_not_repeated_but_can_be_extended(tmp_path: Path) -> None:
    _, weights, _ = fit(tmp_path, elastic)
    seen, found, _ = fit(tmp_path, elastic)
    assert seen == []
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    seen, _, trainer = fit(tmp_path, elastic, epochs=4)
    assert [step for step, _ in seen] == [12, 13, 14, 15]
    assert trainer.current_epoch == 4
    newest: Commit = next(read_commits(LocalStorage(tmp_path)))
    assert (newest.step, newest.epoch) == (16, 4)
    assert newest.metrics["loss"] > 0


def test_samples_are_counted_through_restarts_if_the_loader_reports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = note_samples(monkeypatch)
    fit(tmp_path / "whole", elastic)
    fit(tmp_path / "state", elastic, stop_at=5)
    fit(tmp_path / "state", elastic)
    fit(tmp_path / "other", torchdatas)
    assert counted == [12 * GLOBAL_BATCH, 12 * GLOBAL_BATCH, None]


def test_total_steps_are_correct_with_manual_optimization(tmp_path: Path) -> None:
    for stop_at in (6, -1):
        _, _, trainer = fit(tmp_path, elastic, steps_itself=True, stop_at=stop_at)
        assert trainer.callbacks[0]._session.progress.total_steps == 24, "two steps for each of twelve batches"
    assert trainer.global_step == 24


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path, elastic, epochs=1)
    monkeypatch.setattr(hook_programs, "network", lambda: torch.nn.Sequential(torch.nn.Linear(2, 1)))
    with pytest.raises(RestoreError, match=r"(?s)step 4: the checkpoint does not fit this model: .*network\.2\.weight"):
        fit(tmp_path, elastic)


def test_ranks_stop_together_after_notice_and_fewer_continue(tmp_path: Path, launcher: Launcher) -> None:
    url = tmp_path / "state"
    processes = ranks.start(hook_programs.lightning_until_notice, 2, str(url), str(launcher.folder))
    while min(launcher.hear("progress", 2).values()) < 6:
        pass
    (launcher.folder / "notice").touch()
    (step,) = set(launcher.hear("drained", 2).values())
    for process in processes:
        process.kill()
        process.join()
    lines = [json.loads(line) for rank in (0, 1) for line in (launcher.folder / f"seen-{rank}").open()]
    before = Counter(number for at, samples in lines if at < step for number in samples)
    assert next(read_commits(LocalStorage(url))).step == step
    epochs = step // 4 + 1
    after, _, _ = fit(url, elastic, epochs=epochs)
    assert after[0][0] == step
    total = before + Counter(number for _, samples in after for number in samples)
    assert total == Counter(dict.fromkeys(range(SAMPLES), epochs))
