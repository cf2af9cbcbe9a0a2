"""The entry point that torch loads for `torchrun --rdzv-backend=elasticctl` (group `torchrun.handlers`).

torch loads it while its own rendezvous package is still half imported, so nothing of ours may be imported up here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def backend() -> Callable[[Any], Any]:
    """Return the function that makes the handler from torch's RendezvousParameters."""

    def create(parameters: Any) -> Any:
        from elasticctl_train.launcher.rendezvous import create_handler

        return create_handler(parameters)

    return create
