"""DistributedDataParallel that survives the loss of a peer: what fails is the step, not the script.

Whatever a lost peer makes fail in a forward or backward pass is caught here, below the script's loop. From then on the
pass is only this rank's own; what it computes is not used, because the optimizer's step is left out (`steps`).
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from elasticctl_train.dist import GroupOver
from elasticctl_train.inplace.waits import ReduceWaits

Buckets = list[list[int]]
"""The numbers of the parameters in each bucket of gradients, in the order in which buckets are reduced."""


_OWN_ERRORS = ("Expected to ", "CUDA error", "CUDA out of memory")
"""What errors begin with that no loss of a peer explains: DistributedDataParallel's about unused parameters first."""


def is_own(error: BaseException) -> bool:
    """Has this process or its script failed, and not a peer? It would do so again in any other group."""
    return isinstance(error, torch.OutOfMemoryError) or str(error).startswith(_OWN_ERRORS)


OnLoss = Callable[[BaseException], None]


class PeerWatch:
    """Has a collective failed since the last step? `on_loss(error)` is called for the first that does, from any thread.

    It is that of the group in which it failed: the next group may be under way by then. Gradients go through `group`,
    of `size` ranks. `survives`: what fails is caught, as somebody heeds it. `buckets` are those of gradients that the
    ranks have settled on; `recorded` is what is known of them by now. `waits`: for how long gradients are waited for.
    """

    def __init__(self, size: int, on_loss: OnLoss) -> None:
        self.size, self._on_loss = size, on_loss
        self.group: dist.ProcessGroup | None = None
        self.waits = ReduceWaits()
        self._lock = threading.Lock()
        self.lost = False
        self.survives = True
        self.buckets: Buckets | None = None
        self.recorded: dict[int, list[int]] | None = None
        self._expected: dict[Future[torch.Tensor], torch.Tensor] = {}

    def expect(self, future: Future[Any], buffer: torch.Tensor) -> Future[torch.Tensor]:
        """`buffer`, once `future` is done, whether it has failed or not, or has been given up."""
        result: Future[torch.Tensor] = Future()
        with self._lock:
            self._expected[result] = buffer
        future.add_done_callback(partial(self._settle, result))
        return result

    def give_up(self, error: BaseException) -> bool:
        """Expect nothing of this group any more; False if nothing was expected."""
        with self._lock:
            expected, self._expected = self._expected, {}
        for result, buffer in expected.items():
            self._complete(result, buffer, error)
        return bool(expected)

    def _settle(self, result: Future[torch.Tensor], future: Future[Any]) -> None:
        with self._lock:
            buffer = self._expected.pop(result, None)
        if buffer is not None:  # else it has been given up, and another group may be under way
            self._complete(result, buffer, _error_of(future))

    def _complete(self, result: Future[torch.Tensor], buffer: torch.Tensor, error: BaseException | None) -> None:
        try:
            if error is not None:
                self.note(error)
            result.set_result(buffer)
        except RuntimeError as own:
            result.set_exception(own)  # type: ignore[arg-type]

    def note(self, error: BaseException) -> None:
        """A collective has failed. Raises the error itself where nobody would heed it, or no peer is to blame."""
        if not self.survives or is_own(error):
            raise error
        with self._lock:
            if self.lost:
                return
            self.lost, on_loss = True, self._on_loss
        on_loss(error)

    def reset(self, size: int, group: dist.ProcessGroup | None, on_loss: OnLoss) -> None:
        """A new group has been formed, of `size` ranks."""
        with self._lock:
            self.size, self.group, self.lost, self.recorded, self._on_loss = size, group, False, None, on_loss
            self._expected = {}

    def record(self, index: int, parameters: list[int], *, is_last: bool) -> None:
        """One of the buckets, while they are recorded."""
        if self.recorded is None:
            return
        self.recorded[index] = parameters
        if is_last:
            self.buckets, self.recorded = [self.recorded[key] for key in sorted(self.recorded)], None


