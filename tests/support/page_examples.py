"""A script that a page shows, as processes that have imported torch already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.forked.launcher import take_output
from tests.support.train.ranks import alone, run_script, start

PATIENCE_S = 240.0


def run_example(script: Path, ranks: int = 1, **environ: str) -> str:
    """What `python -W error SCRIPT` prints in the script's folder, on so many ranks; all of them have to end well."""
    log = script.with_suffix(".log")
    log.write_text("")
    processes = [alone(_run, script, log, environ)] if ranks == 1 else start(_run, ranks, script, log, environ)
    for process in processes:
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
    assert {process.exitcode for process in processes} == {0}, log.read_text()
    return log.read_text()


def _run(script: Path, log: Path, environ: Mapping[str, str]) -> None:
    take_output(log)
    os.chdir(script.parent)
    run_script(script, [], environ)
