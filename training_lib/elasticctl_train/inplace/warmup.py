"""Compiles a newcomer's model before it joins, so that the group does not wait for that.

A compiled model (`torch.compile`) is compiled when it is called, which can take minutes. The ranks that train therefore
report what they call theirs with (`example_inputs`), and a newcomer does the same before it asks for its place.
"""

from __future__ import annotations

import logging

import torch

from elasticctl_train.checkpoint import parts
from elasticctl_train.inplace import example_inputs
from elasticctl_train.inplace.atomic_steps import LastStep
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel, PeerWatch
from elasticctl_train.inplace.example_inputs import ExampleInputs

log = logging.getLogger("elasticctl_train")


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
    before.begin()
    wrapped = ElasticDataParallel(model, watch, init_sync=False)
    try:
        for call in examples.calls:
            example_inputs.repeat(call, wrapped, next(model.parameters()).device)
            wrapped.reform()
    except Exception as error:  # noqa: BLE001 - the script's own code
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("the model will be compiled in this worker's first step, because it does not accept zeros: %s", why)
    finally:
        wrapped.release()
        before.restore()
        for parameter in model.parameters():
            parameter.grad = None