class ElasticDataParallel(DistributedDataParallel):
    """As DistributedDataParallel, over the watch's group, and over another one after each `reform`.

    Rank 0's buffers go to the others at the end of a step, and not as the next one begins: so they outlive rank 0, and
    an evaluation needs nobody else.
    """

    _watch: PeerWatch
    _has_buffers_of_rank_0 = False

    def __init__(self, module: torch.nn.Module, watch: PeerWatch, *, init_sync: bool) -> None:
        """`init_sync`: begin with rank 0's parameters; without it they have to be equal on all ranks already."""
        self.__dict__["_watch"] = watch  # before Module's own constructor, which would refuse
        super().__init__(module, process_group=watch.group, init_sync=init_sync)
        numbers = {parameter: number for number, parameter in enumerate(self._reduced())}
        self.register_comm_hook((watch, numbers), _average)

    def reform(self) -> None:
        """Go on over the group as it is now; parameters are equal on all its ranks."""
        was_training = self.training
        self.__init__(self.module, self._watch, init_sync=False)  # type: ignore[misc]
        self.training = was_training
        self._has_buffers_of_rank_0 = False

    def reduce_waits_s(self) -> float:
        """For how long gradients of other ranks have been waited for."""
        return self._watch.waits.total_s()

    def share_buffers(self) -> None:
        """A step has been made: take over rank 0's buffers. All ranks must call. Raises RuntimeError."""
        if self.forward_sync_buffers and self.modules_buffers and self._watch.size > 1:
            self._sync_buffers()  # type: ignore[no-untyped-call]
            self._has_buffers_of_rank_0 = True

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """As DistributedDataParallel, but raises GroupOver for what never comes, and leaves `tensors` alone then."""
        if any(tensor.is_cuda for tensor in tensors):  # NCCL is told to abort
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = _flatten_dense_tensors(alike)  # type: ignore[no-untyped-call]
            work = dist.broadcast(flat, group=self._watch.group, group_src=authoritative_rank, async_op=True)
            self._watch.expect(work.get_future(), flat).wait()
            if self._watch.lost:
                raise GroupOver("rank 0's buffers never came")
            parts = _unflatten_dense_tensors(flat, alike)  # type: ignore[no-untyped-call]
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        has_them = self._has_buffers_of_rank_0
        self._has_buffers_of_rank_0 &= not self.training
        return not has_them and bool(super()._check_sync_bufs_pre_fwd())  # type: ignore[no-untyped-call]

    def _reduced(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are reduced, as they are numbered in buckets."""
        found, _ = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        parameters: list[torch.nn.Parameter] = found
        return parameters

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        """Begin with the buckets that the ranks have settled on: how gradients are summed depends on them.

        DistributedDataParallel settles on them in its second pass, and takes none from outside.
        """
        module: Any = dist
        buckets, assign = self._watch.buckets, module._compute_bucket_assignment_by_size

        def assign_known(*arguments: Any) -> Any:
            _, limits = assign(*arguments)
            known = list(reversed(buckets or ()))
            return known, limits[:1] * len(known)

        if buckets:
            module._compute_bucket_assignment_by_size = assign_known
        try:
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            module._compute_bucket_assignment_by_size = assign

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._watch.lost:
            had_settled = self._has_rebuilt_buckets
            try:
                passed = super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
                if self._has_rebuilt_buckets and not had_settled:
                    self._watch.recorded = {}
                return passed
            except RuntimeError as error:
                self._watch.note(error)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if not self._watch.lost:
            try:
                return super()._post_forward(output)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                self._watch.note(error)
        return output


def _average(state: tuple[PeerWatch, Mapping[torch.Tensor, int]], bucket: GradBucket) -> Future[torch.Tensor]:
    """DistributedDataParallel's communication hook: the mean over all ranks, or just anything once a peer is lost."""
    watch, numbers = state
    if watch.recorded is not None:
        of_bucket = [numbers[parameter] for parameter in bucket.parameters()]
        watch.record(bucket.index(), of_bucket, is_last=bucket.is_last())
    buffer = bucket.buffer()
    if watch.size > 1 and not watch.lost:
        try:
            first, last = bucket.index() == 0, bucket.is_last()
            mark = watch.waits.hand_in(is_first=first, is_last=last, on_gpu=buffer.is_cuda)
            work = dist.all_reduce(buffer.div_(watch.size), group=watch.group, async_op=True)
            if not buffer.is_cuda:
                reduced = work.get_future()
                reduced.add_done_callback(lambda _: watch.waits.take())
                return watch.expect(reduced, buffer)
            averaged: Future[torch.Tensor] = work.get_future().then(
                lambda future: _averaged(watch, future, buffer, mark)
            )
            return averaged
        except RuntimeError as error:
            watch.note(error)
    done: Future[torch.Tensor] = Future()
    done.set_result(buffer)
    return done


def _averaged(watch: PeerWatch, future: Future[Any], buffer: torch.Tensor, mark: Any | None) -> torch.Tensor:
    watch.waits.take_on_gpu(mark)
    error = _error_of(future)
    if error is not None:
        watch.note(error)
    return buffer


def _error_of(future: Future[Any]) -> BaseException | None:
    try:
        future.value()
    except RuntimeError as error:
        return error
    return None
