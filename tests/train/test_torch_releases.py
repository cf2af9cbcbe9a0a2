"""Releases of torch: the private names that we rely on, which any release may change, and what old releases lack."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _C, _dynamo, _utils
from torch.autograd import graph
from torch.distributed import distributed_c10d
from torch.distributed.elastic.agent.server import api
from torch.distributed.tensor import placement_types
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.optim import lr_scheduler
from torch.utils.data import dataloader

from elasticctl_launcher.ranks.torch_agent import TorchAgent
from elasticctl_train import torch_releases
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel

LIBRARY = Path(torch_releases.__file__).parents[1]
HOMES: dict[Any, set[str]] = {
    torch: {"_C", "_utils", "_foreach_copy_"},
    torch.Tensor: {"_version"},
    _C: {"_current_graph_task_id", "_distributed_c10d"},
    _C.StorageBase: {"_cdata"},
    _C._distributed_c10d.Reducer: {"_rebuild_buckets", "_set_ddp_runtime_logging_sample_rate"},
    _C._distributed_c10d.ProcessGroup: {"_get_backend", "_get_sequence_number_for_group"},
    _dynamo.eval_frame: {"_orig_mod", "_torchdynamo_orig_callable"},
    _utils: {"_flatten_dense_tensors", "_unflatten_dense_tensors"},
    api: {"_rendezvous", "_worker_group"},
    api.SimpleElasticAgent: {
        "_assign_worker_ranks",
        "_monitor_workers",
        "_shutdown",
        "_start_workers",
        "_stop_workers",
    },
    dataloader: {"_next_data"},
    distributed: {"_compute_bucket_assignment_by_size", "_sync_module_states", "_verify_param_shape_across_processes"},
    distributed_c10d: {"_world"},
    graph: {"_engine_run_backward"},
    lr_scheduler: {"_opt_called"},
    placement_types: {"_StridedShard"},
    torch.nn.Module: {"_compiled_call_impl", "_extra_state", "_metadata"},
    DistributedDataParallel: {
        "_assign_modules_buffers",
        "_build_params_for_reducer",
        "_check_sync_bufs_pre_fwd",
        "_ddp_init_helper",
        "_distributed_broadcast_coalesced",
        "_get_ddp_logging_data",
        "_has_rebuilt_buckets",
        "_post_forward",
        "_pre_forward",
        "_sync_buffers",
    },
}
"""Where torch has the private names that we use: all of them in 2.6, 2.8, 2.11, 2.13, 2.14 and 2.15. `make torch` shows
whether another release will do."""
NOT_EVERYWHERE = {"_dump_fr_trace_json", "_dump_nccl_trace_json", "_group_start", "_group_end"}
"""A missing flight recorder is not read. The others are those of NCCL, which builds for CPUs lack."""
OF_SOME_RELEASES = {"_get_root_mesh", "_mesh_resources"}
"""Old releases have the second, new ones the first."""
OURSELVES = {"self", "cls"}
SUBCLASSES = [(ElasticDataParallel, DistributedDataParallel), (TorchAgent, api.SimpleElasticAgent)]
NOT_TORCH = {
    "_checkpoint_connector",
    "_load_from_checkpoint",
    "_loaded_checkpoint",
    "_maybe_log_save_evaluate",
    "_current_frames",
    "_inheriting",
    "_abc_impl",
    "_elasticctl_collective",
    "_exit",
}
"""The trainers', our own mark on errors, and Python's."""


def own_names(tree: ast.Module) -> Iterator[str]:
    """What a module defines, also as attributes of its objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used_names(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """What a module imports, and the attributes that it has not defined: `ours` is what all modules define."""
    own = set(own_names(tree))
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("elasticctl"):
                yield from [*module.split("."), *(each.name for each in names)]
            case ast.Attribute(value=ast.Call(func=ast.Name("super")), attr=name):
                yield name
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name) if name not in ours:
                yield name
            case ast.Attribute(value=value, attr=name) if not isinstance(value, ast.Name) or value.id not in OURSELVES:
                yield from {name} - own
            case ast.Constant(value=str(name)):
                yield from {name} - ours


def is_private(name: str) -> bool:
    return name.isidentifier() and name[:1] == "_" != name[1:2] and len(name) > 1


def test_every_private_name_of_torch_is_listed_and_exists() -> None:
    trees = [ast.parse(path.read_text("utf-8")) for path in LIBRARY.rglob("*.py")]
    ours = {name for tree in trees for name in own_names(tree)}
    used = {name for tree in trees for name in used_names(tree, ours) if is_private(name)}
    used |= {name for ours, theirs in SUBCLASSES for name in vars(ours) if is_private(name) and hasattr(theirs, name)}
    listed = set().union(NOT_EVERYWHERE, OF_SOME_RELEASES, *HOMES.values())
    assert used - listed - NOT_TORCH == set(), "does each release have it? Then list it"
    for home, names in HOMES.items():
        assert [name for name in names if not hasattr(home, name) and name not in inspect.getsource(home)] == []


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("takes_it", [True, False])
def test_torch_2_6_is_kept_from_exchanging_parameters(
    monkeypatch: pytest.MonkeyPatch, init_sync: bool, takes_it: bool
) -> None:
    monkeypatch.setattr(torch_releases, "TAKES_INIT_SYNC", takes_it)
    before = dict(vars(distributed))
    with torch_releases.construction(init_sync=init_sync) as options:
        assert options == ({"init_sync": init_sync} if takes_it else {})
        replaced = {name for name, value in vars(distributed).items() if value is not before[name]}
    assert len(replaced) == (0 if takes_it or init_sync else 2)
    assert vars(distributed) == before
