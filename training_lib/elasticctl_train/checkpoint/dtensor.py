"""Tensors that are sharded over ranks: `DTensor`, as FSDP2 (`fully_shard`) and tensor parallelism create them.

`torch.distributed.tensor` takes most of a second to import and most runs never use it. So nothing here imports it
before a sharded tensor has been seen: if it has not been imported, there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from elasticctl_store.checkpoints import boxes
from elasticctl_store.checkpoints.boxes import Box
from elasticctl_store.errors import StateError

_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def has_sharded(module: torch.nn.Module) -> bool:
    """Return whether any parameter of this module is a DTensor."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, without a copy and outside autograd."""
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    return part.detach()


def check_placements(tensor: Any, path: str) -> None:
    """Raise StateError for placements that are not boxes: partial sums, and strided shards."""
    from torch.distributed.tensor import Replicate, Shard

    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise StateError(f"{path}: a checkpoint cannot hold a DTensor placed as {placement}, only Shard, Replicate")


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """Return a DTensor's layout; equal for two tensors if and only if all ranks hold the same boxes of both."""
    return tensor.device_mesh, tensor.placements


def describe(tensor: Any) -> str:
    """Return a tensor's layout as text, equal on two ranks if and only if it is the same; "" if it is not sharded."""
    return f"{tensor.device_mesh.mesh.tolist()} {tensor.placements}" if is_sharded(tensor) else ""


def holders(tensor: Any) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of a DTensor with the ranks that hold each, identical on every rank; empty boxes are left
    out."""
    found: dict[Box, list[int]] = {}
    mesh = tensor.device_mesh.mesh
    for coordinate in torch.cartesian_prod(*(torch.arange(length) for length in mesh.shape)).reshape(-1, mesh.dim()):
        box = _box(tensor, coordinate.tolist())
        if box.elements or not tensor.numel():
            found.setdefault(box, []).append(int(mesh[tuple(coordinate.tolist())]))
    return [(box, tuple(sorted(ranks))) for box, ranks in found.items()]


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
    stride = tuple(boxes.contiguous_strides(tensor.shape))
    device = tensor.device
    spread = DTensor.from_local(part.to(device), mesh, placements, run_check=False, shape=tensor.shape, stride=stride)
    return spread


def placements(tensor: Any) -> tuple[Any, ...]:
    """Return the placement of a DTensor along each dimension of its mesh."""
    found: tuple[Any, ...] = tensor.placements
    return found


def sharded_dims(tensor: Any) -> list[int | None]:
    """Return which dimension of a DTensor each dimension of its mesh shards; None for those along which it is
    replicated."""
    return [place.dim % tensor.dim() if place.is_shard() else None for place in tensor.placements]


def stand_in(parameter: Any, shape: Sequence[int], dtype: torch.dtype, dims: Sequence[int | None]) -> Any:
    """Return a DTensor without memory, over the mesh of `parameter` and sharded by `dims` (see `sharded_dims`).

    If the mesh has another number of dimensions, it is sharded like the parameter, as far as `dims` has the dimension.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = parameter.device_mesh
    if len(dims) != mesh.ndim:
        dims = [dim if dim in dims else None for dim in sharded_dims(parameter)]
    places = [Replicate() if dim is None else Shard(dim) for dim in dims]
    here = mesh.get_coordinate()
    splits = zip(dims, mesh.shape, here or (), strict=False)
    part = boxes.shard(shape, [(dim, count, index) for dim, count, index in splits if dim is not None])
    local = torch.zeros((), dtype=dtype, device=parameter.device).expand(part.shape if here else (0,) * len(shape))
    stride = tuple(boxes.contiguous_strides(shape))
    return DTensor.from_local(local, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride)


def _box(tensor: Any, coordinate: list[int]) -> Box:
    """Return what the rank at `coordinate` of the mesh holds; mesh dimensions split a tensor one after the other."""
    placements = zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True)
    splits = [(p.dim % tensor.dim(), count, index) for p, count, index in placements if p.is_shard()]
    return boxes.shard(tensor.shape, splits)
