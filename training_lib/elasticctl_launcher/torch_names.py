"""The private names of torch that the launcher relies on. A new release of torch may change any of them.

A test looks each of them up in the torch that is installed. This module does not import torch, which takes seconds.
"""

from __future__ import annotations

import re

PRIVATE_NAMES = (
    # `ranks.torch_agent` overrides these methods, and `restart_ranks` calls `_rendezvous` and reads the group.
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._invoke_run"),
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._rendezvous"),
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._assign_worker_ranks"),
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._start_workers"),
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._stop_workers"),
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._monitor_workers"),
    ("torch.distributed.elastic.agent.server.api", "SimpleElasticAgent._shutdown"),
    # `rendezvous` and `store_connection` create stores without the rest of torch.distributed.
    ("torch._C._distributed_c10d", "PrefixStore"),
    ("torch._C._distributed_c10d", "Store"),
    ("torch._C._distributed_c10d", "TCPStore"),
    # `hangs.rank_location` recognizes calls by the files and functions below.
    ("torch.distributed.distributed_c10d", "all_reduce"),
    ("torch.distributed._functional_collectives", "all_reduce"),
    ("torch.autograd.graph", "_engine_run_backward"),
    ("torch.cuda", "synchronize"),
    ("torch.cuda.streams", "Stream.synchronize"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter._next_data"),
)
"""(module, name), in order of what uses them. The launcher replaces the agent's loop, so the group's own attribute
`_worker_group`, which exists only in instances, comes with it."""
OPTIONAL_NAMES = (
    ("torch._C._distributed_c10d", "_dump_fr_trace_json"),
    ("torch._C._distributed_c10d", "_dump_nccl_trace_json"),
)
"""Read by `bootstrap`, which can import nothing of ours: torch's flight recorders. Builds may lack them."""

COLLECTIVE_FILES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/rendezvous.py",
    "/torch/distributed/utils.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/nn/functional.py",
)
"""The files whose calls wait for other ranks."""
C10D = COLLECTIVE_FILES[0]
DEVICE_CALLS = (
    ("/torch/autograd/graph.py", "_engine_run_backward"),
    ("/torch/cuda/__init__.py", "synchronize"),
    ("/torch/cuda/streams.py", "synchronize"),
    ("/torch/cuda/streams.py", "wait"),
)
DEVICE_LINE = re.compile(r"\.(wait|item|synchronize|tolist|cpu|numpy|to|backward)\(")
"""Calls into C++ that return when the GPU, or another rank, is done. Methods in Python have inner frames instead."""
NEXT_BATCH = ("/torch/utils/data/dataloader.py", "_next_data", "DataLoader._next_data")
"""The file and the function that fetch a batch, and what they are called."""
