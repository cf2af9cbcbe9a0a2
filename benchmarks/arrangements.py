"""How jobs come to rest on a real cluster that they share, by what decides: elasticctl, Kueue, gangs, or nothing.

    export KUBECONFIG=…        # kubelab with two nodes; for `gangs`, started with --feature GenericWorkload
    export ELASTICCTL_TEST_LAB=…/kubelab
    python -m benchmarks.arrangements [--arrangement sharing ...] [--scenarios 20]

Each arrangement runs the same random scenarios of `tests.on_cluster.random_jobs`: three jobs in two projects are
submitted, scaled, suspended, resumed and deleted, on six GPUs. docs/performance.md has results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.figures import progress, show, spread
from benchmarks.programs import count, end_as_by_ctrl_c, parser
from elasticctl.api.errors import ElasticctlError
from elasticctl.kubeapi.connection import connect
from tests.on_cluster.arrangements import ARRANGEMENTS, Arrangement
from tests.on_cluster.random_jobs import EVENTS
from tests.on_cluster.replicas import Replicas, prepare
from tests.on_cluster.scenario_player import Settled, open_player

COLUMNS = ("", "events", "at rest after, s", "with idle GPUs that a job could use", "with a minimum that waits")


def measure(arrangement: Arrangement, scenarios: int, events: int, found: list[Settled]) -> None:
    """Run the scenarios, with a controller for this arrangement."""
    api = connect()
    prepare(api)
    with tempfile.TemporaryDirectory() as folder:
        replicas = Replicas(Path(folder))
        try:
            replicas.start(flags=arrangement.flags)
            replicas.leader()
            with open_player(api, arrangement) as player:
                for seed in range(scenarios):
                    for settled in player.play(seed, events):
                        found.append(settled)
                        progress(f"{arrangement.name}, scenario {seed}: {settled}")
        finally:
            replicas.stop()


def row(name: str, found: Sequence[Settled]) -> list[str]:
    """Return the cells of one arrangement."""
    idle, waits = sum(bool(one.rest.idle) for one in found), sum(bool(one.rest.waits) for one in found)
    return [name, str(len(found)), spread((one.settled_s for one in found), 1), str(idle), str(waits)]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if jobs did not come to rest, 130 after Ctrl-C."""
    options = parser(__doc__)
    options.add_argument("--arrangement", action="append", choices=ARRANGEMENTS, help="repeatable; all by default")
    options.add_argument("--scenarios", type=count, default=20, metavar="N", help="of each arrangement (20)")
    options.add_argument("--events", type=count, default=EVENTS, metavar="N", help=f"in each scenario ({EVENTS})")
    args = options.parse_args(argv)
    end_as_by_ctrl_c()
    found: dict[str, list[Settled]] = {name: [] for name in args.arrangement or ARRANGEMENTS}
    code = 0
    try:
        for name, settled in found.items():
            measure(ARRANGEMENTS[name], args.scenarios, args.events, settled)
    except KeyboardInterrupt:
        code = 130
    except (ElasticctlError, AssertionError, TimeoutError, pytest.skip.Exception) as e:
        progress(f"stopped: {e}")
        code = 1
    show("events after which jobs came to rest", COLUMNS, [row(name, settled) for name, settled in found.items()])
    return code


if __name__ == "__main__":
    sys.exit(main())
