"""Lets the script's own collectives return without a result in a step that is lost.

Scripts average the loss over the ranks in each step, to print it. If a peer is lost, such a call would end the script,
though the step is to be made again and nothing of it remains. So the call returns as if all ranks had this rank's
values, like the backward pass of that step, whose gradients are those of this rank alone.

Only calls of `torch.distributed` in the default group, from the thread that trains and within a step, are covered. An
evaluation is never repeated, so a collective that breaks in one ends the script.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticctl_train.dist import GroupOver, finish
from elasticctl_train.inplace.group import ElasticGroup

CONFIRMED_S = 10.0
"""How long an error waits for a report that a peer is lost. Without one, the error is the script's own."""
_LOOK_S = 0.01

Arguments = dict[str, Any]


def _nothing(_: Arguments) -> None:
    """Leave the tensor as it is."""


def _gather(arguments: Arguments) -> None:
    for tensor in arguments["tensor_list"]:
        tensor.copy_(arguments["tensor"])


def _gather_into(arguments: Arguments) -> None:
    values = arguments["input_tensor"].reshape(1, -1)
    arguments["output_tensor"].view(-1, values.numel()).copy_(values)


def _gather_objects(arguments: Arguments) -> None:
    arguments["object_list"][:] = [arguments["obj"]] * len(arguments["object_list"])


ALONE: dict[str, Callable[[Arguments], None]] = {
    "all_gather": _gather,
    "all_gather_into_tensor": _gather_into,
    "all_gather_object": _gather_objects,
    "all_reduce": _nothing,
    "barrier": _nothing,
    "broadcast": _nothing,
    "broadcast_object_list": _nothing,
    "reduce": _nothing,
}
"""What fills the result of each collective if the other ranks are gone."""


class ScriptCollectives:
    """The collectives of `torch.distributed`, from `install` on."""

    def __init__(self, group: ElasticGroup, is_in_step: Callable[[], bool], is_made: Callable[[], bool]) -> None:
        """`is_in_step()`: whether a step has begun and not ended. `is_made()`: the optimizers have made it, so it
        counts though the peer is lost."""
        self._group, self._is_in_step, self._is_made = group, is_in_step, is_made
        self._is_within = False

    def install(self) -> None:
        """Replace the functions. Those that the script has imported by name before this call stay as they are."""
        for name, alone in ALONE.items():
            covered = self._cover(getattr(distributed_c10d, name), alone)
            for module in (distributed_c10d, dist):
                setattr(module, name, covered)

    def _cover(self, original: Callable[..., Any], alone: Callable[[Arguments], None]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        is_of_tensors = "async_op" in signature.parameters

        @functools.wraps(original)
        def collective(*args: Any, **options: Any) -> Any:
            if not self._is_covered():
                return original(*args, **options)
            bound = signature.bind(*args, **options)
            if bound.arguments.get("group") not in (None, dist.group.WORLD):
                return original(*args, **options)
            bound.apply_defaults()
            if is_of_tensors:
                return self._call(original, bound, alone)
            return self._call_with_objects(original, bound, alone)

        return collective

    def _is_covered(self) -> bool:
        group = self._group
        is_ours = group.watch.survives and group.world.size > 1 and threading.get_ident() == group.thread
        return is_ours and self._is_in_step()

    def _call(
        self, original: Callable[..., Any], bound: inspect.BoundArguments, alone: Callable[[Arguments], None]
    ) -> Any:
        is_async, arguments = bound.arguments["async_op"], bound.arguments
        if self._group.watch.lost and not self._is_within:
            alone(arguments)
            return _Ended() if is_async else None
        arguments["async_op"] = True
        work = original(*bound.args, **bound.kwargs)  # an error here is one of the arguments
        if work is None:
            return None
        if self._is_within:
            finish(work, self._group.world.channel)
            return None
        waiting = _Waiting(work, functools.partial(self._finish, work, functools.partial(alone, arguments)))
        if is_async:
            return waiting
        waiting.wait()
        return None

    def _call_with_objects(
        self, original: Callable[..., Any], bound: inspect.BoundArguments, alone: Callable[[Arguments], None]
    ) -> None:
        """These make several collectives, none of which may return without a result."""
        if self._group.watch.lost:
            alone(bound.arguments)
            return
        self._is_within = True
        try:
            original(*bound.args, **bound.kwargs)
        except RuntimeError as error:
            self._record(error)
            alone(bound.arguments)
        finally:
            self._is_within = False

    def _finish(self, work: Any, alone: Callable[[], None]) -> None:
        try:
            finish(work, self._group.world.channel)
        except RuntimeError as error:
            self._record(error)
            alone()

    def _record(self, error: RuntimeError) -> None:
        """Record that a peer is lost; raise the error if none is, or if it comes after the step."""
        give_up_s = time.monotonic() + CONFIRMED_S
        while not (isinstance(error, GroupOver) or self._group.is_over or self._group.watch.lost):
            if time.monotonic() > give_up_s:
                raise error
            time.sleep(_LOOK_S)
        if not self._is_in_step():
            raise error
        if not self._is_made():
            self._group.watch.record_loss(error)


class _Waiting:
    """The handle of a collective that may break; everything but `wait` is torch's."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish

    def wait(self, timeout: Any = None) -> bool:
        """Return True once there is a result, or none is to come. `timeout` is not used: a lost peer is noticed."""
        self._finish()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Ended:
    """The handle of a collective that was not begun."""

    def wait(self, timeout: Any = None) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is complete."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future
