"""Which scripts get a warning that they save nothing: only those of which it is certain."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.operations.submit.script_checks import (
    lines_of_bad_syntax,
    lines_of_lone_ranks,
    lines_without_checkpoints,
)
from elasticctl.operations.submit.training_command import TrainingCommand

TRAINS = "import torch\nfor batch in range(3):\n    loss.backward()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def warned(command: TrainingCommand) -> bool:
    return bool(lines_without_checkpoints(command))


def test_a_script_that_trains_and_saves_nothing(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINS)
    (folder / "pkg").mkdir()
    (folder / "pkg/__main__.py").write_text(TRAINS)
    assert lines_without_checkpoints(TrainingCommand("train.py"))[0].startswith(
        "train.py saves no checkpoints: after each loss"
    )
    assert warned(TrainingCommand(str(folder / "train.py")))
    assert warned(TrainingCommand("", ("python", "-m", "pkg")))


def test_a_script_that_does_not_compile(folder: Path) -> None:
    (folder / "train.py").write_text(f"{TRAINS}\ndef train(:\n    pass\n")
    line = TRAINS.count("\n") + 2
    assert [text.partition(", in Python 3.")[0] for text in lines_of_bad_syntax(TrainingCommand("train.py"))] == [
        f"train.py, line {line}: invalid syntax"
    ]
    assert not lines_of_bad_syntax(TrainingCommand("run.sh"))
    (folder / "train.py").write_bytes(b"\xef\xbb\xbf" + TRAINS.encode())
    assert not lines_of_bad_syntax(TrainingCommand("train.py"))
    assert not lines_of_bad_syntax(TrainingCommand("missing.py"))


def test_a_script_as_other_editors_write_it(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    (folder / "train.py").write_bytes(b"\xef\xbb\xbf" + f"import re\nre.compile('\\d')\n{TRAINS}".encode())
    assert warned(TrainingCommand("train.py"))
    assert not recwarn, "the script's own escapes are its author's affair"


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'-' * 100_000}1\n{TRAINS}",
        "print('no training')\n",
        f"{TRAINS}torch.save(model, 'x')\n",
        f"from elasticctl_train import Run\n{TRAINS}",
        f"from transformers import Trainer\n{TRAINS}",
        f"import helpers.io\n{TRAINS}",
        f"from helpers import io\n{TRAINS}",
        f"{TRAINS}this is no Python\n",
        "\udcff",
    ],
)
def test_others_are_left_alone(folder: Path, text: str) -> None:
    (folder / "helpers").mkdir()
    (folder / "helpers/io.py").write_text("def keep(model):\n    torch.save(model, 'x')\n")
    (folder / "train.py").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert not warned(TrainingCommand("train.py"))


def test_ranks_that_are_not_joined_train_alone(folder: Path) -> None:
    (folder / "helpers").mkdir()
    (folder / "helpers/io.py").write_text("import numpy\n")
    (folder / "train.py").write_text(f"import os.path\nfrom torch import nn\nfrom helpers import io\n{TRAINS}")
    assert lines_of_lone_ranks(TrainingCommand("train.py"), 3)[0].startswith(
        "train.py does not join its ranks: each of the 3 "
    )
    assert not lines_of_lone_ranks(TrainingCommand("train.py"), 1)
    assert not lines_of_lone_ranks(TrainingCommand("run.sh"), 3)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nprint('no training')\n",
        f"{TRAINS}torch.distributed.init_process_group()\n",
        f"from elasticctl_train import Run\n{TRAINS}",
        f"import accelerate\n{TRAINS}",
        f"from helpers import ranks\n{TRAINS}",
        f"{TRAINS}this is no Python\n",
    ],
)
def test_ranks_that_may_be_joined_are_left_alone(folder: Path, text: str) -> None:
    (folder / "helpers").mkdir()
    (folder / "helpers/ranks.py").write_text("import torch.distributed as d\nd.init_process_group('gloo')\n")
    (folder / "train.py").write_text(text)
    assert not lines_of_lone_ranks(TrainingCommand("train.py"), 3)


def test_a_missing_script_is_not_checked_here() -> None:
    for command in (
        TrainingCommand("no.py"),
        TrainingCommand("run.sh"),
        TrainingCommand("", ("python", "-m", "no.pkg")),
        TrainingCommand("", ("ls",)),
    ):
        assert not warned(command)
