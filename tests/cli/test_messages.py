"""docs/troubleshooting.md: each message of its table is what the command line says, brought about for real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from elasticctl.settings import contexts
from elasticctl.settings.contexts import Config, Context
from tests.support.cli import Run
from tests.support.cluster_contract import phase, running
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
TABLE = re.findall(r"^\| `(.+?)` \|.+\|.+\|$", PAGE.read_text("utf-8").partition("## Messages")[2], flags=re.MULTILINE)

WITHOUT_A_CLUSTER = [
    ('there is no verb "…"', "sumbit train.py"),
    ("… has no option …", "submit train.py --epochs 3"),
    ("Missing argument '…'", "scale"),
    ("Invalid value for '…': \"…\" is not a whole number of at least …", "scale digits --to 0"),
    ('the script "…" does not exist', "submit tarin.py"),
    ("nothing to run. FIX: give a script, or a manifest with -f", "submit"),
    ('the script "…" is left out by the rules of .gitignore or .elasticctlignore.', "submit ignored.py --dry-run"),
    ("the workspace … has …, more than …; the largest: …", "submit train.py --workspace-limit 1 --dry-run"),
    ('unknown GPU type "…"', "submit train.py --gpu-type t5"),
    ("… workers are fewer than the minimum of …", "submit train.py --workers 2 --min-workers 3"),
    ("--image is needed in context …", "submit train.py --context bare --storage s3://b/p"),
    ("--storage is needed in context …", "submit train.py --context bare --image i"),
    ("--secret: there is no secret …", "submit train.py --secret hub"),
    ('no context "…"', "list --context none"),
]
ON_A_CLUSTER = [
    ('no job "…" in context …, namespace …', "status none", 3),
    ('"…" matches several jobs in context …', "status digits", 3),
    ("… workers are more than the maximum of …", "scale digits-a --to 5", 2),
    ("… has ended (…) and cannot be scaled", "scale digits-b --to 2", 3),
    ("… is still …. FIX: add --yes to delete it anyway", "delete digits-a", 2),
    ("… failed after …", "wait digits-b", 1),
]


def says(message: str, err: str) -> bool:
    """Is it a line of stderr, with anything where the table has `…`?"""
    pattern = ".+".join(map(re.escape, message.split("…")))
    return re.search(pattern, err) is not None


def test_the_table_has_these_and_no_others() -> None:
    assert sorted(TABLE) == sorted([*(row[0] for row in WITHOUT_A_CLUSTER), *(row[0] for row in ON_A_CLUSTER)])
    assert len(TABLE) == 20


@pytest.mark.parametrize(("message", "line"), WITHOUT_A_CLUSTER)
def test_commands_that_need_no_cluster(
    message: str, line: str, run: Run, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("train.py", "ignored.py"):
        (folder / name).write_text("print('hello')\n")
    (folder / ".gitignore").write_text("ignored.py\n")
    bare = Context("bare", "kubernetes")
    contexts.save_config(Config("local", (Context("local", "local"), bare)), private_home / "config.yaml")
    done = run(*line.split())
    assert done.code in (2, 3)
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert says(message, done.err), done.err


def test_messages_about_jobs(run: Run, local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("digits-a", FOREVER, 1, minReplicas=1, maxReplicas=4))
    local_cluster.create_job(shell_job("digits-b", "exit 7", 1, backoffLimit=0))
    wait_until(lambda: running(local_cluster, "digits-a") and phase(local_cluster, "digits-b") == "Failed")
    for message, line, code in ON_A_CLUSTER:
        done = run(*line.split())
        assert (done.code, says(message, done.err)) == (code, True), (message, done)
