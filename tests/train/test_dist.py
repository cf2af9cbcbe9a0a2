"""The group of ranks at the end of a process; other tests with several ranks cover the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.ports import free_port

END = """
import sys
import torch
from torch.distributed import destroy_process_group
from elasticctl_train import dist

world = dist.join()
tensors = [torch.ones(1) for _ in range(1000)]
sys.setswitchinterval(1000)  # no thread gets the interpreter from another one, as on a busy machine
torch.distributed.all_reduce_coalesced(tensors, group={group})
{end}
"""


@pytest.mark.timeout(900)  # two imports of torch
@pytest.mark.parametrize(
    ("group", "end", "code"),
    [
        ("world.channel.group", "sys.exit(3)", 3),
        ("None", "dist.leave(world); destroy_process_group(); torch.distributed.destroy_process_group()", 0),
        ("None", "", 0),
    ],
)
def test_a_rank_ends_with_its_own_exit_code(group: str, end: str, code: int) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        ended = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", END.format(group=group, end=end)],
                    env={**os.environ, **place, "RANK": str(rank)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for process in ended:
            stack.callback(process.kill)
        said = [process.communicate()[1] for process in ended]
    assert [process.returncode for process in ended] == [code, code], said
    assert not any("terminate called" in text for text in said)


UNGUARDED = """
import torch
from torch.utils.data import TensorDataset
from elasticctl_train import Run

model = torch.nn.Linear(1, 1)
with Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    for epoch in run.epochs(1):
        data = TensorDataset(torch.zeros(4, 1))
        for (batch,) in run.loader(data, global_batch=2, num_workers=1, multiprocessing_context="spawn"):
            run.model(batch).sum().backward()
            run.step()
"""


@pytest.mark.timeout(900)  # two imports of torch
def test_a_worker_of_a_data_loader_that_imports_the_script_does_not_train(tmp_path: Path) -> None:
    """It has the rank's environment: it would join the group again, and take over the storage."""
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "ELASTICCTL_STORAGE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert 'FIX: put the script\'s code into a function, main(), and call it below if __name__ == "__main__":' in (
        ended.stderr
    )
    assert ended.stderr.count("no checkpoint at") == 1, ended.stderr
