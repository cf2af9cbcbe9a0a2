"""A warm spare behaves as `python SCRIPT` does, but starts sooner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from elasticctl_launcher.main import modules_to_preload
from elasticctl_launcher.ranks.warm_spares import (
    WARM_S,
    PythonCommand,
    RankStarter,
    installed_imports,
    shared_environment,
)
from tests.support.processes import has_ended
from tests.support.waiting import wait_until

SCRIPT = """
import json, multiprocessing, os, sys
from dataclasses import dataclass
import helper

@dataclass
class Item:
    value: int

def double(item):
    return Item(item.value * 2)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.apply(double, (Item(21),)).value
    print(json.dumps({
        "argv": sys.argv[1:], "script": os.path.basename(sys.argv[0]), "file": __file__, "path0": sys.path[0],
        "doubled": doubled, "helper": helper.NAME, "env": os.environ.get("GIVEN"), "left": os.environ.get("TAKEN"),
        "stdin": sys.stdin.read(), "cwd": os.getcwd(),
    }, sort_keys=True))
    sys.exit(5)
"""

PEER = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=int(os.environ["RANK"]), world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))  # keeps the group's threads alive when it is taken down
    tensors = [torch.ones(1) for _ in range(1000)]
    sys.setswitchinterval(1000)  # from here on no thread gets the interpreter from another, as on a crowded machine
    dist.all_reduce_coalesced(tensors)
    dist.destroy_process_group()

main()
sys.exit(5)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("NAME = 'found next to the script'")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    return process.returncode, output.decode()


def ranks_environment() -> dict[str, str]:
    return {**os.environ, "GIVEN": "to the rank"}


Start = Callable[..., RankStarter]


@pytest.fixture
def warmed() -> Iterator[Start]:
    """`warmed(*ARGUMENTS, preload=(), environ={})`: a starter of Python with these arguments that has `spares` spares.

    Its clock stands still: no machine is too slow for a spare.
    """
    made: list[RankStarter] = []

    def start(
        *arguments: object, preload: Sequence[str] = ("json",), spares: int = 1, environ: Mapping[str, str] = {}
    ) -> RankStarter:
        command = [sys.executable, *map(str, arguments)]
        made.append(
            RankStarter(command, {**os.environ, "TAKEN": "by the spare alone", **environ}, preload, lambda: 0.0)
        )
        made[-1].warm(spares)
        return made[-1]

    yield start
    for starter in made:
        starter.close()


def both(warmed: Start, *arguments: object) -> list[tuple[int, str]]:
    """Exit code and output, without a spare and with one."""
    starters = [warmed(*arguments, preload=(), spares=0), warmed(*arguments)]
    return [run(starter.start(ranks_environment())) for starter in starters]


def test_a_spare_runs_a_script_as_python_does(script: Path, warmed: Start) -> None:
    plain, warm = both(warmed, script, "--lr", "0.1", "a b", "{x}", "-m")
    assert plain == warm
    assert plain[0] == 5
    assert '"doubled": 42' in plain[1]


def test_a_spare_runs_a_module(script: Path, warmed: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    code, output = run(warmed("-u", "-m", "train", "x").start(ranks_environment()))
    assert (code, '"argv": ["x"]' in output) == (5, True), output
    (script.parent / "bad.py").write_text("raise ValueError('no')")
    code, output = run(warmed("-m", "bad").start(ranks_environment()))
    assert code == 1
    assert output.endswith("ValueError: no\n")
    assert "bootstrap" not in output
    assert "contextlib" not in output


@pytest.mark.parametrize(
    ("source", "code", "last"),
    [
        ("x = (", 1, "SyntaxError: '(' was never closed"),
        ("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e", 1, "KeyError: 'x'"),
        ("import sys; sys.exit('a message')", 1, "a message"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_errors_look_as_without_a_spare(tmp_path: Path, warmed: Start, source: str, code: int, last: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    plain, warm = both(warmed, tmp_path / "bad.py")
    assert plain[0] == warm[0] == code
    assert warm[1].rstrip().endswith(last)
    if code != -signal.SIGINT:  # a traceback of an interrupt may contain lines of the bootstrap
        assert plain[1] == warm[1]


@pytest.mark.timeout(900)  # four imports of torch
def test_the_exit_code_is_the_scripts_own(tmp_path: Path, warmed: Start) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    for attempt in range(2):  # without the moment that a spare gives gloo's threads, every second one aborts
        starter = warmed(tmp_path / "peer.py", preload=["torch.nn.parallel.distributed"], spares=2)
        starter.wait_until_warm(600)
        meet = f"file://{tmp_path}/meet-{attempt}"
        ranks = [starter.start({**ranks_environment(), "MEET": meet, "RANK": str(rank)}) for rank in range(2)]
        ended = [run(rank) for rank in ranks]
        assert [code for code, _ in ended] == [5, 5], ended


def test_a_missing_script_is_named(tmp_path: Path, warmed: Start) -> None:
    said = f"cannot open '{tmp_path / 'none.py'}': No such file or directory\n"
    assert run(warmed(tmp_path / "none.py").start(ranks_environment())) == (2, said)


def test_a_dead_spare_is_replaced_by_a_fresh_process(script: Path, warmed: Start) -> None:
    starter = warmed(script)
    starter.wait_until_warm(240)
    (spare,) = starter.own_pids()
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: has_ended(spare))
    assert run(starter.start(ranks_environment()))[0] == 5


def test_unneeded_spares_end(script: Path, warmed: Start) -> None:
    starter = warmed(script, spares=2)
    starter.wait_until_warm(240)
    made = starter.own_pids()
    assert len(made) == 2
    starter.close()
    assert all(has_ended(spare) for spare in made)


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (["python", "train.py", "-x"], ("train.py", "-x")),
        ([sys.executable, "-u", "train.py"], ("train.py",)),
        (["python3", "-m", "pkg.train", "y"], ("-m", "pkg.train", "y")),
        (["python", "-X", "faulthandler", "train.py"], ("train.py",)),
        (["python", "-uB", "-Xdev", "-W", "error", "-OO", "-m", "train"], ("-m", "train")),
        (["python", "-i", "train.py"], None),
        (["python", "-X"], None),
        (["python", "-c", "print()"], None),
        (["python"], None),
        (["bash", "run.sh"], None),
        (["python-not-installed", "train.py"], None),
    ],
)
def test_which_commands_have_spares(command: list[str], argv: tuple[str, ...] | None) -> None:
    parsed = PythonCommand.parse(command)
    assert (parsed.argv if parsed else None) == argv


FLAGS = """
import os, sys
print(sys.flags.optimize, sys.flags.dont_write_bytecode, sys.flags.isolated, sys.flags.no_user_site, sys.flags.dev_mode)
print(sys.stdout.write_through, sys.warnoptions, sys._xoptions, __debug__, len(sys.path))
print(any(path == os.path.dirname(os.path.abspath(__file__)) for path in sys.path))
"""


@pytest.mark.parametrize(
    "flags", [["-u", "-X", "dev"], ["-OOB", "-W", "ignore"], ["-I"], ["-E", "-s"], ["-P"]], ids=" ".join
)
def test_a_spare_runs_with_the_interpreter_s_flags(tmp_path: Path, warmed: Start, flags: list[str]) -> None:
    (tmp_path / "flags.py").write_text(FLAGS)
    plain, warm = both(warmed, *flags, tmp_path / "flags.py")
    assert plain == warm


def test_a_spare_whose_imports_fail_is_given_up_with_a_warning(
    script: Path, warmed: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no driver')")
    starter = warmed(script, preload=["broken"], spares=2, environ={"PYTHONPATH": str(tmp_path)})
    starter.wait_until_warm(240)
    starter.warm(2)
    assert run(starter.start(ranks_environment()))[0] == 5
    assert starter.own_pids() == set()
    words = "a spare cannot import broken (exit code 1: RuntimeError: no driver): ranks start without spares"
    assert [record.getMessage() for record in caplog.records] == [words]


def test_a_spare_whose_imports_hang_is_given_up_with_a_warning(
    script: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hanging.py").write_text("import time; time.sleep(1000)")
    now, environ = [0.0], {**os.environ, "PYTHONPATH": str(tmp_path)}
    with closing(RankStarter([sys.executable, str(script)], environ, ["hanging"], lambda: now[0])) as starter:
        starter.warm(1)
        now[0] += WARM_S
        for _ in range(2):
            assert run(starter.start(ranks_environment()))[0] == 5
    assert len(caplog.records) == 1
    assert "has not finished its imports within 60 s" in caplog.text


def test_a_rank_uses_a_spare_that_is_nearly_ready(script: Path, warmed: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, time\nwhile not os.path.exists(__file__ + '.go'): time.sleep(0.01)")
    starter = warmed(script, preload=["slow"], environ={"PYTHONPATH": str(tmp_path)})
    spares = starter.own_pids()
    process = starter.start(ranks_environment())
    assert {process.pid} == spares
    (tmp_path / "slow.py.go").touch()
    assert run(process)[0] == 5


def test_the_script_determines_what_a_spare_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported ahead of its time')")
    script = tmp_path / "train.py"
    script.write_text(
        "import json, mine\nimport torch.nn as nn\nfrom sklearn.datasets import load_digits\n"
        "from . import helper\nimport no_such_package\ndef f():\n    import wave\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_imports(str(script)) == ["json", "torch.nn", "sklearn.datasets"]
    script.write_text("x = (")
    assert installed_imports(str(script)) == []
    assert installed_imports(str(tmp_path / "none.py")) == []


def test_imports_of_a_spare_are_kept_and_exempt_from_garbage_collection(tmp_path: Path, warmed: Start) -> None:
    (tmp_path / "heavy.py").write_text("import os; open(f'{__file__}-{os.getpid()}', 'x').close()")
    (tmp_path / "t.py").write_text(
        "import gc, heavy; print(gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()))"
    )
    starter = warmed(tmp_path / "t.py", preload=["heavy"], environ={"PYTHONPATH": str(tmp_path)})
    starter.wait_until_warm(240)
    (imported,) = tmp_path.glob("heavy.py-*")
    process = starter.start(ranks_environment())
    assert imported.name == f"heavy.py-{process.pid}"
    assert run(process) == (0, "True True\n")


@pytest.mark.parametrize(("url", "modules"), [("s3://b/x", ["s3"]), ("gs://b/x", ["gcs"]), ("file:///x", []), ("", [])])
def test_a_spare_imports_what_the_storage_needs(url: str, modules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICCTL_STORAGE", url)
    ours = [f"elasticctl_store.storage.{name}" for name in modules]
    assert modules_to_preload("auto", ["sh"]) == ["torch", "torch._dynamo", "elasticctl_train.run", *ours]


def test_ranks_on_one_machine_use_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo and with NCCL; on a cluster over what the node has, and always as the user has set it."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ELASTICCTL_POD_IP"):
        monkeypatch.delenv(name, raising=False)
    shared = shared_environment()
    assert (shared["GLOO_SOCKET_IFNAME"], shared["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    assert shared_environment()["NCCL_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setenv("ELASTICCTL_POD_IP", "10.0.0.7")
    assert "GLOO_SOCKET_IFNAME" not in shared_environment()
