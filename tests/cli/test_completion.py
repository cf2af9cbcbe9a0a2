"""The completion scripts in the shells that are there, with the Tab key, as the scripts' own help says to load them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from tests.support.jobs import shell_job
from tests.support.terminal import Terminal
from tests.support.waiting import wait_until

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(elasticctl completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(elasticctl completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "elasticctl completion fish | source"),
}
READY = "ready-to-type"


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in SHELLS])
def shell(request: pytest.FixtureRequest, local_cluster: LocalCluster) -> Iterator[Terminal]:
    """A shell that completes, and a job called `digits`."""
    name: str = request.param
    local_cluster.create_job(shell_job("digits", "true", suspend=True))
    wait_until(lambda: local_cluster.get_job("default", "digits").get("status"))
    argv, loading = SHELLS[name]
    opened = Terminal(program=argv, PATH=PATH, PS1="$ ", HISTFILE="/dev/null")
    opened.type(f"{loading}; echo {READY[:5]}''{READY[5:]}")
    opened.shows(READY)
    yield opened
    opened.child.close(force=True)


COMPLETED = {
    "elasticctl expl": "elasticctl explain ",
    "elasticctl status di": "elasticctl status digits",
    "elasticctl list --context lo": "elasticctl list --context local",
    "elasticctl config use-c": "elasticctl config use-context",
}


def test_the_tab_key_completes(shell: Terminal) -> None:
    for typed, completed in COMPLETED.items():
        shell.press(f"{typed}\t")
        shell.shows(completed.rstrip())
        shell.press("\x15")  # Ctrl-U: an empty line again
