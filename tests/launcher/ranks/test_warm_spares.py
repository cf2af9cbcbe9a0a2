"""A warm spare behaves as `python SCRIPT` does, only sooner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from elasticctl_launcher.main import modules_to_preload
from elasticctl_launcher.ranks.command import PythonCommand, installed_imports
from elasticctl_launcher.ranks.warm_spares import WARM_S, RankStarter, shared_environment
from tests.support.processes import has_ended
from tests.support.waiting import wait_until

SCRIPT = """
import json, multiprocessing, os, sys
from dataclasses import dataclass
import beside

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
        "doubled": doubled, "beside": beside.NAME, "env": os.environ.get("GIVEN"), "left": os.environ.get("TAKEN"),
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
    (tmp_path / "beside.py").write_text("NAME = 'found beside the script'")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def starters() -> Iterator[list[RankStarter]]:
    made: list[RankStarter] = []
    yield made
    for starter in made:
        starter.close()


def environment() -> dict[str, str]:
    return {**os.environ, "TAKEN": "by the spare alone"}


def run(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    return process.returncode, output.decode()


def ranks_environment() -> dict[str, str]:
    return {**os.environ, "GIVEN": "to the rank"}


@pytest.mark.parametrize("arguments", [[], ["--lr", "0.1", "a b", "{x}", "-m"]])
def test_a_spare_is_what_python_script_is(script: Path, starters: list[RankStarter], arguments: Sequence[str]) -> None:
    command = [sys.executable, str(script), *arguments]
    plain, warm = RankStarter(command, environment(), []), RankStarter(command, environment(), ["json"])
    starters += [plain, warm]
    warm.warm(1)
    results = [run(starter.start(ranks_environment())) for starter in (plain, warm)]
    assert results[0] == results[1]
    assert results[0][0] == 5
    assert '"doubled": 42' in results[0][1]


def test_a_spare_runs_a_module(script: Path, starters: list[RankStarter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    starter = RankStarter([sys.executable, "-u", "-m", "train", "x"], environment(), ["json"])
    starters.append(starter)
    starter.warm(1)
    code, output = run(starter.start(ranks_environment()))
    assert (code, '"argv": ["x"]' in output) == (5, True), output


def test_an_error_in_a_module_does_not_begin_with_how_it_was_started(
    tmp_path: Path, starters: list[RankStarter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("raise ValueError('no')")
    starter = RankStarter([sys.executable, "-m", "bad"], environment(), ["json"])
    starters.append(starter)
    starter.warm(1)
    code, output = run(starter.start(ranks_environment()))
    assert code == 1
    assert output.endswith("ValueError: no\n")
    assert "bootstrap" not in output
    assert "contextlib" not in output


@pytest.mark.parametrize(
    ("source", "code", "last"),
    [
        ("def f():\n    raise ValueError('no')\nf()", 1, "ValueError: no"),
        ("x = (", 1, "SyntaxError: '(' was never closed"),
        ("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e", 1, "KeyError: 'x'"),
        ("import sys; sys.exit('a message')", 1, "a message"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_errors_look_the_same(tmp_path: Path, starters: list[RankStarter], source: str, code: int, last: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    command = [sys.executable, str(tmp_path / "bad.py")]
    plain, warm = RankStarter(command, environment(), []), RankStarter(command, environment(), ["json"])
    starters += [plain, warm]
    warm.warm(1)
    results = [run(starter.start(ranks_environment())) for starter in (plain, warm)]
    assert results[0][0] == results[1][0] == code
    assert results[1][1].rstrip().endswith(last)
    if code != -signal.SIGINT:  # of an interrupt, the lines of the bootstrap may be seen
        assert results[0][1] == results[1][1]


@pytest.mark.timeout(900)  # two imports of torch, three rounds
def test_ranks_without_this_library_end_with_their_own_exit_code(tmp_path: Path, starters: list[RankStarter]) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    starter = RankStarter([sys.executable, str(tmp_path / "peer.py")], environment(), ["torch.nn.parallel.distributed"])
    starters.append(starter)
    for attempt in range(3):  # without the moment that a spare gives gloo's threads, every second one aborts
        meet = f"file://{tmp_path}/meet-{attempt}"
        starter.warm(2)
        starter.wait_until_warm(120)
        ranks = [starter.start({**ranks_environment(), "MEET": meet, "RANK": str(rank)}) for rank in range(2)]
        ended = [run(rank) for rank in ranks]
        assert [code for code, _ in ended] == [5, 5], ended


def test_a_script_that_is_not_there_is_named(tmp_path: Path, starters: list[RankStarter]) -> None:
    starter = RankStarter([sys.executable, str(tmp_path / "none.py")], environment(), ["json"])
    starters.append(starter)
    starter.warm(1)
    code, output = run(starter.start(ranks_environment()))
    assert code == 2
    assert output.strip() == f"cannot open '{tmp_path / 'none.py'}': No such file or directory"


def test_a_dead_spare_is_replaced_by_a_fresh_process(script: Path, starters: list[RankStarter]) -> None:
    starter = RankStarter([sys.executable, str(script)], environment(), ["json"])
    starters.append(starter)
    starter.warm(1)
    starter.wait_until_warm(60)
    (spare,) = spares()
    spare.kill()
    psutil.wait_procs([spare], timeout=10)
    assert run(starter.start(ranks_environment()))[0] == 5


def test_spares_end_when_they_are_not_needed(script: Path) -> None:
    starter = RankStarter([sys.executable, str(script)], environment(), ["json"])
    starter.warm(2)
    starter.wait_until_warm(60)
    made = spares()
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
    "flags",
    [["-u"], ["-O"], ["-OOB"], ["-X", "dev"], ["-Xfaulthandler"], ["-W", "ignore"], ["-I"], ["-E", "-s"], ["-P"]],
    ids=" ".join,
)
def test_a_spare_runs_with_the_interpreter_s_flags(
    tmp_path: Path, starters: list[RankStarter], flags: list[str]
) -> None:
    (tmp_path / "flags.py").write_text(FLAGS)
    command = [sys.executable, *flags, str(tmp_path / "flags.py")]
    plain, warm = RankStarter(command, environment(), []), RankStarter(command, environment(), ["json"])
    starters += [plain, warm]
    warm.warm(1)
    assert run(plain.start(ranks_environment())) == run(warm.start(ranks_environment()))


def spares() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "spare" in child.cmdline()]


def test_a_spare_that_cannot_make_its_imports_is_given_up_with_a_word(
    script: Path, starters: list[RankStarter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no driver')")
    starter = RankStarter([sys.executable, str(script)], {**environment(), "PYTHONPATH": str(tmp_path)}, ["broken"])
    starters.append(starter)
    starter.warm(2)
    starter.wait_until_warm(60)
    starter.warm(2)
    assert run(starter.start(ranks_environment()))[0] == 5
    assert spares() == []
    words = "a spare cannot import broken (exit code 1: RuntimeError: no driver): ranks start without spares"
    assert [record.getMessage() for record in caplog.records] == [words]


def test_a_spare_whose_imports_hang_is_given_up_with_a_word(
    script: Path, starters: list[RankStarter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hanging.py").write_text("import time; time.sleep(1000)")
    now = [0.0]
    environ = {**environment(), "PYTHONPATH": str(tmp_path)}
    starter = RankStarter([sys.executable, str(script)], environ, ["hanging"], lambda: now[0])
    starters.append(starter)
    starter.warm(1)
    now[0] += WARM_S
    for _ in range(2):
        assert run(starter.start(ranks_environment()))[0] == 5
    assert len(caplog.records) == 1
    assert "has not finished its imports within 60 s" in caplog.text


def test_a_rank_relies_on_a_spare_that_is_nearly_ready(
    script: Path, starters: list[RankStarter], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import os, time\nwhile not os.path.exists(__file__ + '.go'): time.sleep(0.01)")
    starter = RankStarter([sys.executable, str(script)], {**environment(), "PYTHONPATH": str(tmp_path)}, ["slow"])
    starters.append(starter)
    starter.warm(1)
    (spare,) = wait_until(spares)  # until it has its own command line
    process = starter.start(ranks_environment())
    assert process.pid == spare.pid
    (tmp_path / "slow.py.go").touch()
    assert run(process)[0] == 5


def test_what_a_spare_imports_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported ahead of its time')")
    script = tmp_path / "train.py"
    script.write_text(
        "import json, mine\nimport torch.nn as nn\nfrom sklearn.datasets import load_digits\n"
        "from . import beside\nimport no_such_package\ndef f():\n    import wave\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_imports(str(script)) == ["json", "torch.nn", "sklearn.datasets"]
    script.write_text("x = (")
    assert installed_imports(str(script)) == []
    assert installed_imports(str(tmp_path / "none.py")) == []


def test_what_was_imported_ahead_is_not_imported_again(tmp_path: Path, starters: list[RankStarter]) -> None:
    (tmp_path / "heavy.py").write_text("import os; open(f'{__file__}-{os.getpid()}', 'x').close()")
    (tmp_path / "t.py").write_text("import heavy; print('ready')")
    starter = RankStarter(
        [sys.executable, str(tmp_path / "t.py")], {**environment(), "PYTHONPATH": str(tmp_path)}, ["heavy"]
    )
    starters.append(starter)
    starter.warm(1)
    starter.wait_until_warm(60)
    (imported,) = tmp_path.glob("heavy.py-*")
    process = starter.start(ranks_environment())
    assert imported.name == f"heavy.py-{process.pid}"
    assert run(process) == (0, "ready\n")


def test_what_a_spare_has_imported_is_not_searched_for_garbage(tmp_path: Path, starters: list[RankStarter]) -> None:
    (tmp_path / "t.py").write_text("import gc; print(gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()))")
    starter = RankStarter([sys.executable, str(tmp_path / "t.py")], environment(), ["json"])
    starters.append(starter)
    starter.warm(1)
    assert run(starter.start(ranks_environment())) == (0, "True True\n")


@pytest.mark.parametrize(
    ("url", "module"),
    [("s3://bucket/job", "boto3"), ("gs://bucket/job", "google.auth"), ("file:///state", ""), ("/state", ""), ("", "")],
)
def test_a_spare_has_imported_what_the_storage_needs(
    url: str, module: str, tmp_path: Path, starters: list[RankStarter], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "which.py"
    script.write_text("import sys; print(*{'boto3', 'google.auth'} & set(sys.modules))")
    monkeypatch.setenv("ELASTICCTL_STORAGE", url)
    command = [sys.executable, str(script)]
    slow = ("torch",) if url == "file:///state" else ("torch", "elasticctl_train")  # once is enough: it imports torch
    preload = [name for name in modules_to_preload("auto", command) if not name.startswith(slow)]
    starter = RankStarter(command, environment(), preload)
    starters.append(starter)
    starter.warm(1)
    starter.wait_until_warm(60)
    assert run(starter.start(ranks_environment())) == (0, f"{module}\n")


def test_ranks_of_this_machine_talk_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo and with NCCL; on a cluster over what the node has, and always as whoever set it wants it."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ELASTICCTL_POD_IP"):
        monkeypatch.delenv(name, raising=False)
    shared = shared_environment()
    assert (shared["GLOO_SOCKET_IFNAME"], shared["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    assert shared_environment()["NCCL_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setenv("ELASTICCTL_POD_IP", "10.0.0.7")
    assert "GLOO_SOCKET_IFNAME" not in shared_environment()
