"""Every command that can be typed."""

from __future__ import annotations

import typer
from typer.main import get_group

from elasticctl.cli.main import app

ROOT = get_group(app)


VERBS = ROOT.list_commands(typer.Context(ROOT))


FAMILIES = {
    "checkpoints": ["list", "verify", "pull", "rm", "prune", "repair"],
    "config": ["get-contexts", "use-context", "set-context", "import", "delete-context", "view"],
    "local": ["status", "down", "sharing"],
    "quota": ["list", "set", "rm", "explain"],
    "secret": ["set", "list", "delete"],
    "template": ["list", "show", "new"],
}
