"""The launcher: starts, stops and restarts the ranks of one worker, on torch.distributed.elastic.

It runs any training script. Ranks whose script uses the training library can also be drained, and report their steps.
"""

from collections.abc import Callable
from typing import Any


def torchrun_backend() -> Callable[[Any], Any]:
    """Return the factory for `torchrun --rdzv-backend=elasticctl`, found through the entry point `torchrun.handlers`.

    torch calls this function while its own rendezvous package is only partly imported, so `rendezvous` is imported
    later.
    """

    def create(parameters: Any) -> Any:
        from elasticctl_launcher.rendezvous import create_handler

        return create_handler(parameters)

    return create
