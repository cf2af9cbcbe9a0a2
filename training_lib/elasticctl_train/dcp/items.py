"""The plans of `torch.distributed.checkpoint` in terms of a checkpoint: items by name, and a state tree.

A planner flattens a state dict into items, each with a *name* (DCP: fqn) that says where it was. The checkpoint has the
original state dict, a tree of tensors and plain values, so that `Checkpointer` and every command can read it. The names
are in the field `dcp` of rank 0's share document:

    {"paths": [[NAME, [KEY, …]], …], "mapped": true, "planner_data": TREE, "raw": [NAME, …]}

`paths` is the position of each item in the tree. With `mapped`, the planner's own data is just that (as for PyTorch's
planners); otherwise it is in `planner_data`. The items in `raw` are bytes that only their creator can interpret.

DCP passes everything that is not a tensor as pickled bytes. They are stored as the values that they represent, as JSON,
and pickled again when they are loaded. So nothing that comes from the storage is ever unpickled.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elasticctl_protocol import variables
from elasticctl_store.checkpoints.state_trees import decode
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, StateError, StorageError
from elasticctl_train.checkpoint import tree

FIELD = "dcp"
Path = tuple[str | int, ...]

_STEP = re.compile(r"#(\d+|latest)$", re.ASCII)


def parse_id(checkpoint_id: str | os.PathLike[str] | None, url: str) -> tuple[str, int | None]:
    """Return the URL and the step of DCP's `checkpoint_id`: `URL`, `URL#STEP`, or `#STEP` of the given URL."""
    text = "" if checkpoint_id is None else os.fspath(checkpoint_id)
    found = _STEP.search(text)
    step = int(found[1]) if found and found[1] != "latest" else None
    return text[: found.start() if found else None] or url, step


def check_url(url: str) -> str:
    """Return the URL, or else the job's. Raises StorageError if there is neither."""
    url = url or os.environ.get(variables.STORAGE, "")
    if not url:
        raise StorageError(f"there is no storage URL. FIX: pass one, or a checkpoint_id, or set ${variables.STORAGE}")
    return url


def encode_bytes(name: str, content: bytes) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what a planner has pickled, as JSON and the tensors in it by name. Raises StateError if that is
    impossible."""
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as e:  # what unpickling raises is anything
        raise StateError(
            f"{name}: a checkpoint cannot hold such an object, except as a pickle, which can run any code. FIX: use"
            " tensors, numbers, text, lists and dicts; or pass allow_pickle=True to the writer and the reader"
        ) from e
    flat = tree.Flattener()
    return flat.encode(value, name), flat.tensors


def to_bytes(value: object) -> io.BytesIO:
    """Return a value in the form that planners accept."""
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content


def encode_tree(items: Mapping[str, Any], paths: Mapping[str, Path]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the state tree of items, which are JSON by name, and the position of each item in it.

    The positions are those of the planner or, if these form no tree of dicts and lists, the top level. Raises
    StateError.
    """
    places = {name: tuple(paths.get(name, (name,))) for name in items}
    try:
        root = _nest(items, places)
    except ValueError:
        places = {name: (name,) for name in items}
        root = _nest(items, places)
    for part in root:
        tree.check_part_name(part)
    return {part: _as_json(value) for part, value in root.items()}, places


def describe(places: Mapping[str, Path], planner_data: Any, raw: Sequence[str]) -> dict[str, Any]:
    """Return the field `dcp`. Raises StateError for planner data that JSON cannot represent."""
    said: dict[str, Any] = {"paths": [[name, list(path)] for name, path in places.items()]}
    if isinstance(planner_data, Mapping) and planner_data == places:
        said["mapped"] = True
    elif planner_data is not None:
        flat = tree.Flattener()
        said["planner_data"] = flat.encode(planner_data, "the planner's data")
        if flat.tensors:
            raise StateError("the planner's data: a checkpoint cannot hold tensors there")
    return {**said, "raw": list(raw)} if raw else said


def find_items(state: Any, said: Any) -> tuple[dict[str, Any], Any, frozenset[str]]:
    """Return the items of a state by name, the planner's data, and the raw items; `said` is the field `dcp`.

    Raises DamagedError.
    """
    try:
        places = {name: tuple(path) for name, path in said["paths"]}
        items = {name: _at(state, path) for name, path in places.items()}
        raw = frozenset(said.get("raw", ()))
        if len(places) != len(said["paths"]) or not raw <= items.keys():
            raise ValueError("duplicate or unknown names")
        planner_data = places if said.get("mapped") else decode(said.get("planner_data"), _refuse_tensor)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise DamagedError(f"its field {FIELD} does not fit its state: {e!s:.80}") from e
    return items, planner_data, raw


def replace_tensors(value: Any, found: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with its tensors replaced."""
    if isinstance(value, torch.Tensor):
        return found(value)
    if isinstance(value, Counter):
        return value
    if isinstance(value, dict):
        return {key: replace_tensors(item, found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([replace_tensors(item, found) for item in value])
    return value


class _Leaf:
    """JSON that is opaque here."""

    def __init__(self, content: Any) -> None:
        self.content = content


def _nest(items: Mapping[str, Any], places: Mapping[str, Path]) -> dict[str, Any]:
    """Return nested dicts with the items as leaves. Raises ValueError if one is inside another, or a key is invalid."""
    root: dict[Any, Any] = {}
    for name, content in items.items():
        *above, last = places[name]
        node = root
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"{name} is inside another item")
        if last in node or any(type(key) not in (str, int) for key in places[name]):
            raise ValueError(f"{name} has the position of another item")
        node[last] = _Leaf(content)
    if any(type(key) is not str for key in root):
        raise ValueError("the keys of a state dict must be text")
    return root


def _as_json(node: Any) -> Any:
    if isinstance(node, _Leaf):
        return node.content
    keys = {type(key) for key in node}
    if keys == {int}:
        if sorted(node) != list(range(len(node))):
            raise StateError("the planner's paths leave gaps in a list")
        return [_as_json(node[index]) for index in range(len(node))]
    pairs = {key: _as_json(value) for key, value in node.items()}
    if keys == {str} and not any(key.startswith("$") for key in pairs):
        return pairs
    return {"$map": [[key, value] for key, value in pairs.items()]}


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        if type(key) not in (str, int) or not isinstance(value, dict | list):
            raise ValueError("a path does not exist")
        value = value[key]
    return value


def _refuse_tensor(name: str, kind: TensorType) -> Any:
    raise ValueError(f"tensor {name!r:.100} in the planner's data")
