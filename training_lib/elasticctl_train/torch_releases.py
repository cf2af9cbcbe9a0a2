"""The differences between the supported releases of torch. All other code uses names that exist in each of them.

`tests/train/test_torch_releases.py` has the list of the private names of torch that this package and the launcher rely
on, and checks that each release has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel, distributed

TAKES_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters
"""Since torch 2.7, DistributedDataParallel has an option to skip the broadcast of rank 0's parameters."""
_EXCHANGES = ("_verify_param_shape_across_processes", "_sync_module_states")


@contextmanager
def construction(*, init_sync: bool) -> Iterator[dict[str, Any]]:
    """Yield arguments for a DistributedDataParallel that is constructed inside the `with` block.

    Without `init_sync`, its construction does not communicate with other ranks.
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
