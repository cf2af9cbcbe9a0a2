"""Give every reader many inputs: `make fuzz`, or `python -m tests.support.fuzz.soak --help`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.fuzz.targets import TARGETS, Target


def search(target: Target, first: int, inputs: int, seconds: float) -> tuple[int, float]:
    """Try so many inputs, or for so many seconds of CPU; returns how many, and the seconds. Raises what fails."""
    tried, began = 0, time.process_time()
    with tempfile.TemporaryDirectory() as name:

        def check(found: object) -> None:
            nonlocal tried
            tried += 1
            target.check(Path(name), found)

        while tried < inputs and time.process_time() - began < seconds:
            some = settings(
                max_examples=min(1000, inputs - tried),
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )
            seed(first + tried)(some(given(target.inputs)(check)))()
    return tried, time.process_time() - began


def main() -> int:
    """Search as the command line says; prints what each target came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the seed to begin with")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs of all targets together")
    parser.add_argument("--seconds", type=float, default=600.0, help="CPU seconds for each target at most")
    parser.add_argument("--target", choices=list(TARGETS), help="only this one")
    asked = parser.parse_args()
    logging.disable()  # of each journal that is damaged
    chosen = {name: target for name, target in TARGETS.items() if asked.target in (None, name)}
    total, failed = 0, 0
    for name, target in chosen.items():
        try:
            tried, cpu_s = search(target, asked.first, -(-asked.inputs // len(chosen)), asked.seconds)
        except (Exception, BaseExceptionGroup) as e:  # noqa: BLE001 - a counterexample: the other targets go on
            failed += 1
            print(f"{name}: {type(e).__name__}: {e}", *getattr(e, "__notes__", ()), sep="\n", flush=True)
            continue
        total += tried
        print(f"{name}: {tried} inputs in {cpu_s:.0f} s of CPU", flush=True)
    print(f"{total} inputs, {failed} targets failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
