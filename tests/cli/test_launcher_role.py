"""`submit --launcher` on a real local cluster: one program, whose files follow scaling by count and by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run
from tests.support.waiting import wait_until

PROGRAM = """#!/bin/sh
echo begun >> "$SEEN/starts"
while [ ! -e "$SEEN/done" ]; do
    "$ELASTICCTL_DISCOVER_HOSTS" > "$SEEN/new" && mv "$SEEN/new" "$SEEN/hosts"
    sleep 0.05
done
while read -r host slots; do ssh -n "$host" 'cat beside; echo " on $ELASTICCTL_WORKER"'; done < "$ELASTICCTL_HOSTFILE"
"""


@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_the_program_runs_once_while_its_workers_change(
    run: Run, local_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, folder = tmp_path / "seen", tmp_path / "code"
    for made in (seen, folder):
        made.mkdir()
    (folder / "all.sh").write_text(PROGRAM)
    (folder / "beside").write_text("copied")
    monkeypatch.chdir(folder)

    def names(*indexes: int) -> list[str]:
        return [f"all-worker-{index}:1" for index in indexes]

    def hosts() -> list[str]:
        return (seen / "hosts").read_text().split() if (seen / "hosts").exists() else []

    done = run("submit", "--launcher", "-d", "--workers", "2", "--env", f"SEEN={seen}", "--", "sh", "all.sh")
    assert done.code == 0, done.err
    wait_until(lambda: hosts() == names(0, 1))
    assert run("scale", "all", "4").code == 0
    wait_until(lambda: hosts() == names(0, 1, 2, 3))
    assert run("scale", "all", "--remove-worker", "1").code == 0
    wait_until(lambda: hosts() == names(0, 2, 3))
    assert run("scale", "all", "2").code == 0
    wait_until(lambda: hosts() == names(0, 2))
    assert "The launcher program, on all-worker-0, starts its ranks" in run("explain", "all").out
    assert "Redone" not in run("describe", "all").out

    (seen / "done").touch()

    assert run("wait", "all", "--timeout", "120s").code == 0
    assert (seen / "starts").read_text().count("begun") == 1
    said = run("logs", "all", "--worker", "0").out
    assert [line for line in said.splitlines() if "copied" in line] == [
        f"worker-0 | copied on all-worker-{index}" for index in (0, 2)
    ]
