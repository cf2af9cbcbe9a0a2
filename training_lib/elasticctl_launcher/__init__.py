"""The launcher: starts, stops and restarts the ranks of one worker, on torch.distributed.elastic.

It runs any training script. Scripts that use the training library can also be drained and watched for hangs.
"""

from collections.abc import Callable
from typing import Any


def torchrun_backend() -> Callable[[Any], Any]:
    """Return the function that creates the handler for `torchrun --rdzv-backend=elasticctl` (`torchrun.handlers`).

    torch calls this while its own rendezvous package is only half imported, so `rendezvous` cannot be imported yet.
    """

    def create(parameters: Any) -> Any:
        from elasticctl_launcher.rendezvous import create_handler

        return create_handler(parameters)

    return create
