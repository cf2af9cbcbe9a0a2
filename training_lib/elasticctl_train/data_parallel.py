"""DistributedDataParallel for models that are partly frozen and unfrozen, and that computes the same after a restart.

torch's own fixes the set of parameters when it is created. The gradients of parameters that are unfrozen later would
not be averaged, so the ranks' models would drift apart silently; for those that are frozen later, it would wait.

In its second pass, it also rebuilds its buckets of gradients. How three or more ranks sum up a gradient depends on its
position in a bucket, so a resumed training has to start with the buckets that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticctl_store.errors import TrainError

Buckets = list[list[int]]
"""The numbers of the parameters in each bucket of gradients, in the order in which buckets are reduced."""
_UNUSED = (
    "FIX: freeze parameters that the loss never depends on (requires_grad_(False)). If it depends on others in each "
    "step, call init_process_group yourself, and pass Run the model in DistributedDataParallel with "
    "find_unused_parameters=True"
)
"""What torch says then is how to call DistributedDataParallel, which the script does not."""


class ModelCopy(torch.nn.Module):
    """What a copy of a `ResumableDataParallel` is: a model that does not communicate.

    Scripts copy `run.model` for averages of the weights (`AveragedModel`, `copy.deepcopy`). The names in its state are
    the same.
    """

    def __init__(self, module: torch.nn.Module, training: bool) -> None:
        super().__init__()
        self.module, self.training = module, training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)


class ResumableDataParallel(DistributedDataParallel):
    """DistributedDataParallel with these changes. `known_buckets` are those to start with."""

    _listed: list[torch.nn.Parameter]
    _trained: list[bool]
    known_buckets: Buckets | None = None

    def __init__(self, module: torch.nn.Module, *, buckets: Buckets | None = None, **options: Any) -> None:
        """`options` are DistributedDataParallel's."""
        listed = list(module.parameters())
        # Module would refuse attributes before its own constructor.
        self.__dict__ |= {"_listed": listed, "_trained": _require_gradients(listed)}
        if buckets is not None:
            self.__dict__["known_buckets"] = buckets
        super().__init__(module, **options)

    def buckets(self) -> Buckets | None:
        """Return the buckets that gradients are in by now; None before they are determined."""
        said = self._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")  # type: ignore[no-untyped-call]
        if not said:
            return self.known_buckets
        return [[int(number) for number in bucket.split()] for bucket in said.split(",")]

    def adopt_parameters(self) -> None:
        """Adopt the parameters as they are now. All ranks must call."""
        self.__init__(self.module, init_sync=False)  # type: ignore[misc]

    def __reduce_ex__(self, _: object) -> tuple[type[ModelCopy], tuple[torch.nn.Module, bool]]:
        """Copy and pickle the model without the connections to its group."""
        return ModelCopy, (self.module, self.training)

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing: the ranks of a run make the same steps, so none runs out of batches."""
        return nullcontext()

    def join_hook(self, **_: Any) -> NoReturn:
        """Raise TrainError in `torch.distributed.algorithms.Join`, for the same reason."""
        raise TrainError(
            "run.model cannot be in torch.distributed.algorithms.Join, which is for ranks with different numbers of "
            "batches: run.loader gives all ranks the same number. FIX: remove it"
        )

    def _ddp_init_helper(self, parameters: Sequence[torch.nn.Parameter], *args: Any, **kwargs: Any) -> None:
        """Start with the known buckets, which DistributedDataParallel offers no parameter for."""
        module: Any = dist
        buckets, assign = self.known_buckets, module._compute_bucket_assignment_by_size

        def assign_known(*arguments: Any) -> Any:
            _, limits = assign(*arguments)
            known = list(reversed(buckets or ()))
            return known, limits[:1] * len(known)

        if buckets and _fit(buckets, parameters):
            module._compute_bucket_assignment_by_size = assign_known
        try:
            super()._ddp_init_helper(parameters, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            module._compute_bucket_assignment_by_size = assign

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            trained = _require_gradients(self._listed)
            if not any(trained):
                return inputs, kwargs
            if trained != self._trained:
                was_training, syncs = self.training, self.require_backward_grad_sync
                self.__dict__.pop("known_buckets", None)
                self.adopt_parameters()
                self.training, self.require_backward_grad_sync = was_training, syncs
        try:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if str(error).startswith("Expected to have finished reduction"):
                error.add_note(_UNUSED)
            raise

    def _post_forward(self, output: Any) -> Any:
        is_watched = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if is_watched and not any(parameter.requires_grad for parameter in self._listed):  # typically, the first does
            return output
        return super()._post_forward(output)  # type: ignore[no-untyped-call]


def _require_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _fit(buckets: Buckets, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether these buckets cover exactly these parameters, each with one dtype and device."""
    if sorted(chain.from_iterable(buckets)) != list(range(len(parameters))):
        return False
    kinds = [{(parameters[number].dtype, parameters[number].device) for number in bucket} for bucket in buckets]
    return all(len(each) == 1 for each in kinds)
