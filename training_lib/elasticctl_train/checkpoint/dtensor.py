"""Tensors that are sharded over ranks: `DTensor`, as FSDP2 (`fully_shard`) and tensor parallelism create them.

`torch.distributed.tensor` takes most of a second to import and most runs never use it. So nothing here imports it
before a sharded tensor has been seen: if it has not been imported, there are none.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed import device_mesh

from elasticctl_store.checkpoints import tensor_boxes
from elasticctl_store.checkpoints.tensor_boxes import Box
from elasticctl_store.errors import StateError

_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def has_sharded(module: torch.nn.Module) -> bool:
    """Return whether any parameter of this module is a DTensor."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def is_tensor_parallel(module: torch.nn.Module, world_size: int) -> bool:
    """Return whether ranks work on one batch together; with FSDP2 alone, each of them has its own batch."""
    spread: list[Any] = [parameter for parameter in module.parameters() if is_sharded(parameter)]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if world_size == 1 or not spread:
        return False
    if fsdp is None or not any(isinstance(part, fsdp.FSDPModule) for part in module.modules()):
        return True
    return any(
        one.device_mesh.size() < world_size or len(sharded_dims(one)) - sharded_dims(one).count(None) > 1
        for one in spread
    )


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, without a copy and outside autograd."""
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    return part.detach()


def check_placements(tensor: Any, path: str) -> None:
    """Raise StateError for placements that are not boxes: partial sums, and most kinds of strided shards."""
    from torch.distributed.tensor import Replicate, Shard

    for number, placement in enumerate(tensor.placements):
        if type(placement) not in (Shard, Replicate) and not _is_nested(tensor, number):
            raise StateError(f"{path}: a checkpoint cannot hold a DTensor placed as {placement}, only Shard, Replicate")


def _is_nested(tensor: Any, number: int) -> bool:
    """Return whether this mesh dimension splits what later ones leave, as FSDP2 over tensor parallelism does."""
    from torch.distributed.tensor.placement_types import _StridedShard

    found = tensor.placements[number]
    if not isinstance(found, _StridedShard):
        return False
    later = zip(sharded_dims(tensor)[number + 1 :], tensor.device_mesh.shape[number + 1 :], strict=True)
    is_even = box_of(tensor).shape == tuple(local_part(tensor).shape) or tensor.device_mesh.get_coordinate() is None
    return is_even and found.split_factor == prod(size for dim, size in later if dim == found.dim % tensor.dim())


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """Return a DTensor's layout; equal for two tensors if and only if all ranks hold the same boxes of both."""
    return tensor.device_mesh, tensor.placements


def describe(tensor: Any) -> str:
    """Return a tensor's layout as text, equal on two ranks if and only if it is the same; "" if it is not sharded."""
    if not is_sharded(tensor):
        return ""
    return f"{[mesh.tolist() for mesh in _meshes(tensor.device_mesh)]} {tensor.placements}"


def holders(tensor: Any) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of a DTensor with the ranks that hold each, identical on every rank; empty boxes are left out.

    If its mesh is a slice of another one (the tensor-parallel ranks of a 2-D mesh), each such slice holds the tensor.
    """
    found: dict[Box, list[int]] = {}
    for mesh in _meshes(tensor.device_mesh):
        for coordinate in itertools.product(*map(range, mesh.shape)):
            box = _box(tensor, coordinate)
            if box.elements or not tensor.numel():
                found.setdefault(box, []).append(int(mesh[coordinate]))
    return [(box, tuple(sorted(ranks))) for box, ranks in found.items()]


@functools.lru_cache(maxsize=64)
def _meshes(mesh: Any) -> list[torch.Tensor]:
    """Return the ranks of a mesh or, if it is a slice of another one, of all such slices; identical on every rank."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else device_mesh._mesh_resources.get_root_mesh(mesh)
    part, whole = mesh.mesh, root.mesh
    places = [(whole == rank).nonzero()[0].tolist() for rank in part.flatten()]
    varying = [dim for dim in range(whole.dim()) if len({place[dim] for place in places}) > 1]
    if prod(whole.shape[dim] for dim in varying) != part.numel():
        return [part]
    fixed = [dim for dim in range(whole.dim()) if dim not in varying]
    found = []
    for coordinate in itertools.product(*(range(whole.shape[dim]) for dim in fixed)):
        here = dict(zip(fixed, coordinate, strict=True))
        ranks = [int(whole[tuple(here.get(dim, at) for dim, at in enumerate(place))]) for place in places]
        found.append(torch.tensor(ranks).reshape(part.shape))
    return found


