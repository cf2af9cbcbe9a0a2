"""Compiles a newcomer's model before it joins, so that the group does not wait for that.

A compiled model (`torch.compile`) is compiled when it is called, which can take minutes. The ranks that train therefore
report what they call theirs with: the structure of the arguments and, of each tensor, dtype, shape and strides, but no
values. A newcomer calls its own model with zeros of the same kind before it asks for its place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from elasticctl_train.checkpoint import parts
from elasticctl_train.checkpoint.tree import DTYPES, NAMES
from elasticctl_train.inplace.atomic_steps import LastStep
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel, PeerWatch

log = logging.getLogger("elasticctl_train")

_KINDS = 4
"""How many different calls to remember, the newest ones. After two sizes, torch compiles for any."""
_MAX_CHARACTERS = 8000
"""As much as the rendezvous service accepts."""
_PLAIN = (bool, int, float, str, type(None))


class ExampleInputs:
    """The newest different calls of a model in training, oldest first, as JSON data."""

    def __init__(self, known: str = "") -> None:
        """`known` is a text that another rank's `pop_report` has returned."""
        self.calls: list[Any] = json.loads(known) if known else []
        self._is_new, self._reports = False, 0

    def record(self, inputs: Sequence[object], options: Mapping[str, object]) -> None:
        """Record a call of the model, unless there are other objects than tensors and plain values among its inputs."""
        try:
            call = [_describe(list(inputs)), _describe(dict(options)), _autocast()]
        except TypeError:
            return
        if call not in self.calls:
            self.calls = [*self.calls, call][-_KINDS:]
            self._is_new = True

    def enter_group(self) -> None:
        """Have all calls reported again in a new group, by another rank perhaps, or to a service that has restarted."""
        self._is_new, self._reports = bool(self.calls), 0

    def pop_report(self) -> str | None:
        """Return the calls as text if they have to be reported, else None.

        That is not often in one group, even if each batch has a size of its own.
        """
        if not self._is_new or self._reports == _KINDS:
            return None
        self._is_new, self._reports = False, self._reports + 1
        text = json.dumps(self.calls)
        return text if len(text) <= _MAX_CHARACTERS else None


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether the first call of this model compiles it, or a part of it."""
    return any(map(_is_compiled_itself, model.modules()))


def _is_compiled_itself(module: torch.nn.Module) -> bool:
    """True after `torch.compile(module)`, `module.compile()` or `module.forward = torch.compile(module.forward)`."""
    is_wrapped = parts.is_compiled(module) or module._compiled_call_impl is not None
    return is_wrapped or hasattr(module.forward, "_torchdynamo_orig_callable")


def warm_up(model: torch.nn.Module, examples: ExampleInputs, watch: PeerWatch) -> None:
    """Call the model with each of the examples, wrapped as in training, and undo what that changes.

    `watch` is that of a group of this process alone. Logs one line if the model fails, which was not written for zeros:
    it is then compiled in its first step.
    """
    before = LastStep(model, [], {})
    before.begin_step()
    wrapped = ElasticDataParallel(model, watch, init_sync=False)
    try:
        for call in examples.calls:
            repeat_call(call, wrapped, next(model.parameters()).device)
            wrapped.reform()
    except Exception as error:  # noqa: BLE001 - the script's own code
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("the model will be compiled in this worker's first step, because it does not accept zeros: %s", why)
    finally:
        wrapped.release()
        before.restore()
        for parameter in model.parameters():
            parameter.grad = None


def repeat_call(call: Any, model: torch.nn.Module, device: torch.device) -> None:
    """Call the model, whose parameters are on `device`, with zeros instead of the values; then do a backward pass.

    The gradients are zeros as well. Raises what the model raises for zeros.
    """
    inputs, options, autocast = call
    with ExitStack() as stack:
        for kind, dtype in autocast:
            stack.enter_context(torch.autocast(kind, DTYPES[dtype]))
        output = model(*_build(inputs, device), **_build(options, device))
    roots = [tensor for tensor in _tensors_of(output) if tensor.requires_grad]
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


def _describe(value: object) -> Any:
    """Return JSON data for the structure of a value. Raises TypeError if it has other parts than `_build` can make."""
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.dtype not in NAMES:
            raise TypeError
        kind = [NAMES[value.dtype], list(value.shape), list(value.stride()), value.device.type == "cpu"]
        return {"tensor": [*kind, value.requires_grad]}
    if isinstance(value, _PLAIN):
        return value
    if type(value) is list:
        return [_describe(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [_describe(item) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _describe(item)] for key, item in value.items()]}
    raise TypeError


def _build(kind: Any, device: torch.device) -> Any:
    """Return zeros, and the same plain values, in the structure that `_describe` has described."""
    if isinstance(kind, list):
        return [_build(item, device) for item in kind]
    if not isinstance(kind, dict):
        return kind
    ((name, inner),) = kind.items()
    if name == "tuple":
        return tuple(_build(item, device) for item in inner)
    if name == "dict":
        return {key: _build(item, device) for key, item in inner}
    dtype, shape, stride, is_on_cpu, requires_grad = inner
    home = "cpu" if is_on_cpu else device
    zeros = torch.empty_strided(shape, stride, dtype=DTYPES[dtype], device=home).zero_()
    return zeros.requires_grad_(requires_grad)


def _autocast() -> list[Any]:
    """Return for which kinds of device autocast is enabled, and with which dtype."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [[kind, NAMES[torch.get_autocast_dtype(kind)]] for kind in kinds]


def _tensors_of(output: object) -> list[torch.Tensor]:
    """Return the tensors in what a model returns."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, Mapping) else output
    return [tensor for item in items for tensor in _tensors_of(item)] if isinstance(items, Iterable) else []
