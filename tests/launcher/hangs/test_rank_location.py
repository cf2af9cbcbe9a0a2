"""The place of a rank, from its stack."""

from __future__ import annotations

import pytest

from elasticctl_launcher.hangs.rank_location import NOWHERE, Kind, StackPlace, describe, place_of
from elasticctl_launcher.hangs.stacks import StackFrame as Call
from elasticctl_launcher.hangs.stacks import ThreadStack, parse, to_lines
from elasticctl_protocol.reports import RankPlace

TORCH = "/env/lib/python3.12/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
SCRIPT = Call("<module>", "/job/train.py", 7)


def at(*frames: Call, line: str = "") -> StackPlace:
    return place_of((ThreadStack(1, "MainThread", (*frames, SCRIPT)),), lambda file, number: line)


@pytest.mark.parametrize(
    ("frames", "line", "kind", "where"),
    [
        ((Call("all_reduce", C10D, 1), Call("wrapper", f"{TORCH}/distributed/c10d_logger.py", 2)), "",
         Kind.COLLECTIVE, "all_reduce"),
        ((Call("_create_c10d_store", f"{TORCH}/distributed/rendezvous.py", 1), Call("init_process_group", C10D, 9)),
         "", Kind.COLLECTIVE, "init_process_group"),
        ((Call("_engine_run_backward", f"{TORCH}/autograd/graph.py", 1), Call("Tensor.backward", "/t/_tensor.py", 2)),
         "", Kind.DEVICE, "_engine_run_backward (graph.py:1)"),
        ((Call("step", "/job/loop.py", 3),), "    return loss.item()", Kind.DEVICE, "step (loop.py:3)"),
        ((Call("step", "/job/loop.py", 3),), "    time.sleep(60)", Kind.SLEEP, "step (loop.py:3)"),
        ((Call("Lock.hold", "/job/loop.py", 3),), "    self.lock.acquire()", Kind.CODE, "Lock.hold (loop.py:3)"),
        ((Call("Condition.wait", "/usr/lib/python3.12/threading.py", 3), Call("load", "/job/data.py", 9)), "",
         Kind.CODE, "load (data.py:9)"),
        ((Call("poll", "/usr/lib/python3.12/selectors.py", 3),
          Call("_Iter._next_data", f"{TORCH}/utils/data/dataloader.py", 9)), "", Kind.CODE, "DataLoader._next_data"),
        ((Call("finish", "/site/elasticctl_train/dist.py", 3),
          Call("Means.hand_in", "/site/elasticctl_train/inplace/elastic_ddp.py", 9)),
         "            work.wait(_LOOK)", Kind.DEVICE, "backward"),
        ((), "import something", Kind.CODE, "train.py:7"),
    ],
)  # fmt: skip
def test_a_stack_has_a_name_and_a_kind(frames: tuple[Call, ...], line: str, kind: Kind, where: str) -> None:
    assert at(*frames, line=line) == StackPlace(kind, where)


def test_the_main_thread_of_the_outermost_process_counts() -> None:
    other = ThreadStack(1, "Thread-1", (Call("run", "/job/other.py", 1),))
    child = ThreadStack(2, "MainThread", (Call("child", "/job/child.py", 1),))
    main = ThreadStack(1, "MainThread", (SCRIPT,))
    assert place_of((other, main, child), lambda file, line: "").where == "train.py:7"
    assert place_of(None, lambda file, line: "") == NOWHERE


def test_frames_of_the_bootstrap_are_left_out() -> None:
    frames = [
        {"name": "<module>", "filename": "/job/train.py", "line": 7},
        {"name": "main", "filename": "/env/elasticctl_launcher/bootstrap.py", "line": 1},
    ]
    found = parse([{"pid": 5, "thread_name": "MainThread", "os_thread_id": 5, "frames": frames}])
    assert found is not None
    assert list(to_lines(found)) == ["MainThread:", "    <module> (/job/train.py:7)"]
    assert parse([{"pid": 5, "thread_name": None, "os_thread_id": 5, "frames": []}]) is None


def test_the_description_says_which_ranks_wait_for_which() -> None:
    waiting = [RankPlace(rank, "all_reduce", 300.0, True) for rank in (0, 1, 2, 4, 5, 6, 7)]
    standing = RankPlace(3, "DataLoader._next_data", 242.0, False)
    assert describe([*waiting, standing]) == (
        "rank 3 has been in DataLoader._next_data for 4m02s; ranks 0-2, 4-7 wait for it in all_reduce"
    )
    assert describe([RankPlace(0, "broadcast", 20.0, True), RankPlace(1, "barrier", 30.0, True)]) == (
        "waiting for each other for 20s: rank 0 in broadcast, rank 1 in barrier"
    )