def boxes_by_rank(tensor: Any) -> dict[int, Box]:
    """Return what each rank of a DTensor's mesh holds; ranks that hold nothing are left out."""
    return {rank: box for box, ranks in holders(tensor) for rank in ranks}


def box_of(tensor: Any) -> Box:
    """Return this rank's box of a DTensor; an empty one if the rank is not in its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    return Box((0,) * tensor.dim(), (0,) * tensor.dim()) if coordinate is None else _box(tensor, coordinate)


def spread_like(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the layout of `tensor` whose part on this rank is `part`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements
    stride = tuple(tensor_boxes.contiguous_strides(tensor.shape))
    device = tensor.device
    spread = DTensor.from_local(part.to(device), mesh, placements, run_check=False, shape=tensor.shape, stride=stride)
    return spread


def placements(tensor: Any) -> tuple[Any, ...]:
    """Return how a DTensor is placed along each dimension of its mesh."""
    found: tuple[Any, ...] = tensor.placements
    return found


def sharded_dims(tensor: Any) -> list[int | None]:
    """Return which dimension of a DTensor each dimension of its mesh shards; None if it is replicated along it."""
    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    return [None if dim is None else dim % tensor.dim() for dim in dims]


def stand_in(parameter: Any, shape: Sequence[int], dtype: torch.dtype, dims: Sequence[int | None]) -> Any:
    """Return a DTensor without its own memory, over the mesh of `parameter`, sharded by `dims` (see `sharded_dims`).

    If the mesh has another number of dimensions, it is sharded like the parameter, as far as `dims` has the dimension.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = parameter.device_mesh
    if len(dims) != mesh.ndim:
        dims = [dim if dim in dims else None for dim in sharded_dims(parameter)]
    places: list[Any] = []
    for number, (dim, like) in enumerate(zip(dims, parameter.placements, strict=True)):
        rest = zip(dims[number + 1 :], mesh.shape[number + 1 :], strict=True)
        later = prod(size for each, size in rest if each == dim)
        if dim is None:
            places.append(Replicate())
        elif type(like) is Shard or like.is_replicate() or later == 1:
            places.append(Shard(dim))
        else:
            places.append(type(like)(dim, split_factor=later))
    here = mesh.get_coordinate()
    part = (0,) * len(shape) if here is None else _box_at(shape, places, mesh.shape, here).shape
    local = torch.zeros((), dtype=dtype, device=parameter.device).expand(part)
    stride = tuple(tensor_boxes.contiguous_strides(shape))
    return DTensor.from_local(local, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride)


def _box(tensor: Any, coordinate: Sequence[int]) -> Box:
    """Return what the rank at `coordinate` of the mesh holds."""
    return _box_at(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)


def _box_at(shape: Sequence[int], placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[int]) -> Box:
    """Return a box: mesh dimensions split a tensor in order, but strided ones split what later ones leave."""
    from torch.distributed.tensor import Shard

    splits: list[tuple[int, int, int]] = []
    for placement, count, index in reversed(list(zip(placements, mesh, coordinate, strict=True))):
        if not placement.is_replicate():
            place = 0 if type(placement) is Shard else len(splits)
            splits.insert(place, (placement.dim % len(shape), count, index))
    return tensor_boxes.shard(shape, splits)
