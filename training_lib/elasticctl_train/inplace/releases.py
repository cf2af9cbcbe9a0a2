"""What differs between the releases of torch that we allow. All other code uses names that each of them has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel, distributed

TAKES_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters
"""Since 2.7 it can be told not to begin with rank 0's parameters."""
_EXCHANGES = ("_verify_param_shape_across_processes", "_sync_module_states")


@contextmanager
def construction(*, init_sync: bool) -> Iterator[dict[str, Any]]:
    """A DistributedDataParallel is made in here, with these arguments.

    Without `init_sync` it exchanges nothing with the other ranks.
    """
    if TAKES_INIT_SYNC:
        yield {"init_sync": init_sync}
        return
    names: dict[str, Any] = vars(distributed)
    kept = {name: names[name] for name in _EXCHANGES if not init_sync}
    names.update(dict.fromkeys(kept, lambda *args, **options: None))
    try:
        yield {}
    finally:
        names.update(kept)
