"""The command line with two contexts, `east` and `west`, that are local clusters of their own.

python -m tests.support.two_places EAST_HOME WEST_HOME ARGS...      only what a context leads to is put in its place
"""

from __future__ import annotations

import sys
from pathlib import Path

from elasticctl.cli import main
from elasticctl.cli.framework import target
from elasticctl.cluster.base import Cluster
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.paths import HOME_VARIABLE, local_paths
from elasticctl.settings.contexts import Context


class Places:
    """Stands in for `elasticctl.cluster.connect`."""

    def __init__(self, east: Path, west: Path) -> None:
        self.clusters = {name: LocalCluster(local_paths({HOME_VARIABLE: str(home)})) for name, home in
                         (("east", east), ("west", west))}  # fmt: skip

    def __call__(self, context: Context, *, starts: bool = True) -> Cluster:
        return self.clusters.get(context.name) or LocalCluster(starts=starts)


if __name__ == "__main__":
    target.connect = Places(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.exit(main.main(sys.argv[3:]))
